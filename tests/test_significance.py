"""Tests of paired differences: against scipy, and against all patterns; false alarms as often as promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dex.errors import DexError
from dex.evaluation.paired import mean_over_tasks, mean_score
from dex.evaluation.significance import DRAWS, holm, mcnemar, paired_test, sign_flips

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=7)


# McNemar


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (3, 3), (2, 9), (40, 71), (0, 60), (900, 1034)])
def test_mcnemar_is_the_binomial_test_of_the_discordant_items(b: int, c: int) -> None:
    expected = stats.binomtest(b, b + c).pvalue if b + c else 1.0
    assert mcnemar(b, c) == pytest.approx(expected, rel=1e-12)
    assert mcnemar(c, b) == mcnemar(b, c)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=12))
def test_mcnemar_counts_every_way_in_which_labels_could_be_swapped(items: list[tuple[bool, bool]]) -> None:
    a, b = np.array(items, dtype=float).T
    test = paired_test(a, b, np.ones(len(a)), np.arange(len(a)))
    assert test is not None
    assert test.name == "McNemar, exact"
    assert test.p == pytest.approx(by_brute_force(a - b))


def by_brute_force(differences: np.ndarray) -> float:
    """The share of all 2^M patterns of signs whose sum is as far from zero."""
    patterns = np.array(list(itertools.product((-1, 1), repeat=len(differences))))
    sums, observed = abs(patterns @ differences), abs(differences.sum())
    return float((sums >= observed - 1e-9).mean())


# Sign flips


@settings(deadline=None)
@given(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=10))
def test_sign_flips_are_the_share_of_all_patterns(differences: list[float]) -> None:
    assert sign_flips(differences).p == pytest.approx(by_brute_force(np.array(differences)))


def test_drawn_patterns_agree_with_scipys_permutation_test() -> None:
    rng = np.random.default_rng(0)
    for size, shift in ((30, 0.3), (61, 0.1), (200, 0.0)):
        differences = rng.normal(shift, 1, size)
        found = sign_flips(differences)
        assert found.name == "sign flips, 65,535 drawn"
        expected = stats.permutation_test(
            (differences,), np.sum, permutation_type="samples", n_resamples=20_000, rng=1, vectorized=True
        ).pvalue
        assert found.p == pytest.approx(expected, abs=4 * 0.5 / 20_000**0.5)


def test_drawn_and_counted_patterns_agree() -> None:
    differences = np.random.default_rng(3).normal(0.4, 1, 17)
    counted, drawn = sign_flips(differences), sign_flips(np.append(differences, 1e-9))
    assert (counted.name, drawn.name) == ("sign flips, exact", "sign flips, 65,535 drawn")
    assert drawn.p == pytest.approx(counted.p, abs=4 * (counted.p / DRAWS) ** 0.5)


def test_a_drawn_p_is_never_zero_and_the_seed_decides_it() -> None:
    assert sign_flips(np.ones(80)).p == 1 / (DRAWS + 1)
    differences = np.random.default_rng(0).normal(0.2, 1, 40)
    assert sign_flips(differences, seed=1) == sign_flips(differences, seed=1) != sign_flips(differences, seed=2)


def test_groups_that_do_not_differ_change_nothing() -> None:
    assert sign_flips([0.0, 0.0, 0.0]).p == 1.0
    assert sign_flips([1.0, 2.0, 4.0, 0.0, 0.0]) == sign_flips([1.0, 2.0, 4.0]) == ("sign flips, exact", 0.25)


def test_equal_sums_count_as_equal_whatever_their_rounding() -> None:
    """0.1 + 0.2 − 0.3 is not zero in floating point; half of the patterns of (0.3, 0.1, 0.2) tie at 0 or at 0.6."""
    assert sign_flips([0.1, 0.2, -0.3]).p == 1.0
    assert sign_flips([0.3, 0.1, 0.2]).p == 0.25


# Which test


def test_items_that_are_alike_are_swapped_together() -> None:
    """Twelve items in three groups are three coins and not twelve."""
    a, b, groups = np.ones(12), np.zeros(12), np.repeat(["x", "y", "z"], 4)
    test = paired_test(a, b, np.ones(12), groups)
    assert test == ("sign flips, exact", 0.25)
    assert mcnemar(12, 0) < 0.001


@pytest.mark.parametrize("case", ["graded", "weighted"])
def test_mcnemar_is_for_scores_of_0_and_1_that_count_alike(case: str) -> None:
    a, weights = np.array([1.0, 0.0, 1.0, 1.0]), np.ones(4)
    if case == "graded":
        a[0] = 0.5
    else:
        weights[0] = 2.0
    test = paired_test(a, np.zeros(4), weights, range(4))
    assert test is not None
    assert test.name == "sign flips, exact"


def test_one_group_says_nothing_and_what_is_not_finite_is_refused() -> None:
    assert paired_test([1.0, 0.0], [0.0, 0.0], [1, 1], ["x", "x"]) is None
    with pytest.raises(DexError, match="not finite"):
        paired_test([1.0, np.nan], [0.0, 0.0], [1, 1], ["x", "y"])


def test_items_without_weight_are_left_out() -> None:
    a, b = [1.0, 1.0, 0.0, np.nan], [0.0, 0.0, 0.0, 0.0]
    assert paired_test(a, b, [1, 1, 1, 0], range(4)) == paired_test(a[:3], b[:3], [1, 1, 1], range(3))


@settings(deadline=None)
@given(st.permutations(range(20)))
def test_the_order_of_items_does_not_matter(order: list[int]) -> None:
    rng = np.random.default_rng(5)
    a, b, weights, groups = rng.normal(size=20), rng.normal(size=20), rng.integers(1, 9, 20), np.arange(20) % 7
    found = paired_test(a[order], b[order], weights[order], groups[order])
    assert found == paired_test(a, b, weights, groups)


def test_under_the_null_hypothesis_p_is_below_5_percent_in_5_percent() -> None:
    """1000 experiments each, standard error 0.7 %. McNemar's p takes few values, so it errs on the safe side."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(15), 3)
    graded = binary = 0
    for _ in range(1000):
        shared = np.repeat(rng.normal(size=15), 3)  # a group's items move together
        test = paired_test(shared + rng.normal(size=45), np.zeros(45), np.ones(45), groups)
        graded += test is not None and test.p < 0.05
        right = rng.random((2, 100)) < 0.6
        test = paired_test(*right.astype(float), np.ones(100), np.arange(100))
        binary += test is not None and test.p < 0.05
    assert 0.03 < graded / 1000 < 0.07
    assert 0.01 < binary / 1000 < 0.06


# Holm


def holm_by_definition(p_values: list[float], index: int) -> float:
    """The smallest level at which Holm's procedure, run as it is defined, rejects this hypothesis."""

    def rejects(level: float) -> bool:
        left = sorted(range(len(p_values)), key=lambda i: (p_values[i], i))
        while left and p_values[left[0]] * len(left) <= level:
            if left.pop(0) == index:
                return True
        return False

    levels = sorted({1.0, *(min(1.0, p * k) for p in p_values for k in range(1, len(p_values) + 1))})
    return next((level for level in levels if rejects(level)), 1.0)


@settings(deadline=None)
@given(P_VALUES)
def test_an_adjusted_p_is_the_level_at_which_holms_procedure_rejects(p_values: list[float]) -> None:
    assert holm(p_values) == pytest.approx([holm_by_definition(p_values, i) for i in range(len(p_values))])


@settings(deadline=None)
@given(P_VALUES)
def test_adjusting_raises_p_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    by_raw = [q for _, q in sorted(zip(p_values, adjusted, strict=True))]
    assert by_raw == sorted(adjusted)
    assert holm(p_values[::-1]) == adjusted[::-1]


def test_one_test_is_not_adjusted_and_none_is_none() -> None:
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_any_false_alarm_among_many_tests_is_as_rare_as_one() -> None:
    rng = np.random.default_rng(0)
    raw = rng.random((2000, 12))
    assert (raw.min(axis=1) < 0.05).mean() > 0.4
    assert np.mean([min(holm(row)) < 0.05 for row in raw.tolist()]) == pytest.approx(0.05, abs=0.015)


# The mean over tasks


def test_the_mean_over_tasks_counts_each_once() -> None:
    long, short = ([1.0] * 10, [1] * 10, range(10)), ([0.0, 1.0], [1, 1], range(2))
    assert mean_over_tasks([long, short]) == (0.75, 0.5, 1.0)
    assert mean_over_tasks([long, ([0.5], [1], ["x"])]) == (0.75, None, None)


def test_tasks_of_the_same_groups_draw_the_same_ones() -> None:
    """The same questions asked four times are no more evidence than asked once; of four other sets they are."""
    scores = np.random.default_rng(0).normal(size=50)
    once = mean_score(scores, np.ones(50), np.arange(50))
    again = mean_over_tasks([(scores, np.ones(50), np.arange(50))] * 4)
    assert again == pytest.approx(once)
    others = mean_over_tasks([(scores, np.ones(50), [f"{task}.{i}" for i in range(50)]) for task in range(4)])
    assert others.low is not None
    assert once.low is not None
    assert once.mean - others.low == pytest.approx((once.mean - once.low) / 2, rel=0.1)
