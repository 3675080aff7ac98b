"""What the attention of every layout is made of, as a forward pass makes it: one map a head, or two and a λ.

    map_i = softmax(s q¹_i·k¹_j) − λ_i softmax(s q²_i·k²_j)        DIFF layouts: it has negative entries
    map_i = softmax(s q_i·k_j)                                     a stock head

Nothing is computed here that is O(T²): `LayerMaps` holds queries and keys, of which `dex.stats` makes what is linear
in the maps without them, and `blocks` makes the maps themselves, a block of queries at a time; `parts` are those
of some queries alone.

    B batch   T queries   S keys   H heads (of a DIFF layout: its diff heads)   G key/value heads   D head_dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dex.stats import attend, evaluating, logits_in_blocks, observed_attention, real_tokens_first

SIGNED = ("diff_v1", "diff_v2", "diffllama")  # model types whose heads have two maps

# Of a block of maps: 2 MB, since passes over what falls out of the cache cost up to four times as much.
ENTRIES = 2**19
LEAST, MOST = 16, 128  # queries of a block: with fewer, reading the keys costs more than the products


class QueryKey(NamedTuple):
    """What one map of every head is made of."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, G, S, D]


class MapBlock(NamedTuple):
    """The maps of some queries, float32; 0 where a key is not seen. S: as `dex.stats.logits_in_blocks` has it."""

    rows: slice  # of the T queries
    first: Tensor  # [B, H, t, S]
    second: Tensor | None  # [B, H, t, S]
    lam: Tensor | None  # [B, H, t, 1]
    seen: Tensor  # bool; broadcasts to [B, H, t, S]

    @property
    def map(self) -> Tensor:
        """The map that the head's output is made with, [B, H, t, S]."""
        if self.second is None:
            return self.first
        assert self.lam is not None
        return self.first - self.lam * self.second


@dataclass(frozen=True)
class LayerMaps:
    """The attention of one layer in one forward pass. `second` and `lam` [B, H, T]: None for a stock head."""

    layer_idx: int
    first: QueryKey
    second: QueryKey | None
    lam: Tensor | None
    mask: Tensor | None  # [B, 1, T, S] bool; None: causal
    scaling: float

    @property
    def num_heads(self) -> int:
        return self.first.query.shape[1]

    def attend(self, value: Tensor) -> Tensor:
        """Σ_j map_ij value_j, [B, H, T, C] float32, from value [B, G, S, C]; no map is formed."""
        attended, _ = attend(*self.first, value, self.mask, self.scaling)
        if self.second is None:
            return attended
        assert self.lam is not None
        return attended - self.lam[..., None] * attend(*self.second, value, self.mask, self.scaling)[0]

    def at(self, queries: Sequence[int]) -> LayerMaps:
        """The same maps, of these queries alone."""
        key = self.first.key
        index = torch.tensor(list(queries), device=key.device)
        if self.mask is None:  # causal
            seen = (torch.arange(key.shape[2], device=key.device) <= index[:, None])[None, None]
        else:
            seen = self.mask[:, :, index]
        first, second = (
            None if each is None else each._replace(query=each.query[:, :, index])
            for each in (self.first, self.second)
        )
        assert first is not None
        lam = None if self.lam is None else self.lam[:, :, index]
        return replace(self, first=first, second=second, lam=lam, mask=seen)

    def parts(self, queries: Sequence[int]) -> Iterator[LayerMaps]:
        """The same maps, of as many of these queries at a time as a block has: their mask is O(block × S) too."""
        for start in range(0, len(queries), self.rows_of_block):
            yield self.at(queries[start : start + self.rows_of_block])

    @property
    def rows_of_block(self) -> int:
        B, H = self.first.query.shape[:2]
        return min(MOST, max(LEAST, ENTRIES // (B * H * self.first.key.shape[2])))

    def blocks(self, block: int | None = None) -> Iterator[MapBlock]:
        """The maps, `block` queries at a time, by default `rows_of_block`: O(block × S) memory."""
        block = block or self.rows_of_block
        first = self._probabilities(self.first, block)
        if self.second is None:
            for rows, p, seen in first:
                yield MapBlock(rows, p, None, None, seen)
            return
        assert self.lam is not None
        for (rows, p, seen), (_, q, _) in zip(first, self._probabilities(self.second, block), strict=True):
            yield MapBlock(rows, p, q, self.lam[:, :, rows, None], seen)

    def _probabilities(self, of_map: QueryKey, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        query, key = (each.float() for each in of_map)
        for rows, logits, seen in logits_in_blocks(query, key, self.mask, self.scaling, block):
            yield rows, logits.softmax(-1).mul_(seen), seen  # masked_fill_ takes three times as long


def is_signed(model: Any) -> bool:
    return unwrapped(model).config.model_type in SIGNED


def unwrapped(model: Any) -> Any:
    """The model that an adapter is attached to, with the adapter in it; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def for_each_layer(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    take: Callable[[LayerMaps, Tensor], None],
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Call `take` with the maps of every layer and the tokens' positions [B, T], −1 on padding, of every batch.

    Batches are those of `dex.stats.attention_entropy`; their padding is moved behind the tokens, where no real query
    sees it. `on_progress` gets the number of sequences done.
    """
    stock = unwrapped(model)
    done = 0
    position = torch.empty(0)
    with torch.no_grad(), evaluating(model), observed_maps(model, lambda maps: take(maps, position)):
        for batch in batches:
            inputs, position = real_tokens_first(batch, stock.device)
            stock.get_decoder()(**inputs, use_cache=False)  # the logits are not needed
            done += len(position)
            if on_progress is not None:
                on_progress(done)


@contextmanager
def observed_maps(model: Any, observe: Callable[[LayerMaps], None]) -> Iterator[None]:
    """Call `observe` with the maps of every layer, in the layers' order, in every forward pass in the block."""
    stock = unwrapped(model)
    calls: list[tuple[QueryKey, Tensor | None, float]] = []

    def keep(layer_idx: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        calls.append((QueryKey(query, key), mask, scaling))

    def combine(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        made = [of_map for of_map, _, _ in calls]
        _, mask, scaling = calls[0]
        calls.clear()
        first, second, lam = _maps_of(attention, made, hidden)
        observe(LayerMaps(attention.layer_idx, first, second, lam, mask, scaling))

    with ExitStack() as stack:
        stack.enter_context(observed_attention(stock, keep))
        for layer in stock.get_decoder().layers:
            handle = layer.self_attn.register_forward_hook(combine, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _maps_of(
    attention: Any, calls: list[QueryKey], hidden: Tensor
) -> tuple[QueryKey, QueryKey | None, Tensor | None]:
    """First map, second map and λ [B, H, T], from the kernel's calls, which DIFF layouts make one or several of.

    hidden: [B, T, d], of which DIFF V2 makes its λ.
    """
    kind = attention.config.model_type
    if kind not in SIGNED:
        (only,) = calls
        return only, None, None
    if kind == "diff_v2":  # a call for each map
        first, second = calls
        lam = attention.lam(hidden).transpose(1, 2)
    elif kind == "diff_v1":  # one call for both maps, or each map with each half of V
        first, second = _halves(calls[0]) if len(calls) == 1 else (calls[0], calls[2])
        lam = -attention.config.lambda_sign * attention.lam()
    else:  # both maps with each half of V
        first, second = _halves(calls[0])
        lam = _diffllama_lam(attention)
    return first, second, lam.float().expand(*first.query.shape[:3])


def _halves(call: QueryKey) -> tuple[QueryKey, QueryKey]:
    (query, other_query), (key, other_key) = (heads.chunk(2, dim=1) for heads in call)
    return QueryKey(query, key), QueryKey(other_query, other_key)


def _diffllama_lam(attention: Any) -> Tensor:
    first = (attention.lambda_q1.float() * attention.lambda_k1.float()).sum().exp()
    second = (attention.lambda_q2.float() * attention.lambda_k2.float()).sum().exp()
    lam: Tensor = first - second + attention.lambda_init
    return lam
