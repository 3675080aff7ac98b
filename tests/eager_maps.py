"""The explicit attention maps of a model, from eager attention and the equations: the oracle of dex.analysis.

One row at a time and without its padding, so no code of dex has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from test_prefix import KINDS, model_of
from tiny import tiny_tokenizer, tokens

from dex.analysis.subject import Passage, Settings, Subject
from dex.evaluation.evaluated import Evaluated

__all__ = ["KINDS", "HeadMaps", "eager_maps", "padded", "real_rows", "subject_of"]

SIGNED = ("diff_v1", "diff_v2", "diffllama")


class HeadMaps(NamedTuple):
    """Of one row and layer, float64: first and second [H, T, T], lam [H, T]; map = first − lam · second."""

    first: torch.Tensor
    second: torch.Tensor | None
    lam: torch.Tensor | None

    @property
    def map(self) -> torch.Tensor:
        return self.first if self.second is None else self.first - self.lam[..., None] * self.second


def eager_maps(model: Any, ids: Sequence[int]) -> list[HeadMaps]:
    """The maps of every layer for one row without padding."""
    stock = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = stock.config._attn_implementation
    stock.set_attn_implementation("eager")
    hidden: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: hidden.append(kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in stock.get_decoder().layers
    ]
    with torch.no_grad():
        found = model(input_ids=torch.tensor([list(ids)]), output_attentions=True, use_cache=False).attentions
    for handle in handles:
        handle.remove()
    stock.set_attn_implementation(before)
    attentions = [layer.self_attn for layer in stock.get_decoder().layers]
    return [
        _of_layer(a, both[0].double(), x[0].double()) for a, both, x in zip(attentions, found, hidden, strict=True)
    ]


@torch.no_grad()
def _of_layer(attention: Any, maps: torch.Tensor, hidden: torch.Tensor) -> HeadMaps:
    """maps [H or 2H, T, T], all first maps before all second ones; hidden [T, d]."""
    kind = attention.config.model_type
    if kind not in SIGNED:
        return HeadMaps(maps, None, None)
    first, second = maps.chunk(2)
    if kind == "diff_v2":
        return HeadMaps(first, second, torch.sigmoid(hidden @ attention.lambda_proj.weight.double().T).T)
    a, b = (
        (getattr(attention, f"lambda_q{i}").double() @ getattr(attention, f"lambda_k{i}").double()).exp()
        for i in (1, 2)
    )
    return HeadMaps(first, second, (a - b + attention.lambda_init).expand(first.shape[:2]))


def padded(lengths: Sequence[int], seed: int = 0, side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of these lengths, padded with token 258: ids and attention_mask, both [N, T]."""
    T = max(lengths)
    ids, mask = torch.full((len(lengths), T), 258), torch.zeros(len(lengths), T, dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = slice(T - length, T) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = tokens(1, length, seed + row)[0], 1
    return ids, mask


def real_rows(subject: Subject) -> list[list[int]]:
    """The rows of the text without their padding."""
    mask = torch.ones_like(subject.ids) if subject.attention_mask is None else subject.attention_mask
    return [ids[real.bool()].tolist() for ids, real in zip(subject.ids, mask, strict=True)]


def subject_of(
    kind_or_model: Any,
    lengths: Sequence[int] = (60, 47, 60),
    side: str = "left",
    passages: Sequence[Passage] = (),
    batch_size: int = 2,
    path: str = "tiny",
    **settings: Any,
) -> Subject:
    """A tiny model of a kind (`KINDS`), or a given one, over rows of these lengths; padded if they differ."""
    model = model_of(kind_or_model) if isinstance(kind_or_model, str) else kind_or_model
    ids, mask = padded(lengths, side=side)
    evaluated = Evaluated("tiny", model, tiny_tokenizer(), {"id": "tiny"}, batch_size)
    attention_mask = None if len(set(lengths)) == 1 else mask
    return Subject(evaluated, path, Settings(**settings), ids, list(passages), attention_mask)
