"""`dex heads` and `dex convert`: plans and untrained adapters, from a folder and from a Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import FAMILIES, tokens, write_tiny

from dex.adapter import load_adapter
from dex.data import Source
from dex.errors import DexError
from dex.heads import HeadPlan
from dex.models import fingerprint, load_model
from dex.tuner import DexConfig
from dex.verbs.convert import Choice, choose_heads, convert, write_plan

QUICK = Choice(source=Source("pydoc"), sequences=2, length=48)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_folder_holds_the_adapter_alone_and_equals_its_base(tmp_path: Path, family: str) -> None:
    base = write_tiny(tmp_path / "base", family)
    plan = convert(str(base), tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), QUICK)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert {name.rsplit(".", 1)[1] for name in file.keys()} == {"dex_w_d", "dex_lam", "dex_step"}  # noqa: SIM118
    assert HeadPlan.load(tmp_path / "adapter" / "heads.json") == plan
    attached, loaded = load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = load_model(str(base)).model(tokens()).logits
        assert torch.equal(attached(tokens()).logits, expected)
    assert loaded.source.id == str(base)


def test_the_seed_decides_w_d(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "base"))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert(base, tmp_path / name, DexConfig(task_type="CAUSAL_LM"), QUICK, seed=seed)
    a, b, c = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_plan_records_model_data_and_scores(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    plan = write_plan(str(base), tmp_path / "plan.json", QUICK)
    assert HeadPlan.load(tmp_path / "plan.json") == plan
    assert plan.model.fingerprint == fingerprint(load_model(str(base)).model)
    assert plan.data is not None
    assert (plan.data.source, plan.data.sequences, plan.data.length) == ("pydoc", 2, 48)
    assert plan.scores is not None
    assert [len(row) for row in plan.heads] == [2, 2, 2]
    for scores, chosen in zip(plan.scores, plan.heads, strict=True):
        others = [score for head, score in enumerate(scores) if head not in chosen]
        assert min(scores[head] for head in chosen) >= max(others)


@pytest.mark.parametrize("criterion", ["entropy", "importance", "random", "all", "none"])
def test_every_criterion_gives_a_plan(tmp_path: Path, criterion: str) -> None:
    base = load_model(str(write_tiny(tmp_path / "base")))
    plan = choose_heads(base, Choice(criterion, sequences=2, length=48))
    assert {len(row) for row in plan.heads} == {{"all": 4, "none": 0}.get(criterion, 2)}


def test_fewer_windows_than_asked_for_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 100)
    base = load_model(str(write_tiny(tmp_path / "base")))
    choice = Choice(source=Source(str(tmp_path / "short.txt")), sequences=5, length=48)
    plan = choose_heads(base, choice)
    assert plan.data is not None
    assert plan.data.sequences == 2


def test_the_hub_commit_is_resolved_and_recorded(tmp_path: Path, hub: Any) -> None:
    first = hub.add_model("org/tiny", write_tiny(tmp_path / "v1", seed=1))
    convert("org/tiny", tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), QUICK)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", first)
    assert "base_model: org/tiny" in (tmp_path / "adapter" / "README.md").read_text()
    hub.add_model("org/tiny", write_tiny(tmp_path / "v2", seed=2))  # main moves on
    attached, loaded = load_adapter(str(tmp_path / "adapter"))
    assert loaded.source.commit == first
    expected = load_model(str(tmp_path / "v1")).model
    with torch.no_grad():
        assert torch.equal(attached(tokens()).logits, expected(tokens()).logits)


def test_what_the_hub_refuses_leaves_nothing(tmp_path: Path, hub: Any) -> None:
    hub.add_model("org/private", write_tiny(tmp_path / "base"), private=True)
    for model in ("org/private", "org/none"):
        with pytest.raises(DexError):
            convert(model, tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), QUICK)
    with hub.unreachable(), pytest.raises(DexError, match="network"):
        convert("org/private", tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), QUICK)
    assert not (tmp_path / "adapter").exists()


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = write_plan(str(write_tiny(tmp_path / "a", seed=1)), tmp_path / "plan.json", QUICK)
    other = str(write_tiny(tmp_path / "b", seed=2))
    with pytest.raises(DexError, match="fingerprint"):
        convert(other, tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), plan)
    assert not (tmp_path / "adapter").exists()


def test_a_plan_is_not_overwritten_without_force(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "base"))
    write_plan(base, tmp_path / "plan.json", QUICK)
    with pytest.raises(DexError, match="--force"):
        write_plan(base, tmp_path / "plan.json", QUICK)
    write_plan(base, tmp_path / "plan.json", QUICK, force=True)
