"""report.json: the numbers of `dex analyze`, and what each of them means. No torch here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION = 1
NEWLINE = "⏎"  # a line break within a token of an example

# None: it is not defined there (a layer without a branch).
Number = Annotated[float, Field(allow_inf_nan=False)] | None
Signs = Literal["raw", "absolute", "clipped", "renormalised"]
FirstToken = Literal["counted", "left out"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Statistic(_Strict):
    """One number for the model, a layer or a head.

    values: a number; [L]; or [L, H]. signs and first_token: how negative entries of a DIFF map, and the first token
    of a text, are treated; None where there is no such choice. diverging: 0 is its middle, not its end.
    """

    name: str  # unique in a report: "entropy"
    title: str  # "Attention entropy"
    meaning: str  # one sentence
    unit: str = ""  # "nats", "share"
    over: Literal["model", "layer", "head"]
    values: Number | list[Number] | list[list[Number]]
    signs: Signs | None = None
    first_token: FirstToken | None = None
    diverging: bool = False
    headline: bool = False  # shown first, and drawn as a PNG

    @model_validator(mode="after")
    def _of_its_shape(self) -> Self:
        depth, value = {"model": 0, "layer": 1, "head": 2}[self.over], self.values
        for _ in range(depth):
            if not isinstance(value, list) or not value:
                raise ValueError(f"{self.name} is over {self.over}, and its values are not")
            value = value[0]
        if isinstance(value, list):
            raise ValueError(f"{self.name} is over {self.over}, and its values are not")
        return self


class Curve(_Strict):
    """Lines over a common x: λ over the steps, importance by rank, eigenvalues."""

    name: str
    title: str
    meaning: str
    x_label: str
    y_label: str
    x: list[float]
    lines: dict[str, list[Number]]  # by their label; each as long as x
    points: bool = False  # drawn as points: x has no order of its own


class Table(_Strict):
    """Rows of words and numbers that are no statistic of a layer or head."""

    name: str
    title: str
    meaning: str
    columns: list[str]
    rows: list[list[str | float | int | None]]


class Example(_Strict):
    """One text, or a part of it, token by token: how much of each head's attention goes where.

    start: where the part begins in the text; span (the answer) and queries count from there. masses: [L, H, T] of the
    part, the mean over the text's queries of the map's entries (signed for a DIFF layout). on_answer, on_first and
    on_all: [L, H] of the whole text, the mass of the answer, of the text's first token and of all tokens.
    """

    title: str
    meaning: str
    start: int
    tokens: list[str]  # a line break is NEWLINE
    span: tuple[int, int]
    queries: list[int]
    masses: list[list[list[float]]]
    on_answer: list[list[float]]
    on_first: list[list[float]]
    on_all: list[list[float]]


class Findings(_Strict):
    """What one section found. `remarks`: whole sentences for the overview, the most telling first."""

    statistics: list[Statistic] = []
    curves: list[Curve] = []
    tables: list[Table] = []
    example: Example | None = None
    remarks: list[str] = []


class ModelReport(_Strict):
    label: str
    kind: str  # "a stock Llama", "a stock Llama, folded from a Dex adapter", "a DIFF Transformer V1"
    identity: dict[str, Any]
    layers: int
    heads: int  # of each layer: those whose outputs o_proj reads
    overview: list[str]
    sections: dict[str, Findings]
    left_out: dict[str, str]  # sections that were not computed, and why
    seconds: dict[str, float]  # of each section

    def statistic(self, name: str) -> Statistic | None:
        every = (one for found in self.sections.values() for one in found.statistics)
        return next((one for one in every if one.name == name), None)


class Report(_Strict):
    """models: one or two. differences: the second minus the first, of every statistic that both have in one shape."""

    version: Literal[1] = 1
    settings: dict[str, Any]
    text: dict[str, Any]
    models: list[ModelReport]
    differences: list[Statistic]
    not_compared: list[str]  # whole sentences
    environment: dict[str, Any]


def number(value: float | None) -> Number:
    """A number of six digits as report.json has it, 0 without a sign; None for what is not finite or None itself."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") + 0.0  # −0 + 0 = 0


def numbers(values: Any) -> Any:
    """The same for a tensor or nested lists of any depth."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return [numbers(each) for each in values] if isinstance(values, list) else number(values)
