"""The λ dial: an attached model with S·λ in place of its λ. 0 leaves K, V and O alone, 1 is as trained.

The scale belongs to the layers in memory (`DexOutput.lam_scale`), not to the adapter: it is never saved. λ enters the
folded weight linearly, so W_O(S) = W_O(0) + S (W_O(1) − W_O(0)).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft import PeftConfig
from torch import nn

from dex.errors import DexError
from dex.tuner.config import DexConfig
from dex.tuner.model import dex_outputs


@contextmanager
def scale_lambda(model: nn.Module, scale: float) -> Iterator[None]:
    """Inside `with`, every forward pass, λ, branch ratio and merge of an attached model has scale · λ for its λ.

    Any finite number; of nested ones the innermost holds. The scale is gone afterwards, and what was saved inside has
    the adapter's own λ; a merge made inside stays as it is. Raises DexError where the scale would have no effect: no
    active adapter has a branch, or it is merged already.
    """
    check_finite(scale)
    layers = dex_outputs(model)
    if not any(layer.has_branch(adapter) for layer in layers for adapter in layer.active_adapters):
        raise DexError("No active adapter of this model has a branch, so there is no λ to scale.")
    if any(layer.merged for layer in layers):
        raise DexError("The adapter is merged, and a merged λ cannot be scaled; call unmerge_adapter() first.")
    before = [layer.lam_scale for layer in layers]
    try:
        for layer in layers:
            layer.lam_scale = scale
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.lam_scale = own


def check_finite(scale: float) -> None:
    if not math.isfinite(scale):
        raise DexError(
            f"λ cannot be multiplied by {scale}; give a finite number: 0 leaves the branch out, 1 is as trained."
        )


def check_scales(scales: Sequence[float], adapter: str, config: PeftConfig) -> None:
    """Raise DexError for a scale that is not finite, and for any scale of an adapter without a branch."""
    for scale in scales:
        check_finite(scale)
    if scales and (not isinstance(config, DexConfig) or config.schedule == "off"):
        method = "schedule='off'" if isinstance(config, DexConfig) else f"{config.peft_type}"
        raise DexError(
            f"{adapter} has no branch ({method}), so it has no λ to scale; leave the scale out, or name an adapter "
            "with a branch."
        )


def scale_name(scale: float) -> str:
    """A scale as it is written: 0, 0.5, -1. Different scales have different names."""
    return repr(float(scale) + 0.0).removesuffix(".0")  # −0 + 0 is 0
