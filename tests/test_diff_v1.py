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
    "tied": lambda: tiny_diff_v1(
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    ),
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


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # `cache` since transformers 5.20
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


def equal_maps(lam: float) -> DiffV1Attention:
    """A layer without a norm whose two maps are one, so that it passes on 1 − λ of the first."""
    attention = layers(tiny_diff_v1(head_norm="off", lambda_mode="fixed", lambda_value=lam))[0]
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            pairs = projection.weight.unflatten(0, (-1, 2, 16))
            pairs[:, 1] = pairs[:, 0]
    return attention


def input_of_o_proj(attention: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    seen: list[Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        attention(hidden, rotary, attention_mask=None)
    handle.remove()
    return seen[0]


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
    dtype = torch.float32 if autocast else torch.bfloat16
    attention, first_alone = equal_maps(0.998).to(dtype), equal_maps(0.0).to(dtype)
    hidden = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    rotary = tiny_diff_v1().model.rotary_emb(hidden, torch.arange(6)[None])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = 0.002 * input_of_o_proj(first_alone, hidden, rotary)
        assert agrees(input_of_o_proj(attention, hidden, rotary), expected, 2**-7)
        with rounded_lambda(attention):
            assert not agrees(input_of_o_proj(attention, hidden, rotary), expected, 0.5)


# ---- every parameter trains --------------------------------------------------------------------------------

TINY = 2e-5  # of the first step's λ under the norm, which only its eps lets through (equal maps): 1e-6 to 1e-5
TRAINED: dict[str, Callable[[], DiffV1ForCausalLM]] = {
    "doubled, calibrated": lambda: laid_out("qwen2"),
    "doubled, annealing": lambda: laid_out("qwen2", norm="anneal", config={"head_norm_steps": 4}),
    "doubled, no norm": lambda: laid_out("llama-bias", norm="off"),
    "doubled, q/k norm": lambda: laid_out("qwen3"),
    "paired": lambda: laid_out("qwen2", heads="paired"),
    "fresh": lambda: fresh("diff-v1", tiny_config("qwen2"), seed=1, options={}),
}


def laid_out(family: str, config: dict[str, Any] | None = None, changes: Any = None, **options: Any) -> Any:
    base = tiny_model(family, **(changes or {}))
    return to_diff_v1(base, V1Options(**options, config=config or {}), TEXT)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    ids = tokens(seed=seed)
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("start", TRAINED)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_parameter_has_a_gradient_by_the_second_step(start: str, kind: type[torch.optim.Optimizer]) -> None:
    model = TRAINED[start]().train()
    optimizer = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    for seed in (0, 1):
        step(model, optimizer, seed)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        by_head = parameter.grad.unflatten(0, (-1, 16)).flatten(1) if "_proj.weight" in name else parameter.grad[None]
        if ".q_proj." in name or ".k_proj." in name or ".v_proj." in name:
            assert (by_head.norm(dim=1) > TINY).all(), name
        assert parameter.grad.norm() > TINY, name


@pytest.mark.parametrize("norm", ["calibrate", "anneal", "off"])
def test_the_two_maps_of_doubled_heads_part_in_the_first_step(norm: Any) -> None:
    steps = {"head_norm_steps": 4} if norm == "anneal" else {}
    model = laid_out("llama", norm=norm, config=steps).train()
    pairs = [layer.q_proj.weight.unflatten(0, (-1, 2, layer.head_dim)) for layer in layers(model)]
    assert all(torch.equal(pair[:, 0], pair[:, 1]) for pair in pairs)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-1))
    for pair in (layer.q_proj.weight.unflatten(0, (-1, 2, layer.head_dim)) for layer in layers(model)):
        assert (pair[:, 0] != pair[:, 1]).any(dim=(1, 2)).all()


# ---- the annealing of the norm -----------------------------------------------------------------------------


def steps_done(model: Any) -> list[int]:
    return [int(attention.head_norm_step) for attention in layers(model)]


def test_the_annealing_counts_the_steps_of_a_bare_loop() -> None:
    model = annealing().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for done in range(6):
        assert steps_done(model) == [done] * 3
        share = [float(attention.head_norm_share()) for attention in layers(model)]
        assert share == pytest.approx([min(1.0, done / 4)] * 3)
        step(model, optimizer, done)


def test_the_annealing_counts_optimiser_steps_not_accumulated_batches() -> None:
    model = annealing().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in range(6):
        model(input_ids=tokens(seed=batch), labels=tokens(seed=batch)).loss.backward()
        if batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert steps_done(model) == [2] * 3


def test_the_annealing_does_not_count_the_steps_of_another_model() -> None:
    model, other = annealing().train(), annealing().train()
    step(other, torch.optim.SGD(other.parameters(), lr=1e-3))
    assert (steps_done(model), steps_done(other)) == ([0] * 3, [1] * 3)


def test_two_optimisers_of_one_model_count_once_a_step() -> None:
    model = annealing().train()
    vectors = [p for n, p in model.named_parameters() if "lambda" in n]
    rest = [p for n, p in model.named_parameters() if "lambda" not in n]
    for optimizer in (torch.optim.SGD(vectors, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)):
        step(model, optimizer)
    assert steps_done(model) == [1] * 3


def test_the_annealing_runs_when_only_some_weights_train() -> None:
    model = annealing().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("v_proj" in name)
    step(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    assert steps_done(model) == [1] * 3


def test_the_annealing_runs_when_the_optimiser_holds_only_some_weights() -> None:
    model = annealing().train()
    held = [p for n, p in model.named_parameters() if "o_proj" in n or "q_proj" in n]
    optimizer = torch.optim.SGD(held, lr=1e-3)
    for batch in range(2):
        step(model, optimizer, batch)
    assert steps_done(model) == [2] * 3


def trainer(model: Any, folder: Path, max_steps: int) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 12)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=max_steps,
        save_steps=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows)


def test_the_annealing_counts_under_trainer_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    model = annealing(steps=8)
    trainer(model, tmp_path, max_steps=3).train()
    assert steps_done(model) == [3] * 3
    resumed = annealing(steps=8)
    trainer(resumed, tmp_path, max_steps=5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert steps_done(resumed) == [5] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_annealing_survives_save_and_load(tmp_path: Path, dtype: torch.dtype) -> None:
    register_layouts()
    model = annealing(done=3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).train()
    assert loaded.config.head_norm_steps == 4
    assert steps_done(loaded) == [3] * 3
    if dtype == torch.float32:
        assert torch.equal(logits(loaded.eval(), tokens()), logits(model, tokens()))
    step(loaded.train(), torch.optim.SGD(loaded.parameters(), lr=1e-3))
    assert steps_done(loaded) == [4] * 3
    assert float(layers(loaded)[0].head_norm_share()) == 1.0


def test_the_annealing_of_a_deep_copy_counts_on_its_own() -> None:
    model = annealing(done=1).train()
    copied = copy.deepcopy(model)
    step(copied, torch.optim.SGD(copied.parameters(), lr=1e-3))
    assert (steps_done(model), steps_done(copied)) == ([1] * 3, [2] * 3)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert (steps_done(model), steps_done(copied)) == ([2] * 3, [2] * 3)


def test_the_annealing_counts_exactly_after_a_cast_to_bfloat16() -> None:
    model = annealing(steps=1000, done=513).to(torch.bfloat16).train()  # bfloat16 has no 513
    assert steps_done(model) == [513] * 3
    assert float(layers(model)[0].head_norm_share()) == pytest.approx(0.513)
    step(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert steps_done(model) == [514] * 3


def without_annealing(model: DiffV1ForCausalLM, head_norm: str) -> DiffV1ForCausalLM:
    other = tiny_diff_v1(head_norm=head_norm)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def test_the_annealing_ends_as_the_plain_norm() -> None:
    model = annealing(done=4)
    assert agrees(logits(model, tokens()), logits(without_annealing(model, "rms"), tokens()), 1e-6)
    assert not agrees(logits(annealing(done=3), tokens()), logits(without_annealing(model, "rms"), tokens()), 1e-3)


def test_the_annealing_starts_without_a_norm() -> None:
    model = annealing()
    plain = without_annealing(model, "off")
    for ours, theirs in zip(layers(model), layers(plain), strict=True):
        scale = ours.subln.weight.repeat(4) / ours.head_rms.repeat_interleave(
            32
        )  # gain and constant, column by column
        theirs.o_proj.weight.data.mul_(scale)
    assert agrees(logits(model, tokens()), logits(plain, tokens()))


def test_annealing_without_a_number_of_steps_refuses_to_train_and_not_to_evaluate() -> None:
    model = annealing(steps=None)
    assert agrees(logits(model, tokens()), logits(annealing(steps=7), tokens()), 0.0)
    with pytest.raises(ValueError, match="head_norm_steps"):
        model.train()(input_ids=tokens())


# ---- a base laid out as V1 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("norm", ["off", "anneal"])
def test_doubled_heads_compute_what_the_base_does(family: str, norm: Any) -> None:
    for changes in ({}, {"num_key_value_heads": 1}):
        base = tiny_model(family, **changes)
        model = to_diff_v1(base, V1Options(norm=norm), TEXT)
        assert agrees(logits(model, tokens()), logits(base, tokens()))


@pytest.mark.parametrize(
    "options",
    [
        {"lambda_mode": "fixed"},
        {"lambda_mode": "fixed", "lambda_value": 0},
        {"lambda_mode": "fixed", "lambda_value": 1.7},
        {"lambda_mode": "fixed", "lambda_value": 1, "lambda_sign": 1},
        {"lambda_sign": 1},
    ],
)
def test_doubled_heads_compute_what_the_base_does_with_any_lambda(options: dict[str, Any]) -> None:
    base = tiny_model("qwen2")
    for norm in ("off", "anneal"):
        model = to_diff_v1(base, V1Options(norm=norm, config=options), TEXT)  # type: ignore[arg-type]
        assert agrees(logits(model, tokens()), logits(base, tokens()))


def test_equal_maps_that_cancel_are_refused() -> None:
    with pytest.raises(DexError, match="cancel"):
        laid_out("llama", norm="off", config={"lambda_mode": "fixed", "lambda_value": 1})


def test_control_doubled_heads_with_a_lambda_of_another_layer_are_not_the_base() -> None:
    base = tiny_model("qwen2")
    model = to_diff_v1(base, V1Options(norm="off"), TEXT)
    for layer_idx, attention in enumerate(layers(model)):
        attention.lambda_init = modeling_diff_v1.lambda_init(layer_idx + 1)
    assert not agrees(logits(model, tokens()), logits(base, tokens()), 1e-3)


def test_lambda_of_a_laid_out_model_starts_at_lambda_init_and_is_not_dead() -> None:
    for layer_idx, attention in enumerate(layers(laid_out("llama"))):
        assert attention.lam().item() == pytest.approx(modeling_diff_v1.lambda_init(layer_idx), rel=1e-6)
        assert all(getattr(attention, name).norm() > 0 for name in modeling_diff_v1.LAMBDA_VECTORS)


def test_the_seed_decides_the_lambda_vectors() -> None:
    one, same, other = (layers(laid_out("llama", seed=seed)) for seed in (1, 1, 2))
    for a, b, c in zip(one, same, other, strict=True):
        assert torch.equal(a.lambda_q1, b.lambda_q1)
        assert not torch.equal(a.lambda_q1, c.lambda_q1)


@pytest.mark.parametrize("heads", ["doubled", "paired"])
def test_calibrated_columns_lose_least_against_the_heads_of_the_base(heads: Any) -> None:
    """W_O's columns are the base's times s, where Σ (s z − O)² is least: its residual has no part along z."""
    base = tiny_model("qwen2")
    plan = (doubled if heads == "doubled" else paired)(4, 2)
    model = to_diff_v1(base, V1Options(heads=heads), TEXT)
    for ours, theirs, x in zip(layers(model), layers(base), attention_inputs(base, TEXT), strict=True):
        rotary = base.model.rotary_emb(x, torch.arange(16)[None])
        z = input_of_o_proj(ours, x, rotary).double().unflatten(-1, (-1, 16))
        own = input_of_o_proj(theirs, x, rotary).double().unflatten(-1, (-1, 16))
        for block, head in enumerate(plan.o):
            columns = ours.o_proj.weight.double().unflatten(1, (-1, 16))[:, block]
            if head == NEW:
                assert not columns.any()
                continue
            scale = columns.norm() / theirs.o_proj.weight.double().unflatten(1, (-1, 16))[:, head].norm()
            along = ((scale * z[:, :, block] - own[:, :, head]) * z[:, :, block]).sum()
            assert abs(along) < 1e-5 * own[:, :, head].norm() * z[:, :, block].norm()


def attention_inputs(model: Any, ids: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kw: seen.append(kw["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def test_paired_heads_keep_the_number_of_every_head_and_of_parameters_but_lambda_and_gain() -> None:
    base = tiny_model("qwen2")
    model = to_diff_v1(base, V1Options(heads="paired"), TEXT)
    new = 3 * (4 * 16 + 2 * 16)  # layers · (λ vectors + gain)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in base.parameters()) + new
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)


def test_an_odd_number_of_key_value_heads_is_refused_for_pairs_and_not_for_doubled_heads() -> None:
    base = tiny_model("llama", num_key_value_heads=1)
    with pytest.raises(DexError, match="odd"):
        to_diff_v1(base, V1Options(heads="paired"), TEXT)
    assert to_diff_v1(base, V1Options(), TEXT).config.num_key_value_heads == 2


def test_a_laid_out_model_keeps_head_dim_and_tied_embeddings_through_a_folder(tmp_path: Path) -> None:
    register_layouts()
    model = laid_out("qwen3")  # head_dim 32, where hidden_size / heads is 16
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.head_dim == 32
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert agrees(logits(loaded, tokens()), logits(model, tokens()), 1e-6)


HEAD_COUNTS = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda gn: (gn[0] * gn[1], gn[0]))  # H, G


@given(HEAD_COUNTS)
def test_doubled_heads_give_both_maps_their_own_query_key_and_value(counts: tuple[int, int]) -> None:
    H, G = counts
    plan, group = doubled(H, G), H // G
    assert len(plan.k) == len(plan.v) == 2 * G
    for i in range(H):
        m = i // group  # of the V1: H diff heads on G pairs
        assert plan.q[2 * i : 2 * i + 2] == [i, i]
        assert plan.k[2 * m : 2 * m + 2] == [i // group, i // group]
        assert plan.v[2 * m : 2 * m + 2] == [i // group, (i // group + 1) % G]  # its own, and the next key's
        assert plan.o[2 * i : 2 * i + 2] == [i, NEW]


@given(HEAD_COUNTS.map(lambda counts: (2 * counts[0], 2 * counts[1])))
def test_paired_heads_are_a_permutation_and_keep_query_key_and_value_together(counts: tuple[int, int]) -> None:
    H, G = counts
    plan, group = paired(H, G), H // G
    assert sorted(plan.q) == list(range(H))
    assert plan.o == plan.q
    for i in range(H // 2):
        for which in (0, 1):
            key = plan.k[2 * (i // group) + which]
            assert plan.q[2 * i + which] // group == key
