"""λ(t) advances by itself: a hook on torch's optimisers counts the steps of whichever holds an adapter.

So t is right in any loop: a bare one, Trainer, TRL, accelerate with accumulation (an optimiser that is not
stepped, or whose step a gradient scaler skips, does not count). The count is a buffer of the layer (`dex_step`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from dex.tuner.projection import DexLayer

# Of every layer, for each adapter: how often each of its trainable parameters (by id) was stepped. The most often
# stepped one gives t, so that two optimisers that share an adapter do not count twice, and a new one goes on.
_layers: weakref.WeakKeyDictionary[DexLayer, dict[str, dict[int, int]]] = weakref.WeakKeyDictionary()


def follow(layer: DexLayer) -> None:
    """Count the optimiser steps of this layer's adapters from now on."""
    _layers[layer] = {}


def count_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add one to t of every adapter that this optimiser holds a trainable parameter of."""
    found_inf = getattr(optimizer, "found_inf", None)  # a gradient scaler's word to a fused optimiser: skip this step
    if found_inf is not None and found_inf.item():
        return
    held = _held(optimizer)
    for layer, counts in list(_layers.items()):
        for adapter, step in layer.dex_step.items():
            before = counts.get(adapter, {})
            trained = {id(p): before.get(id(p), 0) for p in layer.adapter_parameters(adapter) if p.requires_grad}
            counts[adapter] = {p: count + (p in held) for p, count in trained.items()}
            if max(counts[adapter].values(), default=0) > max(trained.values(), default=0):
                step += 1


def count_unseen_step(optimizer: Any, layers: Iterable[DexLayer]) -> None:
    """After a step of an optimiser that holds none of the layers' parameters, only flat copies of them: add one."""
    held = _held(optimizer)
    trained = [(layer, adapter) for layer in layers for adapter in layer.dex_step if layer.trains(adapter)]
    if any(id(p) in held for layer, adapter in trained for p in layer.adapter_parameters(adapter)):
        return  # `count_step` has seen it
    for layer, adapter in trained:
        layer.dex_step[adapter] += 1


def _held(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


register_optimizer_step_post_hook(count_step)
