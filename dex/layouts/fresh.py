"""Models with fresh weights in any layout, with as many parameters as the model they are like.

    base         the model itself
    diff-v1      h = H/2 diff heads, as the paper matches them: the same projections, with λ and the gain on top
    diffllama    the same, without a gain
    diff-v2      H output heads, so q_proj has twice the rows. Its authors say that they are borrowed from other parts
                 of the model, not from which: ours takes them from the MLP

All weights are drawn as transformers draws a Llama's: N(0, initializer_range²), biases zero, norms one; the vectors
of λ N(0, 0.1²), as in the paper.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, PretrainedConfig, PreTrainedModel, set_seed

from dex.errors import DexError
from dex.layouts.body import body, kept, on_meta
from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.configuration_diff_v2 import DiffV2Config
from dex.layouts.diffllama import refuse_what_diffllama_lacks
from dex.layouts.options import diff_v1_config
from dex.layouts.registry import register_layouts

MLP_STEP = 8  # intermediate_size stays a multiple of it: kernels like that


def fresh(layout: str, like: PretrainedConfig, seed: int, options: dict[str, Any]) -> PreTrainedModel:
    """A float32 model in this layout with new weights, sized like `like`. Raises DexError where heads do not fit."""
    register_layouts()
    config = fresh_config(layout, like, options)
    set_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fresh_config(layout: str, like: PretrainedConfig, options: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a fresh model; `options` are DIFF V1's own."""
    if layout == "base":
        return like
    shape = body(on_meta(like))
    if layout == "diff-v2":
        return _matched_v2(shape, num_parameters(like))
    G = shape["num_key_value_heads"]
    if G % 2:
        raise DexError(
            f"{layout} joins key/value heads in pairs, and this model has {G}; take one with an even number, "
            "or --layout diff-v2."
        )
    config = diff_v1_config(**{**shape, **options})
    if layout == "diff-v1":
        return config
    refuse_what_diffllama_lacks(DiffV1Config(**{**shape, "head_norm_eps": shape["rms_norm_eps"]}))
    return DiffLlamaConfig(**kept(config), attention_bias=config.qkv_bias)


def num_parameters(config: PretrainedConfig) -> int:
    """Parameters of a model, a tied head counted once; without allocating any."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def _matched_v2(shape: dict[str, Any], wanted: int) -> DiffV2Config:
    """The V2 configuration whose intermediate_size brings it nearest to `wanted` parameters."""
    unmatched = DiffV2Config(**shape)
    per_column = shape["num_hidden_layers"] * (3 * shape["hidden_size"] + (2 if shape["mlp_bias"] else 0))
    too_many = (num_parameters(unmatched) - wanted) / per_column
    size = round((shape["intermediate_size"] - too_many) / MLP_STEP) * MLP_STEP
    if size < MLP_STEP:
        raise DexError(
            f"DIFF V2 would need {too_many:.0f} columns of the MLP for its second queries, and this model has "
            f"{shape['intermediate_size']}; take a model with a wider MLP."
        )
    return DiffV2Config(**{**shape, "intermediate_size": size})
