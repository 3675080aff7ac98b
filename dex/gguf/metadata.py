"""What llama.cpp has to know of a model beside its weights, and the models that it has no place for."""

from __future__ import annotations

from typing import Any

import gguf
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dex.cards.front_matter import line_of
from dex.errors import DexError
from dex.gguf.types import TYPES
from dex.models import DIFF, attention_shape, refuse_quantised


def refuse_what_gguf_cannot_hold(config: PretrainedConfig, model: str) -> None:
    """Raise DexError for a model that would come out of llama.cpp as another one."""
    if config.model_type in DIFF:
        raise DexError(
            f"{model} is a DIFF model ({config.model_type}), for which llama.cpp has no architecture; run it with "
            "transformers, or export a folded Dex model."
        )
    refuse_quantised(config)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise DexError(
            f"{model} has sliding-window layers, and llama.cpp's {config.model_type} has full attention alone; "
            "serve the folder with transformers or vLLM."
        )
    if config.model_type == "qwen3" and config.attention_bias:
        raise DexError(
            f"{model} has attention biases, and llama.cpp's qwen3 has no bias of o_proj; serve the folder with "
            "transformers or vLLM."
        )
    if config.hidden_act != "silu":
        raise DexError(f"{model} has the activation {config.hidden_act!r}; llama.cpp's {config.model_type} has silu.")
    _refuse_rope(config, model)
    _refuse_sizes(config, model)


def _refuse_sizes(config: PretrainedConfig, model: str) -> None:
    for name in ("vocab_size", "intermediate_size", "max_position_embeddings"):
        size = getattr(config, name)
        if not isinstance(size, int) or not 0 < size < 2**32:
            raise DexError(f"{name} in the config.json of {model} is {size!r}, which is no size; mend it.")
    padding = config.pad_token_id
    if padding is not None and not -config.vocab_size <= padding < config.vocab_size:
        raise DexError(
            f"pad_token_id in the config.json of {model} is {padding}, outside of vocab_size {config.vocab_size}; "
            "mend the one that is wrong."
        )


def _refuse_rope(config: PretrainedConfig, model: str) -> None:
    kind = config.rope_parameters["rope_type"]
    if kind != "default" and not (kind == "llama3" and config.model_type == "llama"):
        raise DexError(
            f"{model} is a {config.model_type} with RoPE scaling of type {kind!r}, and this export writes Llama's "
            "'llama3' only; use llama.cpp's own converter, or serve the folder with transformers or vLLM."
        )
    share = config.rope_parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0:
        raise DexError(
            f"{model} rotates {share:g} of each head, and llama.cpp's {config.model_type} rotates all of it."
        )


def rope_factors(config: PretrainedConfig) -> torch.Tensor | None:
    """By how much Llama 3's scaling slows each frequency, [head_dim / 2]; None for RoPE without scaling."""
    if config.rope_parameters["rope_type"] == "default":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = 2 * len(scaled)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (plain / scaled.double()).float()


def write_metadata(
    writer: gguf.GGUFWriter, config: PretrainedConfig, dtype: str, name: str, card: dict[str, Any]
) -> None:
    """Sizes and names. `card`: what can be read of the head of the folder's README.md; licence and base are used."""
    shape = attention_shape(config)
    writer.add_type("model")
    writer.add_name(name)
    _write_origin(writer, card)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(shape.num_layers)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(TYPES[dtype].file)
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_origin(writer: gguf.GGUFWriter, card: dict[str, Any]) -> None:
    for key, add in (
        ("license", writer.add_license),
        ("license_name", writer.add_license_name),
        ("license_link", writer.add_license_link),
    ):
        if len(lines := _lines(card.get(key))) == 1:
            add(lines[0])
    bases = _lines(card.get("base_model"))
    if bases:
        writer.add_base_model_count(len(bases))
    for index, hub_id in enumerate(bases):
        organisation, _, title = hub_id.rpartition("/")
        writer.add_base_model_name(index, title)
        writer.add_base_model_organization(index, organisation)


def _lines(value: Any) -> list[str]:
    """A value of the card, or the values of a list, as far as they are text."""
    lines = map(line_of, value if isinstance(value, list) else [value])
    return [line for line in lines if line is not None]
