"""DIFF V2: the model against its equations, a base laid out as V2 bit for bit, and what trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_diff import NaiveDiffV2, agrees
from tiny import FAMILIES, SLIDING, tiny_config, tiny_diff_v2, tiny_model, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from dex.layouts.fresh import fresh
from dex.layouts.modeling_diff_v2 import DiffV2Attention, DiffV2ForCausalLM
from dex.layouts.registry import register_layouts
from dex.layouts.to_diff_v2 import to_diff_v2


def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def layers(model: Any) -> list[DiffV2Attention]:
    return [layer.self_attn for layer in model.model.layers]


def naive(model: Any, cls: type[NaiveDiffV2] = NaiveDiffV2) -> NaiveDiffV2:
    return cls(model.state_dict(), model.config)


# ---- the equations -----------------------------------------------------------------------------------------

EVERYTHING = {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True, **SLIDING}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "one key, head_dim apart": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20},
    "three heads a key": {"num_attention_heads": 6},
    "biases, q/k norm, sliding": EVERYTHING,
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_v2_computes_the_equations_head_by_head(variant: str) -> None:
    model, ids = tiny_diff_v2(**VARIANTS[variant]), tokens(2, 11)
    expected = naive(model).logits(ids)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        assert agrees(logits(model, ids), expected), attention


@pytest.mark.parametrize("variant", ["gqa", "biases, q/k norm, sliding"])
def test_the_gradient_of_every_parameter_is_that_of_the_equations(variant: str) -> None:
    model, ids = tiny_diff_v2(**VARIANTS[variant]), tokens(1, 9)
    upstream = torch.randn(1, 9, model.config.vocab_size, generator=torch.Generator().manual_seed(3))
    oracle = NaiveDiffV2(model.state_dict(keep_vars=True), model.config)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad((oracle.logits(ids) * upstream).sum(), parameters)
    actual = torch.autograd.grad((model(ids).logits * upstream).sum(), parameters)
    for name, a, e in zip(names, actual, expected, strict=True):
        assert agrees(a, e, 1e-4), name  # sums over all tokens: longer than a logit's, and so rounded further


class PairedAsHalves(NaiveDiffV2):
    def queries_of(self, n: int) -> tuple[int, int]:
        return n, n + self.config.num_attention_heads


class MapsExchanged(NaiveDiffV2):
    def queries_of(self, n: int) -> tuple[int, int]:
        return 2 * n + 1, 2 * n


class LambdaOfTheNextHead(NaiveDiffV2):
    def lam(self, layer: int, n: int, x: Tensor) -> Tensor:
        return super().lam(layer, (n + 1) % self.config.num_attention_heads, x)


class LambdaOfTheTokenBefore(NaiveDiffV2):
    def lam(self, layer: int, n: int, x: Tensor) -> Tensor:
        return super().lam(layer, n, x.roll(1, dims=0))


class LambdaOfTheFirstHeadForAll(NaiveDiffV2):
    def lam(self, layer: int, n: int, x: Tensor) -> Tensor:
        return super().lam(layer, 0, x)


@pytest.mark.parametrize(
    "wrong",
    [PairedAsHalves, MapsExchanged, LambdaOfTheNextHead, LambdaOfTheTokenBefore, LambdaOfTheFirstHeadForAll],
)
def test_control_a_wrong_equation_does_not_agree(wrong: type[NaiveDiffV2]) -> None:
    model, ids = tiny_diff_v2(), tokens(1, 11)
    assert agrees(logits(model, ids), naive(model).logits(ids))
    assert not agrees(logits(model, ids), naive(model, wrong).logits(ids), 1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True])
def test_padding_on_either_side_changes_nothing(attention: str, sliding: bool) -> None:
    model = tiny_diff_v2(attn_implementation=attention, **(SLIDING if sliding else {}))
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[1, :5] = 0
    mask[2, 8:] = 0
    expected, real = naive(model).logits(ids, mask), mask.bool()
    assert agrees(logits(model, ids, attention_mask=mask)[real], expected[real])
    assert not agrees(logits(model, ids)[real], expected[real], 1e-3)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # `cache` since transformers 5.20
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True])
def test_decoding_with_a_cache_is_the_whole_forward_pass(attention: str, sliding: bool) -> None:
    model = tiny_diff_v2(attn_implementation=attention, **(SLIDING if sliding else {}))
    ids = tokens(2, 14)
    expected = naive(model).logits(ids)
    out, parts = None, []
    for start, end in ((0, 6), (6, 7), (7, 10), (10, 11), (11, 12), (12, 13), (13, 14)):
        with torch.no_grad():
            out = model(ids[:, start:end], past_key_values=out and out.past_key_values, use_cache=True)
        parts.append(out.logits)
    assert agrees(torch.cat(parts, 1), expected)


def test_the_attentions_are_all_first_maps_then_all_second_ones() -> None:
    model, ids = tiny_diff_v2(attn_implementation="eager"), tokens(1, 7)
    with torch.no_grad():
        out = model(ids, output_attentions=True, output_hidden_states=True)
    oracle, eye, real = naive(model), torch.eye(7).double(), torch.ones(7, dtype=torch.bool)
    for layer, maps in enumerate(out.attentions):
        x = model.model.layers[layer].input_layernorm(out.hidden_states[layer])[0].detach().double()
        expected = [oracle.attend(layer, 2 * n + which, n // 2, x, eye, real) for which in (0, 1) for n in range(4)]
        assert agrees(maps[0], torch.stack(expected))


# ---- λ -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "bfloat16", "float16", "autocast"])
def test_lambda_is_float32_in_low_precision_and_under_autocast(how: str) -> None:
    model = tiny_diff_v2()
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(how, torch.float32)
    model = model.to(dtype)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for layer, attention in enumerate(layers(model)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            lam = attention.lam(hidden)
        assert lam.dtype == torch.float32
        expected = [naive(model).lam(layer, n, hidden[0].double()) for n in range(4)]
        torch.testing.assert_close(lam[0].double(), torch.cat(expected, -1), rtol=1e-5, atol=0)


def input_of_o_proj(attention: DiffV2Attention, hidden: Tensor) -> Tensor:
    seen: list[Tensor] = []
    rotary = tiny_diff_v2().model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attention(hidden, rotary)
    handle.remove()
    return seen[0]


def equal_maps(score: float) -> DiffV2Attention:
    """A layer whose two maps are one, with λ = σ(score) for an input whose first number is 1."""
    attention = layers(tiny_diff_v2())[0]
    with torch.no_grad():
        pairs = attention.q_proj.weight.unflatten(0, (-1, 2, 16))
        pairs[:, 1] = pairs[:, 0]
        attention.lambda_proj.weight.zero_()
        attention.lambda_proj.weight[:, 0] = score
    return attention


@pytest.mark.parametrize("autocast", [False, True])
def test_a_lambda_near_one_is_not_rounded_away(autocast: bool) -> None:
    """λ = σ(6.5) = 0.9985 is 1 in bfloat16, and 1 − λ nothing."""
    dtype = torch.float32 if autocast else torch.bfloat16
    attention, first_alone = equal_maps(6.5).to(dtype), equal_maps(-200.0).to(dtype)
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    hidden[..., 0] = 1.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = torch.tensor(-6.5).double().sigmoid() * input_of_o_proj(first_alone, hidden)
        assert agrees(input_of_o_proj(attention, hidden), expected, 2**-7)
        plain = attention.lam
        attention.lam = lambda x: plain(x).bfloat16().float()  # type: ignore[method-assign]
        assert not agrees(input_of_o_proj(attention, hidden), expected, 0.5)


# ---- a base laid out as V2 ---------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def aligned(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A base as a folder loads in this dtype, but for where its weights lie.

    Rotary buffers stay float32. In memory tensors are 64-byte aligned; those of a safetensors file need not be, and
    then even a deep copy of the base differs from it in products of one row.
    """
    model = tiny_model(family, **changes)
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    model = model.to(dtype)
    rotary.inv_freq, rotary.original_inv_freq = frequencies, frequencies.clone()
    return model


def bit_equal(base: Any, other: Any) -> bool:
    """The same bits for a batch, with padding on either side, and token by token with a cache."""
    ids, mask = tokens(3, 20), torch.ones(3, 20, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, 15:] = 0
    a, b = (logits(model, ids, attention_mask=mask)[mask.bool()] for model in (base, other))
    options = {"attention_mask": mask[:2], "max_new_tokens": 6, "eos_token_id": None, "do_sample": False}
    steps = [
        model.generate(ids[:2], **options, output_logits=True, return_dict_in_generate=True).logits
        for model in (base, other)
    ]
    return torch.equal(a, b) and all(torch.equal(x, y) for x, y in zip(*steps, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_base_laid_out_as_v2_has_the_same_bits(family: str, dtype: torch.dtype) -> None:
    base = aligned(family, dtype)
    model = to_diff_v2(base)
    assert model.dtype == dtype
    for attention in ("sdpa", "eager"):
        base.set_attn_implementation(attention)
        model.set_attn_implementation(attention)
        if dtype == torch.float16 and model.config.o_bias:
            # Halved heads below 1.2e-4 lose their last bit, and a bias rules out doubling them: only close.
            assert agrees(logits(model, tokens()), logits(base, tokens()), 2**-8)
        else:
            assert bit_equal(base, model), attention


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 20}])
def test_mha_mqa_and_another_head_dim_have_the_same_bits(changes: dict[str, int]) -> None:
    base = aligned("llama", **changes)
    assert bit_equal(base, to_diff_v2(base))


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3"])
def test_the_other_choice_of_tied_embeddings_has_the_same_bits(family: str) -> None:
    base = aligned(family, tie_word_embeddings=family == "llama")
    assert bit_equal(base, to_diff_v2(base))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_laid_out_as_v2_has_the_same_bits_under_autocast(dtype: torch.dtype) -> None:
    base = aligned("qwen2")
    with torch.autocast("cpu", dtype):
        assert torch.equal(logits(to_diff_v2(base), tokens()), logits(base, tokens()))


def small_heads(base: Any) -> Any:
    """Heads so small that float16 cannot halve them exactly."""
    for layer in base.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(2.0**-16)
        if layer.self_attn.v_proj.bias is not None:
            layer.self_attn.v_proj.bias.data.mul_(2.0**-16)
        layer.self_attn.o_proj.weight.data.mul_(2.0**6)
    return base


def test_heads_too_small_to_be_halved_in_float16_keep_their_bits() -> None:
    base = small_heads(aligned("qwen2", torch.float16))
    assert bit_equal(base, to_diff_v2(base))


def halves(attention: DiffV2Attention) -> None:
    weight = attention.q_proj.weight.data.unflatten(0, (-1, attention.head_dim))
    weight.copy_(torch.cat([weight[0::2], weight[1::2]]))


def o_not_doubled(attention: DiffV2Attention) -> None:
    attention.o_proj.weight.data.mul_(0.5)


def o_bias_doubled(attention: DiffV2Attention) -> None:
    attention.o_proj.bias.data = 2.0 * attention.o_proj.bias.data


def second_query_zero(attention: DiffV2Attention) -> None:
    attention.q_proj.weight.data.unflatten(0, (-1, 2, attention.head_dim))[:, 1] = 0.0


def no_query_bias(attention: DiffV2Attention) -> None:
    attention.q_proj.bias.data = torch.zeros_like(attention.q_proj.bias)


def keys_exchanged(attention: DiffV2Attention) -> None:
    weight = attention.k_proj.weight.data.unflatten(0, (-1, attention.head_dim))
    weight.copy_(weight.flip(0))


@pytest.mark.parametrize(
    "break_it", [halves, o_not_doubled, o_bias_doubled, second_query_zero, no_query_bias, keys_exchanged]
)
def test_control_a_base_laid_out_wrongly_is_seen(break_it: Callable[[DiffV2Attention], None]) -> None:
    base = aligned("llama-bias")
    model = to_diff_v2(base)
    assert bit_equal(base, model)
    break_it(layers(model)[1])
    assert not bit_equal(base, model)
    assert not agrees(logits(model, tokens()), logits(base, tokens()), 1e-3)


def test_only_queries_and_lambda_are_added() -> None:
    base = tiny_model("qwen3")
    model = to_diff_v2(base)
    H, d, D = 4, 64, 32
    new = 3 * (H * D * d + H * d)  # layers · (second queries + λ_proj)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in base.parameters()) + new
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (H, 2)


def test_a_laid_out_model_keeps_head_dim_and_tied_embeddings_through_a_folder(tmp_path: Path) -> None:
    register_layouts()
    model = to_diff_v2(tiny_model("qwen3"))  # head_dim 32, where hidden_size / heads is 16
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DiffV2ForCausalLM
    assert loaded.config.head_dim == 32
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert agrees(logits(loaded, tokens()), logits(model, tokens()), 1e-6)


# ---- what trains -------------------------------------------------------------------------------------------


def gradients(model: Any) -> dict[str, Tensor]:
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_at_the_start_are_the_bases_shared_out(family: str) -> None:
    """(a − ½ a)(2 W): twice the base's gradient for the first query, minus it for the second, half of it for 2 W."""
    base = tiny_model(family)
    expected, actual = gradients(base), gradients(to_diff_v2(base))
    for name, gradient in expected.items():
        if name.endswith("q_proj.weight"):
            pairs = actual[name].unflatten(0, (-1, 2, base.config.head_dim))
            of_head = gradient.unflatten(0, (-1, base.config.head_dim))
            assert agrees(pairs[:, 0], 2.0 * of_head, 1e-4)
            assert agrees(pairs[:, 1], -of_head, 1e-4)
        else:
            assert agrees(actual[name], gradient * (0.5 if name.endswith("o_proj.weight") else 1.0), 1e-4), name


STARTS: dict[str, Callable[[], DiffV2ForCausalLM]] = {
    "laid out, biases": lambda: to_diff_v2(tiny_model("llama-bias")),  # type: ignore[return-value]
    "laid out, q/k norm": lambda: to_diff_v2(tiny_model("qwen3")),  # type: ignore[return-value]
    "fresh": lambda: fresh("diff-v2", tiny_config("qwen2", intermediate_size=256), seed=1, options={}),  # type: ignore[return-value]
}


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = tokens(seed=seed)
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_parameter_has_a_gradient_by_the_second_step(start: str, kind: type[torch.optim.Optimizer]) -> None:
    model = STARTS[start]().train()
    optimizer = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    for seed in (0, 1):
        step(model, optimizer, seed)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 2e-5, name
        if any(f"{kind}_proj.weight" in name for kind in "qkv"):
            assert (parameter.grad.unflatten(0, (-1, model.config.head_dim)).flatten(1).norm(dim=1) > 2e-5).all(), (
                name
            )
        if "lambda_proj" in name:
            assert (parameter.grad.norm(dim=1) > 2e-5).all(), name


def test_the_two_queries_of_a_head_part_and_lambda_leaves_one_half_in_the_first_step() -> None:
    model = to_diff_v2(tiny_model("qwen2")).train()
    pairs = [layer.q_proj.weight.unflatten(0, (-1, 2, layer.head_dim)) for layer in layers(model)]
    assert all(torch.equal(pair[:, 0], pair[:, 1]) for pair in pairs)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-1), seed=0)
    for layer in layers(model):
        pair = layer.q_proj.weight.unflatten(0, (-1, 2, layer.head_dim))
        assert (pair[:, 0] != pair[:, 1]).any(dim=(1, 2)).all()
        assert layer.lambda_proj.weight.any(dim=1).all()
