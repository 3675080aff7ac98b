"""A shared prefix: what comes after it is what a plain forward pass over the whole sequence gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from tiny import FAMILIES, SLIDING, tiny_diff_v1, tiny_diff_v2, tiny_diffllama, tiny_model, tokens

import dex
from dex.evaluation import prefix as module
from dex.evaluation.prefix import Prefix

KINDS = [*FAMILIES, "attached", "diff-v1", "diff-v2", "diff-v2-sliding", "diffllama"]


def model_of(kind: str) -> Any:
    if kind == "attached":
        config = dex.DexConfig(task_type="CAUSAL_LM", schedule="fixed", lam=0.5, w_d_init="zeros")
        model = get_peft_model(tiny_model("qwen3"), config).eval()
        for name, parameter in model.named_parameters():
            if "dex_w_d" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return model
    if kind == "diff-v2-sliding":
        return tiny_diff_v2(**SLIDING)
    makers: dict[str, Any] = {"diff-v1": tiny_diff_v1, "diff-v2": tiny_diff_v2, "diffllama": tiny_diffllama}
    return makers[kind]() if kind in makers else tiny_model(kind)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {kind: model_of(kind) for kind in KINDS}


def ids(length: int, seed: int) -> list[int]:
    return tokens(1, length, seed)[0].tolist()


@torch.no_grad()
def plain_log_likelihood(model: Any, before: list[int], continuation: list[int]) -> float:
    whole = torch.tensor([before + continuation])
    logits = model(input_ids=whole, use_cache=False).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(continuation))


def plain_greedy(model: Any, before: list[int], steps: int, stop: int) -> list[int]:
    whole = torch.tensor([before])
    made = model.generate(
        input_ids=whole,
        attention_mask=torch.ones_like(whole),
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=stop,
    )[0, len(before) :].tolist()
    return made[: made.index(stop)] if stop in made else made


@pytest.mark.parametrize("kind", KINDS)
def test_log_likelihoods_are_those_of_a_plain_forward_pass_again_and_again(
    models: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHED_TOKENS", 100)  # so that they go in several groups
    monkeypatch.setattr(module, "LOGITS", 2 * 260 * 3)  # and the long one in several parts
    model, start = models[kind], ids(29, 1)
    prefix = Prefix(model, start, chunk=8)
    for seed, suffix in ((2, ids(5, 2)), (3, []), (4, ids(11, 4))):
        continuations = [ids(length, seed + length) for length in (1, 9, 2, 0, 3, 1, 20)]
        expected = [plain_log_likelihood(model, start + suffix, each) for each in continuations]
        assert prefix.log_likelihoods(suffix, continuations) == pytest.approx(expected, abs=1e-5 * 20)
        prefix.greedy(suffix, 3, ())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate_again_and_again(models: dict[str, Any], kind: str) -> None:
    model, start = models[kind], ids(21, 5)
    prefix = Prefix(model, start, chunk=8)
    for suffix in (ids(4, 6), [], ids(12, 7), ids(4, 6)):
        free = plain_greedy(model, start + suffix, 6, stop=-1)
        assert prefix.greedy(suffix, 6, ()) == free
        assert prefix.greedy(suffix, 6, {free[3]}) == free[: free.index(free[3])]
        assert prefix.greedy(suffix, 0, ()) == []


def test_without_a_prefix_the_suffix_stands_alone(models: dict[str, Any]) -> None:
    model, suffix, after = models["llama"], ids(7, 8), ids(4, 9)
    prefix = Prefix(model, [])
    expected = plain_log_likelihood(model, suffix, after)
    assert prefix.log_likelihoods(suffix, [after]) == pytest.approx([expected], abs=1e-5)
    assert prefix.greedy(suffix, 5, ()) == plain_greedy(model, suffix, 5, stop=-1)
    with pytest.raises(ValueError, match="before the first token"):
        prefix.log_likelihoods([], [after])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 30), st.integers(1, 12), st.integers(1, 40), st.lists(st.integers(0, 6), max_size=5))
def test_neither_the_chunks_nor_the_place_where_prefix_and_suffix_meet_matter(
    length: int, suffix: int, chunk: int, lengths: list[int]
) -> None:
    model, whole = tiny_model("qwen2-sliding"), ids(length + suffix, 10)
    continuations = [ids(n, n) for n in lengths]
    one = Prefix(model, whole, chunk=64).log_likelihoods([], continuations)
    other = Prefix(model, whole[:length], chunk=chunk).log_likelihoods(whole[length:], continuations)
    assert other == pytest.approx(one, abs=1e-4)


def test_a_forward_pass_that_fails_half_way_leaves_the_prefix_as_it_was(models: dict[str, Any]) -> None:
    model, start, suffix, after = models["llama"], ids(12, 11), ids(3, 12), ids(4, 13)
    prefix = Prefix(model, start)
    expected = prefix.log_likelihoods(suffix, [after])

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        prefix.greedy(suffix, 3, ())
    hook.remove()
    assert prefix.log_likelihoods(suffix, [after]) == expected


def test_no_logits_are_formed_but_those_of_the_last_position(models: dict[str, Any]) -> None:
    shapes: list[tuple[int, ...]] = []
    hook = models["attached"].get_output_embeddings().register_forward_hook(lambda m, i, o: shapes.append(o.shape))
    Prefix(models["attached"], ids(100, 14), chunk=30)
    hook.remove()
    assert [shape[:2] for shape in shapes] == [(1, 1)] * 4
