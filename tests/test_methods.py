"""Every method of dex.methods: it starts at the base, trains what it says, resumes exactly, and its result loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train import keep_only_checkpoint, log, recipe
from tiny import tokens
from torch import nn
from transformers import PreTrainedModel

import dex
from dex.adapter import load_adapter
from dex.data import Prepared
from dex.methods import METHODS
from dex.models import ANY, load_model
from dex.recipe import Recipe
from dex.run_data import prepare_data
from dex.tuner import DexConfig, dex_outputs
from dex.verbs.fold import fold
from dex.verbs.train import load_base, train

SHORT: dict[str, Any] = {"run.tokens": 512, "run.save_every": 256}  # 4 updates, a checkpoint after 2
SETTINGS: dict[str, dict[str, Any]] = {
    "dex": {"method.heads": "{sequences: 2, length: 48}"},
    "galore": {"method.rank": 8, "method.gap": 2},
    "apollo": {"method.rank": 8, "method.gap": 2},
    "lora": {"method.rank": 4},
    "pissa": {"method.rank": 4},
}
# What may change, by a part of its name, of methods that leave the rest of the base alone.
TRAINED = {
    "dex": ("k_proj", "v_proj", "o_proj"),
    "attention": ("k_proj", "v_proj", "o_proj"),
    "lora": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "pissa": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "diff-v2": ("q_proj", "k_proj", "v_proj", "o_proj", "lambda_proj"),
    "diff-v1": ("q_proj", "k_proj", "v_proj", "o_proj", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def recipe_of(folder: Path, name: str, run: str = "run", **changes: Any) -> Recipe:
    changes = {**SHORT, "method": f"{{name: {name}}}", **SETTINGS.get(name, {}), **changes}
    return recipe(folder, run, **changes)


def trained_model(recipe: Recipe) -> nn.Module:
    """What the run made, loaded as its user would, with an adapter merged."""
    folder = Path(recipe.output) / recipe.method.result
    if recipe.method.result == "model":
        return load_model(str(folder), families=ANY).model
    return load_adapter(str(folder))[0].merge_and_unload()


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next(run.glob("*/*model.safetensors")))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_trains_what_it_says_resumes_exactly_and_its_result_loads(tmp_path: Path, name: str) -> None:
    one = recipe_of(tmp_path, name)
    result = train(one)
    base, model = load_model(one.model.id).model, trained_model(one)
    assert [entry["step"] for entry in log(tmp_path / "run") if "loss" in entry] == [1, 2, 3, 4]
    with torch.no_grad():
        ids = tokens()
        assert not torch.allclose(model(ids).logits, base(ids).logits)
    before = dict(base.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if name in TRAINED and not set(TRAINED[name]) & set(parameter_name.split(".")):
            new = torch.ones_like(parameter)  # a layout's own norm, which begins at one and is not trained
            assert torch.equal(parameter, before.get(parameter_name, new)), parameter_name
    expected = tensors(tmp_path / "run")
    keep_only_checkpoint(tmp_path / "run", 2, one.method.result)
    again = train(one)
    assert again["held_out_loss"] == result["held_out_loss"]
    for tensor_name, tensor in tensors(tmp_path / "run").items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"pissa"}))
def test_a_method_begins_at_its_base(tmp_path: Path, name: str) -> None:
    assert started(recipe_of(tmp_path, name)) <= 1e-4


def test_pissa_begins_at_its_base_but_for_rounding(tmp_path: Path) -> None:
    assert started(recipe_of(tmp_path, "pissa")) <= 1e-3


def started(recipe: Recipe) -> float:
    """max |Δlogit| between the base and what the run starts with."""
    base = load_base(recipe)
    with torch.no_grad():
        expected = base.model(tokens()).logits.clone()
        prepare(recipe)
        subject = recipe.method.subject(recipe, base, None)
        return (subject.model.eval()(tokens()).logits - expected).abs().max().item()


def prepare(recipe: Recipe) -> Prepared:
    return prepare_data(recipe.data, load_base(recipe).tokenizer, recipe.run.tokens)


@pytest.mark.parametrize("name", ["lora", "pissa"])
def test_a_lora_is_folded_and_certified_like_dex(tmp_path: Path, name: str) -> None:
    train(recipe_of(tmp_path, name))
    certificate = fold(str(tmp_path / "run" / "adapter"), tmp_path / "folded")
    assert certificate["passed"]
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert f"| method | {name} |" in card


def test_pissa_saves_the_difference_from_its_start_for_the_base_as_it_was(tmp_path: Path) -> None:
    one = recipe_of(tmp_path, "pissa")
    train(one)
    saved = tensors(tmp_path / "run")
    assert {t.shape[0] for n, t in saved.items() if "lora_A" in n} == {8}  # twice the rank
    base = load_model(one.model.id).model.model.layers[0].self_attn.q_proj.weight
    merged = trained_model(one).model.layers[0].self_attn.q_proj.weight
    low_rank = torch.linalg.svdvals((merged - base).detach())
    assert low_rank[0] > 1e-4
    assert low_rank[8] < 1e-5


def test_galore_and_apollo_keep_small_states_of_the_layers_matrices(tmp_path: Path) -> None:
    for name in ("galore", "apollo"):
        train(recipe_of(tmp_path, name, name))
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        with torch.serialization.safe_globals([GaLoreProjector]):
            state = torch.load(tmp_path / name / "checkpoints" / "checkpoint-4" / "optimizer.pt", weights_only=True)
        groups = {group["kind"]: group["params"] for group in state["param_groups"]}
        assert {min(state["state"][p]["exp_avg"].shape) for p in groups["matrices"]} == {8}
        assert all("projector" not in state["state"][p] for p in groups["embeddings"] + groups["vectors"])


def test_a_baseline_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytorch_optimizer" else find(name))
    with pytest.raises(dex.DexError, match="pip install pytorch-optimizer"):
        train(recipe_of(tmp_path, "galore"))


# --- Dex's own controls


@pytest.mark.parametrize("schedule", ["paper", "land", "fixed"])
def test_plus_is_minus_with_w_d_negated(schedule: Any) -> None:
    """O + λ f(W_D) = O − λ f(−W_D): the same loss and, mirrored, the same gradients, at any step."""
    minus, plus = (branch(sign=sign, schedule=schedule) for sign in ("minus", "plus"))
    with torch.no_grad():
        for ours, theirs in zip(dex_outputs(plus), dex_outputs(minus), strict=True):
            ours.dex_w_d["default"].copy_(-theirs.dex_w_d["default"])
            for layer, sign in ((ours, -1.0), (theirs, 1.0)):
                layer.dex_step["default"] += 2
                if layer.dex_lam:
                    layer.dex_lam["default"].copy_(torch.tensor([0.3 * sign]))
    ids = tokens()
    losses = [model(ids, labels=ids).loss for model in (minus, plus)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(dex_outputs(plus), dex_outputs(minus), strict=True):
        assert torch.equal(ours.lam("default"), -theirs.lam("default"))
        torch.testing.assert_close(ours.dex_w_d["default"].grad, -theirs.dex_w_d["default"].grad)


def branch(**options: Any) -> Any:
    from peft import get_peft_model
    from tiny import tiny_model

    steps = None if options["schedule"] == "fixed" else 4
    torch.manual_seed(0)
    config = DexConfig(heads=[[0, 2], [1], [0, 3]], anneal_steps=steps, w_d_init="zeros", **options)
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        for layer in dex_outputs(model):
            layer.dex_w_d["default"].normal_(std=0.3)
    return model


def test_one_w_d_for_each_head_equals_the_layers_where_all_are_the_same() -> None:
    shared, own = (branch(schedule="fixed", w_d_per=per) for per in ("layer", "head"))
    with torch.no_grad():
        for ours, theirs in zip(dex_outputs(own), dex_outputs(shared), strict=True):
            assert ours.dex_w_d["default"].shape[0] == int(theirs.dex_selected["default"].sum())
            ours.dex_w_d["default"].copy_(theirs.dex_w_d["default"].expand_as(ours.dex_w_d["default"]))
    torch.testing.assert_close(own(tokens()).logits, shared(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_w_d_of_each_head_equals_the_plain_form_and_folds() -> None:
    """The oracle is the loop over heads, token by token, in float64."""
    model = branch(schedule="fixed", w_d_per="head")
    layer = dex_outputs(model)[0]
    heads = torch.randn(2, 5, 64)
    plain = heads.double()
    lam, w_d = layer.lam("default").double(), layer.dex_w_d["default"].double()
    branches = {head: lam * (plain[..., 16 * head : 16 * head + 16] @ w_d[n]) for n, head in enumerate([0, 2])}
    expected = plain.clone()
    for head, branch_of_head in branches.items():
        expected[..., 16 * head : 16 * head + 16] -= branch_of_head
    expected = expected @ layer.base_layer.weight.double().T
    torch.testing.assert_close(layer(heads).double(), expected, rtol=1e-5, atol=1e-5)
    selected = torch.cat([plain[..., :16], plain[..., 32:48]], -1)
    ratio = torch.cat(list(branches.values()), -1).norm() / selected.norm()
    torch.testing.assert_close(layer.branch_ratio(heads).double(), ratio, rtol=1e-5, atol=1e-7)
    before = model(tokens()).logits
    folded = model.merge_and_unload()
    assert isinstance(folded, PreTrainedModel)
    torch.testing.assert_close(folded(tokens()).logits, before, rtol=1e-5, atol=1e-4)


def test_w_d_of_each_head_is_saved_and_loaded(tmp_path: Path) -> None:
    one = recipe_of(tmp_path, "dex", **{"method.w_d_per": "head", "method.schedule": "land"})
    result = train(one)
    model, _ = load_adapter(str(tmp_path / "run" / "adapter"))
    assert {layer.dex_w_d["default"].shape for layer in dex_outputs(model)} == {(2, 16, 16)}
    assert result["branch"]["mean_ratio"] > 0
    assert fold(str(tmp_path / "run" / "adapter"), tmp_path / "folded")["passed"]
    shutil.rmtree(tmp_path / "folded")


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_dex_on_a_quantised_base_is_folded_into_the_whole_one_only_by_choice(tmp_path: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    one = recipe_of(tmp_path, "attention", **{"model.quantise": bits, "model.dtype": "bfloat16"})
    train(one)
    adapter = str(tmp_path / "run" / "adapter")
    with pytest.raises(dex.DexError, match=f"trained on its base in {bits}.*--into-unquantised"):
        fold(adapter, tmp_path / "folded")
    certificate = fold(adapter, tmp_path / "folded", into_unquantised=True)
    assert (certificate["passed"], certificate["trained_on"]) == (True, bits)
    kinds = {type(module).__name__ for module in load_adapter(adapter)[0].modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}  # evaluated on what it was trained on


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("lora", {"method.targets": "[q_proj, nope]"}, "has 'nope', which no projection of this model is called"),
        ("lora", {"method.targets": "[lm_head]"}, "has 'lm_head'"),
        ("lora", {"method.targets": "[self_attn]"}, "has 'self_attn'"),
        ("pissa", {"method.rank": 40}, "method.rank is 40, and k_proj has no more than 32"),
    ],
)
def test_targets_and_ranks_that_the_model_has_not_are_refused_before_training(
    tmp_path: Path, name: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(dex.DexError, match=sentence):
        train(recipe_of(tmp_path, name, **settings))
    assert not (tmp_path / "run").exists()
