"""How far two models are apart on the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dex.errors import DexError

POSITIONS = 64


@dataclass(frozen=True)
class Agreement:
    """How far the logits of two models are apart, over all positions of the text."""

    max_logit_difference: float
    largest_logit: float
    kl: float  # mean KL(a ‖ b) per position, nats
    top1_agreement: float  # share of positions with the same most likely token


def agreement(pairs: Iterator[tuple[Tensor, Tensor]]) -> Agreement:
    """Compare logits a and b, given block by block as [T, V]. Raises DexError where one is not finite."""
    difference = largest = kl = 0.0
    same = positions = 0
    for a, b in _few_at_a_time(pairs):
        a, b = a.double(), b.double()
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DexError("A model computes logits that are not finite, so nothing can be compared; try float32.")
        difference = max(difference, (a - b).abs().max().item())
        largest = max(largest, a.abs().max().item())
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl += (log_a.exp() * (log_a - log_b)).sum().item()
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        positions += a.shape[0]
    return Agreement(difference, largest, kl / positions, same / positions)


def _few_at_a_time(pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """For 512 positions of a vocabulary of 128k, the float64 copies of the comparison would take 3 GB."""
    for a, b in pairs:
        yield from zip(a.split(POSITIONS), b.split(POSITIONS), strict=True)
