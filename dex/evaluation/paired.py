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

from dex.errors import DexError, NotFinite

Floats = NDArray[np.float64]
Groups = Sequence[object] | NDArray[np.generic]

RESAMPLES = 10_000
LARGEST_LOSS = 700.0  # nats; exp of it is nearly the largest float
ALIKE = 8  # groups to a kind of them, from which on kinds are drawn
DRAWS_AT_ONCE = 2**21  # 16 MB of indices, whatever the number of groups


class Interval(NamedTuple):
    """An estimate and its 95 % interval. `low` and `high` are None where one group leaves it undefined."""

    mean: float
    low: float | None
    high: float | None


def mean_score(
    score: ArrayLike, weight: ArrayLike, group: Groups, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The weighted mean of scores, with its interval.

    score: [N]; weight: [N], of a block's mean loss its number of targets; group: [N]. Items of weight 0 are left out.
    Raises DexError where no item has a weight or a score is not finite, ValueError where the lengths differ.
    """
    sums, counts = per_group(score, weight, group)
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


def mean_over_tasks(tasks: Sequence[tuple[ArrayLike, ArrayLike, Groups]], resamples: int = RESAMPLES) -> Interval:
    """The mean of the means of several tasks, each counting once; a task is its scores, weights and groups.

    The interval draws the groups of every task. Tasks with the same groups (the same questions in another context,
    say) draw the same ones, since what is asked twice is not two independent questions.
    """
    per_task = [per_group(*task) for task in tasks]
    mean = float(np.mean([sums.sum() / counts.sum() for sums, counts in per_task]))
    if any(len(sums) < 2 for sums, _ in per_task):
        return Interval(mean, None, None)
    numbers = sets_of_groups([(weight, group) for _, weight, group in tasks])
    total = np.zeros(resamples)
    for number in dict.fromkeys(numbers):
        together = [each for each, own in zip(per_task, numbers, strict=True) if own == number]
        drawn = _sums_of_drawn(np.concatenate([np.stack(each) for each in together]), number, resamples)  # [2 T, …]
        total += (drawn[::2] / drawn[1::2]).sum(axis=0)
    return interval_of(mean, total / len(tasks))


def sets_of_groups(tasks: Sequence[tuple[ArrayLike, Groups]]) -> list[int]:
    """Of every task's weights and groups, a number that it shares with the tasks of the same groups."""
    seen: dict[tuple[object, ...], int] = {}
    numbers = []
    for weight, group in tasks:
        counted = np.asarray(group)[np.asarray(weight, dtype=np.float64) > 0]
        numbers.append(seen.setdefault(tuple(np.unique(counted).tolist()), len(seen)))
    return numbers


def interval_of(mean: float, resampled: Floats | None) -> Interval:
    """The percentile interval of the bootstrap's values."""
    if resampled is None:
        return Interval(mean, None, None)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(mean, float(low), float(high))


def perplexity(loss: Interval) -> Interval:
    """exp of a mean loss and of its bounds. Raises NotFinite for a loss that has none."""
    if max(value for value in loss if value is not None) > LARGEST_LOSS:
        raise NotFinite(
            f"The loss is {loss.mean:,.0f} nats a token, for which there is no perplexity: the weights are off."
        )
    return Interval(*(None if value is None else math.exp(value) for value in loss))  # type: ignore[arg-type]


def per_group(score: ArrayLike, weight: ArrayLike, group: Groups) -> tuple[Floats, Floats]:
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
        raise NotFinite("A score is not finite, so it has no mean: the model returns NaN or infinite logits.")
    _, index = np.unique(names[counted], return_inverse=True)
    sums: Floats = np.bincount(index, weights=scores[counted] * weights[counted]).astype(np.float64)
    counts: Floats = np.bincount(index, weights=weights[counted]).astype(np.float64)
    return sums, counts


def _drawn(sums: Floats, counts: Floats, seed: int, resamples: int) -> Floats | None:
    """The weighted mean of `resamples` draws of M groups with replacement, [resamples]; None for one group."""
    if len(sums) < 2:
        return None
    drawn_sums, drawn_counts = _sums_of_drawn(np.stack([sums, counts]), seed, resamples)
    return drawn_sums / drawn_counts


def _sums_of_drawn(values: Floats, seed: int, resamples: int) -> Floats:
    """The sum of each row of [R, M] over M columns, drawn with replacement: [R, resamples].

    Where many columns are the same, as of scores of 0 and 1, only how often each kind is drawn has to be: a
    multinomial number, of the same distribution and hundreds of times as fast.
    """
    generator, groups = np.random.default_rng(seed), values.shape[1]
    _, first, times = np.unique(values + 0.0, axis=1, return_index=True, return_counts=True)
    if len(first) * ALIKE <= groups:
        seen = np.argsort(first)  # by first appearance: then a − b and b − a draw alike
        drawn_kinds = generator.multinomial(groups, times[seen] / groups, size=resamples)
        kinds: Floats = values[:, first[seen]]
        return kinds @ drawn_kinds.T
    at_once = max(1, DRAWS_AT_ONCE // groups)
    sums = []
    for start in range(0, resamples, at_once):
        drawn = generator.integers(groups, size=(min(at_once, resamples - start), groups))
        sums.append(np.stack([row[drawn].sum(axis=1) for row in values]))
    return np.concatenate(sums, axis=1)
