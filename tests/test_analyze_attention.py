"""dex/analysis/attention.py against explicit float64 maps, and against known answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eager_maps import KINDS, HeadMaps, eager_maps, real_rows, subject_of
from test_stats import LargestTensor
from tiny import tiny_diff_v1, tiny_model, tokens

from dex import attention_maps
from dex.analysis import attention
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.subject import Passage, Subject
from dex.errors import NotFinite
from dex.stats import FIRST_POSITION

SIGNED = ("diff-v1", "diff-v2", "diff-v2-sliding", "diffllama")
PASSAGES = [
    Passage(tokens(1, 50, 11)[0].tolist(), (10, 17), [40, 41, 49]),
    Passage(tokens(1, 44, 12)[0].tolist(), (1, 3), [30, 43]),
    Passage(tokens(1, 30, 13)[0].tolist(), (0, 4), [4]),  # it holds the first token
]


def analyze(subject: Subject) -> Findings:
    return attention.analyze(subject, lambda done, total: None)


def values(findings: Findings) -> dict[str, torch.Tensor]:
    return {one.name: torch.tensor(one.values, dtype=torch.float64) for one in findings.statistics}


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -torch.special.xlogy(p, p).sum(-1)


def of_rows(maps: HeadMaps) -> dict[str, torch.Tensor]:
    """By the definitions, [H, T] each."""
    if maps.second is None or maps.lam is None:
        return {"entropy": entropy(maps.first), "first_token_mass": maps.map[..., 0]}
    return {
        "entropy_first_map": entropy(maps.first),
        "entropy_second_map": entropy(maps.second),
        "first_token_mass": maps.map[..., 0],
        "row_sum": maps.map.sum(-1),
        "lam": maps.lam,
    }


def expected(subject: Subject) -> dict[str, torch.Tensor]:
    """[L, H] each: over the text, and over the passages."""
    counted: list[list[dict[str, torch.Tensor]]] = [
        [
            {name: x[:, FIRST_POSITION:] for name, x in of_rows(layer).items()}
            for layer in eager_maps(subject.model, ids)
        ]
        for ids in real_rows(subject)
    ]
    pooled = [
        {name: torch.cat([row[index][name] for row in counted], -1) for name in counted[0][index]}
        for index in range(len(subject.layers))
    ]
    means = {name: torch.stack([layer[name].mean(-1) for layer in pooled]) for name in pooled[0]}
    if subject.stock.config.model_type == "diff_v2":
        means["lam_spread"] = torch.stack([layer["lam"].std(-1, correction=0) for layer in pooled])
    elif "lam" in means:
        means["lam"] = means["lam"][:, 0]
    answers, others = [], []
    for passage in subject.passages:
        rows = torch.stack([each.map[:, passage.queries] for each in eager_maps(subject.model, passage.ids)])
        inside = list(range(*passage.span))
        outside = [key for key in range(1, len(passage.ids)) if key not in inside]
        answers.append(rows[..., inside].sum(-1).mean(-1))
        others.append(rows[..., outside].sum(-1).mean(-1))
    if answers:
        means |= {"answer_mass": torch.stack(answers).mean(0), "other_mass": torch.stack(others).mean(0)}
    return means


@pytest.mark.parametrize(("side", "batch_size"), [("left", 1), ("right", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_statistic_is_that_of_the_explicit_maps(
    kind: str, side: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_maps, "MOST", 2)  # so that a passage's queries come in several parts
    subject = subject_of(kind, side=side, batch_size=batch_size, passages=PASSAGES)
    found, oracle = values(analyze(subject)), expected(subject)
    assert found.keys() == oracle.keys()
    for name, right in oracle.items():
        torch.testing.assert_close(
            found[name], right, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_the_treatment_of_signs_and_of_the_first_token_is_named(kind: str) -> None:
    named = {
        one.name: (one.signs, one.first_token) for one in analyze(subject_of(kind, passages=PASSAGES)).statistics
    }
    signs = "raw" if kind in SIGNED else None
    assert named["first_token_mass"] == (signs, "counted")
    assert named["answer_mass"] == (signs, "counted")
    assert named["other_mass"] == (signs, "left out")
    assert {named[name] for name in named if name.startswith("entropy")} == {(None, "counted")}


@pytest.mark.parametrize("kind", ["llama", "diff-v1"])
def test_without_passages_no_answer_is_spoken_of(kind: str) -> None:
    findings = analyze(subject_of(kind))
    assert not {"answer_mass", "other_mass"} & values(findings).keys()
    assert not any("answer" in remark for remark in findings.remarks)


def test_a_uniform_attention_over_n_tokens_has_the_entropy_ln_n() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    found = values(analyze(subject_of(model, lengths=(60, 50))))
    counted = [position for length in (60, 50) for position in range(FIRST_POSITION, length)]
    entropies = sum(math.log(position + 1) for position in counted) / len(counted)
    shares = sum(1 / (position + 1) for position in counted) / len(counted)
    assert found["entropy"].flatten().tolist() == pytest.approx([entropies] * 12, rel=1e-5)
    assert found["first_token_mass"].flatten().tolist() == pytest.approx([shares] * 12, rel=1e-5)


def test_a_window_that_has_passed_the_first_token_gives_it_nothing() -> None:
    mass = values(analyze(subject_of("qwen2-sliding")))["first_token_mass"]
    assert (mass[0] > 0).all()
    assert (mass[1:] == 0).all()


def test_without_lambda_a_map_is_its_first_softmax() -> None:
    found = values(analyze(subject_of(tiny_diff_v1(lambda_mode="fixed", lambda_value=0.0), passages=PASSAGES)))
    assert (found["lam"] == 0).all()
    assert (found["row_sum"] - 1).abs().max() < 1e-6
    assert (found["answer_mass"] > 0).all()


def test_a_sum_of_maps_has_a_negative_lambda() -> None:
    model = tiny_diff_v1(lambda_mode="fixed", lambda_value=0.25, lambda_sign=1)
    found = values(analyze(subject_of(model)))
    assert (found["lam"] == -0.25).all()
    assert (found["row_sum"] - 1.25).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_remarks_name_the_heads_at_the_ends(kind: str) -> None:
    findings = analyze(subject_of(kind, passages=PASSAGES))
    mass = values(findings)["first_token_mass"]
    layer, head = divmod(int(mass.argmax()), 4)
    (remark,) = (one for one in findings.remarks if "first token the maps" in one)
    assert (
        f"{mass.mean():.3g} in the mean over heads: most in layer {layer}, head {head} ({mass.max():.3g})" in remark
    )
    assert any("asked about an answer" in one for one in findings.remarks)
    assert any(one.startswith("λ is") for one in findings.remarks) == (kind in SIGNED)


def test_progress_is_told_in_rows_and_passages() -> None:
    told: list[tuple[int, int]] = []
    attention.analyze(subject_of("llama", passages=PASSAGES), lambda done, total: told.append((done, total)))
    assert told == [(2, 6), (3, 6), (4, 6), (5, 6), (6, 6)]


def test_a_text_without_a_counted_query_is_left_out() -> None:
    with pytest.raises(LeftOut, match="No text is longer than 32 tokens"):
        analyze(subject_of("llama", lengths=(32, 20)))
    assert analyze(subject_of("llama", lengths=(33, 20), batch_size=1))  # a batch without one is no matter


@pytest.mark.parametrize("kind", ["llama", "diff-v2"])
def test_a_model_that_gives_no_numbers_is_refused(kind: str) -> None:
    subject = subject_of(kind)
    subject.layers[1].self_attn.k_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(NotFinite, match="layer 1 of tiny are not numbers"):
        analyze(subject)


@pytest.mark.parametrize("kind", ["llama", "diff-v1", "diff-v2"])
def test_no_attention_map_is_ever_allocated(kind: str) -> None:
    length = 300
    passage = Passage(tokens(1, length)[0].tolist(), (10, 20), list(range(20, length)))
    subject: Any = subject_of(kind, lengths=(length,), passages=[passage])
    with LargestTensor() as largest:
        analyze(subject)
    assert largest.sides < length
