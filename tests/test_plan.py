"""`dex plan` says what a run will need, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_diff_v1, tiny_model, tiny_tokenizer, tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from typer.testing import CliRunner

from dex.cli import app
from dex.errors import DexError
from dex.heads import make_plan
from dex.loss import causal_lm_loss
from dex.methods import METHODS
from dex.methods.dex import PlannedHeads
from dex.models import LoadedModel, ModelSource, fingerprint
from dex.planning.outline import outline
from dex.planning.tracker import Tracker
from dex.recipe import Recipe
from dex.run_data import POOL_TOKENS
from dex.subject import Subject
from dex.verbs.plan import describe, plan, plan_model

FAMILIES = ("llama", "llama-bias", "qwen2", "qwen3")  # llama-bias and qwen3 have tied embeddings
BLOCK = 64


def config_folder(folder: Path, model: PreTrainedModel) -> Path:
    """A folder with nothing but the model's config.json."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def recipe_of(folder: Path, method: dict[str, Any] | str = "dex", run: Any = (), model: Any = ()) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"id": str(folder), **dict(model)},
            "method": {"name": method} if isinstance(method, str) else method,
            "data": {"train": [{"source": "pydoc"}], "block": BLOCK},
            "run": {"tokens": 40 * BLOCK, "batch_tokens": 4 * BLOCK, **dict(run)},
            "output": "unused",
        }
    )


def attached(recipe: Recipe, model: PreTrainedModel) -> Subject:
    """The recipe's method on a model with weights, as a run makes it."""
    base = LoadedModel(model, tiny_tokenizer(), ModelSource("tiny"))
    chosen = make_plan(model, "tiny", None, fingerprint(model), "random", "half")
    return recipe.method.subject(recipe, base, chosen if recipe.method.heads_to_choose() else None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model_that_is_trained(tmp_path: Path, family: str, method: str) -> None:
    model = tiny_model(family)
    recipe = recipe_of(config_folder(tmp_path, model), method)
    seen = outline(recipe)
    trained = attached(recipe, model).model
    assert seen.parameters == sum(p.numel() for p in trained.parameters())
    assert seen.trainable == sum(p.numel() for p in trained.parameters() if p.requires_grad)


@pytest.mark.parametrize("settings", [{"w_d_per": "head"}, {"train_kvo": False}, {"layers": [0, 2]}])
def test_parameters_follow_the_settings_of_the_method(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny_model("qwen3")
    recipe = recipe_of(config_folder(tmp_path, model), {"name": "dex", **settings})
    trained = attached(recipe, model).model
    assert outline(recipe).trainable == sum(p.numel() for p in trained.parameters() if p.requires_grad)


def test_a_plan_of_heads_counts_as_it_is_whatever_its_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = config_folder(tmp_path, model)
    made = make_plan(model, "tiny", None, fingerprint(model), "random", 3)
    made.save(tmp_path / "heads.json")
    planned = {"name": "dex", "heads": {"plan": str(tmp_path / "heads.json")}, "w_d_per": "head"}
    recipe = recipe_of(folder, planned)
    assert isinstance(recipe.method.heads_to_choose(), PlannedHeads)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    half = outline(recipe_of(folder, {"name": "dex", "w_d_per": "head"})).trainable
    assert outline(recipe).trainable - half == 3 * head_dim**2  # one head more in each of three layers


def test_a_diff_model_is_planned_too(tmp_path: Path) -> None:
    model = tiny_diff_v1()
    seen = plan(recipe_of(config_folder(tmp_path, model), "full"), "h100")
    assert seen.parameters == seen.trainable == sum(p.numel() for p in model.parameters())


class Real(Tracker):
    """The tracker over tensors that have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(func.overloadpacket, args, kwargs or {}, out)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return out


@pytest.mark.parametrize("method", ["dex", "full", "lora", "diff-v1", "galore", "apollo"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_that_of_real_updates(tmp_path: Path, method: str, checkpointing: bool) -> None:
    """The oracle: the same count of live storages over three updates with values, four documents in a block."""
    model = tiny_model("llama")
    recipe = recipe_of(
        config_folder(tmp_path, model), method, run={"micro_batch": 4, "gradient_checkpointing": checkpointing}
    )
    subject = attached(recipe, model)
    optimizer = recipe.method.optimizer(subject.parameter_groups(recipe.run))
    if checkpointing:
        subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    subject.model.train()
    ids = tokens(4, BLOCK)
    positions = torch.arange(BLOCK // 4).repeat(4).expand_as(ids).contiguous()
    with Real() as tracker:
        tracker.count_as("frozen", [*subject.model.parameters(), *subject.model.buffers(), ids, positions])
        for step in range(3):
            if step == 2 and "update_proj_gap" in optimizer.param_groups[0]:
                for group in optimizer.param_groups:
                    group["step"] = 199  # the next projection is at 200
            causal_lm_loss(subject.model, ids, ids, 4.0 * (BLOCK - 1), position_ids=positions).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert plan(recipe, "h100").memory.peak == pytest.approx(tracker.peak.total(), rel=0.01)


def test_the_parts_at_the_peak_sum_up_to_it(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    for processes, sharding in ((1, "none"), (2, "none"), (2, "fsdp")):
        memory = plan(recipe_of(folder), "h100", processes, sharding).memory  # type: ignore[arg-type]
        assert sum(memory.at_peak.values()) == memory.peak


def test_weights_gradients_and_state_have_the_sizes_of_their_dtypes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = config_folder(tmp_path, model)
    base = sum(p.numel() for p in model.parameters())
    made = plan(recipe_of(folder, model={"dtype": "bfloat16"}), "h100")
    assert made.memory.frozen == pytest.approx(2 * base, rel=0.01)  # and a few buffers
    assert made.memory.trained == made.memory.gradients == 4 * made.trainable
    assert made.memory.optimiser == pytest.approx(8 * made.trainable, rel=0.01)  # and its counts of steps


def test_gradients_stay_while_an_update_accumulates(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    at_once = plan(recipe_of(folder, "full", run={"batch_tokens": BLOCK}), "h100").memory
    in_four = plan(recipe_of(folder, "full"), "h100").memory
    assert at_once.at_peak["gradients"] < in_four.at_peak["gradients"] == in_four.gradients
    assert at_once.activations == in_four.activations


def test_checkpointing_and_smaller_batches_need_less(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))

    def activations(**run: Any) -> int:
        return plan(recipe_of(folder, run=run), "h100").memory.activations

    assert activations(micro_batch=4, gradient_checkpointing=True) < activations(micro_batch=4)
    assert activations(micro_batch=1) < activations(micro_batch=4)


def test_quantised_weights_are_small_and_those_that_stay_whole_are_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = config_folder(tmp_path, model)
    whole = plan(recipe_of(folder, "dex", model={"dtype": "bfloat16"}), "h100")
    four = plan(recipe_of(folder, "dex", model={"dtype": "bfloat16", "quantise": "4bit"}), "h100")
    packed = [
        p.numel() for n, p in model.named_parameters() if any(k in n for k in ("q_proj", "gate", "up_", "down_"))
    ]
    saved = whole.memory.frozen - four.memory.frozen
    assert saved == pytest.approx(sum(packed) * (2 - 0.5625), rel=0.001)
    assert (whole.parameters, whole.trainable) == (four.parameters, four.trainable)


def test_the_operations_are_those_of_every_product(tmp_path: Path) -> None:
    """The oracle: 2 for each weight of a projection and token, 4 in the backward pass; 4·T for attention."""
    model = tiny_model("llama")
    made = plan(recipe_of(config_folder(tmp_path, model), "full"), "h100")
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2) + model.lm_head.weight.numel()
    block_tokens, c = made.work.tokens, model.config
    head = model.lm_head.weight.numel()  # of the positions that predict something, one less in a block
    projections = 6 * layers * block_tokens - 6 * head * block_tokens // BLOCK
    forward = 4 * BLOCK * c.hidden_size * c.num_hidden_layers * block_tokens
    assert made.work.total == pytest.approx(projections + 3.5 * forward, rel=0.01)  # backward makes the scores again


def test_processes_share_an_update_and_its_time(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    one, two = (plan(recipe_of(folder), "h100", processes) for processes in (1, 2))
    assert (one.work.accumulation, two.work.accumulation) == (4, 2)
    assert two.work.flops == one.work.flops
    assert two.devices[0].seconds == pytest.approx(one.devices[0].seconds / 2)
    assert two.memory.communication == two.memory.gradients
    with pytest.raises(DexError, match="3 processes does not divide the 4 blocks"):
        plan(recipe_of(folder), "h100", 3)


def test_fsdp_divides_what_stays(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    whole, shared = plan(recipe_of(folder, "full"), "h100"), plan(recipe_of(folder, "full"), "h100", 4, "fsdp")
    for part in ("trained", "gradients", "optimiser"):
        assert getattr(shared.memory, part) == -(-getattr(whole.memory, part) // 4)
    assert shared.memory.communication > 0


def test_what_does_not_fit_comes_with_one_sentence_of_advice(tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=64)
    model.config.num_hidden_layers, model.config.intermediate_size = 2, 2**22
    made = plan(recipe_of(config_folder(tmp_path, model), "full"), "rtx-3090")
    (fit,) = made.devices
    assert not fit.fits
    assert fit.advice is not None
    assert "does not fit" in fit.advice
    assert "rtx-3090" in fit.advice
    assert fit.advice in describe(made)
    assert all(each.advice is None or not each.fits for each in plan(recipe_of(tmp_path)).devices)


def test_the_file_of_the_result_has_the_planned_size(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for method in ("dex", "lora", "full"):
        recipe = recipe_of(config_folder(tmp_path / method, tiny_model("llama")), method)
        files = plan(recipe, "h100").files
        subject = attached(recipe, tiny_model("llama"))
        for name, buffer in subject.model.named_buffers():
            if ".dex_step." in name:
                buffer += 1  # of an untrained adapter the copies are left out
        subject.save_checkpoint(str(tmp_path / method / "out"), None)
        (written,) = (tmp_path / method / "out").glob("*.safetensors")
        assert written.stat().st_size == pytest.approx(files.result, abs=10_000)  # the header
    save_file({n: p.detach() for n, p in model.named_parameters()}, tmp_path / "base.safetensors")
    folded = plan(recipe_of(tmp_path / "dex"), "h100").files.folded
    assert (tmp_path / "base.safetensors").stat().st_size == pytest.approx(folded, abs=10_000)


def test_kept_checkpoints_are_no_more_than_are_written(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    once = plan(recipe_of(folder), "h100").files
    often = plan(recipe_of(folder, run={"save_every": 4 * BLOCK, "keep_last": 3}), "h100").files
    assert (once.checkpoints, often.checkpoints) == (once.checkpoint, 3 * once.checkpoint)
    assert once.tokens == 5 * POOL_TOKENS  # of a single source there is a pool to draw from


@pytest.mark.parametrize("family", [*FAMILIES, "diff-v1"])
def test_a_model_is_planned_by_its_config(tmp_path: Path, family: str) -> None:
    """The oracle of the cache: what a real one holds."""
    model = tiny_diff_v1() if family == "diff-v1" else tiny_model(family)
    made = plan_model(str(config_folder(tmp_path, model)))
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert made.weights["float32"] == 4 * made.parameters
    with torch.no_grad():
        layers = model(tokens(1, 10), use_cache=True).past_key_values.layers
    real = sum(t.numel() * t.itemsize for layer in layers for t in (layer.keys, layer.values))
    assert made.kv_cache["float32"] == 100 * real == 2 * made.kv_cache["bfloat16"]


def test_no_weights_are_read_and_none_are_made(tmp_path: Path) -> None:
    """Eight billion parameters in a folder that has a config and nothing else."""
    model = tiny_model("llama")
    c = model.config
    c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers = 128_256, 4_096, 14_336, 32
    c.num_attention_heads, c.num_key_value_heads, c.head_dim = 32, 8, 128
    made = plan_model(str(config_folder(tmp_path, model)))
    assert made.parameters == 8_030_261_248
    assert made.kv_cache["bfloat16"] == 1_000 * 2 * 32 * 8 * 128 * 2


def test_a_device_that_is_not_known_is_named_with_those_that_are(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, tiny_model("llama"))
    with pytest.raises(DexError, match=r"no device 'h1000' .* h200, h100"):
        plan(recipe_of(folder), "h1000")
    with pytest.raises(DexError, match="sharding 'zero9' is not known"):
        plan(recipe_of(folder), "h100", sharding="zero9")  # type: ignore[arg-type]


def test_the_command_prints_a_table_or_one_json_object(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "model", tiny_model("llama"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_of(folder).to_yaml())
    run = CliRunner()
    table = run.invoke(app, ["plan", str(recipe), "method.train_kvo=false", "--device", "cpu"])
    assert table.exit_code == 0, table.output
    assert "peak" in table.stdout
    as_json = run.invoke(app, ["plan", str(recipe), "--json", "--processes", "2"])
    assert json.loads(as_json.stdout)["work"]["processes"] == 2
    alone = run.invoke(app, ["plan", str(folder), "--json"])
    assert json.loads(alone.stdout)["attention"]["num_heads"] == 4
    assert run.invoke(app, ["plan", str(folder), "--device", "h100"]).exit_code == 2
    assert run.invoke(app, ["plan", str(recipe), "--revision", "main"]).exit_code == 2


def test_memory_is_counted_until_the_last_reference_is_gone() -> None:
    with FakeTensorMode(), Tracker() as tracker:
        a = torch.empty(1_000)
        b = a[:10]  # a view keeps all of it
        del a
        assert tracker.live.total() == 4_000
        c = torch.empty(500)
        del b, c
    assert (tracker.live.total(), tracker.peak.total()) == (0, 6_000)
