"""The KV cache of a model, counted on fake tensors: right for every layout, sliding windows included."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from dex.planning.step import give_memory


def kv_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of keys and values of one sequence of `length` tokens. The model, on meta, is used up."""
    with FakeTensorMode(), torch.no_grad():
        give_memory(model)
        out: Any = model(input_ids=torch.empty(1, length, dtype=torch.int64), use_cache=True, logits_to_keep=1)
        layers = out.past_key_values.layers
        return sum(t.numel() * t.dtype.itemsize for layer in layers for t in (layer.keys, layer.values))
