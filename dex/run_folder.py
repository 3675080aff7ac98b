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
held_out.json     its loss on every held-out block, as `dex eval` writes it
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

from dex.errors import DexError
from dex.heads import HeadPlan
from dex.output import refuse_file_above, write_json, write_whole
from dex.recipe import Recipe, load_recipe

CONTENT = (
    "recipe.yaml",
    "inputs.json",
    "environment.json",
    "heads.json",
    "log.jsonl",
    "trackers",
    "checkpoints",
    "adapter",
    "model",
    "held_out.json",
)
RESULT, INPUTS = "result.json", "inputs.json"

# What a run may go on with although it changed: where it lies, and how often it speaks and saves.
_FREE = "keep_last save_every eval_every log_every hours track micro_batch gradient_checkpointing"
NOT_COMPARED = ("output", *(f"run.{key}" for key in _FREE.split()))


def trained_folder(recipe: Recipe) -> Path:
    """Where in the run's folder the result is: adapter/ or model/."""
    return Path(recipe.output) / recipe.method.result


@contextmanager
def used_alone(run: Path, locks: Path) -> Iterator[None]:
    """Keep a second `dex train` out of the run's folder. The lock goes with the process, however it ends."""
    name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
    try:
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f".run-{name}.lock", timeout=0):
            yield
    except Timeout:
        raise DexError(f"Another dex train is using {run}; wait for it, or choose another output.") from None


def open_run(run: Path, recipe: Recipe, force: bool) -> dict[str, Any] | None:
    """The result of a finished run, or None where there is work to do. Nothing is written or deleted here.

    Raises DexError for the folder of another run, unless `force`, and for a folder that is no run.
    """
    refuse_file_above(run)
    saved = run / "recipe.yaml"
    if run.exists() and not saved.exists() and (not run.is_dir() or any(run.iterdir())):
        raise DexError(f"{run} is not empty and is not a run of dex (no recipe.yaml); choose another output.")
    if force or not saved.exists():
        return None
    _refuse_another_recipe(run, load_recipe(saved), recipe)
    result = run / RESULT
    trained = trained_folder(recipe) / ("config.json" if recipe.method.result == "model" else "adapter_config.json")
    return _read(result) if all(file.exists() for file in (result, trained, run / "held_out.json")) else None


def start_run(run: Path, recipe: Recipe, inputs: dict[str, Any], plan: HeadPlan | None, force: bool) -> None:
    """Write what the run begins with, once everything is there and fits; check it where the run goes on.

    `force` deletes the run that was there, and nothing else that lies in the folder.
    """
    if force:
        delete_run(run)
    saved = run / INPUTS
    if saved.exists():
        _refuse_other_inputs(run, _read(saved), inputs)
    elif (run / "checkpoints").exists():
        raise DexError(f"{saved} is gone, so the run cannot go on exactly; pass --force to start it again.")
    write_whole(run / "recipe.yaml", recipe.to_yaml())
    if plan is not None:
        plan.save(run / "heads.json", force=True)
    write_json(saved, inputs)


def note_environment(run: Path, environment: dict[str, Any]) -> None:
    """Add what this start runs with to environment.json, which has one entry a start."""
    path = run / "environment.json"
    starts = _read(path)["starts"] if path.exists() else []
    write_json(
        path, {"starts": [*starts, {"started": datetime.now(UTC).isoformat(timespec="seconds"), **environment}]}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not value or not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise DexError(
            f"{path} is damaged ({error}); delete it, and run the same command to make it again."
        ) from error
    return value


def delete_run(run: Path) -> None:
    for name in (*CONTENT, RESULT):
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _refuse_another_recipe(run: Path, before: Recipe, now: Recipe) -> None:
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
