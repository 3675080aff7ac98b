"""Two models side by side: what is subtracted, and what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from dex.analysis.differences import differences
from dex.analysis.records import Findings, ModelReport, Statistic, number, numbers


def statistic(name: str, values: Any, over: str = "layer", **changes: Any) -> Statistic:
    return Statistic(name=name, title=name.title(), meaning="What it is.", over=over, values=values, **changes)


def model(label: str, *statistics: Statistic) -> ModelReport:
    return ModelReport(
        label=label,
        kind="a stock Llama",
        identity={},
        layers=2,
        heads=2,
        overview=[],
        sections={"a": Findings(statistics=statistics[:1]), "b": Findings(statistics=statistics[1:])},
        left_out={},
        seconds={},
    )


def test_a_difference_is_the_second_minus_the_first_cell_by_cell() -> None:
    first = model("base", statistic("x", [[1.0, None], [0.25, 3.0]], "head"), statistic("y", 2.0, "model"))
    second = model("tuned", statistic("x", [[1.5, 1.0], [0.0, None]], "head"), statistic("y", -1.0, "model"))
    made, not_compared = differences(first, second)
    assert [one.values for one in made] == [[[0.5, None], [-0.25, None]], -3.0]
    assert all(one.diverging and one.meaning.startswith("tuned minus base.") for one in made)
    assert not_compared == []


def test_what_cannot_be_subtracted_is_named() -> None:
    first = model("base", statistic("only", [1.0, 2.0]), statistic("wide", [1.0, 2.0]), statistic("s", 1.0, "model"))
    raw = statistic("s", 1.0, "model", signs="raw")
    clipped = statistic("s", 1.0, "model", signs="clipped")
    second = model("diff", statistic("wide", [1.0]), raw, statistic("new", [0.0, 1.0]))
    made, sentences = differences(first, second)
    assert [one.name for one in made] == ["s"]  # a stock map has no negative entries: any treatment is the same
    assert sentences == [
        "Only is there for base alone.",
        "Wide has another shape in diff than in base.",
        "New is there for diff alone.",
    ]
    made, sentences = differences(model("a", clipped), model("b", raw))
    assert (made, len(sentences)) == ([], 1)


@pytest.mark.parametrize(
    ("over", "values"), [("model", [1.0]), ("layer", 1.0), ("layer", [[1.0]]), ("head", [1.0]), ("head", [])]
)
def test_a_statistic_has_the_shape_that_it_says(over: str, values: Any) -> None:
    with pytest.raises(ValidationError):
        statistic("x", values, over)


def test_numbers_that_are_not_finite_are_no_numbers() -> None:
    assert numbers([[0.123456789, float("nan")], [float("inf"), 1]]) == [[0.123457, None], [None, 1.0]]
    assert math.copysign(1.0, numbers(-0.0)) == 1.0
    assert number(None) is None
    with pytest.raises(ValidationError):
        statistic("x", float("nan"), "model")
