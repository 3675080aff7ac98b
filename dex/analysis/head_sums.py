"""Sums over the text's counted queries, by layer and head, and what cannot be summed."""

from __future__ import annotations

import torch
from torch import Tensor

from dex.analysis.left_out import LeftOut
from dex.analysis.subject import Subject
from dex.attention_maps import LayerMaps
from dex.errors import NotFinite
from dex.stats import FIRST_POSITION


class HeadSums:
    """Named sums over queries, [L, H] float64 each, on the CPU."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.shape = (num_layers, num_heads)
        self._sums: dict[str, Tensor] = {}

    def add(self, layer_idx: int, counted: Tensor, **of_queries: Tensor) -> None:
        """counted: bool [B, T]; each of `of_queries`: a value of every head's every query, [B, H, T]."""
        left_out = ~counted[:, None].cpu()
        for name, values in of_queries.items():
            total = self._sums.setdefault(name, torch.zeros(self.shape, dtype=torch.float64))
            total[layer_idx] += values.cpu().double().masked_fill(left_out, 0.0).sum((0, 2))

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def mean(self, name: str, over: str = "queries") -> Tensor:
        """One sum over another; NaN where nothing was counted."""
        return self._sums[name] / self._sums[over]


def leave_out_short_texts(sums: HeadSums) -> None:
    if not sums["queries"].any():
        raise LeftOut(f"No text is longer than {FIRST_POSITION} tokens, and queries before that are not counted.")


def refuse_what_is_not_finite(subject: Subject, maps: LayerMaps) -> None:
    of_maps = [*maps.first, *(maps.second or ()), *(() if maps.lam is None else (maps.lam,))]
    if not all(bool(each.isfinite().all()) for each in of_maps):
        raise NotFinite(
            f"The queries and keys of layer {maps.layer_idx} of {subject.evaluated.label} are not numbers; "
            "try another dtype, such as float32."
        )
