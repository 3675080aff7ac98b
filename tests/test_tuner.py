"""Dex behaves as a PEFT method: attach, train, save, load, switch, merge."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import FAMILIES, tiny_model, tokens, write_tiny
from transformers import AutoModelForCausalLM

import dex
from dex.layer import apply_branch
from dex.tuner import DexOutput, dex_outputs, set_anneal_steps

BRANCH = {"heads": [[0, 2], [1, 3], [0, 1]]}


def attach(model: Any, adapter: str = "default", **options: Any) -> Any:
    torch.manual_seed(1)
    annealed = {"anneal_steps": 4} if options.get("schedule", "paper") in ("paper", "land") else {}
    config = dex.DexConfig(task_type="CAUSAL_LM", **{**BRANCH, **annealed, **options})
    return get_peft_model(model, config, adapter_name=adapter)


def train(model: Any, steps: int = 3, lr: float = 1e-2) -> Any:
    """A bare loop, as a user would write it."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        ids = tokens(seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(seed=99), **inputs).logits


def randomise_adapter(model: Any) -> Any:
    """Move every adapter tensor away from where it starts, λ and t included."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".dex_" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        for layer in dex_outputs(model):
            for step in layer.dex_step.values():
                step.fill_(3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("schedule", ["paper", "land"])
def test_attached_model_equals_base_exactly_at_the_start(family: str, attention: str, schedule: str) -> None:
    base = tiny_model(family, attn_implementation=attention)
    expected = logits(base)
    assert torch.equal(logits(attach(base, schedule=schedule)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_base_gets_float32_copies_and_is_unchanged_at_the_start(dtype: torch.dtype) -> None:
    base = tiny_model("qwen2", dtype=dtype)
    expected = logits(base)
    model = attach(base)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}
    assert torch.equal(logits(model), expected)


def test_zero_w_d_with_a_fixed_lambda_starts_as_the_base() -> None:
    base = tiny_model("llama")
    expected = logits(base)
    assert torch.equal(logits(attach(base, schedule="fixed", w_d_init="zeros")), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_attached_forward_is_the_papers_equation_on_the_input_of_o_proj(family: str) -> None:
    model = randomise_adapter(attach(tiny_model(family)))
    for layer in dex_outputs(model):
        heads = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(7))
        new = apply_branch(heads, layer.dex_w_d["default"], layer.lam("default"), layer.dex_selected["default"])
        expected = torch.nn.functional.linear(
            new,
            layer.dex_weight["default"],
            layer.dex_bias.get("default"),
        )
        torch.testing.assert_close(layer(heads), expected)


def kinds(model: Any) -> set[str]:
    """'k_proj.dex_weight', … of everything that trains."""
    names = [name.removesuffix(".default").split(".") for name, p in model.named_parameters() if p.requires_grad]
    return {".".join(name[-2:]) for name in names}


KVO = {"k_proj.dex_weight", "v_proj.dex_weight", "o_proj.dex_weight"}


def test_trained_set_is_exactly_k_v_o_w_d_and_lambda() -> None:
    assert kinds(attach(tiny_model("llama"))) == KVO | {"o_proj.dex_w_d", "o_proj.dex_lam"}


def test_biases_of_k_and_v_train_with_them() -> None:
    biases = {"k_proj.dex_bias", "v_proj.dex_bias"}
    assert kinds(attach(tiny_model("qwen2"))) == KVO | biases | {"o_proj.dex_w_d", "o_proj.dex_lam"}


def test_adapter_alone_trains_only_w_d_and_lambda() -> None:
    assert kinds(attach(tiny_model("llama"), train_kvo=False)) == {"o_proj.dex_w_d", "o_proj.dex_lam"}


def test_schedule_off_trains_k_v_o_alone() -> None:
    assert kinds(attach(tiny_model("llama"), schedule="off")) == KVO


def test_a_constant_lambda_is_not_trained() -> None:
    assert kinds(attach(tiny_model("llama"), schedule="fixed", w_d_init="zeros")) == KVO | {"o_proj.dex_w_d"}


def test_a_subset_of_layers_restricts_k_v_and_o_alike() -> None:
    model = attach(tiny_model("llama"), layers_to_transform=[1])
    layers = {name.split("layers.")[1][0] for name, p in model.named_parameters() if p.requires_grad}
    assert layers == {"1"}


def test_all_heads_are_selected_without_a_plan() -> None:
    model = get_peft_model(tiny_model("qwen3"), dex.DexConfig())
    assert all(torch.equal(o.dex_selected["default"], torch.ones(4)) for o in dex_outputs(model))


@pytest.mark.parametrize("options", [{}, {"train_kvo": False}, {"schedule": "off"}, {"layers_to_transform": 2}])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_only_the_trained_set_moves_and_all_of_it_does(family: str, options: dict[str, Any]) -> None:
    model = attach(tiny_model(family), **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # A key bias adds the same to every logit of a query before rotary; with rotary it does train.
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_bfloat16_base_moves_at_small_learning_rates() -> None:
    model = attach(tiny_model("llama", dtype=torch.bfloat16))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    train(model, steps=20, lr=1e-5)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def test_unselected_heads_feel_no_branch() -> None:
    model = attach(tiny_model("llama"), train_kvo=False)
    train(model)
    for layer in dex_outputs(model):
        weight = layer.projection("default")[0].unflatten(1, (4, -1))
        base = layer.base_layer.weight.unflatten(1, (4, -1))
        for head in range(4):
            unchanged = torch.equal(weight[:, head], base[:, head])
            assert unchanged == (layer.dex_selected["default"][head] == 0)


def test_saved_adapter_loads_with_its_annealing_state(tmp_path: Path) -> None:
    write_tiny(tmp_path / "base", "qwen2")
    model = train(attach(AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert {layer.dex_step["default"].item() for layer in dex_outputs(loaded)} == {3}
    assert torch.equal(logits(loaded), logits(model))
    assert not any(p.requires_grad for p in loaded.parameters())


def test_transformers_loads_the_adapter_folder_directly(tmp_path: Path) -> None:
    write_tiny(tmp_path / "base", "llama")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model = train(attach(base))
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.bfloat16)
    saved = {n: p for n, p in model.get_base_model().named_parameters() if "dex_" in n}
    assert saved
    for name, parameter in loaded.named_parameters():
        if name in saved:
            assert torch.equal(parameter, saved[name]), name
    assert torch.equal(logits(loaded), logits(model))


def test_untrained_adapter_carries_no_copy_of_base_weights_and_still_loads(tmp_path: Path) -> None:
    write_tiny(tmp_path / "base", "qwen2")
    model = attach(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.rsplit(".", 1)[1] for name in saved} == {"dex_w_d", "dex_lam", "dex_step"}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert torch.equal(logits(loaded), logits(model))
    train(loaded)
    assert not torch.equal(logits(loaded), logits(model))


def test_adapter_loads_through_the_meta_device(tmp_path: Path) -> None:
    """Buffers made in __init__ would come back as garbage, and copies that were not saved as nothing."""
    for steps in (0, 3):
        model = attach(tiny_model("qwen2"))
        if steps:
            train(model, steps)
        model.save_pretrained(tmp_path / str(steps))
        loaded = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / str(steps), low_cpu_mem_usage=True)
        assert {layer.dex_step["default"].item() for layer in dex_outputs(loaded)} == {steps}
        assert torch.equal(logits(loaded), logits(model))


def test_saving_while_merged_keeps_the_trained_copies(tmp_path: Path) -> None:
    model = train(attach(tiny_model("llama")))
    model.merge_adapter()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("dex_weight" in name for name in saved) == 9


def test_an_adapter_belongs_to_the_weights_it_was_made_on(tmp_path: Path) -> None:
    attach(tiny_model("llama")).save_pretrained(tmp_path)
    PeftModel.from_pretrained(tiny_model("llama", dtype=torch.bfloat16), tmp_path)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(dex.DexError, match="fingerprint"):
        PeftModel.from_pretrained(other, tmp_path)


@pytest.mark.parametrize("change", ["w_d is missing", "a trained copy is missing", "unexpected"])
def test_an_adapter_file_that_does_not_fit_is_refused_with_the_names(tmp_path: Path, change: str) -> None:
    from safetensors.torch import save_file

    train(attach(tiny_model("llama"))).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    saved = load_file(file)
    ending = "v_proj.dex_weight" if "copy" in change else "dex_w_d"
    name = next(n for n in saved if n.endswith(ending))
    tensor = saved.pop(name)
    if change == "unexpected":
        saved[name] = tensor
        name = name.replace("dex_w_d", "dex_bogus")
        saved[name] = tensor.clone()
    save_file(saved, file, metadata={"format": "pt"})
    with pytest.raises(dex.DexError, match=name.split("self_attn")[1]):
        PeftModel.from_pretrained(tiny_model("llama"), tmp_path)


def test_disable_adapter_gives_the_base() -> None:
    base = tiny_model("llama")
    expected = logits(base)
    model = train(attach(base))
    trained = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), trained)
    assert not torch.equal(trained, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_merge_and_unload_gives_a_stock_model_that_computes_the_same(family: str) -> None:
    base = tiny_model(family)
    keys = list(base.state_dict())
    model = randomise_adapter(attach(base))
    expected = logits(model)
    merged = model.merge_and_unload()
    assert type(merged) is type(base)
    assert list(merged.state_dict()) == keys
    assert (logits(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    if merged.config.tie_word_embeddings:
        assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()


def test_merge_is_undone_bit_for_bit() -> None:
    model = randomise_adapter(attach(tiny_model("llama-bias", dtype=torch.bfloat16)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    attached = logits(model)
    model.merge_adapter()
    model.merge_adapter()
    assert not torch.equal(
        before["base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight"],
        model.base_model.model.model.layers[0].self_attn.k_proj.base_layer.weight,
    )
    model.unmerge_adapter()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(logits(model), attached)


def test_two_adapters_stand_side_by_side() -> None:
    base = tiny_model("llama")
    expected = logits(base)
    model = train(attach(base))
    first = logits(model)
    second = dex.DexConfig(task_type="CAUSAL_LM", heads="all", train_kvo=False, schedule="land", anneal_steps=2)
    model.add_adapter("second", second)
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), expected)
    train(model)
    assert {o.dex_step["second"].item() for o in dex_outputs(model)} == {3}
    assert not torch.equal(logits(model), expected)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)


def test_two_adapters_cannot_be_active_at_once() -> None:
    model = attach(tiny_model("llama"))
    model.add_adapter("second", dex.DexConfig(task_type="CAUSAL_LM", anneal_steps=4))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(dex.DexError, match="default, second"):
        logits(model)


def test_a_deepcopy_trains_on_its_own() -> None:
    model = attach(tiny_model("llama"))
    twin = copy.deepcopy(model)
    before = logits(model)
    train(twin)
    assert {o.dex_step["default"].item() for o in dex_outputs(twin)} == {3}
    assert {o.dex_step["default"].item() for o in dex_outputs(model)} == {0}
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(twin), before)


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_gradient_checkpointing_gives_the_same_gradients(checkpointing: dict[str, bool]) -> None:
    def gradients(model: Any) -> dict[str, torch.Tensor]:
        randomise_adapter(model).train()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    plain = gradients(attach(tiny_model("qwen3")))
    model = tiny_model("qwen3")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    again = gradients(attach(model))
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient), name


def test_training_through_the_fold_gives_the_gradients_of_the_plain_form() -> None:
    def loss_and_gradients(plain: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = randomise_adapter(attach(tiny_model("qwen3").double()))
        if plain:
            for layer in dex_outputs(model):
                layer.forward = lambda x, layer=layer: torch.nn.functional.linear(  # type: ignore[method-assign]
                    apply_branch(
                        x,
                        layer.dex_w_d["default"].double(),
                        layer.lam("default").double(),
                        layer.dex_selected["default"],
                    ),
                    layer.dex_weight["default"].double(),
                )
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    loss, folded = loss_and_gradients(plain=False)
    plain_loss, plain = loss_and_gradients(plain=True)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-6)
    for name, gradient in plain.items():
        torch.testing.assert_close(folded[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_generation_equal_the_base_at_the_start(family: str) -> None:
    base = tiny_model(family)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    ask = {
        "input_ids": ids,
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 258,
    }
    dynamic, static = base.generate(**ask), base.generate(**ask, cache_implementation="static")
    model = attach(base)
    assert torch.equal(model.generate(**ask), dynamic)
    assert torch.equal(model.generate(**ask, cache_implementation="static"), static)


def test_attached_model_compiles_without_a_graph_break() -> None:
    model = randomise_adapter(attach(tiny_model("llama")))
    compiled = torch.compile(model.get_base_model().model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model.get_base_model().model(tokens(), use_cache=False).last_hidden_state
        actual = compiled(tokens(), use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, expected)


# Each order is imported in a fork of an interpreter that has none of the three; what they all need takes seconds.
IMPORTS = """
import gc, os, sys, scipy.stats, torch, torch.distributed.fsdp, torch._dynamo, torch._inductor.select_algorithm
assert not {"dex", "peft", "transformers", "accelerate"} & sys.modules.keys()
gc.freeze()
for order in sys.argv[1:]:
    if os.fork() == 0:
        exec(f"import {order}")
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
        assert "DEX" in PEFT_TYPE_TO_TUNER_MAPPING, order
        os._exit(0)
assert [os.wait()[1] for _ in sys.argv[1:]] == [0] * (len(sys.argv) - 1)
"""


def test_importing_dex_in_any_order_registers_it_with_peft() -> None:
    orders = ("dex, peft", "peft, dex", "dex.tuner, peft", "transformers, dex, peft")
    subprocess.run([sys.executable, "-c", IMPORTS, *orders], check=True)


def test_saved_configuration_is_plain_json(tmp_path: Path) -> None:
    attach(tiny_model("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "DEX"
    assert config["heads"] == BRANCH["heads"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "papr"}, "papr"),
        ({"w_d_init": "zero"}, "zero"),
        ({"schedule": "off", "train_kvo": False}, "nothing to train"),
        ({"schedule": "fixed", "lam": 0.0, "w_d_init": "zeros"}, "never trains"),
        ({"schedule": "fixed"}, "kaiming"),
        ({"schedule": "paper", "w_d_init": "zeros", "anneal_steps": 1}, "never leaves 0"),
        ({"lam": 0.5}, "no effect"),
        ({"schedule": "fixed", "w_d_init": "zeros", "anneal_steps": 3}, "no effect"),
        ({"heads": [[], [], []]}, "nothing to act on"),
        ({"layers_to_transform": [0], "heads": [[], [1], [2]]}, "nothing to act on"),
        ({"target_modules": ["q_proj"]}, "cannot be chosen"),
        ({"anneal_steps": 0}, "anneal_steps=0"),
        ({"heads": [[0], [1]]}, "2 lists, but the model has 3 layers"),
        ({"heads": [[0], [1], [4]]}, "heads 0 to 3"),
        ({"heads": [[0], [1], [1, 1]]}, "layer 2"),
        ({"heads": "no-such-plan.json"}, "no-such-plan.json"),
        ({"layers_to_transform": [3]}, "layers 0 to 2"),
    ],
)
def test_settings_that_cannot_work_are_refused_naming_both_sides(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dex.DexError, match=said):
        attach(tiny_model("llama"), **options)


def test_training_without_an_annealing_length_is_refused() -> None:
    model = attach(tiny_model("llama"), anneal_steps=None)
    with pytest.raises(dex.DexError, match="anneal_steps"):
        train(model)
    set_anneal_steps(model, "default", 5)
    train(model)


def test_branch_ratio_is_the_papers() -> None:
    model = randomise_adapter(attach(tiny_model("llama")))
    layer = dex_outputs(model)[0]
    assert isinstance(layer, DexOutput)
    heads = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.cat([heads[..., 0:16], heads[..., 32:48]])  # heads 0 and 2
    expected = (layer.lam("default") * (chosen @ layer.dex_w_d["default"])).norm() / chosen.norm()
    torch.testing.assert_close(layer.branch_ratio(heads), expected.detach())
