"""DIFF Transformer V1 (arXiv:2410.05258) on the body of a Llama or a Qwen.

    u_i  = (softmax(q_2i k_2mᵀ / √D) − λ softmax(q_2i+1 k_2m+1ᵀ / √D)) [v_2m, v_2m+1]       diff head i
    out  = concat_i( (1 − λ_init) RMSNorm(u_i) ) W_O
    λ    = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init          λ_init = 0.8 − 0.6 exp(−0.3 l), l the layer from 0

Heads are paired as neighbours, after rotary; m = i // (heads per key/value pair). λ is one float32 number a layer.

    B batch   T queries   S keys   h diff heads   G key/value heads (even)   D head_dim   d model width
    q_proj [2h·D, d]   k_proj, v_proj [G·D, d]   o_proj [d, 2h·D]   subln [2D], one gain for all heads

This file travels with the checkpoints it runs, so it imports nothing but torch, transformers and its configuration.
"""

from __future__ import annotations

import math
import weakref
from functools import cache as once
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from .configuration_diff_v1 import DiffV1Config

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
WIDEST_KERNEL = 256  # head_dim that the fused kernels of torch and flash-attn take


def lambda_init(layer_idx: int) -> float:
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


class DiffV1Attention(nn.Module):
    """Differential attention V1. Takes and returns hidden states [B, T, d]."""

    is_causal = True
    head_rms: Tensor
    head_norm_step: Tensor

    def __init__(self, config: DiffV1Config, layer_idx: int) -> None:
        super().__init__()
        Q, G, D, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = D
        self.num_key_value_groups = Q // G
        self.scaling = D**-0.5
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        self.q_proj = nn.Linear(d, Q * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, G * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, G * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(Q * D, d, bias=config.o_bias)
        self.q_norm = LlamaRMSNorm(D, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(D, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.lambda_init = lambda_init(layer_idx)
        if config.lambda_mode == "learned":
            for name in LAMBDA_VECTORS:
                setattr(self, name, nn.Parameter(torch.empty(D)))
        if config.head_norm != "off":
            self.subln = nn.RMSNorm(2 * D, eps=config.head_norm_eps)
        if config.head_norm == "anneal":
            self.register_buffer("head_rms", torch.ones(Q // 2))  # the constant scale that the norm takes over from
            self.register_buffer("head_norm_step", torch.zeros(1, dtype=torch.int64))
        self.follow_optimizers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.follow_optimizers()  # a deep copy anneals on its own

    def follow_optimizers(self) -> None:
        """From now on, every optimiser step of this module's weights advances its head_norm_step."""
        if self.config.head_norm == "anneal":
            _annealed[self] = {}
            _count_optimizer_steps()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # what earlier releases of transformers call `cache`
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The second value holds the eager path's maps [B, 2h, T, S], all first maps, then all second, before λ."""
        B, T = hidden_states.shape[:2]
        q = self.q_norm(self.q_proj(hidden_states).view(B, T, -1, self.head_dim)).transpose(1, 2)  # [B, 2h, T, D]
        k = self.k_norm(self.k_proj(hidden_states).view(B, T, -1, self.head_dim)).transpose(1, 2)  # [B, G, T, D]
        v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        first, second, maps = self.attend(q, k, v, attention_mask, **kwargs)
        u = self.combine(first, second)
        return self.o_proj(u.to(hidden_states.dtype).reshape(B, T, -1)), maps

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Both maps of every diff head on its joined values, [B, T, h, 2D] each, and the eager path's maps.

        q [B, 2h, T, D], k and v [B, G, S, D]. Fused kernels want values as wide as keys: some flash kernels crop them
        silently, SDPA falls back to the kernel that holds the whole map. So zeros pad q and k to 2D, which changes no
        logit: one call, whose softmax is taken once. For one query the copy of all keys would cost more
        than it saves (4096 keys, 16 heads, two CPU cores: 15 ms against 5), so there each half of V has its call.
        """
        implementation = self.config._attn_implementation
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        options = {"dropout": dropout, "scaling": self.scaling, "sliding_window": self.sliding_window, **kwargs}
        D, takes_wide_values = self.head_dim, implementation in ("eager", "flex_attention")
        if not takes_wide_values and (q.shape[2] == 1 or 2 * D > WIDEST_KERNEL):
            queries, keys, values = (heads.unflatten(1, (-1, 2)).unbind(2) for heads in (q, k, v))
            first, second = (
                torch.cat([interface(self, query, key, value, mask, **options)[0] for value in values], dim=-1)
                for query, key in zip(queries, keys, strict=True)
            )
            return first, second, None
        padding = 0 if takes_wide_values else D
        q, k = (F.pad(_maps_apart(heads), (0, padding)).flatten(1, 2) for heads in (q, k))  # [B, 2h or G, ·, D or 2D]
        joined = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # [B, G/2, S, 2D]
        heads, maps = interface(self, q, k, torch.cat([joined, joined], 1), mask, **options)
        first, second = heads.chunk(2, dim=2)
        return first, second, maps if implementation == "eager" else None

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """(1 − λ_init) RMSNorm(first − λ second), [B, T, h, 2D], in float32."""
        u = first - self.lam() * second if self.config.lambda_sign == -1 else first + self.lam() * second
        if self.config.head_norm == "off":
            return (1.0 - self.lambda_init) * u
        gain = (1.0 - self.lambda_init) * self.subln.weight.float()
        normed = F.rms_norm(u, u.shape[-1:], gain, self.config.head_norm_eps)
        if self.config.head_norm == "rms":
            return normed
        alpha = self.head_norm_share()
        return (1.0 - alpha) * gain * u / self.head_rms[:, None].float() + alpha * normed

    def lam(self) -> Tensor:
        """λ of the layer, [1] in float32 whatever the dtype of the model."""
        if self.config.lambda_mode == "fixed":
            value = self.config.lambda_value
            return self.o_proj.weight.new_full(
                (1,), self.lambda_init if value is None else value, dtype=torch.float32
            )
        q1, k1, q2, k2 = (getattr(self, name).float() for name in LAMBDA_VECTORS)
        first, second = ((q * k).sum(-1, keepdim=True).exp() for q, k in ((q1, k1), (q2, k2)))
        return first - second + self.lambda_init

    def head_norm_share(self) -> Tensor:
        """How much of the output is normalised already, [1] float32: min(1, steps done / head_norm_steps)."""
        steps = self.config.head_norm_steps
        if steps is None and self.training:
            raise ValueError(
                'head_norm is "anneal": set config.head_norm_steps, in optimiser steps, before training.'
            )
        return (self.head_norm_step / (steps or 1)).clamp(max=1.0).float()


def _maps_apart(heads: Tensor) -> Tensor:
    """Heads of both maps, interleaved [B, 2n, T, D], as [B, 2, n, T, D]."""
    return heads.unflatten(1, (-1, 2)).transpose(1, 2)


# Of every attention that anneals, how often each of its trainable parameters (by id) was stepped. The most often
# stepped one gives the count, so that two optimisers that share a model do not count twice, and a new one goes on.
_annealed: weakref.WeakKeyDictionary[DiffV1Attention, dict[int, int]] = weakref.WeakKeyDictionary()


@once
def _count_optimizer_steps() -> None:
    """Once a process: a hook on torch's optimisers, so that the count is right in any training loop."""

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # a gradient scaler's word to a fused optimiser: skip this
        if found_inf is not None and found_inf.item():
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module, before in list(_annealed.items()):
            trained = {id(p): before.get(id(p), 0) for p in module.parameters() if p.requires_grad}
            _annealed[module] = {p: count + (p in held) for p, count in trained.items()}
            if max(_annealed[module].values(), default=0) > max(trained.values(), default=0):
                module.head_norm_step += 1

    register_optimizer_step_post_hook(count)


class DiffV1DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: DiffV1Config, layer_idx: int) -> None:
        super(Qwen3DecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = DiffV1Attention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DiffV1PreTrainedModel(Qwen3PreTrainedModel):
    config_class = DiffV1Config
    _no_split_modules = ["DiffV1DecoderLayer"]
    _can_record_outputs = {"hidden_states": DiffV1DecoderLayer, "attentions": DiffV1Attention}
    _keep_in_fp32_modules_strict = list(LAMBDA_VECTORS)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiffV1Attention):
            if self.config.lambda_mode == "learned":
                for name in LAMBDA_VECTORS:
                    init.normal_(getattr(module, name), 0.0, self.config.lambda_std_dev)
            if self.config.head_norm == "anneal":
                init.ones_(module.head_rms)
                init.zeros_(module.head_norm_step)


class DiffV1Model(DiffV1PreTrainedModel, Qwen3Model):
    """Qwen3's model, whose forward pass masks full and sliding layers, over DIFF V1's decoder layers."""

    def __init__(self, config: DiffV1Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DiffV1DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


class DiffV1ForCausalLM(DiffV1PreTrainedModel, Qwen3ForCausalLM):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: DiffV1Config) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = DiffV1Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
