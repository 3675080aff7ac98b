"""The folder of a run: what is in it, when it may be used, and what it was started with.

recipe.yaml       the recipe, every default written out
inputs.json       the base and the data that the run began with
heads.json        the head plan
log.jsonl         one line per logged step
checkpoints/      checkpoint-N, each whole: written beside its place, then renamed
environment.json  versions, the commit of dex, and the machine, of every start
trackers/         what tensorboard writes
adapter/          the trained adapter, with the tokenizer; or, for methods that train the base's own weights,
model/            the trained model
dex.lock          all of it that the run can be made again from (`dex.lock`); one lies in adapter/ or model/ too
held_out/         its loss on every held-out block, as `dex eval` writes a result
result.json       the figures of the finished run
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from dex.errors import DexError
from dex.heads import HeadPlan
from dex.lock import LOCK
from dex.output import refuse_file_above, write_json, write_whole
from dex.recipe import Recipe, load_recipe

RESULT, INPUTS, RECIPE, HELD_OUT = "result.json", "inputs.json", "recipe.yaml", "held_out"
CONTENT = (
    "inputs.json",
    "environment.json",
    "heads.json",
    "log.jsonl",
    "trackers",
    "checkpoints",
    "adapter",
    "model",
    LOCK,
    HELD_OUT,
)

# What a run may go on with although it changed: where it lies, and how often it speaks and saves.
_FREE = "keep_last save_every eval_every log_every hours track micro_batch gradient_checkpointing"
NOT_COMPARED = ("output", *(f"run.{key}" for key in _FREE.split()))


def trained_folder(recipe: Recipe) -> Path:
    """Where in the run's folder the result is: adapter/ or model/."""
    return Path(recipe.output) / recipe.method.result


def lock_of(folder: Path, locks: Path) -> FileLock:
    """A lock that stands for a folder, and lies elsewhere."""
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    return FileLock(locks / f".run-{name}.lock", timeout=0)


@contextmanager
def used_alone(run: Path, locks: Path) -> Iterator[None]:
    """Keep a second command out of a folder. The lock goes with the process, however it ends."""
    lock = lock_of(run, locks)
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise DexError(f"Another dex is using {run}; wait for it, or choose another output.") from None
    except OSError as error:
        raise DexError(
            f"{locks} could not be written: {error.strerror or error}; set DEX_CACHE to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()


def open_run(run: Path, recipe: Recipe, force: bool) -> dict[str, Any] | None:
    """The result of a finished run, or None where there is work to do. Nothing is written or deleted here.

    Raises DexError for the folder of another run, unless `force`, and for a folder that is no run.
    """
    refuse_file_above(run)
    saved = run / RECIPE
    if _is_no_run(run):
        raise DexError(
            f"{run} is not empty and is not a run of dex (no {RECIPE}); put that back if it was one, or choose "
            "another output."
        )
    if force or not saved.exists():
        return None
    try:
        before = load_recipe(saved)
    except DexError as error:
        raise DexError(f"{str(error).rstrip('.')}; put the run's own copy back, or pass --force.") from error
    refuse_another_recipe(run, before, recipe)
    return _read_result(run, recipe)


def _is_no_run(run: Path) -> bool:
    try:
        if not run.exists():
            return False
        inside = [path.name for path in run.iterdir() if not path.name.endswith(".partial")] if run.is_dir() else [""]
    except OSError as error:
        raise DexError(f"{run} cannot be the output: {error.strerror or error}.") from error
    if "checkpoints" in inside and not (run / "checkpoints").is_dir():
        return True
    return bool(inside) and RECIPE not in inside


def _read_result(run: Path, recipe: Recipe) -> dict[str, Any] | None:
    """What a finished run has to show; None if it has no result, or not what it made."""
    path = run / RESULT
    if not path.exists() or not (run / HELD_OUT / RESULT).exists() or not _is_whole(trained_folder(recipe)):
        return None
    result = _read(path)
    if not {"method", "tokens", "held_out_loss", "held_out_perplexity", "branch"} <= result.keys():
        raise _damaged(path, "it is not the result of a run")
    return result


def _is_whole(folder: Path) -> bool:
    """Are the weights there, with all their bytes? (A safetensors header says how many.)"""
    files = [file for file in folder.glob("*.safetensors") if not file.name.startswith(".")]
    try:
        for file in files:
            with safe_open(file, "pt"):
                pass
    except (SafetensorError, OSError):
        return False
    return bool(files) and any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def check_inputs(run: Path, inputs: dict[str, Any], force: bool) -> None:
    """Raise DexError if a run that goes on would go on with something else than it began with."""
    saved = run / INPUTS
    if force:
        return
    if saved.exists():
        try:
            before = _read(saved)
        except DexError as error:
            raise DexError(
                f"{saved} is damaged, so the run cannot go on exactly; put it back, or pass --force to begin again."
            ) from error
        _refuse_other_inputs(run, before, inputs)
    elif (run / "checkpoints").exists():
        raise DexError(f"{saved} is gone, so the run cannot go on exactly; pass --force to start it again.")


def start_run(run: Path, recipe: Recipe, inputs: dict[str, Any], plan: HeadPlan | None, force: bool) -> None:
    """Write what the run begins with, once everything is there and fits.

    `force` deletes the run that was there, and nothing else that lies in the folder.
    """
    if force:
        delete_run(run)
    write_whole(run / RECIPE, recipe.to_yaml())
    if plan is not None:
        plan.save(run / "heads.json", force=True)
    write_json(run / INPUTS, inputs)


def note_environment(run: Path, environment: dict[str, Any]) -> None:
    """Add what this start runs with to environment.json, which has one entry a start."""
    path = run / "environment.json"
    starts = _read(path).get("starts") if path.exists() else []
    if not isinstance(starts, list):
        raise _damaged(path, "it holds no list of starts")
    write_json(
        path, {"starts": [*starts, {"started": datetime.now(UTC).isoformat(timespec="seconds"), **environment}]}
    )


def earlier_environments(run: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """What earlier starts of a run ran with, where it was something else than the last one does."""
    starts = _read(run / "environment.json")["starts"]
    others = [{key: value for key, value in start.items() if key != "started"} for start in starts]
    return [other for i, other in enumerate(others) if other != now and other not in others[:i]]


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not value or not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return value


def _damaged(path: Path, reason: object) -> DexError:
    return DexError(f"{path} is damaged ({reason}); delete it, and run the same command to make it again.")


def delete_run(run: Path) -> None:
    """Delete what a run wrote; its recipe, by which the folder is known as a run, last."""
    try:
        for name in (*reversed(CONTENT), RESULT, RECIPE):
            path = run / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise DexError(f"{run} could not be deleted: {error.strerror or error}.") from error


def refuse_another_recipe(run: Path, before: Recipe, now: Recipe) -> None:
    differing = [
        found for found in differences(before.model_dump(), now.model_dump()) if found[0] not in NOT_COMPARED
    ]
    if differing:
        key, was, is_now = differing[0]
        more = f" (and {len(differing) - 1} more keys)" if len(differing) > 1 else ""
        raise DexError(
            f"{run} holds a run with {key}={was!r}, but this recipe has {is_now!r}{more}; "
            "choose another output, or pass --force to start it again."
        )


def _refuse_other_inputs(run: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key, was, is_now in differences(before, now):
        raise DexError(
            f"{run} began with {key} {was}, but it is {is_now} now, so the run cannot go on exactly; "
            "put the base or the data back, or pass --force to start it again."
        )


def differences(before: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(key path, value before, value now) of everything that differs in two nested dicts."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            found
            for key in sorted(before.keys() | now.keys())
            for found in differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if before == now else [(path, before, now)]
