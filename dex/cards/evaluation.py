"""evaluation.json: what `dex card --results` found out about a folder, and the entries of the model-index.

It holds the scores of the folder's model and its paired differences from the base and from other models, as
`dex compare` computes them; and no path of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult
from pydantic import BaseModel, ConfigDict, ValidationError

from dex.errors import DexError
from dex.evaluation.paired import Interval
from dex.output import write_json

EVALUATION, SCHEMA = "evaluation.json", 1
INDEXED = ("lm", "perplexity")
NOT_ON_HUB = "text"  # in the place of a data set's id, as `datasets` calls such data


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Score(_Frozen):
    mean: float
    low: float | None
    high: float | None

    @property
    def interval(self) -> Interval:
        return Interval(self.mean, self.low, self.high)


class ScoredTask(_Frozen):
    """A task's score; of a loss, the perplexity too. `data` is the Hub id or the own name of what it was made of."""

    metric: str
    higher_is_better: bool
    items: int
    score: Score
    perplexity: Score | None = None
    data: str
    data_on_hub: bool = False
    data_commit: str | None = None


class ScoredSuite(_Frozen):
    """settings: what decides the items and scores, without paths. environment: versions, the harness among them."""

    settings: dict[str, Any]
    tasks: dict[str, ScoredTask]
    average: Score | None
    environment: dict[str, Any]


class Against(_Frozen):
    """One paired difference: this model's mean score − the other's."""

    suite: str
    task: str | None  # None: the mean over the suite's tasks
    items: int
    other: Score
    difference: Score
    p_adjusted: float | None
    verdict: str


class Compared(_Frozen):
    name: str
    role: Literal["base", "its adapter", "other"]
    model: dict[str, Any]
    rows: list[Against]
    notes: list[str]


class Evaluation(_Frozen):
    """The model in the folder, and what it was compared with: the base first."""

    model: dict[str, Any]
    suites: dict[str, ScoredSuite]
    compared: list[Compared]

    def write(self, folder: Path) -> None:
        about = "95 % percentile bootstrap over groups of items, 10 000 draws, seed 0"
        write_json(folder / EVALUATION, {"schema": SCHEMA, "interval": about, **self.model_dump()})


def read_evaluation(folder: Path) -> Evaluation | None:
    """What evaluation.json of a folder holds, None without one. Raises DexError for a damaged one."""
    path = folder / EVALUATION
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise ValueError("it is of another schema")
        values.pop("interval")
        return Evaluation(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError) as error:
        raise DexError(
            f"{path} is damaged ({str(error).splitlines()[0]}); delete it, and name the results again: dex card "
            f"{folder} --results RESULTS."
        ) from error


def eval_results(evaluation: Evaluation) -> list[EvalResult]:
    """The entries of the model-index: metric, shots and harness version of every task of `lm` and `perplexity`."""
    return [
        entry
        for name, suite in evaluation.suites.items()
        if name in INDEXED
        for task, scored in suite.tasks.items()
        for entry in _entries(task, scored, suite)
    ]


def _entries(task: str, scored: ScoredTask, suite: ScoredSuite) -> Iterator[EvalResult]:
    loss = scored.perplexity is not None
    metrics = [(scored.metric, scored.score)] + ([("perplexity", scored.perplexity)] if loss else [])
    for metric, score in metrics:
        assert score is not None
        yield EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=scored.data if scored.data_on_hub else NOT_ON_HUB,
            dataset_name=task if not loss else f"{scored.data}, held-out documents",
            dataset_config=None if loss else task,
            dataset_revision=scored.data_commit,
            metric_type=metric,
            metric_name=_metric_name(metric, suite),
            metric_value=score.mean,
            metric_args=_circumstances(score, scored, suite),
        )


def _metric_name(metric: str, suite: ScoredSuite) -> str:
    shots = suite.settings.get("shots")
    return metric if shots is None else f"{metric} ({shots}-shot)"


def _circumstances(score: Score, scored: ScoredTask, suite: ScoredSuite) -> dict[str, Any]:
    found = {
        "shots": suite.settings.get("shots"),
        "harness": suite.settings.get("harness"),
        "block": suite.settings.get("block"),
        "dex": suite.environment.get("dex"),
        "items": scored.items,
        "low_95": score.low,
        "high_95": score.high,
    }
    return {name: value for name, value in found.items() if value is not None}
