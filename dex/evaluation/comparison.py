"""Models against a reference, on the same items: differences with intervals, tests, and a verdict each.

A difference is another model's mean score − the reference's. The tests of all tasks and models that are compared
together are one family for Holm's adjustment; those of the averages are another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from dex.errors import DexError
from dex.evaluation.paired import Interval, mean_over_tasks, paired_difference, per_group, sets_of_groups
from dex.evaluation.records import Record, Result, columns, paired
from dex.evaluation.significance import PairedTest, holm, paired_test, sign_flips
from dex.evaluation.tables import interval, p_value

LEVEL = 0.05
AVERAGE = "average"
Verdict = Literal["better", "worse", "no difference shown", "not tested"]


@dataclass(frozen=True)
class Difference:
    """One model against the reference, on a task or on average. `test` and p are None where one group is all."""

    model: str
    score: Interval
    difference: Interval
    test: str | None
    p: float | None
    p_adjusted: float | None
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "score": self.score._asdict(), "difference": self.difference._asdict()}


@dataclass(frozen=True)
class Row:
    """A task of a suite, or with `task` None the mean over the suite's tasks, each counting once."""

    suite: str
    task: str | None
    metric: str | None
    higher_is_better: bool
    items: int
    groups: int
    reference: Interval
    differences: list[Difference]

    @property
    def name(self) -> str:
        return self.task or AVERAGE

    def to_dict(self) -> dict[str, Any]:
        parts = {"reference": self.reference._asdict(), "differences": [each.to_dict() for each in self.differences]}
        return {**self.__dict__, **parts}


def compare_results(suites: Sequence[Sequence[Result]]) -> list[Row]:
    """The rows of all suites. Of each suite, the results of the reference and then of the other models, of one order.

    Raises DexError where two results are not of the same items or metrics.
    """
    rows = [row for results in suites for row in _rows_of(results[0], results[1:])]
    return _adjusted(_adjusted(rows, averages=False), averages=True)


def _rows_of(reference: Result, others: Sequence[Result]) -> list[Row]:
    for other in others:
        _refuse_other_tasks(reference, other)
    rows = []
    for name, task in reference.tasks.items():
        records = reference.of_task(name)
        groups = len({record.group for record in records if record.weight > 0})
        differences = [_difference(reference, other, name) for other in others]
        head = (reference.suite, name, task.metric, task.higher_is_better, len(records), groups)
        rows.append(Row(*head, reference.score(name), differences))
    if (average := reference.average()) is not None:
        higher = rows[0].higher_is_better
        items, groups = (sum(getattr(row, key) for row in rows) for key in ("items", "groups"))
        differences = [_difference_of_averages(reference, other) for other in others]
        rows.append(Row(reference.suite, None, None, higher, items, groups, average, differences))
    return rows


def _refuse_other_tasks(a: Result, b: Result) -> None:
    for one, other in ((a, b), (b, a)):
        if lacking := [task for task in one.tasks if task not in other.tasks]:
            common = ",".join(task for task in a.tasks if task in b.tasks)
            choose = f", or compare the others with --tasks {common}" if common else ""
            raise DexError(
                f"{other.label} lacks the {one.suite} tasks {', '.join(lacking)} of {one.label}; evaluate both on "
                f"the same tasks{choose}."
            )


def _difference(reference: Result, other: Result, task: str) -> Difference:
    theirs, ours = paired(reference, other, task)
    scores, weights, groups = columns(ours)
    before = [record.score for record in theirs]
    test = paired_test(scores, before, weights, groups)
    return _untested(other.label, other.score(task), paired_difference(scores, before, weights, groups), test)


def _difference_of_averages(reference: Result, other: Result) -> Difference:
    tasks = []
    for task in reference.tasks:
        theirs, ours = paired(reference, other, task)
        tasks.append(differing(ours, theirs))
    difference = mean_over_tasks(tasks)
    score = mean_over_tasks([columns(other.of_task(task)) for task in reference.tasks])
    return _untested(other.label, score, difference, _test_of_average(tasks) if difference.low is not None else None)


Columns = tuple[list[float], list[float], list[str]]


def differing(ours: Sequence[Record], theirs: Sequence[Record]) -> Columns:
    _, weights, groups = columns(ours)
    return [x.score - y.score for x, y in zip(ours, theirs, strict=True)], weights, groups


def _test_of_average(tasks: Sequence[Columns]) -> PairedTest:
    """Sign flips over the groups of all tasks, of which each counts once; a group that several share turns in all."""
    differences: list[float] = []
    weights: list[float] = []
    groups: list[str] = []
    numbers = sets_of_groups([(weight, group) for _, weight, group in tasks])
    for (difference, weight, group), number in zip(tasks, numbers, strict=True):
        differences += difference
        total = sum(weight)
        weights += [each / total for each in weight]
        groups += [f"{number}:{name}" for name in group]
    return sign_flips(per_group(differences, weights, groups)[0])


def _untested(model: str, score: Interval, difference: Interval, test: PairedTest | None) -> Difference:
    """A difference before its p value is adjusted to its family."""
    name, p = test or (None, None)
    return Difference(model, score, difference, name, p, None, "not tested")


def _adjusted(rows: Sequence[Row], averages: bool) -> list[Row]:
    """The rows with the p values of a family, the tasks or the averages, adjusted, and with verdicts."""
    family = [row for row in rows if (row.task is None) == averages]
    adjusted = iter(holm([each.p for row in family for each in row.differences if each.p is not None]))
    judged = {id(row): [_judged(each, row.higher_is_better, adjusted) for each in row.differences] for row in family}
    return [replace(row, differences=judged.get(id(row), row.differences)) for row in rows]


def _judged(difference: Difference, higher_is_better: bool, adjusted: Iterator[float]) -> Difference:
    if difference.p is None:
        return difference
    p, (_, low, high) = next(adjusted), difference.difference
    assert low is not None
    assert high is not None
    verdict: Verdict = "no difference shown"
    if p < LEVEL and (low > 0 or high < 0):
        verdict = "better" if (low > 0) == higher_is_better else "worse"
    return replace(difference, p_adjusted=p, verdict=verdict)


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], int]:
    """The table: its header, its cells, and how many of the first columns are words."""
    header = [
        "task",
        "metric",
        "model",
        "items",
        "reference",
        "score",
        "difference [95 %]",
        "p",
        "Holm's p",
        "verdict",
    ]
    several = len({row.suite for row in rows}) > 1
    lines = []
    for row in rows:
        name = f"{row.suite}: {row.name}" if several else row.name
        for index, each in enumerate(row.differences):
            first = [name, row.metric or ""] if index == 0 else ["", ""]
            figures = [f"{row.items:,}", f"{row.reference.mean:.4f}", f"{each.score.mean:.4f}"]
            tested = [p_value(each.p), p_value(each.p_adjusted), each.verdict]
            lines.append([*first, each.model, *figures, interval(each.difference, sign=True), *tested])
    return header, lines, 3
