"""`dex fold`: a stock folder, proved by a fresh process without dex."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import move_trainables, tiny_tokenizer, tokens, write_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import dex
from dex.adapter import save_adapter
from dex.agreement import agreement
from dex.errors import DexError
from dex.models import load_model
from dex.tuner import dex_outputs
from dex.verbs import fold as module
from dex.verbs.fold import fold


def trained_adapter(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """An adapter folder whose every tensor has moved away from where it starts."""
    base = load_model(str(write_tiny(folder / "base", family, dtype=dtype)))
    config = dex.DexConfig(task_type="CAUSAL_LM", heads=[[0, 2], [1], [0, 1, 3]], anneal_steps=4)
    config.base_model_name_or_path = base.source.id
    model = get_peft_model(base.model, config)
    move_trainables(model, 3)
    for layer in dex_outputs(model):
        layer.dex_step["default"].fill_(3)
    save_adapter(model, base, folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3"])
def test_folded_folder_is_stock_and_certified(tmp_path: Path, family: str) -> None:
    certificate = fold(str(trained_adapter(tmp_path, family)), tmp_path / "folded")
    measured = certificate["folded_against_attached"]
    assert measured["max_logit_difference"] <= 1e-4 * measured["largest_logit"]
    assert certificate == json.loads((tmp_path / "folded" / "certificate.json").read_text())
    assert certificate["loaded_without_dex"]
    assert_stock(tmp_path / "base", tmp_path / "folded")


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_low_precision_fold_is_held_to_the_rounding_of_its_base(tmp_path: Path, dtype: torch.dtype) -> None:
    certificate = fold(str(trained_adapter(tmp_path, "qwen2", dtype)), tmp_path / "folded")
    rounding, measured = certificate["rounding_of_the_base"], certificate["folded_against_attached"]
    assert rounding["kl"] > 0
    assert measured["kl"] <= rounding["kl"]
    assert measured["top1_agreement"] >= rounding["top1_agreement"]
    assert_stock(tmp_path / "base", tmp_path / "folded")


def assert_stock(base: Path, folded: Path) -> None:
    """Same class, config, keys, shapes, dtypes, tokenizer, chat template and generation config as the base."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, folded)]
    assert configs[0] == configs[1]
    with safe_open(base / "model.safetensors", "pt") as a, safe_open(folded / "model.safetensors", "pt") as b:
        assert set(a.keys()) == set(b.keys())
        for name in a.keys():  # noqa: SIM118
            before, after = a.get_tensor(name), b.get_tensor(name)
            assert (before.shape, before.dtype) == (after.shape, after.dtype)
            trained = any(part in name for part in ("k_proj", "v_proj", "o_proj"))
            assert torch.equal(before, after) != trained, name
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (base, folded)]
    assert tokenizers[0].backend_tokenizer.to_str() == tokenizers[1].backend_tokenizer.to_str()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    generation = [GenerationConfig.from_pretrained(folder) for folder in (base, folded)]
    assert generation[0] == generation[1]
    assert generation[0].eos_token_id == [257, 258]


def test_folded_model_generates_what_the_attached_one_does(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    fold(str(adapter), tmp_path / "folded")
    folded = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    attached = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter)
    ask = {"input_ids": tokens(1), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 258}
    assert torch.equal(folded.generate(**ask), attached.generate(**ask))
    assert AutoTokenizer.from_pretrained(tmp_path / "folded")("ab").input_ids == tiny_tokenizer()("ab").input_ids


def test_folding_a_folded_models_new_adapter_again_works(tmp_path: Path) -> None:
    fold(str(trained_adapter(tmp_path / "once")), tmp_path / "folded")
    again = tmp_path / "twice"
    again.mkdir()
    base = load_model(str(tmp_path / "folded"))
    model = get_peft_model(base.model, dex.DexConfig(task_type="CAUSAL_LM", schedule="land", anneal_steps=1))
    model.peft_config["default"].base_model_name_or_path = base.source.id
    for layer in dex_outputs(model):
        layer.dex_step["default"].fill_(5)
    save_adapter(model, base, again / "adapter")
    assert fold(str(again / "adapter"), again / "folded")["passed"]


def test_a_fold_that_is_not_the_attached_model_fails_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.save_model

    def with_one_weight_off(model: Any, *rest: Any) -> None:
        model.model.layers[1].self_attn.o_proj.weight.data[0, 0] += 0.5
        original(model, *rest)

    monkeypatch.setattr(module, "save_model", with_one_weight_off)
    with pytest.raises(dex.DexError, match="not the attached one"):
        fold(str(trained_adapter(tmp_path)), tmp_path / "folded")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_agree_with_nothing(value: float) -> None:
    logits = torch.full((2, 3), value)
    with pytest.raises(DexError, match="not finite"):
        agreement(iter([(logits, logits)]))


def test_agreement_of_known_logits() -> None:
    a = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    same = agreement(iter([(a, a.clone())]))
    assert (same.max_logit_difference, same.largest_logit, same.kl, same.top1_agreement) == (0.0, 3.0, 0.0, 1.0)
    b = a.clone()
    b[1] = torch.tensor([0.0, 4.0, 0.0])
    moved = agreement(iter([(a[:1], b[:1]), (a[1:], b[1:])]))
    p, q = a[1].double().softmax(-1), b[1].double().softmax(-1)
    assert moved.max_logit_difference == 4.0
    assert moved.kl == pytest.approx(((p * (p / q).log()).sum() / 2).item())
    assert moved.top1_agreement == 0.5


def test_a_quantised_base_is_refused_before_any_work(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(dex.DexError, match="quantised"):
        fold(str(adapter), tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize("fault", ["not an adapter", "another method", "truncated", "base is gone"])
def test_what_cannot_be_folded_is_refused_in_one_sentence(tmp_path: Path, fault: str) -> None:
    adapter = trained_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    expected = {
        "not an adapter": "not an adapter",
        "another method": "IA3",
        "truncated": "cannot",
        "base is gone": "base",
    }
    if fault == "not an adapter":
        (adapter / "adapter_config.json").unlink()
    elif fault == "another method":
        from peft import IA3Config

        IA3Config(base_model_name_or_path="x").save_pretrained(adapter)
    elif fault == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        shutil.rmtree(tmp_path / "base")
    with pytest.raises(dex.DexError, match=expected[fault]):
        fold(str(adapter), tmp_path / "folded")
    assert not (tmp_path / "folded").exists()


def test_an_adapter_of_other_shapes_is_refused(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    file = adapter / "adapter_model.safetensors"
    saved = load_file(file)
    name = next(n for n in saved if n.endswith("k_proj.dex_weight"))
    saved[name] = saved[name][:-1].contiguous()
    save_file(saved, file, metadata={"format": "pt"})
    with pytest.raises(dex.DexError, match="cannot be put on"):
        fold(str(adapter), tmp_path / "folded")


def test_an_output_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "folded").mkdir()
    (tmp_path / "folded" / "mine.txt").write_text("mine")
    with pytest.raises(dex.DexError, match="--force"):
        fold("whatever", tmp_path / "folded")
    assert (tmp_path / "folded" / "mine.txt").read_text() == "mine"


def test_force_replaces_only_a_folder_that_fold_wrote(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    with pytest.raises(dex.DexError, match=r"certificate\.json"):
        fold(str(adapter), adapter, force=True)
    assert (adapter / "adapter_config.json").exists()


def test_an_adapter_is_not_folded_into_other_weights_than_its_bases(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    shutil.rmtree(tmp_path / "base")
    write_tiny(tmp_path / "base", seed=8)
    with pytest.raises(dex.DexError, match="fingerprint"):
        fold(str(adapter), tmp_path / "folded")


def test_the_cards_name_no_local_path_as_base_model(tmp_path: Path) -> None:
    adapter = trained_adapter(tmp_path)
    fold(str(adapter), tmp_path / "folded")
    for folder in (adapter, tmp_path / "folded"):
        front_matter = (folder / "README.md").read_text().split("---")[1]
        assert "base_model" not in front_matter
    assert "import dex" in (adapter / "README.md").read_text()
