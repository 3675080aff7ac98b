"""Means and paired differences, with intervals that draw whole groups.

Items of one group are alike (the blocks of one document, the questions of one haystack), so drawing items would make
intervals too narrow: the bootstrap draws groups, with all their items, and both models always the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dex.errors import DexError

Floats = NDArray[np.float64]
Groups = Sequence[object] | NDArray[np.generic]

RESAMPLES = 10_000
DRAWS_AT_ONCE = 2**21  # 16 MB of indices, whatever the number of groups


class Interval(NamedTuple):
    """An estimate and its 95 % interval. `low` and `high` are None where one group leaves it undefined."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4f} (one group: no interval)"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def mean_score(
    score: ArrayLike, weight: ArrayLike, group: Groups, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The weighted mean of scores, with its interval.

    score: [N]; weight: [N], of a block's mean loss its number of targets; group: [N]. Items of weight 0 are left out.
    Raises DexError where no item has a weight or a score is not finite, ValueError where the lengths differ.
    """
    sums, counts = _per_group(score, weight, group)
    return interval_of(float(sums.sum() / counts.sum()), _drawn(sums, counts, seed, resamples))


def paired_difference(
    score_a: ArrayLike,
    score_b: ArrayLike,
    weight: ArrayLike,
    group: Groups,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The mean of `score_a − score_b` on the same items. Shapes and errors as in `mean_score`."""
    a, b = np.asarray(score_a, dtype=np.float64), np.asarray(score_b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"Not the same items: the scores have the shapes {a.shape} and {b.shape}.")
    return mean_score(a - b, weight, group, seed, resamples)


def resampled_means(
    score: ArrayLike, weight: ArrayLike, group: Groups, seed: int = 0, resamples: int = RESAMPLES
) -> Floats | None:
    """The bootstrap's means, [resamples], from which an interval of what is made of several means can be had.

    None for one group. Errors as in `mean_score`.
    """
    return _drawn(*_per_group(score, weight, group), seed, resamples)


def interval_of(mean: float, resampled: Floats | None) -> Interval:
    """The percentile interval of the bootstrap's values."""
    if resampled is None:
        return Interval(mean, None, None)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(mean, float(low), float(high))


def perplexity(loss: Interval) -> Interval:
    """exp of a mean loss and of its bounds."""
    return Interval(*(None if value is None else math.exp(value) for value in loss))  # type: ignore[arg-type]


def _per_group(score: ArrayLike, weight: ArrayLike, group: Groups) -> tuple[Floats, Floats]:
    """The sum of the weighted scores and of the weights of each group, both [M]."""
    scores, weights = np.asarray(score, dtype=np.float64), np.asarray(weight, dtype=np.float64)
    names = np.asarray(group)
    if scores.ndim != 1 or not scores.shape == weights.shape == names.shape:
        raise ValueError(
            "An item has one score, one weight and one group, but the shapes are "
            f"{scores.shape}, {weights.shape} and {names.shape}."
        )
    counted = weights > 0
    if not counted.any():
        raise DexError("There is nothing to score, so there is no mean.")
    if not np.isfinite(scores[counted]).all():
        raise DexError("A score is not finite, so it has no mean: the model returns NaN or infinite logits.")
    _, index = np.unique(names[counted], return_inverse=True)
    sums: Floats = np.bincount(index, weights=scores[counted] * weights[counted]).astype(np.float64)
    counts: Floats = np.bincount(index, weights=weights[counted]).astype(np.float64)
    return sums, counts


def _drawn(sums: Floats, counts: Floats, seed: int, resamples: int) -> Floats | None:
    """The weighted mean of `resamples` draws of M groups with replacement, [resamples]; None for one group."""
    if len(sums) < 2:
        return None
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(sums))
    means = []
    for start in range(0, resamples, at_once):
        drawn = generator.integers(len(sums), size=(min(at_once, resamples - start), len(sums)))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(means)
