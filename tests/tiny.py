"""Tiny random Llama, Qwen2, Qwen3 and DIFF models and a tokenizer, with every norm, bias and λ randomised.

Identity values (norms of one, biases of zero) hide errors, so none is left at its default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.configuration_diff_v2 import DiffV2Config
from dex.layouts.modeling_diff_v1 import DiffV1ForCausalLM
from dex.layouts.modeling_diff_v2 import DiffV2ForCausalLM

VOCAB = 260  # 256 bytes, <bos>, <eos>, <pad>, <|user|>
FAMILIES = ("llama", "llama-bias", "qwen2", "qwen2-sliding", "qwen3")


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def tiny_config(family: str, **changes: Any) -> Any:
    shape = SHAPE
    if family == "llama":
        return LlamaConfig(**{**shape, **changes})
    if family == "llama-bias":
        return LlamaConfig(**{**shape, "attention_bias": True, "tie_word_embeddings": True, **changes})
    if family == "qwen2":
        return Qwen2Config(**{**shape, **changes})
    if family == "qwen2-sliding":
        return Qwen2Config(**{**shape, **SLIDING, **changes})
    if family == "qwen3":  # head_dim != hidden_size / num_heads: o_proj.weight is [64, 128]
        return Qwen3Config(**{**shape, "head_dim": 32, "tie_word_embeddings": True, **changes})
    raise ValueError(family)


def tiny_model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    classes: dict[str, type[PreTrainedModel]] = {
        "llama": LlamaForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
    }
    torch.manual_seed(seed)
    model = classes[config.model_type](config)
    randomise(model, seed)
    return model.to(dtype).eval()


def tiny_diff_v1(seed: int = 0, **changes: Any) -> DiffV1ForCausalLM:
    """8 query and 4 key/value heads: 4 diff heads, two to a key/value pair. The body is a Llama's unless changed."""
    shape = {**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return _tiny_diff(DiffV1ForCausalLM, DiffV1Config(**{**shape, **changes}), seed)


def tiny_diff_v2(seed: int = 0, **changes: Any) -> DiffV2ForCausalLM:
    """4 heads on 2 key/value heads, so 8 queries."""
    return _tiny_diff(DiffV2ForCausalLM, DiffV2Config(**{**SHAPE, "head_dim": 16, **changes}), seed)


def tiny_diffllama(seed: int = 0, **changes: Any) -> DiffLlamaForCausalLM:
    shape = {**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    return _tiny_diff(DiffLlamaForCausalLM, DiffLlamaConfig(**{**shape, **changes}), seed)


def _tiny_diff(cls: type[PreTrainedModel], config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = cls(config)
    randomise(model, seed)
    return model.eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw norms around one, biases around zero and weights wide enough that heads differ."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if re.search(r"\blambda_[qk][12]$", name):  # of a DIFF V1: λ stays within about one of λ_init
                parameter.copy_(0.3 * noise)
            elif "norm" in name or "subln" in name:
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "_proj" in name:
                parameter.copy_(noise * 1.2 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.5 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("head_rms"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def move_trainables(model: torch.nn.Module, seed: int) -> None:
    """Move every tensor of an adapter away from where it starts, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def tiny_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token a byte, so that lengths are easy to reason about."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<pad>", "<|user|>")]
    )
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 256)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    wrapped.chat_template = "{% for message in messages %}<|user|>{{ message['content'] }}<eos>{% endfor %}"
    return wrapped


def write_tiny(folder: Path, family: str = "llama", seed: int = 0, **options: Any) -> Path:
    """Save a tiny model with its tokenizer and a generation config, as a stock folder."""
    model = tiny_model(family, seed, **options)
    model.generation_config.eos_token_id = [257, 258]
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids, [B, T]."""
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))
