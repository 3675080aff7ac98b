"""Loss against parameters or tokens, and what a variant saves of them for the same loss.

    ln L = a_v − b ln x        a_v of each variant, the slope b shared

A power law without an irreducible loss, which the few sizes of a study could not tell from it; over a small range of
x it is the tangent of any smooth curve. The control reaches with x · exp((a_c − a_v) / b) what the variant reaches
with x:

    savings ratio of v = x_v / x_c at the same loss = exp((a_v − a_c) / b)

Below one the variant needs less. Its interval draws the seeds, the same ones for all variants, and fits anew. Where
the loss is not shown to fall with x, a ratio means nothing, and none is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dex.evaluation.paired import Interval, interval_of

Floats = NDArray[np.float64]
RESAMPLES = 2_000


@dataclass(frozen=True)
class Scaling:
    """`slope` is b; `savings` the ratio of every variant against the control, empty where b may be 0."""

    slope: Interval
    savings: dict[str, Interval]


def scaling(x: Mapping[str, Sequence[float]], loss: Mapping[str, Floats], control: str) -> Scaling:
    """Fit every variant's losses.

    x: of each variant [P], parameters or tokens of its points; loss: [P, S], of its seeds. Raises ValueError where
    the points or the seeds of two variants differ in number.
    """
    shapes = {np.shape(values) for values in loss.values()}
    if len(shapes) != 1:
        raise ValueError(f"Every variant has a loss for every point and seed, but the shapes are {sorted(shapes)}.")
    names = list(loss)
    seeds = next(iter(shapes))[1]
    slope, savings = _fit(x, {name: values.mean(axis=1) for name, values in loss.items()}, control)
    drawn_slopes, drawn = [], []
    generator = np.random.default_rng(0)
    for _ in range(RESAMPLES if seeds > 1 else 0):
        chosen = generator.integers(seeds, size=seeds)
        b, ratios = _fit(x, {name: values[:, chosen].mean(axis=1) for name, values in loss.items()}, control)
        drawn_slopes.append(b)
        drawn.append([ratios[name] for name in names])
    table = np.array(drawn) if drawn else None
    over = interval_of(slope, np.array(drawn_slopes) if drawn else None)
    if (slope if over.low is None else over.low) <= 0:
        return Scaling(over, {})
    return Scaling(
        over,
        {
            name: interval_of(savings[name], None if table is None else table[:, i])
            for i, name in enumerate(names)
            if name != control
        },
    )


def _fit(
    x: Mapping[str, Sequence[float]], loss: Mapping[str, Floats], control: str
) -> tuple[float, dict[str, float]]:
    """b, and exp((a_v − a_c) / b) of every variant, by least squares."""
    logs = {name: (np.log(np.asarray(x[name], dtype=np.float64)), np.log(loss[name])) for name in loss}
    covariance = sum(float(((u - u.mean()) * (v - v.mean())).sum()) for u, v in logs.values())
    b = -covariance / sum(float(((u - u.mean()) ** 2).sum()) for u, _ in logs.values())
    a = {name: float(v.mean() + b * u.mean()) for name, (u, v) in logs.items()}
    return b, {name: float(np.exp((a[name] - a[control]) / b)) for name in a}
