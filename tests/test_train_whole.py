"""`dex train` with method `full`: models of every layout, whole or by the recipe's list, exact and resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train import log, recipe
from tiny import tokens, write_tiny

from dex.errors import DexError
from dex.models import ANY, load_model
from dex.verbs.init import init
from dex.verbs.lay_out import Target, lay_out
from dex.verbs.train import train

FULL: dict[str, Any] = {"method": "{name: full}"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def laid_out(folder: Path, layout: str, **options: Any) -> str:
    """A tiny Llama in a layout, in a folder of its own; `recipe` finds its data beside."""
    recipe(folder)
    lay_out(str(folder / "llama"), folder / layout, Target(layout, **options), sequences=2, length=64)
    return str(folder / layout)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.parametrize("layout", ["base", "diff-v1", "diff-v2", "diffllama"])
def test_a_fresh_model_of_any_layout_trains_and_its_folder_is_a_model(tmp_path: Path, layout: str) -> None:
    write_tiny(tmp_path / "like")
    init(layout, str(tmp_path / "like"), tmp_path / "fresh")
    result = train(recipe(tmp_path, **FULL, **{"model.id": tmp_path / "fresh", "run.lr": 3e-3}))
    assert result["trained_parameters"] == load_model(str(tmp_path / "fresh"), families=ANY).model.num_parameters()
    losses = [entry["loss"] for entry in log(tmp_path / "run") if "loss" in entry]
    assert losses[-1] < losses[0]
    assert result["branch"] is None
    model = load_model(str(tmp_path / "run" / "model"), families=ANY).model
    assert model.config.use_cache  # the Trainer turns it off
    with torch.no_grad():
        assert torch.isfinite(model(tokens()).logits).all()
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| tokens, optimiser steps | {result['tokens']:,}, {result['steps']:,} |" in card


def test_only_what_the_list_names_moves(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v2")
    train(recipe(tmp_path, method="{name: full, train: [q_proj, lambda_proj]}", **{"model.id": base}))
    before, after = load_file(Path(base) / "model.safetensors"), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == (not any(part in name for part in ("q_proj", "lambda_proj")))


def test_a_norm_that_anneals_survives_a_resume_and_ends_as_v1s(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v1", norm="anneal", options={"head_norm_eps": 1e-6})  # as the base's norms
    changes = {"method": "{name: full, norm_anneal: 0.75}", "model.id": base}
    train(recipe(tmp_path, "parts", **changes))
    parts = tmp_path / "parts"
    one = weights(parts)
    for step in (6, 8):  # as if killed after step 4
        shutil.rmtree(parts / "checkpoints" / f"checkpoint-{step}")
    shutil.rmtree(parts / "model")
    train(recipe(tmp_path, "parts", **changes))
    two = weights(parts)
    assert all(torch.equal(one[name], two[name]) for name in one)

    shares = [entry["head_norm_share"] for entry in log(parts) if "head_norm_share" in entry]
    assert shares == pytest.approx([min(1.0, step / 6) for step in range(1, 9)])
    trained = load_model(str(parts / "model"), families=ANY).model
    assert trained.config.head_norm_steps == 6
    assert all(int(layer.self_attn.head_norm_step) == 8 for layer in trained.model.layers)
    # It is a plain V1 now, so it can be a DiffLlama.
    lay_out(str(parts / "model"), tmp_path / "plain", Target("diffllama"), sequences=2, length=64)
    folders = (parts / "model", tmp_path / "plain")
    with torch.no_grad():
        a, b = (load_model(str(folder), families=ANY).model(tokens()).logits for folder in folders)
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_n_plus_n_steps_with_a_resume_equal_2n_steps_bit_for_bit(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v2")
    changes = {**FULL, "model.id": base}
    train(recipe(tmp_path, "parts", **changes))
    parts = tmp_path / "parts"
    one = weights(parts)
    shutil.rmtree(parts / "checkpoints" / "checkpoint-6")
    shutil.rmtree(parts / "checkpoints" / "checkpoint-8")
    shutil.rmtree(parts / "model")
    train(recipe(tmp_path, "parts", **changes))
    two = weights(parts)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_without_its_weights_is_refused(tmp_path: Path) -> None:
    train(recipe(tmp_path, **FULL))
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-8"
    (newest / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(DexError, match=r"checkpoint-8 is damaged \(it has no model.safetensors\)"):
        train(recipe(tmp_path, **FULL))


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = train(recipe(tmp_path, **FULL))
    written = (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    assert train(recipe(tmp_path, **FULL)) == first
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_mtime_ns == written


def test_weight_decay_is_for_matrices_alone(tmp_path: Path) -> None:
    """With a learning rate too small to matter, decay is what moves a weight: norms and vectors stay."""
    base = laid_out(tmp_path, "diff-v1")
    train(recipe(tmp_path, **FULL, **{"model.id": base, "run.lr": 1e-12, "run.weight_decay": 1e9, "run.tokens": 256}))
    before, after = load_file(Path(base) / "model.safetensors"), weights(tmp_path / "run")
    for name, tensor in before.items():
        moved = not torch.allclose(after[name], tensor, rtol=1e-5)
        assert moved == (tensor.ndim > 1), name


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("diff-v2", {"method": "{name: full, train: [w_q]}"}, "method.train has 'w_q'.*q_proj"),
        ("diff-v2", {"method": "{name: full, norm_anneal: 0.5}"}, "method.norm_anneal has no effect"),
        ("diff-v2", {}, "is a DIFF model"),
        ("diff-v2", {"method": "{name: attention}"}, "is a DIFF model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_written(
    tmp_path: Path, layout: str, changes: dict[str, Any], reason: str
) -> None:
    base = laid_out(tmp_path, layout)
    with pytest.raises(DexError, match=reason):
        train(recipe(tmp_path, **{"model.id": base}, **changes))
    assert not (tmp_path / "run").exists()


def test_a_norm_that_nothing_would_anneal_is_refused(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v1", norm="anneal")
    with pytest.raises(DexError, match="the norm would never anneal"):
        train(recipe(tmp_path, **{"model.id": base, "method": "{name: full, train: [mlp]}"}))


def test_a_norm_length_that_is_said_twice_is_refused(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v1", norm="anneal", options={"head_norm_steps": 4})
    with pytest.raises(DexError, match="anneals over 4 steps"):
        train(recipe(tmp_path, **{"model.id": base, "method": "{name: full, norm_anneal: 0.5}"}))


def test_the_log_has_lambda_of_every_layer(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v1")
    train(recipe(tmp_path, **FULL, **{"model.id": base}))
    logged = [entry["lam"] for entry in log(tmp_path / "run") if "loss" in entry]
    with torch.no_grad():
        layers = load_model(str(tmp_path / "run" / "model"), families=ANY).model.model.layers
        assert logged[-1] == pytest.approx([layer.self_attn.lam().item() for layer in layers])


def test_a_run_does_not_lie_inside_the_model_it_trains(tmp_path: Path) -> None:
    base = laid_out(tmp_path, "diff-v2")
    with pytest.raises(DexError, match="which is read"):
        train(recipe(tmp_path, "diff-v2/run", **FULL, **{"model.id": base}))


def test_full_training_needs_float32(tmp_path: Path) -> None:
    with pytest.raises(DexError, match=r"model.dtype is bfloat16.*needs float32"):
        recipe(tmp_path, **FULL, **{"model.dtype": "bfloat16"})


def test_the_saved_recipe_has_the_method_alone(tmp_path: Path) -> None:
    train(recipe(tmp_path, **FULL))
    saved = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "name: full" in saved
    assert "schedule" not in saved
    assert json.loads((tmp_path / "run" / "result.json").read_text())["method"] == "full"
