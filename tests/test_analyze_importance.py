"""dex/analysis/importance.py: gradients against explicit gates in every layout, and the Gini coefficient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_maps import real_rows, subject_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from dex.analysis.importance import analyze, gini, share_of_top
from dex.analysis.records import Findings
from dex.analysis.subject import Subject
from dex.errors import NotFinite


def analyzed(subject: Subject) -> Findings:
    return analyze(subject, lambda done, of: None)


def statistic(found: Findings, name: str) -> Any:
    return next(each.values for each in found.statistics if each.name == name)


def loss_with_gates(subject: Subject, ids: list[int], gates: Tensor) -> Tensor:
    """The mean loss of a row without padding, every head's output multiplied with its gate; gates [L, H]."""

    def gated(of_layer: Tensor) -> Any:
        def hook(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            return ((args[0].unflatten(-1, (len(of_layer), -1)) * of_layer[:, None].to(args[0].dtype)).flatten(-2),)

        return hook

    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(gated(of_layer))
        for layer, of_layer in zip(subject.layers, gates, strict=True)
    ]
    logits = subject.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    for handle in handles:
        handle.remove()
    return cross_entropy(logits, torch.tensor(ids[1:]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["qwen3", "attached", "diff-v1", "diff-v2", "diffllama"])
def test_importance_is_the_gradient_of_explicit_gates(kind: str, side: str) -> None:
    subject = subject_of(kind, lengths=(40, 23, 31), side=side)
    gates = torch.ones(len(subject.layers), subject.num_heads, requires_grad=True)
    gradients = [torch.autograd.grad(loss_with_gates(subject, ids, gates), gates)[0] for ids in real_rows(subject)]
    expected = torch.stack(gradients).abs().mean(0)
    found = torch.tensor(statistic(analyzed(subject), "importance"))
    assert expected.min() > 1e-5
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-3)


@torch.no_grad()
def test_importance_is_the_slope_of_the_loss_when_one_head_is_scaled() -> None:
    subject = subject_of("diff-v1", lengths=(40,))
    subject.model.double()
    (ids,) = real_rows(subject)
    found = statistic(analyzed(subject), "importance")
    for layer_idx, head in ((0, 3), (2, 0)):
        up, down = torch.ones(2, len(subject.layers), subject.num_heads, dtype=torch.float64)
        up[layer_idx, head], down[layer_idx, head] = 1.01, 0.99
        slope = (loss_with_gates(subject, ids, up) - loss_with_gates(subject, ids, down)) / 0.02
        assert found[layer_idx][head] == pytest.approx(abs(float(slope)), rel=5e-3)


def test_the_model_and_its_adapter_are_left_as_they_were() -> None:
    subject = subject_of("attached", lengths=(20, 15))
    requires_grad = {name: parameter.requires_grad for name, parameter in subject.model.named_parameters()}
    assert set(requires_grad.values()) == {True, False}
    analyzed(subject)
    assert {name: parameter.requires_grad for name, parameter in subject.model.named_parameters()} == requires_grad
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    assert not any(module._forward_pre_hooks for module in subject.model.modules())


def test_the_curve_holds_every_head_once_in_descending_order() -> None:
    subject = subject_of("llama")
    found = analyzed(subject)
    (curve,) = found.curves
    scores = torch.tensor(statistic(found, "importance")).flatten()
    line = torch.tensor(curve.lines["tiny"])
    torch.testing.assert_close(line, scores.sort(descending=True).values / scores.sum(), atol=1e-6, rtol=1e-4)
    assert curve.x == list(range(1, 13))
    everywhere = statistic(found, "importance_gini_all")
    assert everywhere == pytest.approx(gini(scores.tolist()), rel=1e-4)
    assert f"{everywhere:.3f}" in curve.meaning
    assert statistic(found, "importance_gini") == pytest.approx(
        [gini(row) for row in scores.view(3, 4).tolist()], rel=1e-4
    )


def test_the_remarks_state_the_share_of_the_top_heads_and_the_head_of_the_most() -> None:
    found = analyzed(subject_of("llama"))
    scores = torch.tensor(statistic(found, "importance"))
    two = scores.flatten().sort().values[-2:].sum() / scores.sum()  # 10 % of 12 heads, rounded up
    assert found.remarks[0].startswith(
        f"The 10% of heads with the greatest importance (2 of 12) hold {two:.0%} of the"
    )
    layer_idx, head = divmod(int(scores.argmax()), 4)
    assert found.remarks[1].startswith(f"The loss depends most on head {head} of layer {layer_idx},")


def test_a_model_whose_heads_are_cut_off_has_no_inequality() -> None:
    model = tiny_model("llama")
    for layer in model.get_decoder().layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = analyzed(subject_of(model))
    assert statistic(found, "importance") == [[0.0] * 4] * 3
    assert statistic(found, "importance_gini_all") is None
    assert found.curves[0].lines["tiny"] == [None] * 12
    assert found.remarks == ["The loss does not depend on any head: all gradients are 0."]


def test_gradients_that_are_no_numbers_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = torch.nan
    with pytest.raises(NotFinite):
        analyzed(subject_of(model))


def test_progress_is_told_in_texts() -> None:
    told: list[tuple[int, int]] = []
    analyze(subject_of("llama", lengths=(20, 20, 20), batch_size=2), lambda *each: told.append(each))
    assert told == [(2, 3), (3, 3)]


# ---- the Gini coefficient ----------------------------------------------------------------------------------


def test_equal_values_have_a_gini_of_0_and_all_in_one_of_n_has_one_of_n_minus_1_over_n() -> None:
    assert gini([0.3] * 7) == pytest.approx(0)
    assert gini([0.0] * 4 + [2.5]) == pytest.approx(4 / 5)
    assert gini([9.0]) == 0


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(lambda each: max(each) > 1e-6)


@given(VALUES, st.floats(1e-3, 1e3), st.randoms())
def test_a_gini_is_the_mean_difference_whatever_the_scale_and_the_order(
    values: list[float], scale: float, draw: Any
) -> None:
    n = len(values)
    mean_difference = sum(abs(a - b) for a in values for b in values) / n**2
    expected = mean_difference / (2 * sum(values) / n)
    assert gini(values) == pytest.approx(expected, abs=1e-9)
    assert 0 <= gini(values) < 1
    shuffled = draw.sample(values, n)
    assert gini([scale * value for value in shuffled]) == pytest.approx(gini(values), abs=1e-9)


def test_the_top_tenth_is_rounded_up() -> None:
    for scores, count, share in (
        (torch.tensor([[1.0, 6.0, 3.0]]), 1, 0.6),
        (torch.arange(1.0, 21.0)[None], 2, 39 / 210),
    ):
        found = share_of_top(scores, 0.1)
        assert found[0] == count
        assert found[1] == pytest.approx(share)
