"""The checkpoints of a run: which are there, which is the newest, and whether it can be gone on from exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from dex.errors import DexError

# Trainer goes on without a word where one of these is missing, and computes something else.
NEEDED = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N, by N; anything else is not a checkpoint."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def newest_checkpoint(folder: Path, steps: int, weights: Sequence[str]) -> Path | None:
    """The checkpoint to go on from, or None at the start of a run of `steps`.

    `weights` are the files of what is trained. Raises DexError if the checkpoint is not whole.
    """
    checkpoints = sorted_checkpoints(folder)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    missing = [name for name in (*weights, *NEEDED) if not (newest / name).is_file()]
    if missing:
        raise damaged(newest, f"it has no {missing[0]}")
    try:
        step = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(newest, f"trainer_state.json: {error}") from error
    if step != step_of(newest) or step > steps:
        raise damaged(newest, f"it is of step {step}, in a run of {steps} steps")
    return newest


def damaged(checkpoint: Path, reason: object) -> DexError:
    lines = str(reason).splitlines() or [type(reason).__name__]
    return DexError(
        f"{checkpoint} is damaged ({lines[0]}); delete it and run the same command to go on from the checkpoint "
        "before it, or from the start."
    )


def kept(folder: Path) -> str:
    """Half a sentence about what is there to go on from."""
    checkpoints = sorted_checkpoints(folder)
    return f"{checkpoints[-1]} is whole" if checkpoints else "there is no earlier checkpoint"
