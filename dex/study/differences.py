"""What a variant differs by from the control, and what that is worth: intervals over items, over seeds, over both.

A difference of two runs on the same items has two sources of chance. The items: another held-out text would give
another mean. The seeds: the same text trained in another order, from another W_D, would too. An interval over the one
says nothing about the other, so both are given, and a third that draws both.

    d[s, n]   score of the variant − score of the control, of seed s on item n; both with the same seed, so the same
              data in the same order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dex.errors import DexError
from dex.evaluate.paired import RESAMPLES, Interval, interval_of, paired_difference
from dex.evaluate.records import Result, paired

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """`per_seed`: the mean difference of every seed. `p`: of a paired t-test over the seeds; None for one seed."""

    mean: float
    per_seed: list[float]
    over_items: Interval
    over_seeds: Interval
    over_both: Interval
    p: float | None


def difference(variant: Sequence[Result], control: Sequence[Result], task: str) -> Difference:
    """The variant's runs against the control's, seed by seed, on a task's items.

    A variant that is not trained has one run, which stands against every seed of the control.
    Raises DexError where the items differ.
    """
    ours = list(variant) * len(control) if len(variant) == 1 else list(variant)
    if len(ours) != len(control):
        raise DexError(f"{len(ours)} runs cannot be paired with {len(control)} of the control.")
    pairs = [paired(a, b, task) for a, b in zip(ours, control, strict=True)]
    first = pairs[0][0]
    weights = np.array([record.weight for record in first])
    groups = [record.group for record in first]
    by_id = [{record.id: record.score for record in a} for a, _ in pairs]
    theirs = [{record.id: record.score for record in b} for _, b in pairs]
    d = np.array(
        [[a[record.id] - b[record.id] for record in first] for a, b in zip(by_id, theirs, strict=True)]
    )  # [S, N]
    per_seed = (d * weights).sum(axis=1) / weights.sum()
    mean = float(per_seed.mean())
    zero = np.zeros(d.shape[1])
    return Difference(
        mean,
        [float(value) for value in per_seed],
        paired_difference(d.mean(axis=0), zero, weights, groups),
        over_seeds(per_seed),
        interval_of(mean, _drawn_twice(d, weights, groups)),
        _p(per_seed),
    )


def over_seeds(per_seed: Sequence[float] | Floats) -> Interval:
    """Student's interval of a mean over seeds; none for one seed."""
    values = np.asarray(per_seed, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, None, None)
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return Interval(mean, mean - half, mean + half)


def _p(per_seed: Floats) -> float | None:
    if len(per_seed) < 2:
        return None
    spread = per_seed.std(ddof=1)
    if spread == 0.0:
        return 1.0 if per_seed[0] == 0.0 else 0.0
    return float(2 * stats.t.sf(abs(per_seed.mean()) / (spread / len(per_seed) ** 0.5), len(per_seed) - 1))


def _drawn_twice(d: Floats, weights: Floats, groups: Sequence[str], resamples: int = RESAMPLES) -> Floats | None:
    """The bootstrap's means where seeds and groups are both drawn, with replacement, [R]; None for one of either.

    The percentiles of few seeds are narrow: of 3 a draw has the same seed thrice in one of nine. With S < 5 the
    interval over seeds is the one to look at.
    """
    S = len(d)
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    M = int(index.max()) + 1
    if S < 2 or M < 2:
        return None
    sums = np.stack([np.bincount(index, weights=row * weights, minlength=M) for row in d])  # [S, M]
    counts = np.bincount(index, weights=weights, minlength=M)  # [M]
    generator = np.random.default_rng(0)
    seeds = generator.multinomial(S, np.full(S, 1 / S), size=resamples) / S  # [R, S]
    drawn = generator.multinomial(M, np.full(M, 1 / M), size=resamples)  # [R, M]
    means: Floats = np.einsum("rs,sm,rm->r", seeds, sums, drawn, optimize=True) / (drawn @ counts)
    return means


@dataclass(frozen=True)
class NoiseFloor:
    """What another seed alone does. `rms`: of the differences of two seeds' mean scores; `largest`: of them all."""

    spread: float | None  # standard deviation of the seeds' means
    rms: float | None
    largest: float | None


def noise_floor(means: Sequence[float]) -> NoiseFloor:
    """A variant against itself with another seed, over all pairs of its seeds."""
    values = np.asarray(means, dtype=np.float64)
    if len(values) < 2:
        return NoiseFloor(None, None, None)
    pairs = [abs(a - b) for i, a in enumerate(values) for b in values[:i]]
    rms = float(np.sqrt(np.mean(np.square(pairs))))
    return NoiseFloor(float(values.std(ddof=1)), rms, float(max(pairs)))
