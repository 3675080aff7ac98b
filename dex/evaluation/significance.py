"""Whether a paired difference can be chance: exact McNemar, sign flips over groups, and Holm's adjustment.

Under the null hypothesis the two models' scores of a group could as well be swapped, which turns the sign of its
difference. All tests are two-sided.

    McNemar      scores 0 or 1, every item a group of its own: of b + c items that one model alone gets right, the
                 smaller share is binomial with probability 1/2
    sign flips   everything else: |Σ_g ± D_g| with D_g the group's weighted sum of differences, over all signs, or
                 over signs that are drawn where there are too many
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dex.evaluation.paired import Floats, Groups, per_group

DRAWS = 2**16 - 1  # with the observed signs themselves 2¹⁶, as many as are enumerated at most
TOO_FEW_GROUPS = 6  # of fewer, even when all differ in one direction, p is at least 2/2⁵
AT_ONCE = 2**21  # sums of 8 signs in memory at once


class PairedTest(NamedTuple):
    """The test that was made, and its p value."""

    name: str
    p: float


def paired_test(
    score_a: ArrayLike, score_b: ArrayLike, weight: ArrayLike, group: Groups, seed: int = 0
) -> PairedTest | None:
    """The test that fits the scores, [N] each; None for one group, of which nothing can be said.

    Errors as in `dex.evaluation.paired.mean_score`.
    """
    a, b, weights = (np.asarray(each, dtype=np.float64) for each in (score_a, score_b, weight))
    sums, _ = per_group(a - b, weights, group)
    if len(sums) < 2:
        return None
    counted = weights > 0
    alone = len(sums) == counted.sum() and len(np.unique(weights[counted])) == 1
    if alone and np.isin(a[counted], (0, 1)).all() and np.isin(b[counted], (0, 1)).all():
        return PairedTest("McNemar, exact", mcnemar(int((sums > 0).sum()), int((sums < 0).sum())))
    return sign_flips(sums, seed)


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact p value, of the numbers of items that one model alone gets right.

    The binomial tail in whole numbers: nothing is rounded until the end.
    """
    n, smaller = only_a + only_b, min(only_a, only_b)
    ways, tail = 1, 1
    for k in range(smaller):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)


def sign_flips(differences: ArrayLike, seed: int = 0) -> PairedTest:
    """The permutation test of the groups' sums of differences, [M].

    The share of sign patterns whose sum is at least as far from zero: of all of them for up to 17 groups that differ,
    otherwise of `DRAWS` that are drawn and the observed one, without which p could be zero.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]  # their sign changes nothing
    # Sums in another order differ by their rounding, and equal ones have to count as equal.
    reached = abs(values.sum()) - 1e-12 * abs(values).sum()
    if len(values) == 0:
        return PairedTest("sign flips, exact", 1.0)
    if (
        2 ** (len(values) - 1) <= DRAWS + 1
    ):  # the first sign is kept: the other half is the same with all signs turned
        sums = values[0] + _signed_sums(values[None, 1:])[0]
        return PairedTest("sign flips, exact", float((abs(sums) >= reached).mean()))
    further = int((abs(_drawn_sums(values, seed)) >= reached).sum())
    return PairedTest(f"sign flips, {DRAWS:,} drawn", (further + 1) / (DRAWS + 1))


def _signed_sums(rows: Floats) -> Floats:
    """Σ ± over each row's k values, of all patterns of signs: [R, k] → [R, 2^k]."""
    sums = np.zeros((len(rows), 1))
    for column in rows.T:
        sums = np.concatenate([sums - column[:, None], sums + column[:, None]], axis=1)
    return sums


def _drawn_sums(values: Floats, seed: int) -> Floats:
    """Σ ± over M values, of `DRAWS` patterns that are drawn: [DRAWS].

    A random byte is the signs of eight values, whose 256 sums are looked up.
    """
    table = _signed_sums(np.pad(values, (0, -len(values) % 8)).reshape(-1, 8))  # [M/8, 256]
    generator, row = np.random.default_rng(seed), np.arange(len(table))
    at_once = max(1, AT_ONCE // len(table))
    sums = []
    for start in range(0, DRAWS, at_once):
        signs = generator.integers(256, size=(min(at_once, DRAWS - start), len(table)), dtype=np.uint8)
        sums.append(table[row, signs].sum(axis=1))
    return np.concatenate(sums)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given.

    Rejecting what is below a level keeps the chance of any false rejection among them below it, however the tests
    depend on each other.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
