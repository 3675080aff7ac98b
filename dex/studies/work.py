"""One run of a study, in a process of its own: its memory is its own, and what it breaks is its own.

The process is forked from a server that has imported the libraries once, so that a run of seconds is not one of
imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dex.errors import DexError, NotFinite
from dex.output import write_json
from dex.studies.jobs import EVALS, RECORD, Done, Job, write_done
from dex.studies.study_file import Fresh, Study

if TYPE_CHECKING:
    from dex.recipe import Recipe

STOPPED, BUSY = "stopped", "busy"


def in_own_process(work: Callable[..., str | None], *arguments: Any) -> str | None:
    """Call `work` in a process of its own and return what it does.

    Raises the DexError that it raised, and one for a process that died. SIGTERM goes on to it; Ctrl-C it gets itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dex.studies.imports"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    terminated: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        if process.is_alive():
            process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        kind, value = _received(ours, process)
    except EOFError:
        process.join()
        if terminated:
            return STOPPED
        raise DexError(
            f"A run's process ended with exit code {process.exitcode} and said nothing (killed, or out of memory; or "
            "see above); run the same command to go on."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if kind == "error":
        raise DexError(value)
    return value


def _received(connection: Connection, process: Any) -> tuple[str, Any]:
    """What the process has to say. Raises EOFError where it ended without a word."""
    while True:
        try:
            answer: tuple[str, Any] = connection.recv()
        except KeyboardInterrupt:
            continue  # the process has had the signal too, and saves a checkpoint
        process.join()
        return answer


def _child(connection: Connection, work: Callable[..., str | None], arguments: tuple[Any, ...]) -> None:
    from dex.quiet import quiet_libraries

    quiet_libraries()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(("ok", work(*arguments)))
    except DexError as error:
        connection.send(("error", str(error)))
    except KeyboardInterrupt:
        connection.send(("error", "Interrupted; run the same command to go on."))


def _end_with_parent() -> None:
    """A run whose study was killed ends too, with a checkpoint."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def run_job(study: Study, job: Job) -> str | None:
    """Train (or only load) the variant and measure its held-out loss; writes the run's record.

    Returns STOPPED where a signal ended it before, with a checkpoint, and BUSY where another `dex study` has it.
    """
    from dex.memory import resident

    began = time.monotonic()
    folder = job.folder(Path(study.output))
    with alone(folder) as is_ours:
        if not is_ours:
            return BUSY
        if (folder / RECORD).exists():
            return None  # by another `dex study` meanwhile
        diverged: str | None = None
        result: dict[str, Any] = {}
        try:
            result = _measured(study, job, folder)
        except NotFinite as error:
            diverged = str(error)
        if result.get("finished") is False:
            return STOPPED
        memory = {"host": resident(), "device": _device_memory()}
        fresh = study.fresh(job.point, job.variant)
        made_like = fresh.model_dump(mode="json") if fresh else None
        seconds = round(time.monotonic() - began, 1)
        write_done(Done(job, folder, result, diverged, seconds, memory, made_like))
        _drop(folder / "checkpoints")
        if not study.suites and not study.keep_weights:
            drop_weights(folder)
    return None


def run_suites(study: Study, job: Job) -> str | None:
    """Evaluate the study's suites on what the run trained; what is there is not evaluated again."""
    from dex.verbs.evaluate import evaluate

    folder = job.folder(Path(study.output))
    with alone(folder) as is_ours:
        if not is_ours:
            return BUSY
        model, revision, dtype = _trained(study, job, folder)
        for suite in study.suites:
            evaluate([model], folder / EVALS, suite, dtype=dtype, revision=revision)
        if not study.keep_weights:
            drop_weights(folder)
    return None


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Is the run this process's? Several `dex study` share the runs of one output; a killed one leaves no lock."""
    from filelock import Timeout

    from dex.run_data import cache_dir
    from dex.run_folder import lock_of

    cache_dir().mkdir(parents=True, exist_ok=True)
    lock = lock_of(folder / RECORD, cache_dir())
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def drop_weights(folder: Path) -> None:
    """Remove what a run trained; its figures, records and log stay."""
    _drop(folder / "adapter", folder / "model", _fresh_folder(folder))


def _measured(study: Study, job: Job, folder: Path) -> dict[str, Any]:
    from dex.verbs.train import train

    if job.lr is None or job.seed is None:
        return _as_it_is(study, job, folder)
    return train(study.recipe(job.point, job.variant, job.lr, job.seed, folder, _fresh(study, job, folder)))


def _fresh_folder(folder: Path) -> Path:
    """Beside the run's folder, which has to begin empty."""
    return folder.parent / f".{folder.name}.fresh"


def _fresh(study: Study, job: Job, folder: Path) -> str | None:
    """The folder of the run's own fresh model, made if it is not there; None where it begins with a given one."""
    wanted = study.fresh(job.point, job.variant)
    if wanted is None:
        return None
    made = _fresh_folder(folder)
    record = made / "fresh.json"
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) != wanted.model_dump(mode="json"):
        raise DexError(f"{made} was made with other settings of `fresh`; choose another output, or delete it.")
    if not record.exists():
        make_fresh(wanted, made, job.seed or 0)
        write_json(record, wanted.model_dump(mode="json"))
    return str(made)


def make_fresh(wanted: Fresh, folder: Path, seed: int) -> None:
    """Write a model with fresh weights. Raises DexError for a size or an option that does not fit."""
    from dex.layouts.options import parse_options
    from dex.models import load_outline
    from dex.verbs.init import init

    config, source = load_outline(wanted.like, None)
    with tempfile.TemporaryDirectory(prefix="dex-like-") as scratch:
        changed = {**config.to_dict(), **wanted.config}
        Path(scratch, "config.json").write_text(json.dumps(changed), encoding="utf-8")
        options = parse_options([f"{name}={value}" for name, value in wanted.options.items()])
        like = str(Path(scratch, "config.json"))
        init(wanted.layout, like, folder, options=options, tokenizer=source.id, seed=seed, force=True)


def recipe_as_it_is(study: Study, job: Job) -> Recipe:
    """The model, the data and the batch size of a variant that is not trained."""
    folder = job.folder(Path(study.output))
    return study.recipe(job.point, job.variant, study.rates(study.control)[0], study.seeds[0], folder, None)


def _as_it_is(study: Study, job: Job, folder: Path) -> dict[str, Any]:
    """The held-out loss of the model before any training, on the blocks of the study's runs."""
    from dex.environment import environment
    from dex.evaluation.held_out import held_out_losses, held_out_result, summarise
    from dex.models import device
    from dex.run_data import held_out_blocks
    from dex.run_folder import HELD_OUT
    from dex.verbs.train import load_base, prepare

    recipe = recipe_as_it_is(study, job)
    base = load_base(recipe)
    data = prepare(recipe, base)
    blocks = held_out_blocks(recipe.data, data)
    identity = base.identity()
    losses = held_out_losses(base.model.to(device()), blocks, recipe.run.micro_batch, job.variant)
    model = {"id": recipe.model.id}
    found = held_out_result(job.variant, model, losses, blocks, data.held_out, environment=environment())
    found.write(folder / HELD_OUT)
    loss, perplexity = summarise(losses)
    losses_of_it = {"held_out_loss": loss._asdict(), "held_out_perplexity": perplexity._asdict()}
    return {**losses_of_it, "branch": None, "model": identity}


def _trained(study: Study, job: Job, folder: Path) -> tuple[str, str | None, str]:
    """What the suites load: the model or adapter, its revision, and the dtype that the study trained in."""
    if job.lr is None or job.seed is None:
        model = recipe_as_it_is(study, job).model
        return model.id, model.revision, model.dtype
    there = [path for path in (folder / "adapter", folder / "model") if path.exists()]
    if not there:
        raise DexError(
            f"{folder} has no weights to evaluate: they were dropped (keep_weights: false) before this suite, with "
            "these settings, was asked for; delete the folder, and the same command trains it again."
        )
    model = study.recipe(job.point, job.variant, job.lr, job.seed, folder, "fresh").model
    return str(there[0]), None, model.dtype


def _drop(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _device_memory() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
