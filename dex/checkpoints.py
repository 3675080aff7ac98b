"""The checkpoints of a run: which are there, which is the newest, and whether it can be gone on from exactly."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import TrainerState

from dex.errors import DexError

RANDOM, HOW = "rng_state.pth", "processes.json"
# Trainer goes on without a word where one of these is missing, and computes something else.
NEEDED = ("scheduler.pt", RANDOM, "trainer_state.json", HOW)
OPTIMIZER = {"whole": "optimizer.pt", "FSDP": "optimizer.bin", "DeepSpeed": "latest"}


class How(NamedTuple):
    """How the run that saved a checkpoint was spread. `sharding`: whole (one process, or DDP), FSDP or DeepSpeed."""

    sharding: str
    processes: int

    def __str__(self) -> str:
        spread = "" if self.sharding == "whole" else f" of {self.sharding}"
        return f"{self.processes} process{'es' if self.processes > 1 else ''}{spread}"


def note_how(checkpoint: Path, how: How) -> None:
    (checkpoint / HOW).write_text(json.dumps(how._asdict()), encoding="utf-8")


def sorted_checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint-N, by N; anything else is not a checkpoint."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def newest_checkpoint(folder: Path, steps: int, weights: Sequence[str], how: How) -> Path | None:
    """The checkpoint to go on from, or None at the start of a run of `steps`.

    `weights` are the files of what is trained. Raises DexError if the checkpoint is not whole, or if a run that is
    spread like this cannot load it.
    """
    checkpoints = sorted_checkpoints(folder)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    _refuse_parts_missing(newest, NEEDED)
    saved = _saved_how(newest)
    _refuse_another_spread(newest, saved, how)
    _refuse_parts_missing(newest, (*weights, OPTIMIZER[saved.sharding]))
    try:
        step = TrainerState.load_from_json(str(newest / "trainer_state.json")).global_step
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(newest, f"trainer_state.json: {error}") from error
    if step != step_of(newest) or step > steps:
        raise damaged(newest, f"it is of step {step}, in a run of {steps} steps")
    return newest


def _refuse_parts_missing(checkpoint: Path, names: Sequence[str]) -> None:
    for name in names:
        if not (checkpoint / name).is_file():
            raise damaged(checkpoint, f"it has no {name}")


def _saved_how(checkpoint: Path) -> How:
    try:
        how = How(**json.loads((checkpoint / HOW).read_text(encoding="utf-8")))
        OPTIMIZER[how.sharding]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(checkpoint, f"{HOW}: {error}") from error
    return how


def _refuse_another_spread(checkpoint: Path, saved: How, now: How) -> None:
    """A whole checkpoint, and FSDP's full state, load at any number of processes; ZeRO's parts do not."""
    if saved.sharding != now.sharding or (saved.sharding == "DeepSpeed" and saved.processes != now.processes):
        raise DexError(
            f"{checkpoint} was saved by {saved} and cannot be gone on from with {now}; start it as it was, or pass "
            "--force to begin again."
        )


def damaged(checkpoint: Path, reason: object) -> DexError:
    lines = str(reason).splitlines() or [type(reason).__name__]
    first = lines[0].partition(". ")[0]  # torch adds advice for its programmers
    return DexError(
        f"{checkpoint} is damaged ({first}); delete it and run the same command to go on from the checkpoint "
        "before it, or from the start."
    )


def kept(folder: Path) -> str:
    """Half a sentence about what is there to go on from."""
    checkpoints = sorted_checkpoints(folder)
    return f"{checkpoints[-1]} is whole" if checkpoints else "there is no earlier checkpoint"


def keep_last(folder: Path, number: int) -> None:
    """Delete all but the last ones. A kill half-way leaves no half of a checkpoint under a checkpoint's name."""
    for old in sorted_checkpoints(folder)[:-number]:
        gone = folder / f".{old.name}.deleted"
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def drop_leftovers(folder: Path) -> None:
    """Delete what a kill left: a checkpoint half written, or half deleted."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- random states: one for all processes, since none of them draws anything of its own ---------------------


def save_random_state(checkpoint: Path) -> None:
    states = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, checkpoint / RANDOM)


def load_random_state(checkpoint: Path) -> None:
    try:
        states = torch.load(checkpoint / RANDOM, weights_only=True)
        random.setstate(states["python"])
        torch.set_rng_state(states["cpu"])
    except Exception as error:  # a file that is cut off makes torch raise anything
        raise damaged(checkpoint, f"{RANDOM}: {error}") from error
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
