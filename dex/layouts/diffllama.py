"""transformers' DiffLlama: the same function as DIFF V1 with the pairs laid out otherwise.

DIFF V1 pairs neighbours (heads 2i, 2i+1), DiffLlama halves (heads j, j + n/2): the q, k and v heads are reordered.
The input of o_proj has the same order in both. DiffLlama's norm has no gain, so V1's gain is multiplied into W_O;
its eps is `rms_norm_eps`; one `attention_bias` covers q, k, v and o, so a missing o bias becomes zeros.
λ's vectors are copied. DiffLlama rounds λ to the activations' dtype: equal in float32, close in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PretrainedConfig, PreTrainedModel

from dex.errors import DexError
from dex.layouts.body import build, kept, weights_of
from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.head_map import HeadMap, Weights, map_heads
from dex.layouts.modeling_diff_v1 import DiffV1ForCausalLM


def to_diffllama(model: PreTrainedModel) -> PreTrainedModel:
    """A DIFF V1 as a DiffLlama. Raises DexError where DiffLlama cannot say what the V1 does."""
    config, weights = _settled(model)
    refuse_what_diffllama_lacks(config)
    Q, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    bias = config.qkv_bias or config.o_bias
    weights = map_heads(weights, HeadMap(_halves(Q), _halves(G), _halves(G), list(range(Q))), D)
    for layer_idx in range(config.num_hidden_layers):
        _gain_into_o_proj(weights, f"model.layers.{layer_idx}.self_attn")
        if bias:
            _add_missing_biases(weights, f"model.layers.{layer_idx}.self_attn")
    options = {"attention_bias": bias, "lambda_std_dev": config.lambda_std_dev}
    return build(DiffLlamaForCausalLM, DiffLlamaConfig(**kept(config), **options), weights)


def from_diffllama(model: PreTrainedModel) -> PreTrainedModel:
    """A DiffLlama as a DIFF V1 with a gain of one."""
    config = model.config
    Q, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = HeadMap(_neighbours(Q), _neighbours(G), _neighbours(G), list(range(Q)))
    weights = map_heads(weights_of(model), heads, D)
    for layer_idx in range(config.num_hidden_layers):
        weights[f"model.layers.{layer_idx}.self_attn.subln.weight"] = torch.ones(2 * D, dtype=model.dtype)
    options: dict[str, Any] = {
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "lambda_std_dev": config.lambda_std_dev,
        "head_norm_eps": config.rms_norm_eps,
    }
    return build(DiffV1ForCausalLM, DiffV1Config(**kept(config), **options), weights)


def refuse_what_diffllama_lacks(config: PretrainedConfig) -> None:
    """Raise DexError, with the reason, unless DiffLlama can express this DIFF V1."""
    if config.qk_norm:
        raise DexError("DiffLlama has no norm on queries and keys, which this model has; use diff-v1 or diff-v2.")
    if "sliding_attention" in config.layer_types:
        raise DexError("DiffLlama has no sliding-window attention, which this model has; use diff-v1 or diff-v2.")
    if config.mlp_bias:
        raise DexError("DiffLlama's MLP has no biases, which this model has; use diff-v1 or diff-v2.")
    if config.attention_dropout:
        raise DexError("DiffLlama refuses attention_dropout, which is set here; set it to 0 in config.json first.")
    for name, value in {"lambda_mode": "learned", "lambda_sign": -1, "head_norm": "rms"}.items():
        if getattr(config, name) != value:
            raise DexError(f"DiffLlama needs {name} {value!r}, and here it is {getattr(config, name)!r}.")
    if not math.isclose(config.head_norm_eps, config.rms_norm_eps, rel_tol=1e-6):  # GGUF holds 1e-5 as a float32
        raise DexError(
            f"DiffLlama has one eps for all norms, and here head_norm_eps is {config.head_norm_eps:g} and "
            f"rms_norm_eps {config.rms_norm_eps:g}; lay the base out with --option head_norm_eps equal to the latter."
        )


def _settled(model: PreTrainedModel) -> tuple[PretrainedConfig, Weights]:
    """Configuration and weights of a V1; one that has annealed to the end is a plain one."""
    config, weights = model.config, weights_of(model)
    if config.head_norm != "anneal":
        return config, weights
    done = int(model.get_decoder().layers[0].get_submodule("self_attn").get_buffer("head_norm_step"))
    if config.head_norm_steps is None or done < config.head_norm_steps:
        steps = "" if config.head_norm_steps is None else f" of {config.head_norm_steps}"
        raise DexError(
            f"The norm of this model is still annealing (step {done}{steps}), and DiffLlama has the whole norm; "
            "train it to the end, or lay its base out with --norm calibrate."
        )
    config = DiffV1Config(**{**config.to_dict(), "head_norm": "rms", "head_norm_steps": None})
    return config, {name: t for name, t in weights.items() if not name.endswith(("head_rms", "head_norm_step"))}


def _halves(n: int) -> list[int]:
    """Which neighbour-paired head stands at each place of the halves' order."""
    return [*range(0, n, 2), *range(1, n, 2)]


def _neighbours(n: int) -> list[int]:
    return [which * (n // 2) + pair for pair in range(n // 2) for which in (0, 1)]


def _gain_into_o_proj(weights: Weights, attention: str) -> None:
    weight, gain = weights[f"{attention}.o_proj.weight"], weights.pop(f"{attention}.subln.weight")
    columns = weight.double().unflatten(1, (-1, gain.numel())) * gain.double()  # [d, h, 2D]
    weights[f"{attention}.o_proj.weight"] = columns.flatten(1).to(weight.dtype)


def _add_missing_biases(weights: Weights, attention: str) -> None:
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = weights[f"{attention}.{projection}.weight"]
        weights.setdefault(f"{attention}.{projection}.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
