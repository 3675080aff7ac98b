"""Attention to the answer and to noise: equal to what the eager attention maps hold, without maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_maps import eager_maps
from test_prefix import KINDS, ids, model_of
from torch.utils._python_dispatch import TorchDispatchMode

from dex.attention_maps import SIGNED, is_signed
from dex.evaluation.attention_mass import SPANS, answer_masses, observed_masses, spans_of
from dex.evaluation.haystack import Haystack, Needle
from dex.evaluation.prefix import Prefix

VALUE = ids(4, 3)


def haystack(length: int = 60, question: int = 7) -> Haystack:
    needles = [Needle("a", "1", 50, (30, 37)), Needle("b", "2", 50, (10, 17)), Needle("c", "3", None, (44, 50))]
    return Haystack(ids(length, 1), 4, needles, [ids(question, 4), ids(question, 5)])


def masses_by_hand(model: Any, hay: Haystack, which: int, answer: list[int]) -> torch.Tensor:
    """[L, H, C], from the eager maps of one plain forward pass."""
    prompt = [*hay.ids, *hay.questions[which]]
    masses = []
    for maps in eager_maps(model, [*prompt, *answer[:-1]]):
        rows = maps.map[:, len(prompt) - 1 :]  # [H, t, T]
        taken: dict[str, list[int]] = {span: [] for span in SPANS}
        for token in range(rows.shape[-1]):
            taken[by_hand(hay, which, token)].append(token)
        masses.append(torch.stack([rows[..., taken[span]].sum(-1).mean(1) for span in SPANS], dim=-1))
    return torch.stack(masses).float()


def by_hand(hay: Haystack, which: int, token: int) -> str:
    if token == 0:
        return "first_token"
    if token < hay.opening or token >= len(hay.ids):
        return "question"
    inside = [i for i, needle in enumerate(hay.needles) if needle.span[0] <= token < needle.span[1]]
    return ("answer" if inside[0] == which else "other_needles") if inside else "noise"


@pytest.mark.parametrize("answer", [VALUE, VALUE[:1]], ids=["four queries", "one query"])
@pytest.mark.parametrize("kind", KINDS)
def test_masses_are_those_of_the_eager_maps(kind: str, answer: list[int]) -> None:
    model, hay = model_of(kind), haystack()
    prefix = Prefix(model, hay.ids, chunk=16)
    for which in (0, 1, 0):
        found = answer_masses(prefix, hay, which, answer)
        with torch.no_grad():
            expected = masses_by_hand(model, hay, which, answer)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        assert found.shape == expected.shape
        if not is_signed(model):
            assert found.sum(-1).numpy() == pytest.approx(1.0, abs=1e-5)
            assert (found[..., : len(SPANS) - 1].amax((0, 1)) > 0).all()
        else:
            assert (found.sum(-1) < 1).all()


def test_only_diff_models_have_signed_masses() -> None:
    signed_kinds = {kind for kind in KINDS if is_signed(model_of(kind))}
    assert signed_kinds == {"diff-v1", "diff-v2", "diff-v2-sliding", "diffllama"}
    assert len(SIGNED) == 3


def test_every_token_belongs_to_one_span_and_the_first_is_counted_apart() -> None:
    hay = haystack()
    found = spans_of(hay, 1, 70)
    assert (found.sum(1) == 1).all()
    assert [SPANS[int(row.argmax())] for row in found] == [by_hand(hay, 1, token) for token in range(70)]
    at_the_start = Haystack(hay.ids, 0, [Needle("a", "1", 0, (0, 7))], hay.questions)  # of a tokenizer without BOS
    assert spans_of(at_the_start, 0, 70).sum(0).tolist() == [6, 0, 1, 10, 53]


def test_the_model_is_as_it_was_afterwards_also_after_a_failure() -> None:
    model = model_of("attached")
    before = model.config._attn_implementation
    with pytest.raises(MemoryError), observed_masses(model, spans_of(haystack(), 0, 10)):
        raise MemoryError
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())


class Largest(TorchDispatchMode):
    """The most elements that a tensor made in the block has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("kind", ["llama", "diff-v1", "diff-v2"])
def test_memory_is_linear_in_the_length(kind: str) -> None:
    model = model_of(kind)
    sizes = []
    for length in (512, 1024, 2048):
        with Largest() as largest:
            hay = haystack(length)
            answer_masses(Prefix(model, hay.ids, chunk=32), hay, 0, VALUE)
        sizes.append(largest.elements)
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)
    assert sizes[2] < 2048 * 2048 / 4
