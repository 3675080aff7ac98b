"""dex/analysis/maps.py against explicit float64 maps, and against known answers."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from eager_maps import KINDS, eager_maps, real_rows, subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_attention_mass import Largest
from tiny import tiny_diff_v1, tiny_model, tokens

from dex import attention_maps
from dex.analysis import maps
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings, Signs
from dex.analysis.subject import Passage, Subject
from dex.errors import NotFinite
from dex.stats import FIRST_POSITION

SIGNED = ("diff-v1", "diff-v2", "diff-v2-sliding", "diffllama")
SIGNS = get_args(Signs)
PASSAGES = [
    Passage(tokens(1, 50, 11)[0].tolist(), (10, 17), [16, 40, 49]),
    Passage(tokens(1, 44, 12)[0].tolist(), (38, 40), [40, 43]),
    Passage(tokens(1, 30, 13)[0].tolist(), (0, 4), [4, 6]),  # it holds the first token
]


def analyze(subject: Subject) -> Findings:
    return maps.analyze(subject, lambda done, total: None)


def values(findings: Findings) -> dict[str, torch.Tensor]:
    """None becomes NaN."""
    return {
        one.name: torch.tensor([[math.nan if x is None else x for x in row] for row in one.values]).double()
        for one in findings.statistics
    }


# ---- the oracle ------------------------------------------------------------------------------------------------


class Entries:
    """Every row of one head, float64, as lists of the entries that are seen: no key 0 where it is left out."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []
        self.second: list[torch.Tensor] = []
        self.map: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []


def treated_by_hand(row: torch.Tensor, signs: str) -> torch.Tensor:
    if signs == "raw":
        return row
    if signs == "clipped":
        return torch.where(row > 0, row, 0.0)
    return row.abs() if signs == "absolute" else row.abs() / row.abs().sum()


def entries_of(model: Any, ids: list[int], queries: list[int], first_key: int, into: dict[Any, Entries]) -> None:
    for layer, of_layer in enumerate(eager_maps(model, ids)):
        both = of_layer.map
        for head in range(len(of_layer.first)):
            found = into.setdefault((layer, head), Entries())
            for query in queries:
                seen = of_layer.first[head, query].nonzero()[:, 0]
                seen = seen[seen >= first_key]
                found.keys.append(seen)
                found.map.append(both[head, query, seen])
                found.first.append(of_layer.first[head, query, seen])
                if of_layer.second is not None:
                    found.second.append(of_layer.second[head, query, seen])


def mean(of_rows: list[Any]) -> float:
    return float(torch.stack([torch.as_tensor(x) for x in of_rows]).mean())


def alike(x: torch.Tensor, y: torch.Tensor, restriction: str) -> dict[str, float]:
    return {
        f"map_correlation{restriction}": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
        f"map_cosine{restriction}": float(x @ y / (x.norm() * y.norm())),
    }


def of_text(found: Entries, signs: str, threshold: float, signed: bool, first_counted: bool) -> dict[str, float]:
    rows = [treated_by_hand(row, signs) for row in found.map]
    made = {"sparsity": float((torch.cat(rows).abs() < threshold).double().mean())}
    if not signed:
        return made
    every = torch.cat(found.map)
    made["negative_share"] = float((every < 0).double().mean())
    made["negative_mass"] = mean([-row[row < 0].sum() for row in found.map])
    if signs != "raw":
        made["signed_entropy"] = mean([-torch.special.xlogy(row, row).sum() for row in rows])
    if first_counted:
        made["signed_first_token_mass"] = mean(
            [row[keys == 0].sum() for row, keys in zip(rows, found.keys, strict=True)]
        )
    return made | alike(torch.cat(found.first), torch.cat(found.second), "")


def of_passages(subject: Subject, first_key: int, signs: str) -> dict[Any, dict[str, float]]:
    apart: list[dict[Any, Entries]] = []
    for passage in subject.passages:
        apart.append({})
        entries_of(subject.model, passage.ids, passage.queries, first_key, apart[-1])
    made = {}
    for which in apart[0]:
        masses, pooled = [], {name: ([], []) for name in ("_answer", "_other")}
        for passage, entries in zip(subject.passages, apart, strict=True):
            found = entries[which]
            inside = [(keys >= passage.span[0]) & (keys < passage.span[1]) for keys in found.keys]
            rows = [treated_by_hand(row, signs) for row in found.map]
            masses.append(mean([row[on].sum() for row, on in zip(rows, inside, strict=True)]))
            for first, second, on in zip(found.first, found.second, inside, strict=True):
                for name, chosen in {"_answer": on, "_other": ~on}.items():
                    pooled[name][0].append(first[chosen])
                    pooled[name][1].append(second[chosen])
        made[which] = {"signed_answer_mass": mean(masses)}
        for name, (first, second) in pooled.items():
            made[which] |= alike(torch.cat(first), torch.cat(second), name)
    return made


def expected(subject: Subject) -> dict[str, torch.Tensor]:
    """[L, H] each."""
    chosen, signed = subject.settings, subject.signed
    first_key = 0 if chosen.count_first_token else 1
    entries: dict[Any, Entries] = {}
    for ids in real_rows(subject):
        entries_of(subject.model, ids, list(range(FIRST_POSITION, len(ids))), first_key, entries)
    made = {
        which: of_text(found, chosen.signs, chosen.threshold, signed, chosen.count_first_token)
        for which, found in entries.items()
    }
    if signed and subject.passages:
        for which, found in of_passages(subject, first_key, chosen.signs).items():
            made[which] |= found
    shape = len(subject.layers), subject.num_heads
    return {
        name: torch.tensor(
            [[made[layer, head][name] for head in range(shape[1])] for layer in range(shape[0])]
        ).double()
        for name in made[0, 0]
    }


def check(subject: Subject, entries_off: int = 0) -> None:
    """entries_off: how many of a head's entries may be at the other side of 0 or of the threshold, by rounding."""
    found, oracle = values(analyze(subject)), expected(subject)
    assert found.keys() == oracle.keys()
    for name, right in oracle.items():
        # Six digits; and a correlation is a difference of sums that rounding of the maps themselves enters.
        atol = 2e-5 if "correlation" in name else 1e-7
        if name in ("negative_share", "sparsity"):
            entries = sum(query + 1 for ids in real_rows(subject) for query in range(FIRST_POSITION, len(ids)))
            atol += entries_off / entries
        torch.testing.assert_close(
            found[name], right, atol=atol, rtol=1e-5, msg=lambda text, of=name: f"{of}: {text}"
        )


# ---- against the oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_statistic_is_that_of_the_explicit_maps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_maps, "LEAST", 7)  # the last block is not full
    monkeypatch.setattr(attention_maps, "ENTRIES", 1)
    side, batch_size = ("left", 3) if KINDS.index(kind) % 2 else ("right", 1)
    check(subject_of(kind, (60, 47), side=side, batch_size=batch_size, passages=PASSAGES, threshold=0.01))


@pytest.mark.parametrize("first_counted", [True, False])
@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("kind", ["qwen2-sliding", "diff-v2-sliding"])
def test_signs_and_the_first_token_are_treated_as_asked(kind: str, signs: Any, first_counted: bool) -> None:
    check(
        subject_of(
            kind, (44, 39), passages=PASSAGES[1:], threshold=0.02, signs=signs, count_first_token=first_counted
        )
    )


@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_float32_rows_and_float64_sums_are_exact_to_five_digits_over_long_rows(kind: str) -> None:
    check(subject_of(kind, (200,)), entries_off=2)


@given(row=arrays("float64", st.integers(1, 9), elements=st.floats(-1, 1, width=32)), signs=st.sampled_from(SIGNS))
@settings(max_examples=100, deadline=None)
def test_treated_maps_are_what_they_are_called(row: Any, signs: Any) -> None:
    before = torch.from_numpy(row)
    after = maps.treated(before, signs)
    assert torch.equal(before, torch.from_numpy(row))  # the map itself stays as it is
    if signs == "renormalised":
        assert float(after.sum()) == pytest.approx(1.0 if before.abs().sum() > 0 else 0.0)
        torch.testing.assert_close(after * before.abs().sum(), before.abs())
    else:
        torch.testing.assert_close(after, treated_by_hand(before, signs))
    if signs != "raw":
        assert (after >= 0).all()
        assert maps.entropy(after) == pytest.approx(-float(torch.special.xlogy(after, after).sum()), abs=1e-9)


# ---- known answers ---------------------------------------------------------------------------------------------


def uniform(model: Any) -> Any:
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    return model


def with_equal_maps(**changes: Any) -> Any:
    model = tiny_diff_v1(**changes)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            first, second = projection.weight.data.unflatten(0, (-1, 2, 16)).unbind(1)
            second.copy_(first)
    return model


def test_the_weights_of_a_uniform_attention_are_sparse_from_one_over_the_threshold_on() -> None:
    model = uniform(tiny_model("llama"))
    assert (values(analyze(subject_of(model)))["sparsity"] == 0).all()
    found = values(analyze(subject_of(model, (60,), threshold=0.0201)))["sparsity"]
    seen = [position + 1 for position in range(FIRST_POSITION, 60)]
    share = sum(n for n in seen if 1 / n < 0.0201) / sum(seen)
    assert found.flatten().tolist() == pytest.approx([share] * 12)


@pytest.mark.parametrize("signs", SIGNS)
def test_without_lambda_nothing_is_negative(signs: Any) -> None:
    model = tiny_diff_v1(lambda_mode="fixed", lambda_value=0.0)
    found = values(analyze(subject_of(model, signs=signs)))
    assert (found["negative_share"] == 0).all()
    assert (found["negative_mass"] == 0).all()


@pytest.mark.parametrize("first_counted", [True, False])
def test_two_equal_maps_have_a_correlation_and_a_cosine_of_1(first_counted: bool) -> None:
    found = values(analyze(subject_of(with_equal_maps(), passages=PASSAGES, count_first_token=first_counted)))
    names = [f"map_{what}{where}" for what in ("correlation", "cosine") for where in ("", "_answer", "_other")]
    assert all((found[name] == 1).all() for name in names)


def test_a_map_that_is_the_same_everywhere_has_no_correlation() -> None:
    model = uniform(subject_of("diff-v2-sliding").model)
    (correlation,) = (one.values for one in analyze(subject_of(model)).statistics if one.name == "map_correlation")
    assert correlation == [[1.0] * 4, [None] * 4, [None] * 4]  # only the first layer has no window


def test_rows_that_cannot_be_renormalised_are_left_out_and_counted() -> None:
    model = with_equal_maps(lambda_mode="fixed", lambda_value=1.0)
    findings = analyze(subject_of(model, (60, 60), passages=PASSAGES))
    found = values(findings)
    assert all(found[name].isnan().all() for name in ("sparsity", "signed_entropy", "signed_answer_mass"))
    rows = 2 * (60 - FIRST_POSITION) * 12
    assert any(one.startswith(f"{rows} of {rows} rows of the maps are 0 everywhere") for one in findings.remarks)
    assert not any("nan" in one for one in findings.remarks)
    clipped = values(analyze(subject_of(model, signs="clipped")))
    assert (clipped["sparsity"] == 1).all()
    assert (clipped["signed_entropy"] == 0).all()


# ---- what is said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_counted", [True, False])
@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_the_treatment_of_signs_and_of_the_first_token_is_named(kind: str, first_counted: bool) -> None:
    subject = subject_of(kind, passages=PASSAGES, signs="clipped", count_first_token=first_counted)
    named = {one.name: (one.signs, one.first_token) for one in analyze(subject).statistics}
    first_token = "counted" if first_counted else "left out"
    assert {which for _, which in named.values()} == {first_token}
    assert named["sparsity"][0] == (None if kind == "llama" and first_counted else "clipped")
    if kind == "llama":
        assert named.keys() == {"sparsity"}
        return
    assert named["negative_mass"][0] == "raw"
    assert named["map_cosine"][0] is None
    assert named["signed_entropy"][0] == "clipped"
    assert ("signed_first_token_mass" in named) == first_counted


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("first_counted", [True, False])
@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_the_remark_speaks_of_the_same_maps_as_the_statistic(kind: str, first_counted: bool, signs: Any) -> None:
    findings = analyze(subject_of(kind, (40,), signs=signs, count_first_token=first_counted))
    (sparsity,) = (one for one in findings.statistics if one.name == "sparsity")
    assert f"entries of {maps.OF_MAP[sparsity.signs or 'raw']} whose" in sparsity.meaning
    assert any(
        one.startswith(f"Of the entries of {maps.OF_MAP[sparsity.signs or 'raw']}, ") for one in findings.remarks
    )


def test_the_threshold_is_named() -> None:
    (sparsity,) = analyze(subject_of("llama", threshold=0.0025)).statistics
    assert "below 0.0025" in sparsity.meaning


def test_raw_maps_have_no_entropy_and_it_is_said() -> None:
    findings = analyze(subject_of("diff-v2", signs="raw"))
    assert "signed_entropy" not in values(findings)
    assert any("entropy of the signed maps is left out" in one for one in findings.remarks)


@pytest.mark.parametrize("signs", SIGNS)
def test_signs_do_not_matter_to_a_stock_head(signs: Any) -> None:
    assert analyze(subject_of("llama", signs=signs)) == analyze(subject_of("llama", signs="raw"))


@pytest.mark.parametrize("kind", ["llama", "diff-v1"])
def test_progress_ends_at_its_total(kind: str) -> None:
    told: list[tuple[int, int]] = []
    maps.analyze(subject_of(kind, passages=PASSAGES), lambda done, total: told.append((done, total)))
    assert told[:2] == [(2, 6), (3, 6)]
    assert told[-1] == (6, 6)


def test_a_text_without_a_counted_query_is_left_out() -> None:
    with pytest.raises(LeftOut, match="No text is longer than 32 tokens"):
        analyze(subject_of("diff-v2", lengths=(32, 20)))
    assert analyze(subject_of("llama", lengths=(33, 20), batch_size=1))


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    subject = subject_of("diff-v1")
    subject.layers[1].self_attn.q_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(NotFinite, match="layer 1 of tiny are not numbers"):
        analyze(subject)


@pytest.mark.parametrize("kind", ["llama", "diff-v1", "diff-v2"])
def test_no_tensor_is_larger_than_a_block_of_maps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_maps, "ENTRIES", 1)  # blocks of LEAST queries
    sizes = []
    for length in (64, 128, 256):
        passage = Passage(tokens(1, length)[0].tolist(), (10, 20), list(range(20, length, length // 8)))
        subject = subject_of(kind, (length,), passages=[passage])
        with Largest() as largest:
            analyze(subject)
        sizes.append(largest.elements)
    assert sizes[1:] == [2 * sizes[0], 4 * sizes[0]]
    wide = 8 * 2 * 16  # of a DIFF V1's queries, which are padded; a block of maps is 4 heads × 16 queries a key
    assert sizes[0] <= 64 * max(wide, subject.num_heads * attention_maps.LEAST)
