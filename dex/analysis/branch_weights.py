"""What a Dex adapter is as weights: the spectrum of the operation, and how far K, V and O are from the base's.

    M   = I − λ W_D                     O'_h = O_h M: the singular values of M are the gains that it gives O_h
    ΔW  = W_folded − W_base = T + F     T = W_copy − W_base              by training
                                        F = fold(W_copy) − W_copy        by the fold, with `dex.layer.fold_weight`

All in float64.

    S selected heads, D head_dim        matrices λ W_D [1, D, D], or [S, D, D] where each head has its own
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dex.tuner.projection import DexLayer, DexOutput


@torch.no_grad()
def branch_matrices(layer: DexOutput, adapter: str) -> Tensor:
    """λ W_D of a layer with a branch, [1, D, D], or [S, D, D] where each selected head has its own."""
    w_d = layer.dex_w_d[adapter].double()
    return layer.lam(adapter).double() * (w_d if w_d.ndim == 3 else w_d[None])


class Spectrum(NamedTuple):
    """Of M = I − λ W_D; over several heads, the largest and smallest of all, and the mean of the rest."""

    singular_values: Tensor  # [D], descending
    largest: float
    smallest: float
    largest_eigenvalue: float  # magnitudes
    smallest_eigenvalue: float
    distance: float  # ‖M − I‖_F / √D


def spectrum(matrices: Tensor) -> Spectrum:
    """matrices: λ W_D, [S, D, D] float64."""
    operation = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device) - matrices
    singular = torch.linalg.svdvals(operation)  # [S, D], descending
    eigenvalues = torch.linalg.eigvals(operation).abs()
    distance = matrices.square().sum((1, 2)).mean() / matrices.shape[-1]
    return Spectrum(
        singular.mean(0),
        float(singular.max()),
        float(singular.min()),
        float(eigenvalues.max()),
        float(eigenvalues.min()),
        float(distance.sqrt()),
    )


class WeightChange(NamedTuple):
    """Norms over ‖W_base‖. None where it is not defined: a cosine with 0, a share of nothing."""

    total: float | None  # ‖ΔW‖
    by_training: float | None  # ‖T‖
    by_fold: float | None  # ‖F‖
    fold_share: float | None  # ‖F‖² / (‖F‖² + ‖T‖²)
    cosine: float | None  # cos(F, T)


UNCHANGED = WeightChange(0.0, 0.0, 0.0, None, None)


@torch.no_grad()
def weight_change(projection: Any, adapter: str) -> WeightChange:
    """Of k_proj, v_proj or o_proj; of one that the adapter does not wrap, no change."""
    if not isinstance(projection, DexLayer) or adapter not in projection.dex_step:
        return UNCHANGED
    base = projection.base_layer.weight.double()
    copy = projection.dex_weight.get(adapter, projection.base_layer.weight).double()
    folded = projection.projection_to_merge(adapter)[0].double()
    training, fold = copy - base, folded - copy
    of_base, t, f = (float(each.norm()) for each in (base, training, fold))
    return WeightChange(
        _over(float((folded - base).norm()), of_base),
        _over(t, of_base),
        _over(f, of_base),
        _over(f**2, f**2 + t**2),
        _over(float((fold * training).sum()), f * t),
    )


def _over(value: float, whole: float) -> float | None:
    return value / whole if whole else None
