"""`dex init`: fresh models with matched parameters, and what cannot be had is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_config, tiny_tokenizer, write_tiny

from dex.errors import DexError
from dex.layouts.fresh import MLP_STEP
from dex.models import ANY, load_model
from dex.verbs.init import init


def files(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["base", "diff-v1", "diff-v2"])
def test_the_seed_decides_the_weights(tmp_path: Path, layout: str) -> None:
    like = str(write_tiny(tmp_path / "like", "qwen3"))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        init(layout, like, tmp_path / name, seed=seed)
    a, b, c = (files(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert not torch.equal(a["model.embed_tokens.weight"], files(tmp_path / "like")["model.embed_tokens.weight"])


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_parameters_are_matched_as_the_papers_match_them(tmp_path: Path, family: str) -> None:
    like = str(write_tiny(tmp_path / "like", family, vocab_size=264))  # Qwen2's tokenizer adds a token
    base = load_model(like).model
    layers, D, width = base.config.num_hidden_layers, base.config.head_dim if family != "qwen2" else 16, 64
    v1 = init("diff-v1", like, tmp_path / "v1")
    v2 = init("diff-v2", like, tmp_path / "v2")
    assert v1["parameters_wanted"] == v2["parameters_wanted"] == base.num_parameters()
    assert v1["parameters"] - base.num_parameters() == layers * (4 * D + 2 * D)  # λ's vectors and the gain
    assert abs(v2["parameters"] - base.num_parameters()) <= layers * 3 * width * MLP_STEP / 2


def test_a_config_file_is_enough_with_a_tokenizer(tmp_path: Path) -> None:
    config = tiny_config("llama", num_attention_heads=8, num_key_value_heads=8)
    config.to_json_file(tmp_path / "small.json")
    with pytest.raises(DexError, match="--tokenizer"):
        init("diff-v1", str(tmp_path / "small.json"), tmp_path / "v1")
    tiny_tokenizer().save_pretrained(tmp_path)
    init("diff-v1", str(tmp_path / "small.json"), tmp_path / "v1")
    assert load_model(str(tmp_path / "v1"), families=ANY).model.config.num_attention_heads == 8
    like = write_tiny(tmp_path / "like")
    (tmp_path / "apart").mkdir()
    config.to_json_file(tmp_path / "apart" / "small.json")
    init("diff-v2", str(tmp_path / "apart" / "small.json"), tmp_path / "v2", tokenizer=str(like))


@pytest.mark.parametrize(
    ("options", "lam"),
    [
        ({"lambda_mode": "fixed", "lambda_value": 0.0}, 0.0),
        ({"lambda_mode": "fixed", "lambda_value": 0.3, "lambda_sign": 1}, 0.3),
        ({"lambda_mode": "fixed"}, 0.2),  # λ_init of layer 0
        ({"head_norm": "off"}, None),
    ],
)
def test_the_controls_of_the_diff_paper_are_options(
    tmp_path: Path, options: dict[str, Any], lam: float | None
) -> None:
    like = str(write_tiny(tmp_path / "like"))
    init("diff-v1", like, tmp_path / "v1", options=options)
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    assert {name: config[name] for name in options} == options
    attention = load_model(str(tmp_path / "v1"), families=ANY).model.model.layers[0].self_attn
    if lam is not None:
        assert attention.lam().item() == pytest.approx(lam)
        assert not any("lambda_" in name for name, _ in attention.named_parameters())
    else:
        assert not hasattr(attention, "subln")


def test_the_hub_gives_config_and_tokenizer_and_no_weights(tmp_path: Path, hub: Any) -> None:
    folder = write_tiny(tmp_path / "like")
    hub.add_model("org/tiny", folder)
    hub.fail("model.safetensors", 500)
    record = init("diff-v2", "org/tiny", tmp_path / "v2")
    assert record["like"]["id"] == "org/tiny"
    assert (tmp_path / "v2" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("layout", "changes", "options", "reason"),
    [
        ("diff-v3", {}, {}, "'diff-v3' is not a layout"),
        ("diff-v1", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, {}, "has 3; take one"),
        ("diffllama", {"num_key_value_heads": 1}, {}, "has 1; take one"),
        ("diff-v2", {"intermediate_size": 16}, {}, "columns of the MLP"),
        ("diff-v2", {}, {"lambda_sign": 1}, "--option is for diff-v1"),
        ("diff-v1", {}, {"head_norm_steps": 5}, "head_norm_steps has no effect"),
        ("diff-v1", {"vocab_size": 100}, {}, "The tokenizer has 260 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, layout: str, changes: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    tiny_config("llama", **changes).to_json_file(tmp_path / "config.json")
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DexError, match=reason):
        init(layout, str(tmp_path / "config.json"), tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_fresh_model_claims_no_weights_of_another(tmp_path: Path, hub: Any) -> None:
    hub.add_model("org/tiny", write_tiny(tmp_path / "like"))
    record = init("diff-v1", "org/tiny", tmp_path / "v1")
    card = (tmp_path / "v1" / "README.md").read_text()
    assert record["like"]["commit"] == hub.commit_of("org/tiny")
    assert "Fresh weights in the size of org/tiny" in card
    assert "base_model" not in card
    assert "local model" not in card


def test_a_quantised_config_is_refused(tmp_path: Path) -> None:
    like = write_tiny(tmp_path / "like")
    values = json.loads((like / "config.json").read_text())
    (like / "config.json").write_text(
        json.dumps({**values, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(DexError, match="is quantised"):
        init("base", str(like), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "no model configuration"),
        ('{"model_type": "bert"}', "type 'bert'"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers of this model is 0"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DexError, match=reason):
        init("diff-v1", str(tmp_path / "bad.json"), tmp_path / "out")


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    like = write_tiny(tmp_path / "like")
    (like / "tokenizer.json").unlink()
    with pytest.raises(DexError, match="has no tokenizer"):
        init("diff-v2", str(like), tmp_path / "out")


def test_qwen3_is_no_diffllama(tmp_path: Path) -> None:
    like = str(write_tiny(tmp_path / "like", "qwen3"))
    with pytest.raises(DexError, match="no norm on queries and keys"):
        init("diffllama", like, tmp_path / "out")


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    like = str(write_tiny(tmp_path / "like"))
    init("base", like, tmp_path / "out")
    with pytest.raises(DexError, match="--force"):
        init("base", like, tmp_path / "out")
    init("diff-v2", like, tmp_path / "out", force=True)
