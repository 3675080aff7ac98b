"""Which head of one model becomes which head of another: every layout is four lists of heads.

q_proj, k_proj, v_proj: new head n is old head q[n], k[n], v[n]: its rows, its bias
o_proj: the D columns that new head n feeds are those of old head o[n]; zeros for o[n] = NEW
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NEW = -1
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class HeadMap:
    q: list[int]
    k: list[int]
    v: list[int]
    o: list[int]


def map_heads(weights: Mapping[str, Tensor], heads: HeadMap, head_dim: int) -> Weights:
    """The weights of a model with other heads; what is not a projection of the attention is passed on as it is.

    The bias of o_proj belongs to no head.
    """
    mapped = dict(weights)
    for name, tensor in weights.items():
        for projection in ("q_proj", "k_proj", "v_proj"):
            if f".self_attn.{projection}." in name:
                mapped[name] = _rows(tensor, getattr(heads, projection[0]), head_dim)
        if name.endswith(".self_attn.o_proj.weight"):
            mapped[name] = _columns(tensor, heads.o, head_dim)
    return mapped


def _rows(tensor: Tensor, heads: list[int], head_dim: int) -> Tensor:
    """Rows of a weight [n·D, d] or a bias [n·D], head by head."""
    return tensor.unflatten(0, (-1, head_dim))[heads].flatten(0, 1)


def _columns(weight: Tensor, heads: list[int], head_dim: int) -> Tensor:
    """Columns of a weight [d, n·D], head by head."""
    blocks = weight.unflatten(1, (-1, head_dim))  # [d, n, D]
    zeros = torch.zeros_like(blocks[:, :1])  # at the end, which is where NEW, −1, points
    return torch.cat([blocks, zeros], 1)[:, heads].flatten(1)
