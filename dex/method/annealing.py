"""λ(t) advances by itself: a hook on torch's optimisers counts the steps of whichever holds an adapter.

So t is right in any loop: a bare one, Trainer, TRL, accelerate with accumulation (an optimiser that is not
stepped, or whose step a gradient scaler skips, does not count). The count is a buffer of the layer (`dex_step`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from dex.method.projection import DexLayer

_layers: weakref.WeakSet[DexLayer] = weakref.WeakSet()


def follow(layer: DexLayer) -> None:
    """Count the optimiser steps of this layer's adapters from now on."""
    _layers.add(layer)


def count_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add one to t of every adapter whose trainable parameters this optimiser holds."""
    found_inf = getattr(optimizer, "found_inf", None)  # a gradient scaler's word to a fused optimiser: skip this step
    if found_inf is not None and found_inf.item():
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in list(_layers):
        for adapter, step in layer.dex_step.items():
            # The first one stands for all, so that two optimisers that share an adapter do not count twice.
            trained = next((p for p in layer.adapter_parameters(adapter) if p.requires_grad), None)
            if trained is not None and id(trained) in held:
                step += 1


register_optimizer_step_post_hook(count_step)
