"""What a variant differs by from the control, and what that is worth: intervals over items, over seeds, over both.

A difference of two runs on the same items has two sources of chance. The items: another held-out text would give
another mean. The seeds: the same text trained in another order, from another W_D, would too. An interval over the one
says nothing about the other, so both are given, and a third that draws both.

    d[s, n]   score of the variant − score of the control, of seed s on item n; both with the same seed, so the same
              data in the same order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dex.evaluation.paired import DRAWS_AT_ONCE, RESAMPLES, Interval, interval_of, paired_difference
from dex.evaluation.records import Result, paired

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """`per_seed`: the mean difference of every seed. `p`: of a paired t-test over the seeds; None for one seed."""

    mean: float
    per_seed: dict[str, float]
    over_items: Interval
    over_seeds: Interval
    over_both: Interval
    p: float | None


Runs = Mapping[int | None, Result]  # by seed; None for a model that is not trained


def difference(variant: Runs, control: Runs, task: str) -> Difference | None:
    """The variant's runs against the control's, seed by seed, on a task's items; None where they share no seed.

    A variant that is not trained has one run, which stands against every seed of the control.
    Raises DexError where the items differ.
    """
    untrained = variant.get(None)
    seeds = [seed for seed in control if untrained is not None or seed in variant]
    if not seeds:
        return None
    pairs = [paired(untrained or variant[seed], control[seed], task) for seed in seeds]
    first = pairs[0][0]
    weights = np.array([record.weight for record in first])
    groups = [record.group for record in first]
    rows = []
    for ours, theirs in pairs:
        by_id = {a.id: a.score - b.score for a, b in zip(ours, theirs, strict=True)}
        rows.append([by_id[record.id] for record in first])
    d = np.array(rows)  # [S, N]
    per_seed = (d * weights).sum(axis=1) / weights.sum()
    mean = float(per_seed.mean())
    return Difference(
        mean,
        {str(seed): float(value) for seed, value in zip(seeds, per_seed, strict=True)},
        paired_difference(d.mean(axis=0), np.zeros(d.shape[1]), weights, groups),
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
    at_once = max(1, DRAWS_AT_ONCE // M)
    means = []
    for start in range(0, resamples, at_once):
        R = min(at_once, resamples - start)
        seeds = generator.multinomial(S, np.full(S, 1 / S), size=R) / S  # [R, S]
        drawn = generator.multinomial(M, np.full(M, 1 / M), size=R)  # [R, M]
        means.append(((seeds @ sums) * drawn).sum(axis=1) / (drawn @ counts))
    return np.concatenate(means)


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
