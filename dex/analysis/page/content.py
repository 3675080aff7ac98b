"""What stands where on the page: the sections in their order, and in each the models side by side."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dex.analysis.page import written
from dex.analysis.records import NEWLINE, Curve, Example, Findings, ModelReport, Report, Statistic, Table

# The order of display, and what each section asks.
SECTIONS = {
    "branch": (
        "The Dex branch",
        "How large is λ, what does the branch do to the head outputs, and how did W_O change?",
    ),
    "attention": ("Attention", "Where does each head look, and how widely is its attention spread?"),
    "maps": ("Attention maps", "What do the whole maps show that no sum over them does?"),
    "example": ("One text, token by token", "Which heads attend to the answer, and what else do they attend to?"),
    "redundancy": ("Redundancy", "How alike are the heads of a layer?"),
    "importance": ("Importance", "How much does the loss depend on each head?"),
    "outliers": ("Outliers", "How large do attention logits and hidden states become?"),
    "quantised": ("Quantised logits", "What do attention logits of 8, 6 and 4 bits cost?"),
    "landscape": ("Loss landscape", "How curved is the loss around these weights?"),
}

SIGNS = {
    "raw": "Negative weights count with their sign.",
    "absolute": "Negative weights count by their size.",
    "clipped": "Negative weights count as 0.",
    "renormalised": "Negative weights count by their size, and each row is divided by its sum.",
}
FIRST_TOKEN = {
    "counted": "A text’s first token is counted.",
    "left out": "A text’s first token is left out.",
}

Over = Literal["model", "layer", "head"]
Named = TypeVar("Named", Statistic, Curve, Table)


@dataclass(frozen=True)
class Measure:
    """A statistic as the models have it; `one` is that of the first model which has it."""

    one: Statistic
    of: list[Statistic | None]  # for each model
    difference: Statistic | None

    @property
    def treatment(self) -> list[tuple[int | None, str]]:
        """Sentences on signs and the first token, each with the model's index where two models differ in it."""
        signs = apart([SIGNS[each.signs] if each is not None and each.signs else None for each in self.of])
        first_token = apart(
            [FIRST_TOKEN[each.first_token] if each is not None and each.first_token else None for each in self.of]
        )
        return [*signs, *first_token]

    @property
    def meanings(self) -> list[tuple[int | None, str]]:
        return apart(meanings_of(self.of))

    @property
    def range(self) -> str:
        """From the smallest value of all models to the largest: "0.22 to 4.9"."""
        every = [value for each in self.of if each is not None for value in _flat(each.values) if value is not None]
        return f"{written.number(min(every))} to {written.number(max(every))}" if every else "no values"

    @property
    def by_layer(self) -> list[list[float | None] | None]:
        """For each model [L]: the value of each layer, or the mean over those of its heads that have one."""
        return [None if each is None else layer_values(each) for each in self.of]


@dataclass(frozen=True)
class Group:
    """The columns of one statistic in the table of layers."""

    measure: Measure
    columns: list[tuple[int | None, list[str]]]  # the model's index (None: the difference), and its values as written


@dataclass(frozen=True)
class Section:
    name: str
    models: list[ModelReport]
    found: list[Findings | None]  # for each model
    measures: list[Measure]

    @property
    def title(self) -> str:
        return SECTIONS[self.name][0]

    @property
    def question(self) -> str:
        return SECTIONS[self.name][1]

    @property
    def present(self) -> list[tuple[int, Findings]]:
        return [(index, found) for index, found in enumerate(self.found) if found is not None]

    @property
    def has_remarks(self) -> bool:
        return any(found.remarks for _, found in self.present)

    @property
    def absent(self) -> list[tuple[int, str]]:
        """The models without this section that another has, and why."""
        reasons = ((index, model.left_out.get(self.name)) for index, model in enumerate(self.models))
        return [(index, why) for index, why in reasons if why is not None]

    def over(self, what: Over) -> list[Measure]:
        return [each for each in self.measures if each.one.over == what]

    @property
    def layers(self) -> list[Group]:
        """The table of layers."""
        return [_group(each) for each in self.measures if each.one.over != "model"]

    @property
    def depth(self) -> int:
        return max(self.models[index].layers for index, _ in self.present)

    @property
    def curves(self) -> list[tuple[Curve, list[Curve | None]]]:
        return _by_name(self.found, lambda found: found.curves)

    @property
    def examples(self) -> list[tuple[int, Example]]:
        return [(index, found.example) for index, found in self.present if found.example is not None]

    @property
    def example_meanings(self) -> list[tuple[int | None, str]]:
        return apart(meanings_of([found.example if found is not None else None for found in self.found]))

    @property
    def tables(self) -> list[tuple[Table, list[Table | None]]]:
        return _by_name(self.found, lambda found: found.tables)


@dataclass(frozen=True)
class Token:
    """A token of an example: what is shown of it, and how it is marked.

    Spaces at its start stand before what is coloured, so that a line can break there.
    """

    before: str
    shown: str
    classes: str
    breaks: bool  # it ends a line


class Page:
    """What report.html.jinja and data.py ask of a report."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.models = report.models
        there = {name for model in self.models for name in model.sections}
        self.sections = [Section(name, self.models, *self._of(name)) for name in SECTIONS if name in there]

    @property
    def title(self) -> str:
        return " and ".join(model.label for model in self.models)

    @property
    def headline(self) -> list[tuple[Section, Measure]]:
        return [(section, each) for section in self.sections for each in section.measures if each.one.headline]

    @property
    def left_out(self) -> Iterator[tuple[int, str, str]]:
        """The model's index, the section's title, and why it was not computed."""
        for index, model in enumerate(self.models):
            for name, why in model.left_out.items():
                yield index, SECTIONS[name][0], why

    @property
    def facts(self) -> list[tuple[str, dict[str, Any]]]:
        """What was read, with which settings, of which models, where, and how long it took."""
        own = [("text", self.report.text), ("settings", self.report.settings)]
        models = [(model.label, {"kind": model.kind, **model.identity}) for model in self.models]
        seconds = [
            (f"seconds, {model.label}" if len(self.models) > 1 else "seconds", model.seconds) for model in self.models
        ]
        return [
            (name, facts) for name, facts in [*own, *models, *seconds, ("machine", self.report.environment)] if facts
        ]

    def _of(self, name: str) -> tuple[list[Findings | None], list[Measure]]:
        found = [model.sections.get(name) for model in self.models]
        differences = {each.name: each for each in self.report.differences}
        grouped = _by_name(found, lambda each: each.statistics)
        measures = [Measure(one, of, differences.get(one.name)) for one, of in grouped]
        return found, sorted(measures, key=lambda each: not each.one.headline)  # stable: the rest in its order


def meanings_of(of: Sequence[Statistic | Curve | Table | Example | None]) -> list[str | None]:
    return [None if each is None else each.meaning for each in of]


def apart(said: list[str | None]) -> list[tuple[int | None, str]]:
    """What is said of each model: once, with None, where it is the same; else each with the model's index."""
    there = [(index, text) for index, text in enumerate(said) if text is not None]
    same = len({text for _, text in there}) < 2
    return [(None, text) for _, text in there[:1]] if same else [*there]


def layer_values(statistic: Statistic) -> list[float | None]:
    """[L] of a statistic over layers or heads."""
    values: Any = statistic.values
    return values if statistic.over == "layer" else [_mean(row) for row in values]


def summary(statistic: Statistic) -> str:
    """Where a head statistic lies: its median and its ends, with the heads that hold them."""
    values: Any = statistic.values
    places = [
        (value, layer, head)
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
        if value is not None
    ]
    if not places:
        return "not defined for any head"
    low, high = min(places), max(places)
    middle = written.number(averages.median(value for value, _, _ in places))
    undefined = sum(len(row) for row in values) - len(places)
    ends = f"lowest {_place(low)}, highest {_place(high)}"
    return f"median {middle}; {ends}" + (f"; {undefined} heads without a value" if undefined else "")


def tokens(example: Example) -> list[Token]:
    """A token that shows nothing by itself, such as a line break or an indentation, is shown by signs."""
    first, end = example.span
    queries = set(example.queries)
    made = []
    for place, text in enumerate(example.tokens):
        classes = ["token"]
        if first <= place < end:
            classes += ["answer", *(["answer-first"] if place == first else [])]
            classes += ["answer-last"] if place == end - 1 else []
        if place in queries:
            classes.append("query")
        shown = text.replace("\t", "⇥")
        if not shown.strip():
            shown = shown.replace(" ", "␣") or "∅"
        inside = first < place < end  # the answer's box has no gaps
        before = "" if inside else shown[: len(shown) - len(shown.lstrip())]
        made.append(Token(before, shown[len(before) :], " ".join(classes), NEWLINE in shown))
    return made


def is_numeric(table: Table, column: int) -> bool:
    """Whether a column's heading stands above numbers, on the right."""
    values = [row[column] for row in table.rows if row[column] is not None]
    return bool(values) and not any(isinstance(value, str) for value in values)


def rows(table: Table) -> list[list[str]]:
    """The rows as they are written."""
    columns = [written.cells([row[place] for row in table.rows]) for place in range(len(table.columns))]
    return [list(row) for row in zip(*columns, strict=True)]


def _place(place: tuple[float, int, int]) -> str:
    value, layer, head = place
    return f"{written.number(value)} (layer {layer}, head {head})"


def _flat(values: Any) -> list[float | None]:
    return [one for each in values for one in _flat(each)] if isinstance(values, list) else [values]


def _mean(row: list[float | None]) -> float | None:
    there = [value for value in row if value is not None]
    return sum(there) / len(there) if there else None


def _group(measure: Measure) -> Group:
    """All models' values with the same decimals; their difference, which is often much smaller, with its own."""
    values = [(index, each) for index, each in enumerate(measure.by_layer) if each is not None]
    text = iter(written.column([value for _, each in values for value in each]))
    columns: list[tuple[int | None, list[str]]] = [(index, [next(text) for _ in each]) for index, each in values]
    if measure.difference is not None:
        columns.append((None, written.column(layer_values(measure.difference))))
    return Group(measure, columns)


def _by_name(
    found: list[Findings | None], pick: Callable[[Findings], list[Named]]
) -> list[tuple[Named, list[Named | None]]]:
    """What the models have under the same name, side by side."""
    own = [{each.name: each for each in pick(findings)} if findings else {} for findings in found]
    names = dict.fromkeys(name for each in own for name in each)
    rows = [(name, [each.get(name) for each in own]) for name in names]
    return [(next(each for each in row if each is not None), row) for _, row in rows]
