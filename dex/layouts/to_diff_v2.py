"""A pretrained model as a DIFF Transformer V2: exact, bit for bit.

Every query head (rows, bias; the norm over head_dim is shared) is there twice, as the two of a pair; λ_proj is zero,
so λ = σ(0) = ½; W_O is doubled (its bias is not):

    (a − ½ a) (2 W_O) = a W_O

It is no dead point: the gradient of the second query is −½ that of the first, and that of λ_proj is not zero.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from dex.layouts.body import body, build, weights_of
from dex.layouts.configuration_diff_v2 import DiffV2Config
from dex.layouts.head_map import HeadMap, map_heads
from dex.layouts.modeling_diff_v2 import DiffV2ForCausalLM


def to_diff_v2(base: PreTrainedModel) -> PreTrainedModel:
    """The same function in DIFF V2's layout, in the base's dtype."""
    config = DiffV2Config(**body(base))
    H, G = config.num_attention_heads, config.num_key_value_heads
    same = list(range(G))
    pairs = [head for head in range(H) for _ in range(2)]
    weights = map_heads(weights_of(base), HeadMap(pairs, same, same, list(range(H))), config.head_dim)
    for layer_idx in range(config.num_hidden_layers):
        attention = f"model.layers.{layer_idx}.self_attn"
        weights[f"{attention}.o_proj.weight"] = 2.0 * weights[f"{attention}.o_proj.weight"]
        weights[f"{attention}.lambda_proj.weight"] = torch.zeros(H, config.hidden_size, dtype=base.dtype)
    return build(DiffV2ForCausalLM, config, weights)
