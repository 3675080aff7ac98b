"""Differential attention output (Dex): the equation, its schedule λ(t), and its fold into W_O.

Source: "Understanding Differential Transformer Unchains Pretrained Self-Attentions", arXiv:2505.16333.

    O_h  = softmax(Q_h K_hᵀ / sqrt(D)) V_h             the attention of the base model, untouched
    O'_h = O_h − λ(t) f_D(O_h)   for h in S            f_D(O) = O W_D
    out  = concat_h(O'_h) W_O

Because f_D is linear, O'_h W_O,h = O_h (I − λ W_D) W_O,h: the operation is the same thing as another W_O,

    W_O,h ← (I − λ W_D) W_O,h    for h in S            "the fold"

which costs D multiplications per weight of the selected heads and nothing per token. Training goes through
it: the folded weight is formed in every forward pass, differentiably, and applied to the untouched concat_h(O_h).

    B  batch                  H  query heads of a layer       d  model width
    T  tokens                 D  width of one head            S  the layer's selected heads
    heads [B, T, H·D]  the input of o_proj, concat_h(O_h)
    w_d   [D, D]       W_D, one per layer, shared by its selected heads, no bias; or [H, D, D], one per head
    lam   [1]          λ(t), one per layer, always float32
    weight [d, H·D]    W_Oᵀ as torch stores it: the D columns h·D … h·D+D−1 belong to head h
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScheduleName = Literal["paper", "land", "fixed", "off"]
WDInit = Literal["kaiming", "zeros"]
ANNEALED = ("paper", "land")  # the schedules with a T_a and a learned λ


def apply_branch(heads: Tensor, w_d: Tensor, lam: Tensor, selected: Tensor) -> Tensor:
    """concat_h(O'_h) from concat_h(O_h), token by token: the plain form, kept as the oracle of `fold_weight`.

    heads [..., H·D], selected [H] (1 for h in S, else 0) → [..., H·D].
    """
    per_head = heads.unflatten(-1, (selected.numel(), -1))  # [..., H, D]
    branch = per_head @ w_d if w_d.ndim == 2 else torch.einsum("...he,hef->...hf", per_head, w_d)  # f_D(O_h)
    return (per_head - (lam * selected)[:, None] * branch).flatten(-2)


def fold_weight(weight: Tensor, w_d: Tensor, lam: Tensor, selected: Tensor) -> Tensor:
    """(I − λ W_D) W_O,h for every selected head, the other heads' columns as they are. Differentiable.

    weight [d, H·D], selected [H] (1 for h in S, else 0) → [d, H·D].
    """
    per_head = weight.unflatten(1, (selected.numel(), -1))  # [d, H, D]: row h of W_Oᵀ's column blocks
    branch = (
        per_head @ w_d.T if w_d.ndim == 2 else (per_head.transpose(0, 1) @ w_d.mT).transpose(0, 1)
    )  # (W_D W_O,h)ᵀ
    return (per_head - (lam * selected)[:, None] * branch).flatten(1)


def lambda_init(layer_idx: int) -> float:
    """λ_init(l) = 0.8 − 0.6 exp(−0.3 l), l the 0-based layer index: 0.2 in the first layer."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


@dataclass(frozen=True)
class Schedule:
    """λ(t) of one layer; t counts the optimiser steps done.

    paper  (1 − α)(t/T_a) λ_init + α λ_learn, α = min(1, t/T_a), λ_learn from 0 (arXiv:2505.16333, Eq. 4)
    land   the same with λ_learn from λ_init: rises from 0 and stays (not in the paper)
    fixed  the constant λ_init, not trained
    """

    name: ScheduleName
    lam_init: float
    anneal_steps: int | None  # T_a

    @property
    def learns(self) -> bool:
        return self.name in ANNEALED

    @property
    def lam_learn_start(self) -> float:
        return self.lam_init if self.name == "land" else 0.0

    def lam(self, step: Tensor, lam_learn: Tensor | None) -> Tensor:
        """λ(t) [1] in float32. With t = 0 and no annealing length yet, 0."""
        if lam_learn is None:
            return torch.full((1,), self.lam_init, device=step.device)
        # Up to T_a, t/T_a is α itself; from T_a on, (1 − α) is 0: so α(1 − α) is Eq. 4's (1 − α)(t/T_a).
        alpha = (step / (self.anneal_steps or 1)).clamp(max=1.0).float()
        return (1.0 - alpha) * alpha * self.lam_init + alpha * lam_learn
