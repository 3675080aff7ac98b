"""Mean losses and paired differences, with intervals that treat the document as the unit.

Blocks of one document are alike, so drawing blocks would make intervals too narrow: the bootstrap draws whole
documents, with all their blocks, and both models always on the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dex.errors import DexError

Floats = NDArray[np.float64]

DRAWS_AT_ONCE = 2**21  # 16 MB of indices, whatever the number of documents


class Interval(NamedTuple):
    """An estimate and its 95 % interval. `low` and `high` are None where one document leaves it undefined."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4f} (one document: no interval)"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def mean_loss(
    loss: ArrayLike,
    tokens: ArrayLike,
    documents: Sequence[object] | NDArray[np.generic],
    seed: int = 0,
    resamples: int = 10_000,
) -> Interval:
    """The mean loss per token, with its interval.

    loss: [N], the mean loss of each block; tokens: [N], the targets it is a mean of; documents: [N], the
    document of each block. Blocks without a target are left out. Raises DexError where there is no target at
    all or a loss is not finite, ValueError where the lengths differ.
    """
    sums, counts = _per_document(loss, tokens, documents)
    mean = float(sums.sum() / counts.sum())
    if len(sums) < 2:
        return Interval(mean, None, None)
    low, high = np.percentile(_resampled_means(sums, counts, seed, resamples), [2.5, 97.5])
    return Interval(mean, float(low), float(high))


def paired_difference(
    loss_a: ArrayLike,
    loss_b: ArrayLike,
    tokens: ArrayLike,
    documents: Sequence[object] | NDArray[np.generic],
    seed: int = 0,
    resamples: int = 10_000,
) -> Interval:
    """The mean of `loss_a − loss_b` per token on the same blocks; negative where A is better.

    Shapes and errors as in `mean_loss`.
    """
    a, b = np.asarray(loss_a, dtype=np.float64), np.asarray(loss_b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"Not the same blocks: the losses have the shapes {a.shape} and {b.shape}.")
    return mean_loss(a - b, tokens, documents, seed, resamples)


def perplexity(loss: Interval) -> Interval:
    """exp of a mean loss and of its bounds."""
    return Interval(*(None if value is None else math.exp(value) for value in loss))  # type: ignore[arg-type]


def _per_document(
    loss: ArrayLike, tokens: ArrayLike, documents: Sequence[object] | NDArray[np.generic]
) -> tuple[Floats, Floats]:
    """The sum of the losses and of the tokens of each document, both [M]."""
    losses, weights = np.asarray(loss, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    names = np.asarray(documents)
    if losses.ndim != 1 or not losses.shape == weights.shape == names.shape:
        raise ValueError(
            "A block has one loss, one token count and one document, but the shapes are "
            f"{losses.shape}, {weights.shape} and {names.shape}."
        )
    scored = weights > 0
    if not scored.any():
        raise DexError("No block has a token to predict, so there is no loss to average.")
    if not np.isfinite(losses[scored]).all():
        raise DexError("A loss is not finite, so it has no mean: the model returns NaN or infinite logits.")
    _, index = np.unique(names[scored], return_inverse=True)
    sums: Floats = np.bincount(index, weights=losses[scored] * weights[scored]).astype(np.float64)
    counts: Floats = np.bincount(index, weights=weights[scored]).astype(np.float64)
    return sums, counts


def _resampled_means(sums: Floats, counts: Floats, seed: int, resamples: int) -> Floats:
    """The mean per token of `resamples` draws of M documents with replacement, [resamples]."""
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWS_AT_ONCE // len(sums))
    means = []
    for start in range(0, resamples, at_once):
        drawn = generator.integers(len(sums), size=(min(at_once, resamples - start), len(sums)))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(means)
