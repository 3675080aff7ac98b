"""Each variant's learning rate: the one with the least held-out loss, found by the same sweep for all.

A shared rate would not be a fair comparison: what suits the control may be too much or too little for another. Where
the best rate is the largest or the smallest that was tried, the sweep goes on beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dex.studies.study_file import Study

Loss = Callable[[float, int], float | None]  # of a rate and a seed; inf if it diverged, None if it has not run


class Swept(NamedTuple):
    """`losses` is by rate, the mean over the sweep's seeds; `best` is None while runs are missing."""

    losses: dict[float, float]
    missing: list[tuple[float, int]]
    best: float | None
    at_edge: bool


def sweep(rates: Sequence[float], seeds: Sequence[int], extend: int, loss: Loss) -> Swept:
    """What the runs that there are say, and which ones to make next."""
    rates = sorted(rates)
    for left in range(extend, -1, -1):
        missing = [(rate, seed) for rate in rates for seed in seeds if loss(rate, seed) is None]
        losses = {rate: _mean([loss(rate, seed) for seed in seeds]) for rate in rates}
        if missing:
            return Swept(losses, missing, None, False)
        best = min(rates, key=lambda rate: (losses[rate], rate))
        beyond = _beyond(rates, best)
        if beyond is None or left == 0:
            break
        rates = sorted([*rates, beyond])
    return Swept(losses, [], best, beyond is not None)


def sweep_of(study: Study, variant: str, loss: Loss) -> Swept:
    """The sweep of a variant. One rate alone is no sweep: it is taken."""
    rates, seeds = study.rates(variant), study.seeds[: study.sweep.seeds]
    return sweep(rates, seeds, study.sweep.extend, loss)


def _beyond(rates: Sequence[float], best: float) -> float | None:
    """The next rate outside, by the factor at that end, if the best one is at an end."""
    if len(rates) < 2:
        return None
    if best == rates[-1]:
        return _rounded(best * best / rates[-2])
    if best == rates[0]:
        return _rounded(best * best / rates[1])
    return None


def _rounded(rate: float) -> float:
    """Three digits: a rate's name is part of its folder's."""
    return float(f"{rate:.3g}")


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")
