"""The largest magnitudes and the median magnitude of more values than memory holds.

    top-k     exact: the k largest seen so far are kept
    median    from a histogram over the leading bits of the float32 magnitude: 8 of the exponent, 9 of the mantissa

Ordered as whole numbers, the bits of non-negative floats are ordered as the floats. A bin is 2^-9 of its lower edge
wide and the median is a bin's middle, so it is off by at most 2^-10 of itself (0.1 %).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dex.errors import NotFinite

MANTISSA_BITS = 9
DROPPED_BITS = 23 - MANTISSA_BITS
BINS = 1 << (8 + MANTISSA_BITS)  # 1 MB of counts


class Magnitudes:
    """Streams values; `largest`: how many of the largest magnitudes are kept."""

    def __init__(self, largest: int = 10) -> None:
        self._top = torch.zeros(largest)
        self._counts = torch.zeros(BINS, dtype=torch.int64)

    def update(self, values: Tensor, seen: Tensor) -> None:
        """Count the values of any shape where `seen`, a bool mask that broadcasts to them, is true.

        Raises NotFinite for one that is not finite.
        """
        # What is not seen becomes 0: never among the largest, and the bin of 0 is corrected by its number.
        magnitude = values.float().abs().masked_fill_(~seen, 0.0)
        largest = float(magnitude.max())  # NaN if there is one
        if not math.isfinite(largest):
            raise NotFinite(
                "A logit or hidden state is not finite, so magnitudes have no median; try another dtype, such as "
                "float32."
            )
        if largest > self._top[-1]:  # rarely: topk of a block takes 6 times as long as its histogram
            candidates = magnitude[magnitude > float(self._top[-1])].cpu()
            self._top = torch.cat([self._top, candidates]).topk(len(self._top)).values
        # In int32: of int64 the conversion alone would take three times as long as counting.
        bins = (magnitude.view(torch.int32) >> DROPPED_BITS).flatten()
        self._counts += torch.bincount(bins, minlength=BINS).cpu()
        self._counts[0] -= values.numel() - int(seen.sum()) * (values.numel() // seen.numel())

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    def top(self, k: int) -> float:
        """The k-th largest magnitude, exact; NaN where fewer than k values were seen. k ≤ `largest`."""
        return float(self._top[k - 1]) if self.count >= k else math.nan

    def median(self) -> float:
        """The median magnitude, or the mean of the two in the middle; NaN where no value was seen."""
        count = self.count
        if count == 0:
            return math.nan
        ranks = torch.tensor([(count - 1) // 2, count // 2])
        bins = torch.searchsorted(self._counts.cumsum(0), ranks, right=True)
        middles = ((bins << DROPPED_BITS) + (1 << (DROPPED_BITS - 1))).to(torch.int32).view(torch.float32).double()
        return float(middles.masked_fill(bins == 0, 0.0).mean())  # the first bin ends at 2^-135

    def ratio(self) -> float:
        """The largest magnitude over the median; NaN where the median is 0 or not defined."""
        median = self.median()
        return self.top(1) / median if median > 0 else math.nan
