"""The numbers that the scripts draw.

Values have four significant digits, which is more than a colour or a hover shows; report.json has them whole. The
masses of an example are most of the data (2 models × 32 layers × 32 heads × 320 tokens = 655,360 numbers), and go as
base64 of float16: 2.7 characters each. That keeps three digits of a mass from 6.1e-5 on, and below it steps of 6e-8,
which are too fine for a colour to show; a smaller mass becomes 0. Sums are not made of these: the report has them.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from dex.analysis.page.content import Measure, Page, Section
from dex.analysis.records import Curve, Example, Statistic

DIGITS = 4


def data_of(page: Page) -> dict[str, Any]:
    return {
        "models": [{"label": model.label, "layers": model.layers, "heads": model.heads} for model in page.models],
        "measures": {
            each.one.name: _measure(each)
            for section in page.sections
            for each in section.measures
            if each.one.over != "model"
        },
        "curves": {
            section.name: {one.name: [_curve(each) for each in of] for one, of in section.curves}
            for section in page.sections
        },
        "examples": {section.name: _examples(section) for section in page.sections},
    }


def _measure(measure: Measure) -> dict[str, Any]:
    one = measure.one
    return {
        "title": one.title,
        "unit": one.unit,
        "over": one.over,
        "diverging": one.diverging,
        "of": [_values(each) for each in measure.of],
        "difference": _values(measure.difference),
    }


def _values(statistic: Statistic | None) -> Any:
    return None if statistic is None else _short(statistic.values)


def _curve(curve: Curve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    return {
        "xLabel": curve.x_label,
        "yLabel": curve.y_label,
        "x": _short(curve.x),
        "lines": [{"label": label, "y": _short(values)} for label, values in curve.lines.items()],
        "points": curve.points,
    }


def _examples(section: Section) -> list[dict[str, Any] | None]:
    return [None if found is None or found.example is None else _example(found.example) for found in section.found]


def _example(example: Example) -> dict[str, Any]:
    masses = np.asarray(example.masses, dtype="<f2")  # [L, H, T]
    return {
        "start": example.start,
        "span": example.span,
        "queries": example.queries,
        "shape": masses.shape,
        "masses": base64.b64encode(masses.tobytes()).decode("ascii"),
        "onAnswer": example.on_answer,
        "onFirst": example.on_first,
        "onAll": example.on_all,
    }


def _short(values: Any) -> Any:
    """The same with four significant digits, whole numbers without a point."""
    if isinstance(values, list):
        return [_short(each) for each in values]
    if values is None or values == 0 or not math.isfinite(values):
        return None if values is None or not math.isfinite(values) else 0
    rounded = float(f"{values:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded
