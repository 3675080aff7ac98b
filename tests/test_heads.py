"""dex/heads.py: importance against explicit gates, and the promises of choice and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, tiny_model, tokens
from torch import Tensor

from dex.errors import DexError
from dex.heads import (
    CRITERIA,
    DataIdentity,
    HeadPlan,
    choose,
    importance,
    make_plan,
)
from dex.stats import attention_entropy
from tests.test_stats import padded

# ---- importance --------------------------------------------------------------------------------------------


def importance_by_gates(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The oracle, [L, H]: a gate multiplies every head output; one sequence, one backward pass at a time."""
    layers, num_heads = model.model.layers, model.config.num_attention_heads
    gates = torch.ones(len(layers), num_heads, requires_grad=True)

    def multiply(layer_idx: int) -> Any:
        def hook(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            heads = args[0].unflatten(-1, (num_heads, -1))  # [1, T, H, D]
            return ((heads * gates[layer_idx][:, None]).flatten(2),)

        return hook

    handles = [layer.self_attn.o_proj.register_forward_pre_hook(multiply(i)) for i, layer in enumerate(layers)]
    gradients = []
    for input_ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        # The first real token is no target: transformers would predict it from the padding on its left.
        labels = input_ids.masked_fill(mask * mask.cumsum(0) < 2, -100)
        loss = model(input_ids=input_ids[None], attention_mask=mask[None], labels=labels[None]).loss
        gradients.append(torch.autograd.grad(loss, gates)[0].abs())
    for handle in handles:
        handle.remove()
    return torch.stack(gradients).double().mean(0)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_importance_equals_the_gradient_of_explicit_gates(family: str, side: str) -> None:
    model = tiny_model(family)
    batch = padded(side)
    oracle = importance_by_gates(model, batch)
    assert oracle.min() > 1e-4
    torch.testing.assert_close(importance(model, [batch]), oracle, atol=1e-6, rtol=1e-4)


def test_importance_needs_no_parameter_that_requires_a_gradient() -> None:
    model = tiny_model("qwen3")
    expected = importance(model, [padded("left")])
    model.requires_grad_(False)
    torch.testing.assert_close(importance(model, [padded("left")]), expected, atol=0, rtol=0)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_importance_takes_absolute_values_per_sequence_and_not_per_batch() -> None:
    model, ids = tiny_model("llama"), tokens(4, 20)
    together = importance(model, [{"input_ids": ids}])
    apart = importance(model, [{"input_ids": row[None]} for row in ids])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-4)


def test_importance_of_packed_documents_does_not_predict_across_them() -> None:
    model = tiny_model("llama")
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    packed = {"input_ids": tokens(1, 20), "position_ids": positions}
    labels = tokens(1, 20).clone()
    labels[0, 12] = -100  # the first token of the second document
    outputs: list[Tensor] = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    loss = model(**packed, labels=labels, use_cache=False).loss
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, outputs[0])
    expected = (outputs[0] * gradient).unflatten(-1, (4, -1)).sum((0, 1, 3)).abs()
    torch.testing.assert_close(importance(model, [packed])[1].float(), expected.detach(), atol=1e-6, rtol=1e-4)


def test_importance_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama").train()
    model.model.embed_tokens.requires_grad_(False)
    requires_grad = [parameter.requires_grad for parameter in model.parameters()]
    with torch.no_grad():  # the caller's own mode does not matter
        importance(model, [padded("right")])
    assert [parameter.requires_grad for parameter in model.parameters()] == requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_importance_of_nothing_is_refused() -> None:
    for batches in ([], [{"input_ids": tokens(2, 1)}]):
        with pytest.raises(DexError, match="two tokens or more"):
            importance(tiny_model("llama"), batches)


# ---- choice ------------------------------------------------------------------------------------------------


@st.composite
def scores_and_k(draw: st.DrawFn) -> tuple[Tensor, int]:
    num_layers, num_heads = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    values = st.integers(-3, 3).map(float) | st.floats(-10, 10)  # integers: many ties
    row = st.lists(values, min_size=num_heads, max_size=num_heads)
    rows = draw(st.lists(row, min_size=num_layers, max_size=num_layers))
    return torch.tensor(rows, dtype=torch.float64), draw(st.integers(0, num_heads))


@settings(deadline=None)
@given(scores_and_k())
def test_entropy_chooses_the_highest_and_importance_the_lowest(case: tuple[Tensor, int]) -> None:
    scores, k = case
    for criterion, sign in [("entropy", 1), ("importance", -1)]:
        for row, heads in zip((sign * scores).tolist(), choose(scores, k, criterion), strict=True):
            rest = set(range(len(row))) - set(heads)
            assert len(heads) == k
            assert heads == sorted(set(heads))
            # Every chosen head beats every other one; between equals the lower index does.
            assert all((row[a], -a) > (row[b], -b) for a in heads for b in rest)


@settings(deadline=None)
@given(scores_and_k(), st.integers(0, 2**31))
def test_the_other_criteria_look_at_no_score(case: tuple[Tensor, int], seed: int) -> None:
    scores, k = case
    num_layers, num_heads = scores.shape
    assert choose(scores, k, "all") == [list(range(num_heads))] * num_layers
    assert choose(scores, k, "none") == [[]] * num_layers
    heads = choose(scores, k, "random", seed)
    assert all(row == sorted(set(row)) and len(row) == k and set(row) <= set(range(num_heads)) for row in heads)
    assert heads == choose(torch.zeros_like(scores), k, "random", seed)
    assert heads[:1] == choose(scores[:1], k, "random", seed)  # a layer's draw does not depend on the others


def test_random_heads_differ_by_seed_and_layer() -> None:
    draws = [tuple(row) for seed in range(3) for row in choose(torch.zeros(8, 32), "half", "random", seed)]
    assert len(set(draws)) == len(draws)


def test_half_of_an_odd_number_of_heads_rounds_down() -> None:
    assert [len(heads) for heads in choose(torch.zeros(2, 9), "half", "entropy")] == [4, 4]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("k", [-1, 5])
def test_a_number_of_heads_that_a_layer_has_not_is_refused(k: int, criterion: str) -> None:
    with pytest.raises(DexError, match=f"^{k} heads per layer .* a layer has 4"):
        choose(torch.zeros(3, 4), k, criterion)


def test_an_unknown_criterion_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DexError, match=r"'entropie'; choose one of entropy, importance, random, all, none\."):
        choose(torch.zeros(3, 4), 2, "entropie")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(DexError, match="not finite"):
        choose(torch.tensor([[1.0, bad]]), 1, "importance")


# ---- the plan ----------------------------------------------------------------------------------------------

DATA = DataIdentity(source="pydoc", fingerprint="d" * 16, sequences=2, length=48)


def plan_of(criterion: str, **options: Any) -> HeadPlan:
    batches = [padded("none")]
    return make_plan(
        tiny_model("llama"), "a/model", "c0ffee", "f" * 16, criterion, batches=batches, data=DATA, **options
    )


@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_plan_survives_saving_and_loading(criterion: str, tmp_path: Path) -> None:
    plan = plan_of(criterion)
    plan.save(tmp_path / "heads" / "plan.json")
    assert HeadPlan.load(tmp_path / "heads" / "plan.json") == plan


def test_a_plan_records_how_it_was_made() -> None:
    plan = plan_of("entropy", per_layer=1)
    scores = attention_entropy(tiny_model("llama"), [padded("none")])
    assert plan.heads == choose(scores, 1, "entropy")
    assert (plan.criterion, plan.per_layer, plan.data, plan.seed) == ("entropy", 1, DATA, None)
    torch.testing.assert_close(torch.tensor(plan.scores), scores.float(), atol=0, rtol=1e-5)
    assert plan.model.model_dump() == {
        "id": "a/model", "commit": "c0ffee", "fingerprint": "f" * 16, "num_layers": 3, "num_heads": 4
    }  # fmt: skip


def test_a_plan_without_scores_records_no_data() -> None:
    for criterion, per_layer, seed in [("all", 4, None), ("none", 0, None), ("random", 2, 7)]:
        plan = plan_of(criterion, seed=7)
        assert (plan.scores, plan.data, plan.per_layer, plan.seed) == (None, None, per_layer, seed)


def test_a_bad_number_of_heads_is_refused_before_scoring() -> None:
    with pytest.raises(DexError, match="a layer has 4"):
        make_plan(tiny_model("llama"), "a/model", None, "f", "entropy", 5, batches=iter_fails())


def iter_fails() -> Any:
    raise AssertionError("scored")
    yield


def test_a_saved_plan_has_a_line_per_layer(tmp_path: Path) -> None:
    plan_of("all").save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text().count("[0, 1, 2, 3]") == 3


def test_a_plan_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of("all").save(path)
    with pytest.raises(DexError, match="--force"):
        plan_of("none").save(path)
    assert HeadPlan.load(path).criterion == "all"
    plan_of("none").save(path, force=True)
    assert HeadPlan.load(path).criterion == "none"


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "fingerprint", "reason"),
    [
        (4, 4, "f" * 16, "a/model at c0ffee, with 3 layers of 4 heads, but this model has 4 layers of 4 heads"),
        (3, 8, "f" * 16, "3 layers of 4 heads, but this model has 3 layers of 8 heads"),
        (3, 4, "0" * 16, "f" * 16 + ", but this model's weights have " + "0" * 16),
    ],
)
def test_a_plan_for_another_model_is_refused(num_layers: int, num_heads: int, fingerprint: str, reason: str) -> None:
    plan_of("all").check(3, 4, "f" * 16)
    with pytest.raises(DexError, match=reason):
        plan_of("all").check(num_layers, num_heads, fingerprint)


BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"criterium": "entropy"}, r"unknown key criterium \(did you mean criterion\?\)"),
    "misspelt key": ({"criterion": ..., "criterium": "entropy"}, r"did you mean criterion\?"),
    "unknown key within": ({"model.finger_print": "x"}, r"unknown key model.finger_print \(did you mean fingerprint"),
    "key like no other": ({"zzz": 1}, r"unknown key zzz\.$"),
    "missing key": ({"criterion": ...}, "has no key criterion"),
    "wrong type": ({"model.num_heads": "4"}, r"model.num_heads is wrong \(input should be a valid integer\)"),
    "other version": ({"version": 2}, r"version is wrong \(input should be 1\)"),
    "head too high": ({"heads": [[0, 1], [1, 4], [0, 1]]}, "layer 1 lists head 4, but heads are 0 to 3"),
    "head below 0": ({"heads": [[0, 1], [0, 1], [-1, 1]]}, "layer 2 lists head -1"),
    "head no number": ({"heads": [["0"], [1], [2]]}, r"heads.0.0 is wrong"),
    "head twice": ({"heads": [[1, 1], [0, 1], [0, 1]]}, "layer 0 lists a head twice"),
    "too few layers": ({"heads": [[0, 1]]}, "lists 1 layers, but the model has 3"),
    "not per_layer": ({"heads": [[0, 1], [0], [0, 1]]}, "layer 1 lists 1 heads, but per_layer is 2"),
    "scores of another shape": ({"scores": [[0.0] * 4] * 2}, "scores are not 3 layers × 4 heads"),
    "scores that are no numbers": ({"scores": [[float("nan")] * 4] * 3}, "scores.0.0 is wrong"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    changes, reason = BAD_PLANS[name]
    values = plan_of("random").model_dump()
    for key, value in changes.items():
        *outer, last = key.split(".")
        place = values[outer[0]] if outer else values
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert_refused(tmp_path / "plan.json", reason)


def test_a_plan_by_hand_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    values = {**plan_of("all").model_dump(), "criterion": "by hand", "per_layer": None, "heads": [[], [3], [0, 2]]}
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert HeadPlan.load(tmp_path / "plan.json").heads == [[], [3], [0, 2]]


def test_a_file_that_is_no_plan_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.json", "cannot be read: No such file or directory")
    assert_refused(tmp_path, "cannot be read: Is a directory")
    for content, reason in [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "cannot be used: it is wrong"),
    ]:
        (tmp_path / "bad.json").write_bytes(content)
        assert_refused(tmp_path / "bad.json", reason)


def assert_refused(path: Path, reason: str) -> None:
    with pytest.raises(DexError, match=reason) as refusal:
        HeadPlan.load(path)
    message = str(refusal.value)
    assert str(path) in message
    assert "\n" not in message
    assert message.endswith(".")
