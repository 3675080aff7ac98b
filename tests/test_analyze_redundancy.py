"""dex/analysis/redundancy.py: distances of maps and CKA of outputs, against explicit ones, and known answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_maps import KINDS, eager_maps, real_rows, subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor

from dex.analysis import redundancy
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.redundancy import Moments, analyze
from dex.analysis.subject import Subject
from dex.errors import NotFinite
from dex.stats import FIRST_POSITION


def analyzed(subject: Subject) -> Findings:
    return analyze(subject, lambda done, of: None)


def values(found: Findings) -> dict[str, Tensor]:
    """Of every statistic, as a tensor; NaN where it is not defined."""
    return {each.name: torch.tensor(_nan_for_none(each.values), dtype=torch.float64) for each in found.statistics}


def _nan_for_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan_for_none(each) for each in value]
    return torch.nan if value is None else value


# ---- the oracle --------------------------------------------------------------------------------------------


def explicit_maps(subject: Subject) -> list[Tensor]:
    """Of every layer, all counted entries of all rows' maps: [H, entries]."""
    first_key = 0 if subject.settings.count_first_token else 1
    rows = [eager_maps(subject.model, ids) for ids in real_rows(subject)]
    return [
        torch.cat([of.map[:, FIRST_POSITION:, first_key:].flatten(1) for of in layer], 1)
        for layer in zip(*rows, strict=True)
    ]


@torch.no_grad()
def explicit_outputs(subject: Subject) -> list[Tensor]:
    """Of every layer, the outputs of all counted tokens of all rows: [H, N, D], row by row and without padding."""
    outputs: list[list[Tensor]] = [[] for _ in subject.layers]
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
        for layer, kept in zip(subject.layers, outputs, strict=True)
    ]
    for ids in real_rows(subject):
        subject.model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [
        torch.cat([of_row[0, FIRST_POSITION:] for of_row in kept])
        .double()
        .unflatten(-1, (subject.num_heads, -1))
        .transpose(0, 1)
        for kept in outputs
    ]


def explicit_cka(x: Tensor, y: Tensor) -> float:
    """Kornblith et al. 2019, of the Gram matrices of the tokens: <K, L> / (|K| |L|). x, y: [N, D]."""
    grams = [(each - each.mean(0)) @ (each - each.mean(0)).T for each in (x, y)]
    return float((grams[0] * grams[1]).sum() / (grams[0].norm() * grams[1].norm()))


def explicit_distance(x: Tensor, y: Tensor) -> float:
    return 1.0 - float(x @ y / (x.norm() * y.norm()))


def assert_pairs(found: dict[str, Tensor], name: str, of_layers: list[Tensor], measure: Any) -> None:
    for layer_idx, heads in enumerate(of_layers):
        H = len(heads)
        pairs = {(g, h): measure(heads[g], heads[h]) for g in range(H) for h in range(H) if g != h}
        assert float(found[name][layer_idx]) == pytest.approx(sum(pairs.values()) / len(pairs), rel=1e-4, abs=1e-5)
        of_head = [sum(pairs[g, h] for h in range(H) if h != g) / (H - 1) for g in range(H)]
        assert found[f"{name}_of_head"][layer_idx].tolist() == pytest.approx(of_head, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_distances_and_cka_are_those_of_explicit_maps_and_outputs(kind: str) -> None:
    side = "right" if kind in ("qwen2", "attached", "diff-v1") else "left"
    subject = subject_of(kind, side=side, count_first_token=kind != "qwen3")
    found = values(analyzed(subject))
    assert_pairs(found, "map_cosine_distance", explicit_maps(subject), explicit_distance)
    assert_pairs(found, "cka", explicit_outputs(subject), explicit_cka)
    assert found["cka"].max() < 0.99  # they do differ


# ---- known answers -----------------------------------------------------------------------------------------


@torch.no_grad()
def rows_of(model: Any, projection: str, head: int) -> Tensor:
    """A head's rows of a projection in every layer, as a view [L, D, d] to read."""
    return torch.stack(
        [getattr(each.self_attn, projection).weight.unflatten(0, (-1, 16))[head] for each in layers(model)]
    )


def layers(model: Any) -> Any:
    return model.get_decoder().layers


@torch.no_grad()
def change(model: Any, projection: str, head: int, rows: Tensor) -> None:
    for layer, of_layer in zip(layers(model), rows, strict=True):
        getattr(layer.self_attn, projection).weight.unflatten(0, (-1, 16))[head].copy_(of_layer)


def test_a_head_that_copies_another_has_distance_0_and_cka_1() -> None:
    model = tiny_model("llama", num_attention_heads=2 + 2, num_key_value_heads=4, num_hidden_layers=2)
    for copy in (1, 2, 3):
        for projection in ("q_proj", "k_proj", "v_proj"):
            change(model, projection, copy, rows_of(model, projection, 0))
    found = values(analyzed(subject_of(model)))
    assert found["map_cosine_distance"].abs().max() < 1e-6
    assert found["cka_of_head"].min() > 1 - 1e-6
    change(model, "v_proj", 3, torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)))
    found = values(analyzed(subject_of(model)))
    assert found["map_cosine_distance_of_head"].abs().max() < 1e-6  # V has no part in the maps
    assert found["cka_of_head"][0, 3] < 0.99


def test_cka_does_not_change_when_a_head_s_values_are_rotated_and_scaled() -> None:
    model = tiny_model("llama", num_key_value_heads=4, num_hidden_layers=1)
    before = values(analyzed(subject_of(model)))["cka_of_head"]
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    change(model, "v_proj", 1, -3.0 * rotation @ rows_of(model, "v_proj", 1))
    torch.testing.assert_close(values(analyzed(subject_of(model)))["cka_of_head"], before, atol=1e-5, rtol=0)


def test_a_head_whose_output_is_constant_has_no_cka_and_leaves_the_others_alone() -> None:
    model = tiny_model("llama-bias", num_key_value_heads=4, num_hidden_layers=1)
    change(model, "v_proj", 2, torch.zeros(1, 16, 64))  # its bias alone is left, up to the rounding of the map's sum
    subject = subject_of(model)
    found = values(analyzed(subject))
    assert found["cka_of_head"][0].isnan().tolist() == [False, False, True, False]
    assert found["map_cosine_distance_of_head"].isfinite().all()
    heads = explicit_outputs(subject)[0]
    three = [explicit_cka(heads[g], heads[h]) for g, h in ((0, 1), (0, 3), (1, 3))]
    assert float(found["cka"]) == pytest.approx(sum(three) / 3, rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.floats(-1e3, 1e3), st.integers(0, 1000))
def test_moments_do_not_depend_on_the_batches_nor_on_how_large_the_mean_is(
    sizes: list[int], mean: float, seed: int
) -> None:
    vectors = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(seed)) + mean
    moments = Moments()
    for batch in vectors.split(sizes):
        moments.add(batch)
    centred = vectors.double() - vectors.double().mean(0)
    assert moments.count == len(vectors)
    torch.testing.assert_close(
        moments.covariance.expand(6, 6), centred.T @ centred, atol=1e-5 * max(1, len(vectors)), rtol=1e-5
    )


def test_moments_of_many_vectors_are_as_exact_as_those_of_few() -> None:
    vectors = torch.randn(65_536, 8, generator=torch.Generator().manual_seed(0))
    moments = Moments()
    moments.add(vectors)
    centred = vectors.double() - vectors.double().mean(0)
    expected = centred.T @ centred
    assert ((moments.covariance - expected).abs().max() / expected.max()) < 1e-7


# ---- what is not counted, left out or refused --------------------------------------------------------------


def test_groups_of_layers_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = analyzed(subject_of("llama", batch_size=3))
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(redundancy, "COVARIANCES", 2 * 8 * 64**2)  # two of the three layers
    found = analyze(subject_of("llama", batch_size=1), lambda *each: told.append(each))
    for name, of_statistic in values(found).items():
        torch.testing.assert_close(of_statistic, values(expected)[name], atol=2e-5, rtol=1e-5)
    assert told == [(done, 9) for done in range(1, 10)]


def test_the_first_token_can_be_left_out_of_the_maps() -> None:
    counted, left_out = (analyzed(subject_of("llama", count_first_token=counts)) for counts in (True, False))
    of = {name: (values(counted)[name] - values(left_out)[name]).abs().max() for name in values(counted)}
    assert of["map_cosine_distance"] > 1e-4
    assert of["cka"] == 0
    assert {each.first_token for each in left_out.statistics} == {"left out", None}
    assert {each.headline for each in left_out.statistics if each.over == "layer"} == {True}


@pytest.mark.parametrize(("kind", "signs"), [("llama", None), ("diff-v2", "raw")])
def test_signs_are_left_as_they_are_where_there_are_any(kind: str, signs: str | None) -> None:
    found = analyzed(subject_of(kind, (40,), signs="clipped"))
    of_maps = [each for each in found.statistics if each.name.startswith("map_")]
    assert [each.signs for each in of_maps] == [signs] * 2
    assert ["signed entries as they are" in each.meaning for each in of_maps] == [signs is not None] * 2
    assert found == analyzed(subject_of(kind, (40,), signs="absolute"))


def test_layers_of_one_head_and_short_texts_are_left_out() -> None:
    with pytest.raises(LeftOut, match="one head"):
        analyzed(subject_of(tiny_model("llama", num_attention_heads=1, num_key_value_heads=1)))
    with pytest.raises(LeftOut, match="longer than 32 tokens"):
        analyzed(subject_of("llama", lengths=(FIRST_POSITION, 20)))


def test_outputs_that_are_no_numbers_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        layers(model)[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(NotFinite):
        analyzed(subject_of(model))


def test_the_remarks_name_the_layers_of_the_least_and_the_most() -> None:
    found = analyzed(subject_of("llama"))
    of_layer = values(found)["cka"]
    assert len(found.remarks) == 2
    assert found.remarks[1] == (
        f"The CKA of two heads' outputs is {of_layer.mean():.3f} on average, from {of_layer.min():.3f} in layer "
        f"{of_layer.argmin()} to {of_layer.max():.3f} in layer {of_layer.argmax()}."
    )
