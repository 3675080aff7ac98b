"""Attention whose logits are rounded to a few bits, as a forward pass would have them in low precision.

    z_ij = s q_i·k_j         step = max |z| / (2^(bits − 1) − 1)         z_ij ← step · round(z_ij / step)
    out_i = Σ_j softmax_j(z_ij) v_j

Symmetric, with 2^bits − 1 levels; the largest logit of all that are seen is one of them, so a few outliers make the
step coarse for all others. The maximum is over one call of the attention kernel, and never over two sequences:

    "tensor"   all heads and queries of a sequence
    "head"     the queries of one head

In generation a call has one query. DIFF V2 makes a call for each of its maps; DIFF V1 and DiffLlama one for both
(DIFF V1 one for each where there is a single query).

Source of the question: "Differential Transformer", arXiv:2410.05258, its section on activation outliers.

    B batch   T queries   S keys   H query heads   G key/value heads   D head_dim   C columns of the values
    query [B, H, T, D]   key [B, G, S, D]   value [B, G, S, C]   mask [B, 1, T, S] bool, or None: causal
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dex.stats import attend, attention_by, by_group, logits_in_blocks

Scope = Literal["tensor", "head"]

IMPLEMENTATION = "dex_quantised"
_settings: ContextVar[tuple[int | None, Scope]] = ContextVar("dex_quantised_settings")


@contextmanager
def quantised_logits(model: PreTrainedModel, bits: int | None, per: Scope) -> Iterator[None]:
    """Within the block, every attention layer of `model`, a stock or DIFF one, rounds its logits; nothing is patched.

    The logits and what follows are float32 whatever the model's dtype; the outputs have the model's. Without dropout.
    bits None: nothing is rounded, so that a difference from it is due to rounding alone.
    Raises ValueError for fewer than 2 bits, DexError for a model whose attention is fixed.
    """
    if bits is not None and bits < 2:
        raise ValueError(f"{bits} bits have no level besides 0; give at least 2.")
    token = _settings.set((bits, per))
    try:
        with attention_by(model, IMPLEMENTATION, _forward, "quantised"):
            yield
    finally:
        _settings.reset(token)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, None]:
    bits, per = _settings.get()
    if bits is None:
        attended, _ = attend(query, key, value, attention_mask, scaling)
    else:
        attended = attend_quantised(query, key, value, attention_mask, scaling, bits, per)
    return attended.to(query.dtype).transpose(1, 2).contiguous(), None  # [B, T, H, C]


def attend_quantised(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    bits: int,
    per: Scope,
    block: int = 64,
) -> Tensor:
    """Σ_j softmax_j(rounded z_ij) v_j, [B, H, T, C] float32.

    In two passes over blocks of queries, first for the maxima: O(block × S) memory.
    """
    query, key, value = query.float(), key.float(), value.float()
    step = _largest(query, key, mask, scaling, per, block) / (2 ** (bits - 1) - 1)
    step = step.clamp(min=torch.finfo(step.dtype).tiny)  # all logits 0
    attended = query.new_empty(*query.shape[:3], value.shape[-1])
    for rows, logits, seen in logits_in_blocks(query, key, mask, scaling, block):
        logits.div_(step).round_().mul_(step)
        # The lowest float, which unseen keys have, may have become −inf: a row that sees no key would be NaN.
        p = logits.masked_fill_(~seen, torch.finfo(logits.dtype).min).softmax(-1)
        attended[..., rows, :] = by_group("bgnts,bgsc->bgntc", p, value[:, :, : p.shape[-1]])
    return attended


def _largest(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, per: Scope, block: int) -> Tensor:
    """The largest |z| that is seen: [B, 1, 1, 1] for "tensor", [B, H, 1, 1] for "head"."""
    largest = query.new_zeros(*query.shape[:2], 1, 1)
    for _, logits, seen in logits_in_blocks(query, key, mask, scaling, block):
        found = logits.masked_fill_(~seen, 0.0).abs_().amax((2, 3), keepdim=True)
        largest = torch.maximum(largest, found)
    return largest.amax(1, keepdim=True) if per == "tensor" else largest
