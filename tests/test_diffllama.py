"""DIFF V1 against transformers' DiffLlama: the same function through an exact map of the heads, both ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_diff import agrees
from tiny import SLIDING, tiny_config, tiny_diff_v1, tiny_diffllama, tiny_model, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from dex.errors import DexError
from dex.layouts import diffllama as diffllama_module
from dex.layouts.diffllama import from_diffllama, to_diffllama
from dex.layouts.fresh import fresh_config
from dex.layouts.head_map import HeadMap, map_heads
from dex.layouts.modeling_diff_v1 import lambda_init
from dex.layouts.to_diff_v1 import V1Options, to_diff_v1

EPS = {"head_norm_eps": 1e-6}  # DiffLlama has one eps for all norms, which is 1e-6 in the tiny models
SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 8},
    "two queries a key": {},
    "three queries a key, biases": {"num_attention_heads": 12, "qkv_bias": True, "o_bias": True},
    "four queries a key, head_dim apart": {"num_attention_heads": 16, "head_dim": 20},
    "q, k, v biases alone, tied": {"qkv_bias": True, "tie_word_embeddings": True},
}


def v1(**changes: Any) -> Any:
    return tiny_diff_v1(**{**EPS, **changes})


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def padded() -> tuple[Tensor, Tensor]:
    """Three rows: whole, padded on the left, padded on the right."""
    mask = torch.ones(3, 18, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, 11:] = 0
    return tokens(3, 18), mask


def same_logits(ours: Any, theirs: Any) -> bool:
    ids, mask = padded()
    real = mask.bool()
    return agrees(logits(ours, ids, attention_mask=mask)[real], logits(theirs, ids, attention_mask=mask)[real])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_v1_is_transformers_diffllama_with_padding_on_either_side(shape: str, attention: str) -> None:
    ours = v1(**SHAPES[shape])
    theirs = to_diffllama(ours)
    for model in (ours, theirs):
        model.set_attn_implementation(attention)
    assert type(theirs).__module__ == "transformers.models.diffllama.modeling_diffllama"
    assert same_logits(ours, theirs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "num_key_value_heads": 2, "tie_word_embeddings": True}]
)
def test_a_diffllama_becomes_the_same_v1_and_comes_back_unchanged(attention: str, changes: Any) -> None:
    theirs = tiny_diffllama(**changes, attn_implementation=attention)
    ours = from_diffllama(theirs)
    ours.set_attn_implementation(attention)
    assert same_logits(ours, theirs)
    back = to_diffllama(ours)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def in_diffllamas_order(gradients: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The gradients of a V1 as those of its DiffLlama: heads moved, the gain's undone in o_proj's columns.

    y = W (g ∘ z) is (W ∘ g) z, so what reaches DiffLlama's W ∘ g is what reaches V1's W, divided by g. The order is
    written down anew here: first all even heads, then all odd ones.
    """
    moved = dict(gradients)
    for name, gradient in gradients.items():
        if any(f"{kind}_proj." in name for kind in "qkv"):
            heads = gradient.unflatten(0, (-1, model.config.head_dim))
            moved[name] = torch.cat([heads[0::2], heads[1::2]]).flatten(0, 1)
        if name.endswith("subln.weight"):
            moved.pop(name)
        if name.endswith("o_proj.weight"):
            gain = model.get_submodule(name.removesuffix("o_proj.weight") + "subln").weight.detach()
            moved[name] = gradient / gain.repeat(gradient.shape[1] // gain.numel())
    return moved


def loss_and_gradients(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", ["mha", "three queries a key, biases", "four queries a key, head_dim apart"])
def test_loss_and_the_gradient_of_every_parameter_are_diffllamas(shape: str, attention: str) -> None:
    ours = v1(**SHAPES[shape])
    theirs = to_diffllama(ours)
    for model in (ours, theirs):
        model.set_attn_implementation(attention)
    ids, mask = padded()
    loss, gradients = loss_and_gradients(ours, ids, mask)
    expected_loss, expected = loss_and_gradients(theirs, ids, mask)
    assert agrees(loss, expected_loss, 1e-6)
    actual = in_diffllamas_order(gradients, ours)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert agrees(actual[name], gradient, 1e-4), name  # sums over all tokens: rounded further than a logit


def test_the_gradient_of_the_gain_is_that_of_the_columns_it_is_folded_into() -> None:
    """d/dg of W ∘ g: what reaches a column of it, times the column of W, over all diff heads."""
    ours = v1()
    theirs = to_diffllama(ours)
    ids, mask = padded()
    gradients, folded = loss_and_gradients(ours, ids, mask)[1], loss_and_gradients(theirs, ids, mask)[1]
    for layer, module in enumerate(ours.model.layers):
        name = f"model.layers.{layer}.self_attn"
        by_column = (folded[f"{name}.o_proj.weight"] * module.self_attn.o_proj.weight).sum(0)
        assert agrees(gradients[f"{name}.subln.weight"], by_column.unflatten(0, (-1, 32)).sum(0), 1e-4)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # `cache` since transformers 5.20
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cached_decoding_is_the_whole_forward_pass_of_diffllama(attention: str) -> None:
    ours, ids = v1(attn_implementation=attention), tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = logits(to_diffllama(ours), ids, attention_mask=mask)
    out, parts = None, []
    for start, end in ((0, 8), (8, 9), (9, 12), (12, 13), (13, 14)):
        with torch.no_grad():
            past = out and out.past_key_values
            out = ours(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=past, use_cache=True)
        parts.append(out.logits)
    assert agrees(torch.cat(parts, 1)[mask.bool()], expected[mask.bool()])


def test_diffllama_generates_the_tokens_of_the_v1() -> None:
    ours, (ids, mask) = v1(), padded()
    prompt = {"input_ids": ids[:2], "attention_mask": mask[:2]}
    ours_out, theirs_out = (
        model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
        for model in (ours, to_diffllama(ours))
    )
    assert torch.equal(ours_out, theirs_out)


# ---- what must not match -----------------------------------------------------------------------------------


def reordered(model: Any, **lists: list[int]) -> Any:
    """The model with heads of some projections in another order."""
    config = model.config
    Q, G = (list(range(n)) for n in (config.num_attention_heads, config.num_key_value_heads))
    heads = HeadMap(**{"q": Q, "k": G, "v": G, "o": Q, **lists})
    model.load_state_dict(map_heads(model.state_dict(), heads, config.head_dim))
    return model


def test_control_neighbours_kept_where_halves_are_meant_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = v1()
    assert same_logits(ours, to_diffllama(ours))
    monkeypatch.setattr(diffllama_module, "_halves", lambda n: list(range(n)))
    assert not same_logits(ours, to_diffllama(ours))


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_control_heads_of_one_projection_in_the_wrong_order_do_not_match(kind: str) -> None:
    ours = v1()
    n = 8 if kind == "q" else 4
    assert not same_logits(ours, reordered(to_diffllama(ours), **{kind: [*range(0, n, 2), *range(1, n, 2)]}))


def test_control_columns_of_o_proj_moved_with_the_queries_do_not_match() -> None:
    ours = v1()
    assert not same_logits(ours, reordered(to_diffllama(ours), o=[*range(0, 8, 2), *range(1, 8, 2)]))


def test_control_keys_paired_as_groups_of_queries_do_not_match() -> None:
    """Under GQA the reference's naive file repeats keys first and pairs them afterwards: maps 0 and 1 share key 0."""
    ours = v1(num_attention_heads=8, num_key_value_heads=4)
    assert not same_logits(ours, reordered(to_diffllama(ours), k=[0, 1, 0, 1]))
    assert not same_logits(ours, reordered(to_diffllama(ours), k=[0, 2, 1, 3]))


def test_control_the_lambda_of_the_next_layer_does_not_match() -> None:
    ours = v1()
    theirs = to_diffllama(ours)
    for layer_idx, layer in enumerate(theirs.model.layers):
        layer.self_attn.lambda_init = lambda_init(layer_idx + 1)
    assert not same_logits(ours, theirs)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_control_a_bias_left_out_does_not_match(name: str) -> None:
    ours = v1(qkv_bias=True, o_bias=True)
    theirs = copy.deepcopy(to_diffllama(ours))  # what the map does not touch is shared with the V1, o's bias too
    assert same_logits(ours, theirs)
    for layer in theirs.model.layers:
        layer.self_attn.get_submodule(name).bias.data.zero_()
    assert not same_logits(ours, theirs)


def test_control_the_gain_left_out_does_not_match() -> None:
    ours = v1()
    theirs = to_diffllama(ours)
    for ours_layer, layer in zip(ours.model.layers, theirs.model.layers, strict=True):
        layer.self_attn.o_proj.weight.data.copy_(ours_layer.self_attn.o_proj.weight)
    assert not same_logits(ours, theirs)


# ---- properties of the map ---------------------------------------------------------------------------------


@given(st.integers(1, 40))
def test_halves_and_neighbours_undo_each_other(half: int) -> None:
    n = 2 * half
    halves, neighbours = diffllama_module._halves(n), diffllama_module._neighbours(n)
    assert sorted(halves) == list(range(n))
    assert [halves[place] for place in neighbours] == list(range(n))
    assert [neighbours[place] for place in halves] == list(range(n))
    for i in range(half):  # the pair (2i, 2i+1) stands at i and i + half
        assert (halves[i], halves[i + half]) == (2 * i, 2 * i + 1)


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_permutation_of_heads_and_its_inverse_give_the_weights_back(G: int, group: int, random: Any) -> None:
    D, sizes = 4, {"q": G * group, "k": G, "v": G, "o": G * group}
    order = {kind: random.sample(range(n), n) for kind, n in sizes.items()}
    inverse = {kind: [places.index(head) for head in range(len(places))] for kind, places in order.items()}
    draw = torch.Generator().manual_seed(0)
    weights = {f"x.self_attn.{kind}_proj.weight": torch.randn(sizes[kind] * D, 6, generator=draw) for kind in "qkv"}
    weights |= {f"x.self_attn.{kind}_proj.bias": torch.randn(sizes[kind] * D, generator=draw) for kind in "qkv"}
    weights["x.self_attn.o_proj.weight"] = torch.randn(6, sizes["o"] * D, generator=draw)
    weights["x.self_attn.o_proj.bias"] = torch.randn(6, generator=draw)
    back = map_heads(map_heads(weights, HeadMap(**order), D), HeadMap(**inverse), D)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


def test_an_annealed_v1_becomes_a_diffllama_and_one_on_its_way_does_not() -> None:
    ours = v1(head_norm="anneal", head_norm_steps=3)
    with pytest.raises(DexError, match="anneal"):
        to_diffllama(ours)
    for layer in ours.model.layers:
        layer.self_attn.head_norm_step.fill_(3)
    assert same_logits(ours, to_diffllama(ours))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "q/k norm": (lambda: v1(qk_norm=True), "norm on queries and keys"),
    "sliding window": (lambda: v1(**SLIDING), "sliding-window"),
    "mlp bias": (lambda: v1(mlp_bias=True), "MLP has no biases"),
    "dropout": (lambda: v1(attention_dropout=0.1), "attention_dropout"),
    "two eps": (lambda: v1(head_norm_eps=1e-5), "eps"),
    "fixed λ": (lambda: v1(lambda_mode="fixed"), "lambda_mode"),
    "sum": (lambda: v1(lambda_sign=1), "lambda_sign"),
    "no norm": (lambda: v1(head_norm="off"), "head_norm"),
    "laid out from Qwen3": (
        lambda: to_diff_v1(tiny_model("qwen3"), V1Options(config=EPS), tokens(2, 16)),
        "norm on queries and keys",
    ),
    "laid out from a sliding Qwen2": (
        lambda: to_diff_v1(tiny_model("qwen2-sliding"), V1Options(config=EPS), tokens(2, 16)),
        "sliding-window",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_diffllama_cannot_say_is_refused_with_the_reason(what: str) -> None:
    build, reason = REFUSED[what]
    with pytest.raises(DexError, match=reason):
        to_diffllama(build())


@pytest.mark.parametrize(("family", "reason"), [("qwen3", "norm on queries"), ("qwen2-sliding", "sliding-window")])
def test_a_fresh_diffllama_like_what_it_cannot_be_is_refused(family: str, reason: str) -> None:
    with pytest.raises(DexError, match=reason):
        fresh_config("diffllama", tiny_config(family), {})


def test_a_qwen2_laid_out_gets_zeros_for_the_bias_it_lacks() -> None:
    ours = to_diff_v1(tiny_model("qwen2"), V1Options(config=EPS), tokens(2, 16))
    theirs = to_diffllama(ours)
    assert theirs.config.attention_bias
    assert not any(layer.self_attn.o_proj.bias.any() for layer in theirs.model.layers)
    assert same_logits(ours, theirs)


def test_a_tied_diffllama_stays_tied_and_keeps_its_head_dim_through_a_folder(tmp_path: Path) -> None:
    theirs = to_diffllama(v1(tie_word_embeddings=True, head_dim=20))
    theirs.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.head_dim == 20
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same_logits(loaded, theirs)


def test_in_bfloat16_diffllama_is_close() -> None:
    """Only close: it rounds λ and the difference of the maps to bfloat16, where V1 keeps both in float32."""
    ours, ids = v1().to(torch.bfloat16), tokens(4, 16)
    theirs = copy.deepcopy(to_diffllama(ours))
    assert agrees(logits(ours, ids), logits(theirs, ids), 2**-4)
    assert not agrees(logits(ours, ids), logits(reordered(theirs, k=[0, 1, 0, 1]), ids), 2**-3)
