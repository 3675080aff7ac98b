"""The runs that a study consists of, and what each left in its folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dex.errors import DexError
from dex.evaluation.records import Result, read_result, results_in
from dex.output import write_json
from dex.run_folder import HELD_OUT
from dex.studies.study_file import Study

RECORD = "record.json"  # in a run's folder: its presence means that the run is done
EVALS = "evals"


@dataclass(frozen=True)
class Job:
    """One run: a variant at a point with a learning rate and a seed; or a variant as it is, without either."""

    point: str
    variant: str
    lr: float | None = None
    seed: int | None = None

    def folder(self, output: Path) -> Path:
        own = "as-it-is" if self.lr is None else f"lr-{self.lr:g}-seed-{self.seed}"
        return output / "runs" / self.point / self.variant / own

    def __str__(self) -> str:
        rate = "as it is" if self.lr is None else f"lr {self.lr:g}, seed {self.seed}"
        return f"{f'{self.point} · ' if self.point else ''}{self.variant} · {rate}"


@dataclass(frozen=True)
class Done:
    """What a run came to. `diverged` is the sentence that it stopped with, where its loss was no number any more."""

    job: Job
    folder: Path
    result: dict[str, Any]
    diverged: str | None
    seconds: float
    memory: dict[str, int | None]
    fresh: dict[str, Any] | None = None  # what its model was made like, where it began with fresh weights

    @property
    def loss(self) -> float:
        return float("inf") if self.diverged else float(self.result["held_out_loss"]["mean"])

    def held_out(self) -> Result:
        try:
            return read_result(self.folder / HELD_OUT)
        except DexError as error:
            raise DexError(
                f"{str(error).rstrip('.')}: delete {self.folder}, and the study makes it again."
            ) from error

    def suites(self) -> dict[str, Result]:
        results = [read_result(folder) for folder in results_in(self.folder / EVALS)]
        return {result.suite: result for result in results}

    def log(self) -> list[dict[str, Any]]:
        """The lines of the run's log, one per logged update; a damaged one is left out."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return []
        lines = [_parsed(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        return [line for line in lines if isinstance(line, dict)]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_done(job: Job, study: Study) -> Done | None:
    """The record of a run that is done; None if it is not. Raises DexError for a damaged one."""
    folder = job.folder(Path(study.output))
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        known = {key: saved[key] for key in ("result", "diverged", "seconds", "memory")}
        made = Done(job, folder, fresh=saved.get("fresh"), **known)
        if not (math.isfinite(made.loss) or made.diverged):
            raise ValueError("no loss")
        return made
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DexError(f"{path} is damaged ({error}); delete {folder} and run the study again.") from error


def write_done(done: Done) -> None:
    parts = {key: getattr(done, key) for key in ("result", "diverged", "seconds", "memory", "fresh")}
    write_json(done.folder / RECORD, parts)
