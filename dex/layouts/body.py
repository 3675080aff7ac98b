"""What a DIFF layout keeps of its base: everything but the heads, read off the model and not off its family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dex.errors import DexError
from dex.layouts.registry import register_layouts
from dex.models import attention_shape, quiet

KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)
_SLIDING = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def body(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments of a DIFF configuration that describe the base, its heads included as they are.

    A model on the meta device will do (`on_meta`).
    """
    config, layer = model.config, model.get_decoder().layers[0]
    shape = attention_shape(config)
    return {
        **{key: getattr(config, key) for key in KEPT},
        **{key: getattr(config, key) for key in _SLIDING if hasattr(config, key)},
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "qkv_bias": layer.self_attn.q_proj.bias is not None,
        "o_bias": layer.self_attn.o_proj.bias is not None,
        "mlp_bias": layer.mlp.gate_proj.bias is not None,
        "qk_norm": hasattr(layer.self_attn, "q_norm"),
    }


def kept(config: PretrainedConfig) -> dict[str, Any]:
    """What DIFF V1 and DiffLlama configurations have in common."""
    return {key: getattr(config, key) for key in (*KEPT, "num_attention_heads", "num_key_value_heads", "head_dim")}


def on_meta(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of a configuration, a DIFF one too, without any memory behind it: its modules and shapes."""
    register_layouts()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies of the model's weights by name, a tied head left out: training what is built of them leaves it alone."""
    tied = set(model.all_tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}


def build(cls: type[PreTrainedModel], config: PretrainedConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    """A model of this class with exactly these weights, in their dtype, in eval mode.

    Of weights on the meta device, which are but shapes, the model on the meta device.
    """
    first = next(iter(weights.values()))
    dtype = first.dtype
    if first.is_meta:
        with torch.device("meta"):
            outline: PreTrainedModel = cls._from_config(config, dtype=dtype)
        return outline.eval()
    with quiet():
        model, report = cls.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    problems = {kind: keys for kind, keys in report.items() if keys}
    if problems:
        raise DexError(f"The weights do not fit {cls.__name__}: {problems}.")
    return model.eval()
