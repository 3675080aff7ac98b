"""The models that are measured: random weights, since time and memory do not depend on the values."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench_timing import Step
from dex.layouts.body import body
from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.modeling_diff_v1 import DiffV1ForCausalLM
from dex.tuner import DexConfig


class Shape(NamedTuple):
    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SMOLLM2 = Shape(49_152, 576, 1_536, 30, 9, 3, 64)  # SmolLM2-135M
# DIFF V1 and DiffLlama pair heads, and SmolLM2's 9 and 3 are odd: the nearest shape with pairs, otherwise SmolLM2's.
PAIRABLE = SMOLLM2._replace(width=512, heads=8, kv_heads=4)
TINY = Shape(4_096, 128, 384, 4, 4, 2, 32)

# transformers renamed the argument in 5.20.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def llama(shape: Shape) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def diff_v1(shape: Shape) -> PreTrainedModel:
    """A DIFF V1 whose projections have the sizes of llama(shape): half as many diff heads as that has heads.

    (`dex init` can also double the heads of a base; that costs twice this in attention.)
    """
    base = llama(shape._replace(layers=1))
    sizes = {**body(base), "num_hidden_layers": shape.layers, "layer_types": None}
    config = DiffV1Config(**sizes, head_norm_eps=base.config.rms_norm_eps)  # DiffLlama has one eps for all its norms
    return DiffV1ForCausalLM(config).eval()


def half_of_the_heads(shape: Shape, schedule: Any = "paper") -> DexConfig:
    anneal_steps = 1_000_000 if schedule == "paper" else None
    heads = [list(range(shape.heads // 2))] * shape.layers
    return DexConfig(heads=heads, schedule=schedule, anneal_steps=anneal_steps)


# ---- what is run -------------------------------------------------------------------------------------------


def prefill(model: nn.Module, length: int) -> Step:
    """A forward pass over a prompt, [1, length], with the logits of its last token, which generation needs."""
    ids = _random_ids(model, length)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, logits_to_keep=1)

    return step


def decode(model: nn.Module, length: int) -> Step:
    """One more token after `length` cached ones, which are random; the cache grows with each, as in generation."""
    config: Any = model.config
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    cache = DynamicCache()
    for layer_idx in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer_idx)
    ids = _random_ids(model, 1)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{CACHE: cache})

    return step


def _random_ids(model: nn.Module, length: int) -> torch.Tensor:
    vocab: Any = model.config.vocab_size  # type: ignore[union-attr]
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(1))
