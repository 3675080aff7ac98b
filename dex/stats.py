"""Attention statistics of a model, without attention maps.

For one query i of one head, over the keys j that it sees:

    p_ij      = exp(s q_i·k_j − z_i)          z_i = ln Σ_j exp(s q_i·k_j)       the map and its log-sum-exp
    entropy_i = −Σ_j p_ij ln p_ij
              = −Σ_j p_ij (s q_i·k_j − z_i)
              = z_i − s q_i·(Σ_j p_ij k_j)    because Σ_j p_ij = 1

Σ_j p_ij k_j is attention with K in V's place. So is every other statistic that is linear in the map: the mass
on a span of keys is attention with the span's indicator in V's place. A fused kernel therefore gives them all
in O(T·D) memory; the map, O(T²), is never formed.

    B batch, T tokens, H query heads, G key/value heads (H a multiple of G), D head_dim, C columns, s scaling

    query [B, H, T, D]   key [B, G, T, D]   value [B, G, T, C]   mask [B, 1, T, T] bool, or None: causal

To add a statistic, write a function of `entropy`'s four arguments beside it; it returns [B, H, T].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dex.errors import DexError

FIRST_POSITION = 32  # queries before it are not counted: they see few tokens, so their entropy is low by construction

# ---- statistics of one layer -------------------------------------------------------------------------------


def entropy(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Entropy of every query's attention in nats, [B, H, T]; float32 whatever the model's dtype."""
    mean_key, z = attend(query, key, key, mask, scaling)
    return z - scaling * (query * mean_key).sum(-1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Σ_j p_ij value_j [B, H, T, C] and the log-sum-exp z [B, H, T], both float32."""
    query, key, value = query.float(), key.float(), value.float()
    if fused_kernel_takes(query, key, value, mask):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=True, scale=scaling
        )
    return attend_in_blocks(query, key, value, mask, scaling)


def fused_kernel_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a kernel that returns the log-sum-exp: on CPU, C = D, plain causal attention of all T keys.

    It would take a mask too, but only as a float [T, T] tensor, and at T=2048 it takes 1.8 times as long then.
    """
    plain = mask is None and query.shape[2] == key.shape[2]
    return plain and query.device.type == "cpu" and value.shape[-1] == query.shape[-1]


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, block: int = 64
) -> tuple[Tensor, Tensor]:
    """`attend` in plain torch, a block of queries at a time: O(block × T) memory, any device, mask and C."""
    B, H, T, _ = query.shape
    # Results are written in place: kept in a list, they once fragmented the heap to 1.2 GB at T=4096.
    attended, z = query.new_empty(B, H, T, value.shape[-1]), query.new_empty(B, H, T)
    for rows, logits, _ in logits_in_blocks(query, key, mask, scaling, block):
        p = logits.softmax(-1)
        attended[..., rows, :] = by_group("bgnts,bgsc->bgntc", p, value[:, :, : p.shape[-1]])
        z[..., rows] = logits.amax(-1) - p.amax(-1).log()  # ln p = logit − z, at the largest p
    return attended, z


def logits_in_blocks(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float, block: int = 64
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The logits s q_i·k_j of `block` queries at a time: their rows, the logits [B, H, t, S], and the keys seen.

    What a query does not see has the lowest float, and not −inf: one that sees no key (padding) stays finite.
    seen: bool, in a shape that broadcasts to the logits'. Where the mask is causal, S ends with the block's last
    query: half the work. Of 64 queries the logits of 9 heads and 1024 keys (2.4 MB) stay in a core's cache.
    """
    T = query.shape[2]
    for start in range(0, T, block):
        rows = slice(start, min(start + block, T))
        seen = _seen_keys(mask, rows, T, key.shape[2], query.device)
        logits = by_group("bgntd,bgsd->bgnts", scaling * query[:, :, rows], key[:, :, : seen.shape[-1]])
        yield rows, logits.masked_fill_(~seen, torch.finfo(logits.dtype).min), seen


def by_group(equation: str, of_heads: Tensor, of_keys: Tensor) -> Tensor:
    """An einsum of every head [B, H, …] with its own key/value head's [B, G, …], without copies: [B, H, …]."""
    G = of_keys.shape[1]
    return torch.einsum(equation, of_heads.unflatten(1, (G, of_heads.shape[1] // G)), of_keys).flatten(1, 2)


def _seen_keys(mask: Tensor | None, rows: slice, T: int, S: int, device: torch.device) -> Tensor:
    """Those rows of the mask; of the causal one, whose last query sees all keys, where there is none."""
    if mask is None:
        index = torch.arange(S - T + rows.stop, device=device)
        return index <= index[S - T + rows.start :, None]
    return mask[:, :, rows]


# ---- a whole model -----------------------------------------------------------------------------------------


def attention_entropy(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    first_position: int = FIRST_POSITION,
    on_progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Mean attention entropy of every head, [L, H] float64: high where a head looks at many tokens at once.

    The mean is over all queries of all sequences at a position ≥ `first_position`, counted from the first
    real token of the sequence: earlier queries have low entropy by construction, at most ln of the number of
    tokens they see. Padding, left or right, does not count.

    A batch holds `input_ids` [B, T]; padded rows also `attention_mask`, packed rows also `position_ids`, [B, T].
    `on_progress` gets the number of sequences done, after each batch.
    """
    totals = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads, dtype=torch.float64)
    num_queries = num_sequences = 0

    def add(layer_idx: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        values = entropy(query, key, mask, scaling) * counted[:, None].to(query.device)
        totals[layer_idx] += values.sum((0, 2)).cpu()

    decoder = model.get_decoder()  # the logits are not needed
    with torch.no_grad(), evaluating(model), observed_attention(model, add):
        for batch in batches:
            inputs, position = real_tokens_first(batch, model.device)
            counted = position >= first_position  # [B, T]
            decoder(**inputs, use_cache=False)
            num_queries += int(counted.sum())
            num_sequences += len(counted)
            if on_progress is not None:
                on_progress(num_sequences)
    if num_queries == 0:
        raise DexError(
            f"None of the {num_sequences} calibration sequences is longer than {first_position} tokens, and "
            f"entropy counts only queries at positions ≥ {first_position}; use longer sequences."
        )
    return totals / num_queries


def real_tokens_first(batch: Mapping[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """The model's inputs with every row's padding moved behind its tokens, and each token's position [B, T].

    A causal model sees no padding then, and needs no [T, T] mask against it: rotary embeddings know distances
    only, so left padding is nothing but a shift. Positions are −1 on padding; in packed rows, which come with
    their own `position_ids`, they start anew with every document.
    """
    input_ids = batch["input_ids"].to(device)
    B, T = input_ids.shape
    index = torch.arange(T, device=device)
    is_real = batch.get("attention_mask", torch.ones_like(input_ids)).to(device).long()
    order = (index + is_real.argmax(1, keepdim=True)) % T
    is_padding = index >= is_real.sum(1, keepdim=True)
    if not torch.equal(is_real.gather(1, order) == 0, is_padding):
        raise DexError("An attention_mask has a gap between real tokens; only padding at the ends can be scored.")

    inputs = {"input_ids": input_ids.gather(1, order)}
    position = index.expand(B, T)
    if "position_ids" in batch:
        position = batch["position_ids"].to(device).expand(B, T).gather(1, order)
        inputs["position_ids"] = position
    return inputs, position.masked_fill(is_padding, -1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is back in its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


# ---- the hook ----------------------------------------------------------------------------------------------

IMPLEMENTATION = "dex_observed_sdpa"

Observer = Callable[[int, Tensor, Tensor, Tensor | None, float], None]  # layer_idx, query, key, mask, scaling
_observer: ContextVar[Observer] = ContextVar("dex_observer")


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Call `observe` in every attention layer of every forward pass; the outputs stay those of SDPA.

    With a KV cache `observe` gets the keys in it too, [B, G, S, D], and a mask [B, 1, T, S], or None for a single
    query, which sees all; `entropy` and `attend` take whole sequences alone.
    """
    token = _observer.set(observe)
    try:
        with attention_by(model, IMPLEMENTATION, _observed_sdpa, "observed"):
            yield
    finally:
        _observer.reset(token)


@contextmanager
def attention_by(model: PreTrainedModel, name: str, function: Callable[..., Any], what: str) -> Iterator[None]:
    """Within the block, `function` in place of the model's attention kernel, with the masks of SDPA.

    It works through transformers' own registry: no module is patched, and the model's own implementation is
    back afterwards, also after an exception. Raises DexError, which says that it cannot be `what` ("observed"),
    for a model with one fixed backend.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)  # without it every mask but causal would be lost
    previous = model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:  # transformers only warns
            raise DexError(f"The attention of {type(model).__name__} cannot be {what}: it has one fixed backend.")
        yield
    finally:
        model.set_attn_implementation(previous)


def _observed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, None]:
    _observer.get()(cast(int, module.layer_idx), query, key, attention_mask, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
