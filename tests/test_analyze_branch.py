"""The section `branch` against token loops, an explicit fold and numpy, and against answers that are known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager_maps import real_rows, subject_of
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

import dex
from dex.analysis import branch
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.run_log import branch_curves
from dex.analysis.subject import Subject
from dex.analysis.thinned import thinned
from dex.errors import DexError, NotFinite
from dex.layer import apply_branch
from dex.tuner import dex_outputs
from dex.tuner.callback import branch_state

HEADS = [[0, 2], [1, 2, 3], [3]]
OPTIONS: dict[str, dict[str, Any]] = {
    "one W_D a layer": {},
    "one W_D a head": {"w_d_per": "head"},
    "two layers": {"layers_to_transform": [0, 2], "w_d_per": "head"},
    "plus": {"schedule": "land", "sign": "plus"},
    "branch alone": {"train_kvo": False},
}


def attached(family: str = "llama", moved: float = 0.05, **options: Any) -> Any:
    """An adapter with every tensor away from where it starts, at step 3 of 4."""
    options = {"heads": HEADS, "schedule": "paper", **options}
    if options["schedule"] in ("paper", "land"):
        options["anneal_steps"] = 4
    model = get_peft_model(tiny_model(family), dex.DexConfig(task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".dex_" in name:
                parameter.add_(moved * torch.randn(parameter.shape, generator=generator))
        for layer in dex_outputs(model):
            layer.dex_step["default"].fill_(3)
    return model


def analysed(subject: Subject) -> Findings:
    return branch.analyze(subject, lambda done, total: None)


def values(found: Findings, name: str) -> Any:
    return next(statistic.values for statistic in found.statistics if statistic.name == name)


def head_inputs(subject: Subject) -> dict[int, torch.Tensor]:
    """concat_h(O_h) of every real token, [n, H·D] float64, row by row without padding."""
    inputs: dict[int, list[torch.Tensor]] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args: inputs.setdefault(module.layer_idx, []).append(args[0][0].double())
        )
        for layer in dex_outputs(subject.model)
    ]
    with torch.no_grad():
        for ids in real_rows(subject):
            subject.model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return {layer_idx: torch.cat(rows) for layer_idx, rows in inputs.items()}


@torch.no_grad()
def looped(subject: Subject) -> dict[str, list[Any]]:
    """The oracle of ratios and cosines: a token and a head at a time, λ f_D(O) = O − O'."""
    L, H = len(subject.layers), subject.num_heads
    found: dict[str, list[Any]] = {
        "branch_ratio": [None] * L,
        "branch_ratio_of_head": [[None] * H for _ in range(L)],
        "branch_cosine": [[None] * H for _ in range(L)],
    }
    inputs = head_inputs(subject)
    for layer in dex_outputs(subject.model):
        whole, taken = 0.0, 0.0
        selected = layer.dex_selected["default"].double()
        for head in selected.nonzero()[:, 0].tolist():
            of_head, of_branch, cosines = 0.0, 0.0, []
            for token in inputs[layer.layer_idx]:
                new = apply_branch(token, layer.w_d("default").double(), layer.lam("default").double(), selected)
                o, rest = (each.view(H, -1)[head].numpy() for each in (token, new))
                f = o - rest
                of_head, of_branch = of_head + o @ o, of_branch + f @ f
                cosines.append(o @ f / np.sqrt((o @ o) * (f @ f)))
            found["branch_ratio_of_head"][layer.layer_idx][head] = np.sqrt(of_branch / of_head)
            found["branch_cosine"][layer.layer_idx][head] = np.mean(cosines)
            whole, taken = whole + of_head, taken + of_branch
        if whole:
            found["branch_ratio"][layer.layer_idx] = np.sqrt(taken / whole)
    return found


def same(found: Any, expected: Any, rel: float = 1e-5) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(same(*each, rel) for each in zip(found, expected, strict=True))
    return found == (None if expected is None else pytest.approx(float(expected), rel=rel, abs=1e-7))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_ratios_and_cosines_are_those_of_a_loop_over_the_real_tokens(options: dict[str, Any], side: str) -> None:
    subject = subject_of(attached(**options), lengths=(9, 14, 6), side=side)
    found, expected = analysed(subject), looped(subject)
    for name, each in expected.items():
        assert same(values(found, name), each), name
    cosines = [np.mean([v for v in row if v is not None]) if any(row) else None for row in expected["branch_cosine"]]
    assert same(values(found, "branch_cosine_of_layer"), cosines)
    lams = {layer.layer_idx: float(layer.lam("default").detach()) for layer in dex_outputs(subject.model)}
    assert same(values(found, "dex_lam"), [lams.get(layer_idx) for layer_idx in range(3)])
    assert min(map(abs, lams.values())) > 0.01  # the comparison means something


def test_on_one_text_the_mean_ratio_is_the_one_that_a_fold_and_a_run_record() -> None:
    model = attached("qwen3", heads=[[0, 2], [], [3]])  # an adapted layer without a selected head counts as 0
    subject = subject_of(model, lengths=(20,))
    state = branch_state(model, subject.ids[0])
    found = analysed(subject)
    assert state is not None
    assert values(found, "branch_mean_ratio") == pytest.approx(state["mean_ratio"], rel=1e-5)
    assert values(found, "branch_ratio")[1] is None


@torch.no_grad()
def test_an_identity_w_d_at_half_takes_half_of_every_head_away() -> None:
    model = attached(schedule="fixed", lam=0.5, w_d_init="zeros", heads="all")
    for layer in dex_outputs(model):
        layer.dex_w_d["default"].copy_(torch.eye(16))
    found = analysed(subject_of(model, lengths=(9, 9)))
    assert same(values(found, "branch_ratio_of_head"), [[0.5] * 4] * 3)
    assert same(values(found, "branch_cosine"), [[1.0] * 4] * 3)
    for name in ("largest", "smallest", "largest_eigenvalue", "smallest_eigenvalue", "distance"):
        assert same(values(found, f"spectrum_{name}"), [0.5] * 3)
    assert found.remarks[0].startswith("The branch is alive:")
    assert "0.5 on average" in found.remarks[0]


def test_at_lambda_0_the_branch_is_inert_and_all_change_is_training() -> None:
    model = attached()
    for layer in dex_outputs(model):
        layer.dex_step["default"].zero_()  # λ(0) = 0
    found = analysed(subject_of(model, lengths=(9, 9)))
    assert found.remarks[0].startswith("The branch is inert:")
    assert "+0.0000 to +0.0000" in found.remarks[0]
    assert values(found, "branch_mean_ratio") == 0
    assert values(found, "branch_ratio") == [0.0] * 3
    assert values(found, "branch_cosine") == [[None] * 4] * 3
    assert values(found, "branch_cosine_of_layer") == [None] * 3
    assert values(found, "spectrum_largest") == values(found, "spectrum_smallest") == [1.0] * 3
    assert values(found, "w_o_fold_share") == [0.0] * 3
    assert values(found, "w_o_cosine") == [None] * 3
    assert values(found, "w_o_change") == values(found, "w_o_change_by_training")


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_spectrum_is_numpys_of_every_head(options: dict[str, Any]) -> None:
    subject = subject_of(attached(**options), lengths=(9,))
    found = analysed(subject)
    (curve,) = [curve for curve in found.curves if curve.name == "spectrum"]
    layers = dex_outputs(subject.model)
    assert list(curve.lines) == [f"layer {layer.layer_idx}" for layer in layers]
    for layer in layers:
        w_d, lam = layer.dex_w_d["default"].double().numpy().reshape(-1, 16, 16), float(layer.lam("default"))
        operations = [np.eye(16) - lam * each for each in w_d]
        singular = np.array([np.linalg.svd(each, compute_uv=False) for each in operations])
        eigenvalues = np.abs([np.linalg.eigvals(each) for each in operations])
        distance = np.sqrt(np.mean([np.linalg.norm(each - np.eye(16)) ** 2 / 16 for each in operations]))
        at = {
            name: values(found, f"spectrum_{name}")[layer.layer_idx] for name in ("largest", "smallest", "distance")
        }
        assert same(list(at.values()), [singular.max(), singular.min(), distance])
        assert same(values(found, "spectrum_largest_eigenvalue")[layer.layer_idx], eigenvalues.max())
        assert same(values(found, "spectrum_smallest_eigenvalue")[layer.layer_idx], eigenvalues.min())
        assert same(curve.lines[f"layer {layer.layer_idx}"], singular.mean(0).tolist())


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_change_of_w_o_splits_into_training_and_an_explicit_fold(options: dict[str, Any]) -> None:
    subject = subject_of(attached("qwen3", **options), lengths=(9,))
    found = analysed(subject)
    adapted = {layer.layer_idx: layer for layer in dex_outputs(subject.model)}
    for layer_idx in range(3):
        if layer_idx not in adapted:
            assert all(values(found, f"w_{name}_change")[layer_idx] == 0 for name in "kvo")
            assert values(found, "w_o_fold_share")[layer_idx] is None
            continue
        layer = adapted[layer_idx]
        base = layer.base_layer.weight.double().T.numpy()  # W_O [H·D, d]
        copy = layer.dex_weight.get("default", layer.base_layer.weight).double().T.numpy()
        w_d, folded, D = layer.w_d("default").double().numpy(), copy.copy(), layer.head_dim
        for head in HEADS[layer_idx]:
            rows = slice(head * D, (head + 1) * D)
            operation = np.eye(D) - float(layer.lam("default")) * (w_d if w_d.ndim == 2 else w_d[head])
            folded[rows] = operation @ copy[rows]
        T, F = copy - base, folded - copy
        t, f, whole = np.linalg.norm(T), np.linalg.norm(F), np.linalg.norm(base)
        expected = {
            "w_o_change": np.linalg.norm(folded - base) / whole,
            "w_o_change_by_training": t / whole,
            "w_o_change_by_fold": f / whole,
            "w_o_fold_share": f**2 / (f**2 + t**2),
            "w_o_cosine": (F * T).sum() / (f * t) if t else None,
        }
        for name, each in expected.items():
            assert same(values(found, name)[layer_idx], each), name


@torch.no_grad()
def test_k_and_v_change_as_far_as_their_copies_moved() -> None:
    model = attached("qwen2")
    found = analysed(subject_of(model, lengths=(9,)))
    for name in "kv":
        for layer_idx, layer in enumerate(model.get_base_model().model.layers):
            projection = getattr(layer.self_attn, f"{name}_proj")
            base, copy = projection.base_layer.weight.double(), projection.dex_weight["default"].double()
            moved = float((copy - base).norm() / base.norm())
            assert moved > 0.01
            assert same(values(found, f"w_{name}_change")[layer_idx], moved)


def test_an_adapter_without_a_branch_has_only_the_changes_of_k_v_and_o() -> None:
    found = analysed(subject_of(attached(schedule="off", heads="all"), lengths=(9,)))
    assert [each.name for each in found.statistics] == ["w_k_change", "w_v_change", "w_o_change"]
    assert min(values(found, "w_o_change")) > 0.01
    assert not found.curves
    assert "no branch" in found.remarks[0]


def test_a_bfloat16_base_is_measured_too() -> None:
    model = get_peft_model(
        tiny_model(dtype=torch.bfloat16), dex.DexConfig(task_type="CAUSAL_LM", schedule="paper", anneal_steps=4)
    ).eval()
    for layer in dex_outputs(model):
        layer.dex_step["default"].fill_(2)
    subject = subject_of(model, lengths=(9,))
    assert same(values(analysed(subject), "branch_ratio"), looped(subject)["branch_ratio"])


@pytest.mark.parametrize("kind", ["llama", "diff-v1", "diff-v2", "diffllama"])
def test_a_model_without_a_branch_is_left_out(kind: str, tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match="no Dex branch"):
        analysed(subject_of(kind, lengths=(9,), path=str(tmp_path)))


def test_a_lora_and_a_merged_adapter_have_no_branch() -> None:
    lora = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(LeftOut, match="no Dex branch"):
        analysed(subject_of(lora, lengths=(9,)))
    merged = attached()
    merged.merge_adapter()
    with pytest.raises(LeftOut, match="merged or switched off"):
        analysed(subject_of(merged, lengths=(9,)))


@pytest.mark.parametrize("what", ["dex_w_d", "dex_weight"])
def test_values_that_are_not_finite_are_refused(what: str) -> None:
    model = attached()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if what in name).view(-1)[0] = float("nan")
    with pytest.raises(NotFinite, match="not finite"):
        analysed(subject_of(model, lengths=(9,)))


def test_the_model_is_left_as_it_was() -> None:
    model = attached()
    model.train()
    hooks = [len(layer._forward_pre_hooks) for layer in dex_outputs(model)]
    analysed(subject_of(model, lengths=(9,)))
    assert all(module.training for module in model.modules())
    assert [len(layer._forward_pre_hooks) for layer in dex_outputs(model)] == hooks


# ---- the run's log -----------------------------------------------------------------------------------------


def write_log(run: Path, lines: list[Any]) -> str:
    (run / "adapter").mkdir()
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (run / "log.jsonl").write_text(text)
    return str(run / "adapter")


def entry(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": 8 * step, "loss": 2.0, "lam": [step / 10, step / 5, step / 2], **more}


def test_lambda_and_ratio_over_the_steps_are_those_of_the_log(tmp_path: Path) -> None:
    lines = [
        entry(1, branch_ratio=[0.0, 0.1, 0.2]),
        {"step": 1, "held_out_loss": {"mean": 2.0}},
        entry(2),  # logged at another step than every `logging_steps`: without a ratio
        entry(3, branch_ratio=[0.3, 0.4, 0.5]),
        '{"step": 4, "lam": [0.4,',  # cut by a kill
    ]
    found = analysed(subject_of(attached(), lengths=(9,), path=write_log(tmp_path, lines)))
    curves = {curve.name: curve for curve in found.curves}
    assert curves["lam_over_steps"].x == [1, 2, 3]
    assert curves["lam_over_steps"].lines["layer 1"] == [0.2, 0.4, 0.6]
    assert curves["branch_ratio_over_steps"].x == [1, 3]
    assert curves["branch_ratio_over_steps"].lines == {
        "layer 0": [0.0, 0.3],
        "layer 1": [0.1, 0.4],
        "layer 2": [0.2, 0.5],
    }
    assert not any("log.jsonl" in remark for remark in found.remarks)


def test_the_lines_of_a_log_are_of_the_adapted_layers(tmp_path: Path) -> None:
    lines = [{"step": 1, "lam": [0.1, 0.2]}]
    model = attached(layers_to_transform=[0, 2])
    found = analysed(subject_of(model, lengths=(9,), path=write_log(tmp_path, lines)))
    (curve,) = [curve for curve in found.curves if curve.name == "lam_over_steps"]
    assert curve.lines == {"layer 0": [0.1], "layer 2": [0.2]}


def test_without_a_log_a_remark_says_so(tmp_path: Path) -> None:
    found = analysed(subject_of(attached(), lengths=(9,), path=str(tmp_path)))
    assert [curve.name for curve in found.curves] == ["spectrum"]
    assert any("No log.jsonl lies beside" in remark for remark in found.remarks)


@pytest.mark.parametrize("damaged", ['{"step": 2, "lam"', "[1, 2]", '{"lam": [1, 2, 3]}', ""])
def test_a_damaged_line_before_the_last_is_refused_by_its_number(tmp_path: Path, damaged: str) -> None:
    write_log(tmp_path, [entry(1), damaged, entry(3)])
    with pytest.raises(DexError, match=r"log\.jsonl, line 2 is damaged"):
        branch_curves(tmp_path / "log.jsonl", [0, 1, 2])


@pytest.mark.parametrize("lam", [[0.1, 0.2], "0.1", [0.1, None, 0.2]])
def test_the_log_of_another_adapter_is_refused(tmp_path: Path, lam: Any) -> None:
    write_log(tmp_path, [{"step": 1, "lam": lam}])
    with pytest.raises(DexError, match="line 1 has no lam for each of the adapter's 3 layers"):
        branch_curves(tmp_path / "log.jsonl", [0, 1, 2])


def test_a_value_that_is_no_number_is_a_gap_in_its_line(tmp_path: Path) -> None:
    write_log(tmp_path, ['{"step": 1, "lam": [0.1]}', '{"step": 2, "lam": [NaN]}'])
    (curve,) = branch_curves(tmp_path / "log.jsonl", [0])
    assert curve.lines == {"layer 0": [0.1, None]}


@given(count=st.integers(0, 500), most=st.integers(2, 40))
def test_thinning_keeps_the_first_and_the_last_at_even_distances(count: int, most: int) -> None:
    kept = thinned(count, most)
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    if count:
        assert (kept[0], kept[-1]) == (0, count - 1)
    distances = {b - a for a, b in itertools.pairwise(kept[:-1])}
    assert len(distances) <= 1
    assert count > most or kept == list(range(count))


# ---- a folded folder ---------------------------------------------------------------------------------------


def folded(folder: Path, certificate: Any) -> Subject:
    text = certificate if isinstance(certificate, str) else json.dumps(certificate)
    (folder / "certificate.json").write_text(text)
    return subject_of("llama", lengths=(9,), path=str(folder))


def test_of_a_folded_model_the_values_of_the_fold_are_reported(tmp_path: Path) -> None:
    recorded = {"layers": [0, 1, 2], "lam": [0.1, 0.2, 0.4], "ratio": [1e-5, 2e-5, 3e-5], "mean_ratio": 2e-5}
    found = analysed(folded(tmp_path, {"passed": True, "branch": recorded}))
    assert values(found, "dex_lam") == recorded["lam"]
    assert values(found, "branch_ratio") == recorded["ratio"]
    assert values(found, "branch_mean_ratio") == 2e-5
    assert found.remarks[0].startswith("The branch is inert:")
    assert "recorded at the fold" in found.remarks[1]
    (mean,) = (one for one in found.statistics if one.name == "branch_mean_ratio")
    assert "as recorded when the adapter was folded; below 0.001 the branch is called inert." in mean.meaning
    assert [one.name for one in found.statistics if one.headline] == ["dex_lam", "branch_ratio"]


def test_a_fold_of_some_layers_has_none_for_the_others(tmp_path: Path) -> None:
    recorded = {"layers": [0, 2], "lam": [0.1, 0.2], "ratio": [0.1, 0.3], "mean_ratio": 0.2}
    found = analysed(folded(tmp_path, {"branch": recorded}))
    assert values(found, "dex_lam") == [0.1, None, 0.2]
    assert values(found, "branch_ratio") == [0.1, None, 0.3]


@pytest.mark.parametrize("certificate", [{"passed": True}, {"branch": None}])
def test_a_certificate_without_a_branch_leaves_the_section_out(tmp_path: Path, certificate: Any) -> None:
    with pytest.raises(LeftOut, match="records no branch"):
        analysed(folded(tmp_path, certificate))


@pytest.mark.parametrize(
    "certificate",
    [
        "{",
        "[]",
        {"branch": 3},
        {"branch": {"lam": [0.1]}},
        {"branch": {"layers": [], "lam": [], "ratio": [], "mean_ratio": 0}},
        {"branch": {"layers": [0, 1], "lam": [0.1], "ratio": [0.1], "mean_ratio": 0.1}},
        {"branch": {"layers": [3], "lam": [0.1], "ratio": [0.1], "mean_ratio": 0.1}},
        {"branch": {"layers": [1, 1], "lam": [0.1, 0.2], "ratio": [0.1, 0.2], "mean_ratio": 0.1}},
    ],
)
def test_a_damaged_certificate_is_refused(tmp_path: Path, certificate: Any) -> None:
    with pytest.raises(DexError, match=r"certificate\.json is damaged"):
        analysed(folded(tmp_path, certificate))
