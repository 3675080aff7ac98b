"""What every suite writes, and what `dex compare` reads: one model on one suite is a folder.

    result.json    the model, the settings, each task's metric and mean score with its interval, figures, versions
    items.jsonl    one line per item: task, id, hash of the prompt, prediction, score, group, weight

`dex eval MODEL… -o OUT` writes OUT/<model>/<suite>/. Two results are comparable if their items are the same: the same
ids with the same prompts, and the same metrics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dex.errors import DexError
from dex.evaluation.paired import Interval, mean_over_tasks, mean_score, paired_difference, perplexity
from dex.output import write_json, write_whole

SCHEMA = 1
KINDS = {"suite": str, "label": str, "model": dict, "settings": dict, "figures": dict, "environment": dict}
RESULT, ITEMS = "result.json", "items.jsonl"


@dataclass(frozen=True)
class Record:
    """One scored item.

    prompt_hash: of what the model was given, and was to choose from. prediction: what it answered, in words, an index
    or None. group: items that share one are alike, and the bootstrap draws them together. details: what else is worth
    keeping, such as the target and the log-likelihood of every choice.
    """

    task: str
    id: str
    prompt_hash: str
    prediction: Any
    score: float
    group: str
    weight: float = 1.0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What a task's scores are. `version` is that of the task's definition, if it has one."""

    metric: str
    higher_is_better: bool = True
    version: str | None = None


@dataclass(frozen=True)
class Result:
    """What one model did on one suite."""

    suite: str
    label: str  # the model's short name
    model: dict[str, Any]
    settings: dict[str, Any]  # all that decides the items and their scores
    tasks: dict[str, Task]
    records: list[Record]
    figures: dict[str, Any] = field(default_factory=dict)  # what a suite measures beside its items
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def of_task(self, task: str) -> list[Record]:
        return [record for record in self.records if record.task == task]

    def mean(self, task: str) -> float:
        """The mean score of a task, without an interval."""
        scores, weights, _ = columns(self.of_task(task))
        return float(np.average(scores, weights=weights))

    def score(self, task: str) -> Interval:
        """The mean score of a task, with its 95 % interval over groups."""
        return mean_score(*columns(self.of_task(task)))

    def average(self) -> Interval | None:
        """The mean of the tasks' means, each counting once; None for one task, or metrics of different sense."""
        if len(self.tasks) < 2 or len({task.higher_is_better for task in self.tasks.values()}) > 1:
            return None
        return mean_over_tasks([columns(self.of_task(task)) for task in self.tasks])

    def summary(self) -> dict[str, Any]:
        """What result.json holds."""
        tasks = {}
        for name, task in self.tasks.items():
            score = self.score(name)
            tasks[name] = {**asdict(task), "items": len(self.of_task(name)), "score": score._asdict()}
            if task.metric == "loss":
                tasks[name]["perplexity"] = perplexity(score)._asdict()
        average = self.average()
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "label": self.label,
            "model": self.model,
            "settings": self.settings,
            "interval": "95 % percentile bootstrap over groups of items, 10 000 draws, seed 0",
            "tasks": tasks,
            "average": average._asdict() if average else None,
            "figures": self.figures,
            "environment": self.environment,
            "seconds": self.seconds,
        }

    def write(self, folder: Path) -> dict[str, Any]:
        """Write both files, the result last: its presence means that the evaluation is whole."""
        summary = self.summary()
        lines = (json.dumps(asdict(record), ensure_ascii=False) for record in self.records)
        write_whole(folder / ITEMS, "".join(line + "\n" for line in lines))
        write_json(folder / RESULT, summary)
        return summary


def paired(a: Result, b: Result, task: str) -> tuple[list[Record], list[Record]]:
    """The records of both models on a task, in the same order.

    Raises DexError where they are not of the same items, saying which differ.
    """
    if a.tasks[task] != b.tasks[task]:
        was, now = a.tasks[task], b.tasks[task]
        raise DexError(
            f"{a.label} and {b.label} are not comparable on {task}: {was.metric} of version {was.version} there, "
            f"{now.metric} of version {now.version} here; evaluate both in the same way."
        )
    ours, theirs = ({record.id: record for record in result.of_task(task)} for result in (a, b))
    for have, miss, one, other in ((ours, theirs, a, b), (theirs, ours, b, a)):
        if lacking := [name for name in have if name not in miss]:
            raise DexError(
                f"{a.label} and {b.label} are not comparable on {task}: {other.label} lacks {len(lacking)} items of "
                f"{one.label}, such as {lacking[0]}; evaluate both on the same items."
            )
    keys = ("prompt_hash", "group", "weight")
    different = [name for name in ours if any(getattr(ours[name], k) != getattr(theirs[name], k) for k in keys)]
    if different:
        raise DexError(
            f"{a.label} and {b.label} are not comparable on {task}: {len(different)} items have other prompts or "
            f"weights, such as {different[0]}; evaluate both with the same settings and tokenizer."
        )
    return list(ours.values()), [theirs[name] for name in ours]


def difference(a: Result, b: Result, task: str) -> Interval:
    """Mean score of `a` − mean score of `b` on the same items, with its 95 % interval over groups."""
    ours, theirs = paired(a, b, task)
    scores, weights, groups = columns(ours)
    return paired_difference(scores, [record.score for record in theirs], weights, groups)


def columns(records: Sequence[Record]) -> tuple[list[float], list[float], list[str]]:
    """Scores, weights and groups: the arguments of `mean_score`."""
    return [r.score for r in records], [r.weight for r in records], [r.group for r in records]


def prompt_hash(*parts: str | Iterable[int]) -> str:
    """A short hash of texts or token ids."""
    digest = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, str) else " ".join(map(str, part))
        digest.update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def read_result(folder: Path) -> Result:
    """Read what `Result.write` wrote. Raises DexError for a folder that holds no result, or a damaged one."""
    summary = _read_summary(folder)
    try:
        with (folder / ITEMS).open(encoding="utf-8") as file:
            records = [Record(**json.loads(line)) for line in file]
        known = ("metric", "higher_is_better", "version")
        tasks = {name: Task(**{key: task[key] for key in known}) for name, task in summary["tasks"].items()}
        parts = {key: summary[key] for key in ("suite", "label", "model", "settings", "figures", "environment")}
        for key, kind in KINDS.items():
            if not isinstance(summary[key], kind):
                raise TypeError(f"{key} of {RESULT} is {type(summary[key]).__name__}")
        result = Result(tasks=tasks, records=records, seconds=summary["seconds"], **parts)
        if {name: task["items"] for name, task in summary["tasks"].items()} != {
            name: len(result.of_task(name)) for name in tasks
        }:
            raise ValueError("items are missing")
        if len({(record.task, record.id) for record in records}) < len(records):
            raise ValueError("an item is there twice")
        if not all(isinstance(each, int | float) for record in records for each in (record.score, record.weight)):
            raise ValueError("a score or weight is not a number")
    except FileNotFoundError:
        raise DexError(f"{folder} has no {ITEMS}; evaluate again.") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DexError(f"{folder / ITEMS} is damaged ({error}); evaluate again.") from error
    return result


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        schema = summary["schema"]
    except FileNotFoundError:
        raise DexError(f"{folder} holds no result of dex eval (no {RESULT}).") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DexError(f"{path} is not a result of dex eval; evaluate again.") from error
    if schema != SCHEMA:
        raise DexError(f"{path} was written in schema {schema}, and this dex reads {SCHEMA}; evaluate again.")
    assert isinstance(summary, dict)
    return summary


def results_in(folder: Path) -> list[Path]:
    """The result folders in a folder of one model (or of several), or the folder itself; sorted."""
    if (folder / RESULT).is_file() and (folder / ITEMS).is_file():
        return [folder]
    found = (path.parent for path in folder.rglob(RESULT) if (path.parent / ITEMS).is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
