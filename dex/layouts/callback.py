"""A Trainer callback that logs λ of a DIFF V1, one number a layer, and how far its norm has annealed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dex.layouts.modeling_diff_v1 import DiffV1Attention
from dex.log_figures import LogFigures, whole


class V1Callback(LogFigures):
    """Adds `lam` and, while there is one, `head_norm_share` to the Trainer's log. Other models: nothing to say."""

    def figures(self, model: Any) -> dict[str, Any]:
        return v1_figures(model)


@torch.no_grad()
def v1_figures(model: nn.Module) -> dict[str, Any]:
    """λ per layer, and the share of the norm; {} for a model that is no DIFF V1."""
    layers = [module for module in model.modules() if isinstance(module, DiffV1Attention)]
    figures: dict[str, Any] = {"lam": [whole(layer.lam()).item() for layer in layers]} if layers else {}
    if layers and layers[0].config.head_norm == "anneal":
        figures["head_norm_share"] = layers[0].head_norm_share().item()
    return figures
