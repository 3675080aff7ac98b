"""Intervals over groups: known answers, and a simulation in which the truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dex.errors import DexError
from dex.evaluation import paired
from dex.evaluation.paired import Interval, mean_over_tasks, mean_score, paired_difference, perplexity


def test_a_constant_difference_has_an_interval_without_width() -> None:
    loss = np.random.default_rng(0).uniform(2, 3, size=30)
    difference = paired_difference(loss + 0.25, loss, np.full(30, 255), np.repeat(np.arange(10), 3))
    assert difference == pytest.approx((0.25, 0.25, 0.25))


def test_the_mean_weighs_every_token_alike() -> None:
    assert mean_score([1.0, 4.0], [300, 100], ["a", "b"]).mean == pytest.approx(1.75)
    assert paired_difference([2.0, 4.0], [1.0, 0.0], [300, 100], ["a", "b"]).mean == pytest.approx(1.75)


def test_splitting_a_document_into_more_blocks_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    loss, tokens, documents = rng.normal(size=20), rng.integers(1, 99, size=20) * 2, np.arange(20)
    whole = mean_score(loss, tokens, documents)
    halves = mean_score(np.repeat(loss, 2), np.repeat(tokens / 2, 2), np.repeat(documents, 2))
    assert halves == pytest.approx(whole)


def test_the_order_of_blocks_and_the_names_of_documents_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    loss, documents = rng.normal(size=40), np.repeat(np.arange(10), 4)
    order = rng.permutation(40)
    named = [f"doc-{d}" for d in documents[order]]
    assert mean_score(loss[order], np.ones(40), named) == pytest.approx(mean_score(loss, np.ones(40), documents))


def test_two_documents_give_the_interval_of_their_three_possible_means() -> None:
    assert mean_score([1.0, 2.0], [10, 10], ["a", "b"]) == pytest.approx((1.5, 1.0, 2.0))


def test_one_document_has_a_mean_and_no_interval() -> None:
    alone = paired_difference([2.0, 3.0], [1.0, 1.0], [1, 1], ["a", "a"])
    assert alone == Interval(1.5, None, None)
    assert perplexity(alone) == Interval(math.exp(1.5), None, None)


def test_blocks_without_a_target_count_for_nothing_even_if_their_mean_is_nan() -> None:
    assert mean_score([1.0, math.nan, 3.0], [5, 0, 5], ["a", "b", "c"]) == mean_score([1.0, 3.0], [5, 5], ["a", "c"])


def test_what_has_no_mean_is_refused() -> None:
    with pytest.raises(DexError, match="not finite"):
        mean_score([1.0, math.inf], [1, 1], ["a", "b"])
    with pytest.raises(DexError, match="nothing to score"):
        mean_score([1.0], [0], ["a"])
    with pytest.raises(DexError, match="nothing to score"):
        mean_score([], [], [])
    with pytest.raises(ValueError, match="Not the same items"):
        paired_difference([1.0], [1.0, 2.0], [1], ["a"])
    with pytest.raises(ValueError, match="one score"):
        mean_score([1.0, 2.0], [1, 1], ["a"])


def test_the_same_seed_gives_the_same_interval_and_another_one_nearly_so() -> None:
    loss = np.random.default_rng(0).normal(size=50)
    first, again, other = (mean_score(loss, np.ones(50), np.arange(50), seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert first == pytest.approx(other, abs=0.02)


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert perplexity(Interval(0.0, -1.0, 1.0)) == pytest.approx((1.0, 1 / math.e, math.e))


def test_memory_does_not_grow_with_the_documents() -> None:
    """20 000 documents × 1000 resamples would be 160 MB of indices at once."""
    loss = np.random.default_rng(0).normal(size=20_000)
    interval = mean_score(loss, np.ones(20_000), np.arange(20_000), resamples=1000)
    assert interval.low is not None
    assert interval.mean - interval.low == pytest.approx(1.96 / 20_000**0.5, rel=0.1)


def test_the_interval_covers_the_truth_as_often_as_it_says_when_items_of_a_group_are_alike() -> None:
    """300 data sets of 40 documents × 5 blocks, differing by document; the truth is 0.1.

    A percentile interval of 40 documents is a little narrow: some 94 % (standard error 1.3 %). Drawing blocks
    in place of documents would cover about 60 %.
    """
    rng = np.random.default_rng(0)
    documents, trials, hits, block_hits = np.repeat(np.arange(40), 5), 300, 0, 0
    for _ in range(trials):
        base = rng.normal(2.5, 0.5, size=200)
        shift = 0.1 + np.repeat(rng.normal(0, 0.2, size=40), 5) + rng.normal(0, 0.05, size=200)
        for unit, is_document in ((documents, True), (np.arange(200), False)):
            _, low, high = paired_difference(base + shift, base, np.full(200, 255), unit, resamples=400)
            assert low is not None
            assert high is not None
            covered = low <= 0.1 <= high
            hits, block_hits = hits + (covered and is_document), block_hits + (covered and not is_document)
    assert 0.89 <= hits / trials <= 0.98
    assert block_hits / trials < 0.75


def test_drawing_kinds_of_groups_is_drawing_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 0 and 1 have two kinds of groups. The bounds of 10 000 draws are uncertain by 3 % of the spread."""
    scores, alike, groups = (np.arange(2000) % 5 < 2).astype(float), np.ones(2000), np.arange(2000)
    kinds = mean_score(scores, alike, groups)
    monkeypatch.setattr(paired, "ALIKE", 2000)
    one_by_one = mean_score(scores, alike, groups)
    assert kinds != one_by_one
    assert kinds == pytest.approx(one_by_one, abs=0.1 * (0.24 / 2000) ** 0.5)


def test_the_difference_the_other_way_round_is_the_negative() -> None:
    rng = np.random.default_rng(0)
    for a, b in (rng.random((2, 300)), rng.integers(2, size=(2, 300))):
        mean, low, high = paired_difference(a, b, np.ones(300), np.arange(300))
        assert low is not None
        assert high is not None
        assert paired_difference(b, a, np.ones(300), np.arange(300)) == pytest.approx((-mean, -high, -low))


def test_a_mean_over_one_task_is_its_mean_and_over_the_same_task_twice_too() -> None:
    scores = np.random.default_rng(0).random(30)
    task = (scores, np.ones(30), np.arange(30))
    assert mean_over_tasks([task]) == mean_score(*task)
    assert mean_over_tasks([task, task]) == pytest.approx(mean_score(*task))
    binary = ((scores > 0.5).astype(float), np.ones(30), np.arange(30))
    assert mean_over_tasks([binary, (1 - binary[0], *binary[1:])]) == pytest.approx((0.5, 0.5, 0.5))
