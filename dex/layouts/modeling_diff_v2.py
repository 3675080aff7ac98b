"""DIFF Transformer V2 (Ye et al., January 2026) on the body of a Llama or a Qwen.

    a      = attention(q, k, v)                     q: 2H heads, k and v: G heads
    out    = (a[0::2] − σ(λ_proj(x)) · a[1::2]) W_O      λ: one per token and head, in float32

No norm and no schedule. The two heads of a pair are neighbours, so they share a key and a value head whatever G is.

    B batch   T tokens   H heads   G key/value heads   D head_dim   d model width
    q_proj [2H·D, d]   k_proj, v_proj [G·D, d]   o_proj [d, H·D]   lambda_proj [H, d]

This file travels with the checkpoints it runs, so it imports nothing but torch, transformers and its configuration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
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

from .configuration_diff_v2 import DiffV2Config


class DiffV2Attention(nn.Module):
    """Differential attention V2. Takes and returns hidden states [B, T, d]."""

    is_causal = True

    def __init__(self, config: DiffV2Config, layer_idx: int) -> None:
        super().__init__()
        H, G, D, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = D
        self.num_key_value_groups = H // G
        self.scaling = D**-0.5
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if sliding else None
        self.q_proj = nn.Linear(d, 2 * H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, G * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, G * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, d, bias=config.o_bias)
        self.lambda_proj = nn.Linear(d, H, bias=False)
        self.q_norm = LlamaRMSNorm(D, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(D, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # what earlier releases of transformers call `cache`
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The second value holds the eager path's maps [B, 2H, T, S], all first maps, then all second, before λ."""
        B, T = hidden_states.shape[:2]
        q = self.q_norm(self.q_proj(hidden_states).view(B, T, -1, self.head_dim)).transpose(1, 2)  # [B, 2H, T, D]
        k = self.k_norm(self.k_proj(hidden_states).view(B, T, -1, self.head_dim)).transpose(1, 2)  # [B, G, T, D]
        v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)

        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        # A call for each map: so a retrofitted model runs its base's own kernels, of H heads each, and starts bit for
        # bit as it. One call of 2H heads rounds otherwise where keys are masked; two cost 4 % more of the attention.
        first, second = (
            attend(
                self,
                q[:, which::2],
                k,
                v,
                attention_mask,
                dropout=self.config.attention_dropout if self.training else 0.0,
                scaling=self.scaling,
                sliding_window=self.sliding_window,
                **kwargs,
            )
            for which in (0, 1)
        )
        lam = self.lam(hidden_states)[..., None]  # [B, T, H, 1]
        out = first[0] - lam * second[0]  # [B, T, H, D], float32 as λ is
        maps = torch.cat([first[1], second[1]], dim=1) if implementation == "eager" else None
        return self.project(out.reshape(B, T, -1), first[0].dtype), maps

    def project(self, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """o_proj of float32 heads, [B, T, H·D] to [B, T, d].

        A retrofitted model starts with σ = ½, so with half of its base's heads. Below 1.2e-4 float16 would lose their
        last bit, and the start would not be exact: there they go through doubled, and the result is halved.
        """
        if dtype == torch.float16 and self.o_proj.bias is None:
            return self.o_proj((2.0 * heads).to(dtype)) * 0.5
        return self.o_proj(heads.to(dtype))

    def lam(self, hidden_states: Tensor) -> Tensor:
        """σ(λ_proj(x)), [B, T, H], in float32 whatever the dtype of the model, under autocast too."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return nn.functional.linear(hidden_states.float(), self.lambda_proj.weight.float()).sigmoid()


class DiffV2DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: DiffV2Config, layer_idx: int) -> None:
        super(Qwen3DecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = DiffV2Attention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DiffV2PreTrainedModel(Qwen3PreTrainedModel):
    config_class = DiffV2Config
    _no_split_modules = ["DiffV2DecoderLayer"]
    _can_record_outputs = {"hidden_states": DiffV2DecoderLayer, "attentions": DiffV2Attention}


class DiffV2Model(DiffV2PreTrainedModel, Qwen3Model):
    """Qwen3's model, whose forward pass masks full and sliding layers, over DIFF V2's decoder layers."""

    def __init__(self, config: DiffV2Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DiffV2DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


class DiffV2ForCausalLM(DiffV2PreTrainedModel, Qwen3ForCausalLM):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: DiffV2Config) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = DiffV2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
