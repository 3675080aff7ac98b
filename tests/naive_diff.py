"""The equations of DIFF V1 and V2, one head at a time, in float64: an oracle that shares no code with dex.

V1 (arXiv:2410.05258), with its own rotary embedding, softmax and RMSNorm:

    u_i = (softmax(q_2i k_2mᵀ / √D) − λ softmax(q_2i+1 k_2m+1ᵀ / √D)) [v_2m ; v_2m+1]     m = i // (diff heads a pair)
    out = concat_i((1 − λ_init) · gain · u_i / RMS(u_i)) W_O
    λ   = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init,     λ_init = 0.8 − 0.6 exp(−0.3 l), l the layer from 0

V2 (January 2026):

    out = concat_n(a_2n − σ(w_n·x) a_2n+1) W_O,         a_j = softmax(q_j k_mᵀ / √D) v_m,     m = n // (heads a key)

Where a test needs a wrong variant of an equation (a negative control), it subclasses and overrides one line. Autograd
runs through it, so it is an oracle of gradients too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Of the largest value. Float32 keeps 6e-8; three layers of sums of some 64 products each, in another order than the
# oracle's, bring the tiny models to 1e-6 to 2e-6. What the negative controls break moves logits by 1e-2 and more.
TOLERANCE = 1e-5


def agrees(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether no value is further from the expected one than `tolerance` times the largest of them all."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


class NaiveDiff:
    """A causal model over state-dict weights; a configuration is only read for numbers and flags."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any) -> None:
        self.weights = {name: tensor.double().cpu() for name, tensor in weights.items()}
        self.config = config
        self.D = config.head_dim

    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T, V] float64. Positions where attention_mask is 0 hold nothing of meaning."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = zip(input_ids, mask, strict=True)
        return torch.stack([self._logits_of_row(ids, real.bool()) for ids, real in rows])

    def _logits_of_row(self, ids: Tensor, real: Tensor) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(layer, self._norm(x, prefix + "input_layernorm"), real)
            x = x + self._mlp(prefix, self._norm(x, prefix + "post_attention_layernorm"))
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self._norm(x, "model.norm") @ self.weights[f"{head}.weight"].T

    def attention(self, layer: int, x: Tensor, real: Tensor | None = None) -> Tensor:
        """The attention module: normed hidden states [T, d] to the output of o_proj [T, d]."""
        real = torch.ones(x.shape[0], dtype=torch.bool) if real is None else real
        return self._linear(layer, "o_proj", torch.cat(self.heads(layer, x, real), dim=-1))

    def heads(self, layer: int, x: Tensor, real: Tensor) -> list[Tensor]:
        """What every output head contributes to the input of o_proj."""
        raise NotImplementedError

    def attend(self, layer: int, query: int, key: int, x: Tensor, values: Tensor, real: Tensor) -> Tensor:
        """softmax(q_query k_keyᵀ / √D) values, token by token."""
        q = self._rotated(self._normed_head(layer, "q", query, x))
        k = self._rotated(self._normed_head(layer, "k", key, x))
        scores = torch.exp(q @ k.T / math.sqrt(self.D)) * self._seen(layer, real)
        return (scores / scores.sum(-1, keepdim=True).clamp(min=1e-300)) @ values

    def _seen(self, layer: int, real: Tensor) -> Tensor:
        """[T, T], 1 where token t looks at token s; nothing for padding before the first real token."""
        T = real.shape[0]
        seen = [[s <= t and bool(real[s]) and self._in_window(layer, t, s) for s in range(T)] for t in range(T)]
        return torch.tensor(seen, dtype=torch.float64)

    def _in_window(self, layer: int, t: int, s: int) -> bool:
        return self.config.layer_types[layer] == "full_attention" or t - s < self.config.sliding_window

    def _normed_head(self, layer: int, kind: str, head: int, x: Tensor) -> Tensor:
        rows = self.head(layer, kind, head, x)
        name = f"model.layers.{layer}.self_attn.{kind}_norm"
        return self._norm(rows, name) if f"{name}.weight" in self.weights else rows

    def head(self, layer: int, kind: str, head: int, x: Tensor) -> Tensor:
        """Head number `head` of q_proj, k_proj or v_proj, [T, D]."""
        name, rows = f"model.layers.{layer}.self_attn.{kind}_proj", slice(head * self.D, (head + 1) * self.D)
        out = x @ self.weights[f"{name}.weight"][rows].T
        return out + self.weights[f"{name}.bias"][rows] if f"{name}.bias" in self.weights else out

    def _rotated(self, heads: Tensor) -> Tensor:
        """Dimensions j and j + D/2 are the real and imaginary part of a number, turned by t · theta^(−2j/D)."""
        half = self.D // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = [[t * theta ** (-2.0 * j / self.D) for j in range(half)] for t in range(heads.shape[0])]
        turn = torch.polar(torch.ones(heads.shape[0], half).double(), torch.tensor(angles, dtype=torch.float64))
        turned = torch.complex(heads[:, :half], heads[:, half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        rms = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + self.config.rms_norm_eps).sqrt()
        return x / rms * self.weights[f"{name}.weight"]

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            out = x @ self.weights[f"{prefix}mlp.{name}.weight"].T
            return (
                out + self.weights[f"{prefix}mlp.{name}.bias"] if f"{prefix}mlp.{name}.bias" in self.weights else out
            )

        gate = linear("gate_proj", x)
        return linear("down_proj", gate / (1.0 + torch.exp(-gate)) * linear("up_proj", x))

    def _linear(self, layer: int, projection: str, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn.{projection}"
        out = x @ self.weights[f"{name}.weight"].T
        return out + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out


class NaiveDiffV1(NaiveDiff):
    def heads(self, layer: int, x: Tensor, real: Tensor) -> list[Tensor]:
        config = self.config
        heads_per_pair = config.num_attention_heads // config.num_key_value_heads
        outputs = []
        for i in range(config.num_attention_heads // 2):
            m = i // heads_per_pair
            values = torch.cat([self.head(layer, "v", 2 * m, x), self.head(layer, "v", 2 * m + 1, x)], dim=-1)
            first = self.attend(layer, 2 * i, self.key_of(i, 0), x, values, real)
            second = self.attend(layer, 2 * i + 1, self.key_of(i, 1), x, values, real)
            outputs.append(self._normalised(layer, i, first + config.lambda_sign * self.lam(layer) * second))
        return outputs

    def key_of(self, i: int, which: int) -> int:
        """The key head of map `which` (0 or 1) of diff head i."""
        return 2 * (i // (self.config.num_attention_heads // self.config.num_key_value_heads)) + which

    def lambda_init(self, layer: int) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * layer)

    def lam(self, layer: int) -> Tensor | float:
        if self.config.lambda_mode == "fixed":
            given = self.config.lambda_value
            return self.lambda_init(layer) if given is None else float(given)
        q1, k1, q2, k2 = (
            self.weights[f"model.layers.{layer}.self_attn.lambda_{name}"] for name in ("q1", "k1", "q2", "k2")
        )
        return torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + self.lambda_init(layer)

    def _normalised(self, layer: int, i: int, u: Tensor) -> Tensor:
        """(1 − λ_init) times u, RMSNorm(u), or what is between them while the norm is annealed."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        outside = 1.0 - self.lambda_init(layer)
        if config.head_norm == "off":
            return outside * u
        gain = outside * self.weights[f"{prefix}.subln.weight"]
        rms = (u.pow(2).sum(-1, keepdim=True) / u.shape[-1] + config.head_norm_eps).sqrt()
        if config.head_norm == "rms":
            return gain * u / rms
        done = min(1.0, float(self.weights[f"{prefix}.head_norm_step"]) / config.head_norm_steps)
        return gain * ((1.0 - done) * u / self.weights[f"{prefix}.head_rms"][i] + done * u / rms)


class NaiveDiffV2(NaiveDiff):
    def heads(self, layer: int, x: Tensor, real: Tensor) -> list[Tensor]:
        config = self.config
        heads_per_key = config.num_attention_heads // config.num_key_value_heads
        outputs = []
        for n in range(config.num_attention_heads):
            m = n // heads_per_key
            first, second = self.queries_of(n)
            values = self.head(layer, "v", m, x)
            a, b = (self.attend(layer, query, m, x, values, real) for query in (first, second))
            outputs.append(a - self.lam(layer, n, x) * b)
        return outputs

    def queries_of(self, n: int) -> tuple[int, int]:
        """The two query heads of output head n."""
        return 2 * n, 2 * n + 1

    def lam(self, layer: int, n: int, x: Tensor) -> Tensor:
        """[T, 1]"""
        score = x @ self.weights[f"model.layers.{layer}.self_attn.lambda_proj.weight"][n]
        return (1.0 / (1.0 + torch.exp(-score)))[:, None]
