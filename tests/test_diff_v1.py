"""DIFF V1: the model against its equations, λ, the norm of the heads and its annealing, and bases laid out as V1."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_diff import NaiveDiffV1, agrees
from tiny import FAMILIES, SLIDING, tiny_config, tiny_diff_v1, tiny_model, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from dex.errors import DexError
from dex.layouts import modeling_diff_v1
from dex.layouts.fresh import fresh
from dex.layouts.head_map import NEW
from dex.layouts.modeling_diff_v1 import DiffV1Attention, DiffV1ForCausalLM
from dex.layouts.registry import register_layouts
from dex.layouts.to_diff_v1 import V1Options, doubled, paired, to_diff_v1

TEXT = tokens(2, 16, seed=5)  # what conversions measure scales on


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def layers(model: Any) -> list[DiffV1Attention]:
    return [layer.self_attn for layer in model.model.layers]


def naive(model: Any, cls: type[NaiveDiffV1] = NaiveDiffV1) -> NaiveDiffV1:
    return cls(model.state_dict(), model.config)


def annealing(steps: int | None = 4, done: int = 0, **changes: Any) -> DiffV1ForCausalLM:
    model = tiny_diff_v1(head_norm="anneal", head_norm_steps=steps, **changes)
    for attention in layers(model):
        attention.head_norm_step.fill_(done)
    return model


# ---- the equations -----------------------------------------------------------------------------------------

EVERYTHING = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, **SLIDING}
VARIANTS: dict[str, Callable[[], DiffV1ForCausalLM]] = {
    "gqa": tiny_diff_v1,
    "mha": lambda: tiny_diff_v1(num_key_value_heads=8),
    "three queries a key": lambda: tiny_diff_v1(num_attention_heads=12),
    "four queries a key, head_dim apart": lambda: tiny_diff_v1(num_attention_heads=16, head_dim=20),
    "biases, q/k norm, sliding": lambda: tiny_diff_v1(**EVERYTHING),
    "tied": lambda: tiny_diff_v1(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    "fixed at lambda_init": lambda: tiny_diff_v1(lambda_mode="fixed"),
    "fixed at zero": lambda: tiny_diff_v1(lambda_mode="fixed", lambda_value=0),
    "sum of the maps": lambda: tiny_diff_v1(lambda_mode="fixed", lambda_value=0.37, lambda_sign=1),
    "learned sum": lambda: tiny_diff_v1(lambda_sign=1),
    "large eps": lambda: tiny_diff_v1(head_norm_eps=0.3),
    "no norm": lambda: tiny_diff_v1(head_norm="off"),
    "annealing, start": lambda: annealing(),
    "annealing, middle": lambda: annealing(done=3),
    "annealing, past the end": lambda: annealing(done=9),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_v1_computes_the_equations_head_by_head(variant: str) -> None:
    model, ids = VARIANTS[variant](), tokens(2, 11)
    expected = naive(model).logits(ids)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        assert agrees(logits(model, ids), expected), attention


@pytest.mark.parametrize("variant", ["gqa", "biases, q/k norm, sliding", "annealing, middle"])
def test_the_gradient_of_every_parameter_is_that_of_the_equations(variant: str) -> None:
    model, ids = VARIANTS[variant](), tokens(1, 9)
    upstream = torch.randn(1, 9, model.config.vocab_size, generator=torch.Generator().manual_seed(3))
    oracle = NaiveDiffV1(model.state_dict(keep_vars=True), model.config)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad((oracle.logits(ids) * upstream).sum(), parameters)
    actual = torch.autograd.grad((model(ids).logits * upstream).sum(), parameters)
    for name, a, e in zip(names, actual, expected, strict=True):
        assert agrees(a, e, 1e-4), name  # sums over all tokens: longer than a logit's, and so rounded further


class LambdaOfTheNextLayer(NaiveDiffV1):
    def lambda_init(self, layer: int) -> float:
        return super().lambda_init(layer + 1)


class KeysRepeatedInTurn(NaiveDiffV1):
    """The reference's naive file under GQA: key heads repeated first and paired afterwards."""

    def key_of(self, i: int, which: int) -> int:
        return (2 * i + which) // (self.config.num_attention_heads // self.config.num_key_value_heads)


class OneKeyForBothMaps(NaiveDiffV1):
    def key_of(self, i: int, which: int) -> int:
        return super().key_of(i, 0)


class PairedAsHalves(NaiveDiffV1):
    """Query head 2i + j where i + j·h is meant, and the other way round."""

    def attend(self, layer: int, query: int, *rest: Any) -> Tensor:
        return super().attend(layer, query // 2 + query % 2 * (self.config.num_attention_heads // 2), *rest)


class MapsExchanged(NaiveDiffV1):
    def attend(self, layer: int, query: int, *rest: Any) -> Tensor:
        return super().attend(layer, query ^ 1, *rest)


@pytest.mark.parametrize(
    "wrong", [LambdaOfTheNextLayer, KeysRepeatedInTurn, OneKeyForBothMaps, PairedAsHalves, MapsExchanged]
)
def test_control_a_wrong_equation_does_not_agree(wrong: type[NaiveDiffV1]) -> None:
    model, ids = tiny_diff_v1(), tokens(1, 11)
    assert agrees(logits(model, ids), naive(model).logits(ids))
    assert not agrees(logits(model, ids), naive(model, wrong).logits(ids), 1e-3)


@pytest.mark.parametrize("name", ["q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "subln.weight"])
def test_control_a_bias_or_gain_left_out_does_not_agree(name: str) -> None:
    model, ids = tiny_diff_v1(qkv_bias=True, o_bias=True), tokens(1, 11)
    oracle = naive(model)
    for key in [key for key in oracle.weights if key.endswith(name)]:
        oracle.weights[key] = torch.full_like(oracle.weights[key], float(name == "subln.weight"))
    if name == "k_proj.bias":  # without rotary embeddings it would change no softmax
        assert not agrees(logits(model, ids), oracle.logits(ids), 1e-4)
    else:
        assert not agrees(logits(model, ids), oracle.logits(ids), 1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True])
def test_padding_on_either_side_changes_nothing(attention: str, sliding: bool) -> None:
    model = tiny_diff_v1(attn_implementation=attention, **(SLIDING if sliding else {}))
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[1, :5] = 0
    mask[2, 8:] = 0
    expected = naive(model).logits(ids, mask)
    real = mask.bool()
    assert agrees(logits(model, ids, attention_mask=mask)[real], expected[real])
    assert not agrees(logits(model, ids)[real], expected[real], 1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True])
def test_decoding_with_a_cache_is_the_whole_forward_pass(attention: str, sliding: bool) -> None:
    model = tiny_diff_v1(attn_implementation=attention, **(SLIDING if sliding else {}))
    ids = tokens(2, 14)
    expected = naive(model).logits(ids)
    out, parts = None, []
    for start, end in ((0, 6), (6, 7), (7, 10), (10, 11), (11, 12), (12, 13), (13, 14)):
        with torch.no_grad():
            out = model(ids[:, start:end], past_key_values=out and out.past_key_values, use_cache=True)
        parts.append(out.logits)
    assert agrees(torch.cat(parts, 1), expected)


def test_heads_too_wide_for_the_fused_kernels_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_diff_v1(attn_implementation="sdpa"), tokens(2, 11)
    expected = naive(model).logits(ids)
    monkeypatch.setattr(modeling_diff_v1, "WIDEST_KERNEL", 31)  # 2 · 16 is wider
    assert agrees(logits(model, ids), expected)


def test_the_attentions_are_all_first_maps_then_all_second() -> None:
    model, ids = tiny_diff_v1(attn_implementation="eager"), tokens(1, 7)
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True)
    oracle, eye, real = naive(model), torch.eye(7).double(), torch.ones(7, dtype=torch.bool)
    for layer, maps in enumerate(out.attentions):
        x = model.model.layers[layer].input_layernorm(out.hidden_states[layer])[0].detach().double()
        order = [(i, which) for which in (0, 1) for i in range(4)]
        expected = [oracle.attend(layer, 2 * i + j, oracle.key_of(i, j), x, eye, real) for i, j in order]
        assert agrees(maps[0], torch.stack(expected))


# ---- λ -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lambda_vectors_stay_float32_through_a_low_precision_folder(tmp_path: Path, dtype: torch.dtype) -> None:
    register_layouts()
    model = tiny_diff_v1()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.lm_head.weight.dtype == dtype
    for ours, theirs in zip(layers(model), layers(loaded), strict=True):
        for name in modeling_diff_v1.LAMBDA_VECTORS:
            assert getattr(theirs, name).dtype == torch.float32
            assert torch.equal(getattr(theirs, name), getattr(ours, name))
        assert torch.equal(theirs.lam(), ours.lam())


@pytest.mark.parametrize("how", ["plain", "cast", "autocast"])
def test_lambda_is_float32_in_low_precision_and_under_autocast(how: str) -> None:
    model = tiny_diff_v1()
    model = model.to(torch.bfloat16) if how == "cast" else model
    for layer, attention in enumerate(layers(model)):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            lam = attention.lam()
        assert lam.dtype == torch.float32
        torch.testing.assert_close(lam[0].double(), naive(model).lam(layer), rtol=1e-6, atol=0)


def nearly_equal_maps(lam: float, dtype: torch.dtype) -> DiffV1Attention:
    """A layer without a norm whose two maps are one, so that what it puts out is 1 − λ of one of them."""
    model = tiny_diff_v1(head_norm="off")
    attention = layers(model)[0]
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            pairs = projection.weight.unflatten(0, (-1, 2, 16))
            pairs[:, 1] = pairs[:, 0]
        for name in modeling_diff_v1.LAMBDA_VECTORS:
            getattr(attention, name).fill_(0.25)
        attention.lambda_q1.mul_(1.0 + (lam - attention.lam().item()) / attention.lam().exp().item())
    return attention.to(dtype)


def input_of_o_proj(attention: DiffV1Attention, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    seen: list[Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attention(hidden, rotary)
    handle.remove()
    return seen[0]


def rotary_of(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])


@contextmanager
def rounded_lambda(attention: DiffV1Attention) -> Iterator[None]:
    """As DiffLlama does it."""
    plain = attention.lam
    attention.lam = lambda: plain().bfloat16().float()  # type: ignore[method-assign]
    yield
    del attention.lam


@pytest.mark.parametrize("autocast", [False, True])
def test_a_lambda_near_one_is_not_rounded_away(autocast: bool) -> None:
    """λ = 0.998 is 1 in bfloat16, and 1 − λ nothing."""
    attention = nearly_equal_maps(0.998, torch.float32 if autocast else torch.bfloat16)
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(attention.o_proj.weight.dtype)
    rotary = rotary_of(tiny_diff_v1(), hidden)
    first_alone = copy.deepcopy(attention)
    first_alone.config.lambda_mode, first_alone.config.lambda_value = "fixed", 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = input_of_o_proj(first_alone, hidden, rotary).double() * (1.0 - attention.lam().double())
        assert agrees(input_of_o_proj(attention, hidden, rotary), expected, 2**-7)
        with rounded_lambda(attention):
            assert not agrees(input_of_o_proj(attention, hidden, rotary), expected, 0.5)
