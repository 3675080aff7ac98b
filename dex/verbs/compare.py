"""`dex compare A B [C…]`: whether models differ on the same items, from what `dex eval` and `dex train` wrote.

An argument is a folder that holds results: of one suite, of a model, of several models, or a run. No model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dex.errors import DexError
from dex.evaluation.comparison import LEVEL, Row, compare_results, table_cells
from dex.evaluation.records import Result, read_result, results_in
from dex.evaluation.significance import TOO_FEW_GROUPS
from dex.evaluation.tables import markdown, terminal
from dex.output import refuse_output_over, refuse_to_overwrite, whole_folder, write_json, write_whole
from dex.settings import one_of, shown
from dex.suites import SUITES

SCHEMA = 1
COMPARE, TABLE, FOREST = "compare.json", "compare.md", "forest.png"
IDENTITY = ("id", "commit", "fingerprint", "content", "adapter")  # of a result's model: what makes it this one


@dataclass(frozen=True)
class Model:
    """One model's results, by suite."""

    label: str
    results: dict[str, Result]
    folders: dict[str, Path]

    def renamed(self, label: str) -> Model:
        named = {suite: replace(result, label=label) for suite, result in self.results.items()}
        return replace(self, label=label, results=named)

    def with_tasks(self, tasks: Sequence[str], suites: Sequence[str]) -> Model:
        """Only these tasks, and only these suites."""
        chosen = {}
        for suite, result in self.results.items():
            if suite in suites:
                kept = {name: task for name, task in result.tasks.items() if name in tasks}
                records = [record for record in result.records if record.task in kept]
                chosen[suite] = replace(result, tasks=kept, records=records)
        return replace(self, results=chosen)


@dataclass(frozen=True)
class Comparison:
    """Other models against the reference."""

    reference: Model
    others: list[Model]
    rows: list[Row]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """What compare.json holds."""
        return {
            "schema": SCHEMA,
            "reference": self.reference.label,
            "models": {model.label: _identities(model) for model in (self.reference, *self.others)},
            "difference": "mean score of the other model − mean score of the reference, on the same items",
            "interval": "95 % percentile bootstrap over groups of items, 10 000 draws, seed 0",
            "adjustment": "Holm, over all tasks and models here; over all models for averages",
            "level": LEVEL,
            "rows": [row.to_dict() for row in self.rows],
            "notes": self.notes,
        }

    def write(self, output: Path, force: bool = False) -> None:
        """Write compare.json, compare.md and forest.png into a folder. Raises DexError where that cannot be done."""
        from dex.plots import forest

        with whole_folder(output, force, made_here=COMPARE) as folder:
            forest.draw(self.rows, self.reference.label, folder / FOREST)
            write_whole(folder / TABLE, self._repr_markdown_())
            write_json(folder / COMPARE, self.to_dict())

    def describe(self) -> str:
        """What is printed."""
        return terminal(*table_cells(self.rows)) + "\n".join(self._lines())

    def _repr_markdown_(self) -> str:
        """What a notebook shows."""
        return f"{markdown(*table_cells(self.rows))}\n" + "".join(f"* {line}\n" for line in self._lines())

    def _lines(self) -> list[str]:
        return [
            f"differences are from {self.reference.label}; intervals are bootstraps over groups of items",
            *self.notes,
        ]

    def regressions(self, margin: float | None = None) -> list[tuple[str, str]]:
        """(model, task) of all that is worse; with a margin, of all that is not shown to be less than it worse."""
        found = []
        for row in self.rows:
            for each in row.differences:
                better_by = each.difference.low
                if not row.higher_is_better:
                    better_by = None if each.difference.high is None else -each.difference.high
                lost = each.verdict == "worse" if margin is None else better_by is None or better_by <= -margin
                if lost:
                    found.append((each.model, row.name if row.task else f"the average of {row.suite}"))
        return found

    def refusal(self, margin: float | None = None) -> str | None:
        """The sentence with which `--require-no-regression` ends; None where nothing is lost, as far as is known.

        Without a margin, nothing is known of tasks with too few groups of items for any of them to be called worse.
        """
        if not (lost := self.regressions(margin)):
            return self._cannot_tell() if margin is None else None
        named = "; ".join(
            f"{model} on {', '.join(task for name, task in lost if name == model)}"
            for model in dict.fromkeys(model for model, _ in lost)
        )
        if margin is None:
            return f"A regression from {self.reference.label}: {named}."
        return (
            f"Not shown to be within {margin:g} of {self.reference.label}: {named}; more items narrow the intervals."
        )

    def _cannot_tell(self) -> str | None:
        blind = [
            row
            for row in self.rows
            if (row.task is not None and row.groups < TOO_FEW_GROUPS)
            or any(each.verdict == "not tested" for each in row.differences)
        ]
        if not blind:
            return None
        named = ", ".join(f"{row.name} ({row.groups} of them)" for row in blind)
        return (
            f"Too few groups of items, such as documents, cannot show a regression from {self.reference.label}: "
            f"{named}; evaluate on more, or give --margin."
        )


def compare(
    folders: Sequence[str | Path],
    *,
    against: str | None = None,
    tasks: Sequence[str] | None = None,
    output: str | Path | None = None,
    force: bool = False,
) -> Comparison:
    """Compare the models whose results lie in `folders` with the one labelled `against`, by default the first.

    Raises DexError where results cannot be read, or are not of the same items, settings and metrics.
    """
    places = [Path(folder) for folder in folders]
    output = None if output is None else Path(output)
    if output is not None:
        from dex.plots import check_matplotlib

        check_matplotlib()
        refuse_to_overwrite(output, force, made_here=COMPARE)
        for place in places:
            refuse_output_over(output, str(place))
    reference, others = _reference_first(read_models(places), against)
    if tasks is not None:
        reference, *others = _chosen([reference, *others], tasks)
    made = compare_models(reference, others)
    if output is not None:
        made.write(output, force)
    return made


def compare_models(reference: Model, others: list[Model]) -> Comparison:
    """`compare`, of models whose results are read already."""
    for other in others:
        _refuse_other_suites(reference, other)
        for suite, result in reference.results.items():
            _refuse_other_settings(result, other.results[suite])
    rows = compare_results([[model.results[suite] for model in (reference, *others)] for suite in reference.results])
    return Comparison(reference, others, rows, [*_notes(reference, others), *_notes_of_rows(rows)])


def read_models(folders: Sequence[Path]) -> list[list[Model]]:
    """The models of each folder, with labels that tell them apart: where two agree, by their folders."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DexError("A folder is named twice; each is compared once.")
    found = [(folder, _models_in(folder)) for folder in folders]
    all_labels = [model.label for _, models in found for model in models]
    seen: set[Path] = set()
    for folder, models in found:
        for index, model in enumerate(models):
            places = {place.resolve() for place in model.folders.values()}
            if again := places & seen:
                raise DexError(f"{min(again)} lies in two of the folders; name each result once.")
            seen |= places
            if all_labels.count(model.label) > 1:
                models[index] = model.renamed(str(folder) if len(models) == 1 else f"{folder}/{model.label}")
    return [models for _, models in found]


def _models_in(folder: Path) -> list[Model]:
    """The results in a folder, together where they have the label of one model."""
    if not folder.exists():
        raise DexError(f"{folder} does not exist; name a folder that dex eval or dex train wrote.")
    places = results_in(folder)
    if not places:
        raise DexError(f"{folder} holds no result; name a folder that dex eval -o wrote, or a finished run.")
    models: dict[str, Model] = {}
    for place in places:
        result = read_result(place)
        model = models.setdefault(result.label, Model(result.label, {}, {}))
        if result.suite in model.results:
            raise DexError(
                f"{folder} holds two results of {result.label} on {result.suite}, {model.folders[result.suite]} and "
                f"{place}; name the one that is meant."
            )
        _refuse_another_model(model, result, place)
        model.results[result.suite], model.folders[result.suite] = result, place
    return list(models.values())


def _refuse_another_model(model: Model, result: Result, place: Path) -> None:
    for suite, other in model.results.items():
        for key in IDENTITY:
            if key in other.model and key in result.model and other.model[key] != result.model[key]:
                raise DexError(
                    f"{place} and {model.folders[suite]} are both of {model.label}, but of two models ({key} is "
                    f"{shown(result.model[key])} and {shown(other.model[key])}); name each by itself."
                )


def _reference_first(folders: Sequence[Sequence[Model]], against: str | None) -> tuple[Model, list[Model]]:
    models = [model for of_folder in folders for model in of_folder]
    labels = [model.label for model in models]
    if len(models) < 2:
        raise DexError(f"Only {labels[0]} is there, and comparing takes two models; name another one's results too.")
    if against is None and len(folders[0]) > 1:
        raise DexError(
            f"The first folder holds {', '.join(model.label for model in folders[0])}; say which the others are "
            f"compared with: --against {labels[0]}, say."
        )
    if against is not None and against not in labels:
        raise DexError(f"--against {against!r} is not one of these models; there is {one_of(against, labels)}.")
    index = labels.index(against) if against is not None else 0
    return models[index], models[:index] + models[index + 1 :]


def _chosen(models: Sequence[Model], tasks: Sequence[str]) -> list[Model]:
    results = [result for model in models for result in model.results.values()]
    known = list(dict.fromkeys(task for result in results for task in result.tasks))
    for task in tasks:
        if task not in known:
            raise DexError(f"{task} is not a task of these results; there is {one_of(task, known)}.")
    suites = [result.suite for result in results if not result.tasks.keys().isdisjoint(tasks)]
    return [model.with_tasks(tasks, suites) for model in models]


def _refuse_other_suites(reference: Model, other: Model) -> None:
    for one, two in ((reference, other), (other, reference)):
        if lacking := [suite for suite in one.results if suite not in two.results]:
            raise DexError(
                f"{two.label} has no result of {', '.join(lacking)}, and {one.label} has; name the results of one "
                "suite, or evaluate both on the same ones."
            )


def _refuse_other_settings(a: Result, b: Result) -> None:
    """Which items there are is left to the items themselves."""
    suite = SUITES.get(a.suite)
    free = {"name", "tasks", "inputs", *(suite.which_items if suite else ())}
    for key in sorted((a.settings.keys() | b.settings.keys()) - free):
        if (was := a.settings.get(key)) != (now := b.settings.get(key)):
            raise DexError(
                f"{a.label} and {b.label} are not comparable on {a.suite}: {key} is {shown(was)} for the one and "
                f"{shown(now)} for the other; evaluate both with the same settings."
            )


def _notes(reference: Model, others: Sequence[Model]) -> list[str]:
    """What may matter and forbids nothing: versions, devices, dtypes."""
    notes = []
    for other in others:
        for suite, result in reference.results.items():
            was, now = (dict(_circumstances(each)) for each in (result, other.results[suite]))
            notes += [
                f"{suite}: {key} is {was.get(key)} for {reference.label} and {now.get(key)} for {other.label}"
                for key in dict.fromkeys([*was, *now])
                if None not in (was.get(key), now.get(key)) and was[key] != now[key]
            ]
    return notes


def _circumstances(result: Result) -> Iterator[tuple[str, Any]]:
    yield "dtype", result.model.get("dtype")
    for key in ("dex", "commit", "device"):
        yield {"commit": "dex's commit"}.get(key, key), result.environment.get(key)
    yield from sorted(result.environment.get("packages", {}).items())


def _notes_of_rows(rows: Sequence[Row]) -> list[str]:
    notes = []
    for row in rows:
        if row.task is not None and 1 < row.groups < TOO_FEW_GROUPS:
            notes.append(f"{row.suite}: {row.name} has {row.groups} groups of items, too few for any p below {LEVEL}")
        if any(each.verdict == "not tested" for each in row.differences):
            notes.append(f"{row.suite}: {row.name} is not tested: one group of items has no interval and no p")
    return notes


def _identities(model: Model) -> dict[str, Any]:
    """By suite, where the result lies and of what it is."""
    return {
        suite: {"folder": str(model.folders[suite]), "model": result.model, "settings": result.settings}
        for suite, result in model.results.items()
    }
