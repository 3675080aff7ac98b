"""The Lanczos process: eigenvalues of a symmetric matrix A that is known only by its products A v.

    A Q_m = Q_m T_m + β_m q_{m+1} e_mᵀ        Q_m [n, m] orthonormal, q_1 the start, T_m [m, m] tridiagonal
    T_m   = S diag(θ) Sᵀ

θ_i, the Ritz values, approach A's extreme eigenvalues first: one of A's eigenvalues lies within β_m |S_mi| of each.
τ_i = S_1i², the weights, sum to 1, and Σ τ_i f(θ_i) = q_1ᵀ f(A) q_1, exactly for a polynomial f of degree 2m − 1.
Over random starts the mean of that is tr f(A)/n, the mean of f over A's eigenvalues: stochastic Lanczos quadrature
(Ghorbani et al. 2019, arXiv:1901.10159).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dex.errors import NotFinite

ROUNDING = 100  # of the machine epsilons of ‖A‖: a smaller β is one of rounding, since no product is more exact


class Lanczos(NamedTuple):
    """[m], m ≤ steps, float64 on the CPU, in descending order of the Ritz values."""

    values: Tensor  # θ
    weights: Tensor  # τ
    residuals: Tensor  # β_m |S_mi|


def lanczos(matvec: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Lanczos:
    """`steps` products of `matvec` [n] → [n] from `start` [n], not 0, in whose dtype and on whose device it works.

    Every new vector is made orthogonal to all before, twice: without it, rounding brings eigenvalues back a second
    time. It ends early in an invariant subspace, where β_m is 0 and the Ritz values are eigenvalues. Memory: steps ×
    n numbers. Raises NotFinite for a product that is not finite.
    """
    steps = min(steps, start.numel())
    basis = start.new_empty(steps, start.numel())
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    beside: list[float] = []  # β
    for step in range(steps):
        product = matvec(basis[step])
        diagonal.append(float(product.double() @ basis[step].double()))
        known = basis[: step + 1]
        for _ in range(2):
            product = product - known.T @ (known @ product)
        beside.append(float(product.norm()))
        if not torch.tensor([diagonal[-1], beside[-1]]).isfinite().all():
            raise NotFinite("The Lanczos process met a product that is not finite.")
        size = max(map(abs, diagonal + beside[:-1]))
        if step + 1 == steps or beside[-1] <= ROUNDING * torch.finfo(start.dtype).eps * size:
            break
        basis[step + 1] = product / beside[-1]
    return _ritz(diagonal, beside)


def _ritz(diagonal: list[float], beside: list[float]) -> Lanczos:
    """diagonal: α [m]; beside: β [m], of which the last leads out of the subspace."""
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    values, vectors = values.flip(0), vectors.flip(1)
    return Lanczos(values, vectors[0].square(), beside[-1] * vectors[-1].abs())
