"""dex export gguf: transformers, gguf's own reader and llama.cpp, if it is there, read back what was written."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from forked import Dex, run_dex
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_diff_v2, tiny_model, tokens, write_tiny
from tiny_tokenizers import TEMPLATE, TEXT, byte_level, sentencepiece
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dex.cards.front_matter import glean_front_matter
from dex.errors import DexError
from dex.gguf.check import PROMPTS
from dex.gguf.metadata import write_metadata
from dex.gguf.sentencepiece import token_scores
from dex.gguf.tensors import encode, interleave_rows, rounded
from dex.gguf.tokenizer import Vocabulary, read_vocabulary
from dex.gguf.types import F32, TYPES
from dex.models import load_model
from dex.verbs.export_gguf import export_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-bias": {"family": "llama-bias", "mlp_bias": True},
    "llama-3": {"family": "llama", "rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
}
READ_BY_TRANSFORMERS = ("llama", "llama-tied", "qwen2", "qwen3")
has_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama.cpp is not installed")


def write(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str = "llama", **changes: Any) -> Path:
    """A tiny model with three rows more than the tokenizer has tokens, as published embeddings have."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = tiny_model(family, **{"vocab_size": len(tokenizer) + 3, **special, **changes})
    model.generation_config.eos_token_id = [special["bos_token_id"], special["eos_token_id"]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def export(folder: Path, dtype: str = "f32", **options: Any) -> tuple[Path, dict[str, Any]]:
    file = folder.with_name(f"{folder.name}-{dtype}.gguf")
    return file, export_gguf(folder, file, dtype=dtype, **options)


def refusal(folder: Path, output: Path | None = None, **options: Any) -> str:
    output = output or folder.with_name("refused.gguf")
    before = output.read_bytes() if output.is_file() else None
    with pytest.raises(DexError) as error:
        export_gguf(folder, output, **options)
    message = str(error.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert (output.read_bytes() if output.is_file() else None) == before
    assert not list(folder.parent.glob(".*partial*"))
    return message


def metadata(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


@pytest.fixture(autouse=True, scope="module")
def _fewer_tokens() -> Iterator[None]:
    """What is compared after each of some twenty exports, in a second less each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dex.gguf.check.PROMPTS", PROMPTS[:2])
        patch.setattr("dex.gguf.check.NEW_TOKENS", 4)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level("gpt-2")


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> dict[str, tuple[Path, Path, dict[str, Any]]]:
    """Every kind of model: its folder, its float32 file and what the command said."""
    made = {}
    for name, changes in MODELS.items():
        folder = write(tmp_path_factory.mktemp("models") / name, tokenizer, **changes)
        made[name] = (folder, *export(folder))
    return made


# Read back by transformers


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_a_float32_file_gives_the_folders_logits(exported: dict[str, Any], name: str) -> None:
    folder, file, result = exported[name]
    read, model = load_model(str(file)), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(tokens()).logits
        torch.testing.assert_close(read.model(tokens()).logits, expected, rtol=0, atol=1e-6 * expected.abs().max())
    assert result["architecture"] == read.model.config.model_type == model.config.model_type
    assert read.model.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert ("output.weight" in tensors(file)) != model.config.tie_word_embeddings
    assert result["checked"]["read_back_by"] == "transformers"
    assert result["checked"]["tensors_equal"] == len(dict(model.named_parameters()))
    assert result["checked"]["prompts_with_the_folders_tokens"] == result["checked"]["prompts"]
    for text in TEXT:
        assert read.tokenizer(text).input_ids == AutoTokenizer.from_pretrained(folder)(text).input_ids


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_matrices_are_rounded_and_norms_and_biases_are_not(exported: dict[str, Any], dtype: str) -> None:
    folder = exported["qwen2"][0]
    file, result = export(folder, dtype)
    stored, whole = tensors(file), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        assert tensor.tensor_type == (TYPES[dtype].matrices if len(tensor.shape) == 2 else F32), name
    assert np.array_equal(stored["blk.1.attn_k.bias"].data, whole["model.layers.1.self_attn.k_proj.bias"].numpy())
    weight = whole["model.layers.2.mlp.up_proj.weight"].numpy()
    read = gguf.dequantize(stored["blk.2.ffn_up.weight"].data, TYPES[dtype].matrices)
    largest = np.abs(weight).reshape(len(weight), -1, 32).max(-1).repeat(32, -1)
    if dtype == "f16":
        assert np.array_equal(read, weight.astype(np.float16).astype(np.float32))
    else:  # half a step of a 127th of the block's largest, and the scale's own rounding
        assert (np.abs(read - weight) <= largest * (0.5 / 127 + 2**-11)).all()
        assert not np.array_equal(read, weight)
    assert result["type"] == dtype
    assert metadata(file)["general.file_type"] == {"f16": 1, "q8_0": 7}[dtype]
    assert 0 <= result["checked"]["prompts_with_the_folders_tokens"] <= result["checked"]["prompts"]


def test_a_bfloat16_folder_is_written_exactly_as_float32(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = write(tmp_path / "m", tokenizer, dtype=torch.bfloat16)
    file, _ = export(folder)
    weight = load_file(folder / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    assert np.array_equal(tensors(file)["blk.0.attn_v.weight"].data, weight.float().numpy())


def test_a_sharded_folder_gives_the_same_file(tmp_path: Path, exported: dict[str, Any]) -> None:
    folder, file, _ = exported["llama"]
    sharded = tmp_path / "llama"
    shutil.copytree(folder, sharded)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    again, _ = export(sharded)
    assert again.read_bytes() == file.read_bytes()


# What transformers does not read from GGUF


def test_llama_3s_rope_scaling_becomes_the_factors_of_its_paper(exported: dict[str, Any]) -> None:
    _, file, result = exported["llama-3"]
    expected = []
    for index in range(16):  # as Llama 3.1's authors have it, frequency by frequency
        wavelength = 2 * math.pi * 500000.0 ** (2 * index / 32)
        if wavelength < 64 / 4.0:
            expected.append(1.0)
        elif wavelength > 64 / 1.0:
            expected.append(32.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append(1 / ((1 - smooth) / 32.0 + smooth))
    assert 1.0 < expected[np.searchsorted(expected, 1.5)] < 32.0  # a frequency in between is among them
    np.testing.assert_allclose(tensors(file)["rope_freqs.weight"].data, expected, rtol=1e-5)
    assert "RoPE scaling" in result["checked"]["read_back_by"]


def test_biases_of_a_llama_are_all_there_in_llama_cpps_order(exported: dict[str, Any]) -> None:
    folder, file, result = exported["llama-bias"]
    stored, whole = tensors(file), load_file(folder / "model.safetensors")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        assert f"blk.2.{name}.bias" in stored
    bias = whole["model.layers.2.self_attn.k_proj.bias"].reshape(2, 16)  # [KV heads, head_dim]
    expected = [head[offset + half] for head in bias for offset in range(8) for half in (0, 8)]
    assert stored["blk.2.attn_k.bias"].data.tolist() == [value.item() for value in expected]
    assert "a Llama's biases" in result["checked"]["read_back_by"]


@has_llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_folders_logits(exported: dict[str, Any], name: str) -> None:
    import llama_cpp

    folder, file, _ = exported[name]
    ids = tokens(1, 90)  # longer than the 64 positions that the scaled RoPE was stretched from
    engine = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, type_k=0, type_v=0, logits_all=True, verbose=False)
    engine.eval(ids[0].tolist())
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0].numpy()
    np.testing.assert_allclose(engine.scores[:90], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    engine.close()


# Metadata


def test_sizes_names_and_ends_of_text_are_in_the_file(exported: dict[str, Any]) -> None:
    folder, file, _ = exported["qwen3"]
    config, found = AutoConfig.from_pretrained(folder), metadata(file)
    assert {
        "general.name": "qwen3",
        "general.type": "model",
        "qwen3.context_length": 512,
        "qwen3.block_count": 3,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
        "qwen3.rope.dimension_count": 32,
        "qwen3.rope.freq_base": config.rope_parameters["rope_theta"],
        "qwen3.vocab_size": config.vocab_size,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.ggml.eot_token_id": config.bos_token_id,  # the other one of generation_config.json
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }.items() <= found.items()
    assert found["qwen3.attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    added, padding = found["tokenizer.ggml.tokens"][-7:-3], found["tokenizer.ggml.tokens"][-3:]
    assert added == ["<bos>", "<eos>", "<pad>", "<|user|>"]
    assert padding == [f"[PAD{index}]" for index in range(config.vocab_size - 3, config.vocab_size)]
    assert found["tokenizer.ggml.token_type"][-7:] == [3, 3, 3, 3, 5, 5, 5]  # control, then unused


def test_licence_and_base_come_from_the_card(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = write(tmp_path / "m", tokenizer)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/Base-1B\n---\n# A model\n")
    file, _ = export(folder, name="My model")
    assert {
        "general.name": "My model",
        "general.license": "apache-2.0",
        "general.base_model.count": 1,
        "general.base_model.0.name": "Base-1B",
        "general.base_model.0.organization": "org",
    }.items() <= metadata(file).items()


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (b"license: mit\nlanguage: zh-Hant\nbase_model: 3\nwidget:\n- text: yes\n", {"license": "mit"}),
        (b"license: null\nlicense_name: [a, b]\nbase_model: [null, a/b]\n", {"base_model.count": 1}),
        (b'license: [mit]\nlicense_link: "\\ud800"\n', {"license": "mit"}),
        (b"license: [\n", {}),
        (b"license: \xff\n", {}),
    ],
)
def test_an_odd_card_keeps_no_model_from_its_file(tmp_path: Path, card: bytes, said: dict[str, Any]) -> None:
    (tmp_path / "README.md").write_bytes(b"---\n" + card + b"---\n")
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    write_metadata(writer, tiny_config("llama"), "f32", "m", glean_front_matter(tmp_path))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = {name: value for name, value in metadata(file).items() if "license" in name or "base_model.count" in name}
    assert found == {f"general.{name}": value for name, value in said.items()}


# Tokenizers


SAMPLES = (
    *TEXT[:4],
    "'Ll I'LL we'Ve  two  spaces\t\ttabs \r\n\n x 12345 12 1 3.14159",
    "<|user|>hi<eos> there",
    "😀👩‍👩‍👧 ٣٤٥ Ⅳ ñ",
    "  lead",
)


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
def test_each_pre_tokenizer_is_known_by_its_name(tmp_path: Path, kind: str) -> None:
    tokenizer = byte_level(kind, adds_bos=kind == "llama-bpe")
    file, result = export(write(tmp_path / "m", tokenizer))
    found = metadata(file)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", kind)
    assert found["tokenizer.ggml.add_bos_token"] == (kind == "llama-bpe")
    assert bool(result["notes"]) == (kind == "qwen2")  # NFC
    compare_with_llama_cpp(file, tokenizer)


def test_a_sentencepiece_tokenizer_becomes_scores(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    file, result = export(write(tmp_path / "m", tokenizer, pad_token_id=None))
    found = metadata(file)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.add_bos_token"]) == ("llama", True)
    assert found["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # unknown, two controls, the first byte
    assert result["notes"] == []
    read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert read(TEXT[0]).input_ids == tokenizer(TEXT[0]).input_ids
    compare_with_llama_cpp(file, tokenizer)


def read(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Vocabulary:
    """The vocabulary of a tokenizer whose tokenizer.json has other parts."""
    parts = {**json.loads(tokenizer.backend_tokenizer.to_str()), **changes}
    backend = Tokenizer.from_str(json.dumps(parts))
    special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token")}
    changed = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    return read_vocabulary(changed, tiny_config("llama", vocab_size=len(changed)), [], "it")


def test_where_llama_cpps_sentencepiece_differs_is_said_or_refused() -> None:
    tokenizer = sentencepiece()
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    assert read(tokenizer).notes == ()
    assert "space" in read(tokenizer, normalizer=None, pre_tokenizer=metaspace).notes[0]
    with pytest.raises(DexError, match="treats spaces"):
        read(tokenizer, normalizer=None, pre_tokenizer={**metaspace, "split": True})
    with pytest.raises(DexError, match="never joins"):
        read(tokenizer, model={**bpe, "merges": bpe["merges"][1:]})


def test_scores_are_the_order_of_the_merges_where_there_is_one() -> None:
    tokens = ["<unk>", "a", "b", "c", "d", "ad", "bc", "ab", "abc"]
    types = [int(gguf.TokenType.UNKNOWN)] + 8 * [int(gguf.TokenType.NORMAL)]
    ordered = [["a", "b"], ["b", "c"], ["ab", "c"], ["a", "bc"], ["a", "d"]]
    scores = dict(zip(tokens, token_scores({"merges": ordered}, tokens, types, "it"), strict=True))
    assert sorted(["ad", "bc", "ab", "abc"], key=scores.__getitem__, reverse=True) == ["ab", "bc", "abc", "ad"]
    mixed = [*ordered[:3], ordered[4], ordered[3]]  # abc, ad, abc
    with pytest.raises(DexError, match="are mixed"):
        token_scores({"merges": mixed}, tokens, types, "it")


def test_ends_of_text_are_the_tokenizers_own_first(tokenizer: PreTrainedTokenizerFast) -> None:
    config = tiny_config("llama", vocab_size=len(tokenizer))
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id

    def ends(*given: int) -> list[int | None]:
        special = read_vocabulary(tokenizer, config, list(given), "it").special
        return [special.get(name) for name in ("eos", "eot", "eom")]

    assert ends(pad, bos, eos, pad) == [eos, pad, bos]
    assert ends(pad) == [pad, None, None]  # generation does not stop at the tokenizer's own
    with pytest.raises(DexError, match="places for three"):
        ends(0, 1, 2, 3)


def compare_with_llama_cpp(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        return
    import llama_cpp

    engine = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text in SAMPLES:
        assert engine.tokenize(text.encode(), add_bos=True, special=True) == tokenizer(text).input_ids, text
    engine.close()


def test_a_pre_tokenizer_of_no_known_name_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level("gpt-2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    message = refusal(write(tmp_path / "m", tokenizer))
    assert "Punctuation" in message
    assert "llama-bpe, qwen2, smollm, gpt-2" in message


def test_whole_words_before_merges_must_be_llama_cpps_choice_where_it_matters(tmp_path: Path) -> None:
    same = byte_level("llama-bpe", ignore_merges=False)  # every token here is what its merges give
    assert export(write(tmp_path / "same", same))[1]["tokenizer"]["pre"] == "llama-bpe"
    parts = json.loads(same.backend_tokenizer.to_str())
    parts["model"]["vocab"]["zzzz"] = len(same)  # and this one is not
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)),
        bos_token="<bos>",
        eos_token="<eos>",
    )
    assert "'zzzz'" in refusal(write(tmp_path / "other", other, pad_token_id=None))


def test_tokenizers_that_gguf_cannot_say_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = write(tmp_path / "m", tokenizer)
    whole = (folder / "tokenizer.json").read_text()

    def changed(**changes: Any) -> str:
        (folder / "tokenizer.json").write_text(json.dumps({**json.loads(whole), **changes}))
        return refusal(folder)

    bpe = json.loads(whole)["model"]
    added = json.loads(whole)["added_tokens"]
    assert "no merges" in changed(model={**bpe, "merges": []})
    assert "end_of_word_suffix" in changed(model={**bpe, "end_of_word_suffix": "</w>"})
    assert "Lowercase" in changed(normalizer={"type": "Lowercase"})
    assert "'<|user|>'" in changed(added_tokens=[*added[:-1], {**added[-1], "lstrip": True}])
    (folder / "tokenizer.json").write_text(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": len(tokenizer) - 1}))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][: len(tokenizer) - 1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "resize the embedding" in refusal(folder)


# Refusals


def test_models_that_llama_cpp_would_run_as_others_are_refused(tmp_path: Path) -> None:
    tiny_diff_v2().save_pretrained(tmp_path / "diff")
    assert "DIFF model (diff_v2)" in refusal(tmp_path / "diff")
    assert "sliding-window" in refusal(write_tiny(tmp_path / "sliding", "qwen2-sliding"))
    assert "bias of o_proj" in refusal(write_tiny(tmp_path / "bias", "qwen3", attention_bias=True))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    assert "'yarn'" in refusal(write_tiny(tmp_path / "yarn", "qwen2", rope_parameters=yarn))
    folder = write_tiny(tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    assert "quantised" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "fold it first" in refusal(folder)
    assert "is no folder" in refusal(tmp_path / "nothing")


def test_numbers_that_the_type_cannot_hold_are_refused_by_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = write(tmp_path / "m", tokenizer, dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder, dtype="f16")
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert "f16 ends at 65504" in message
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 1.0
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(folder)
    narrow = write(tmp_path / "narrow", tokenizer, intermediate_size=40)
    assert "down_proj.weight" in refusal(narrow, dtype="q8_0")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "has the eos_token_id 'x'"),
        ("generation_config.json", {"eos_token_id": [257, None]}, "has the eos_token_id null"),
        ("generation_config.json", None, "generation_config.json is damaged"),
        ("config.json", {"vocab_size": 5}, "outside of vocab_size 5"),
        ("config.json", {"max_position_embeddings": -1}, "max_position_embeddings in the config.json"),
        ("chat_template.jinja", "{% for", "chat template of"),
        ("chat_template.jinja", "a\0b", "NUL character"),
        ("config.json", "[" * 100_000, "config.json is damaged"),
    ],
)
def test_odd_files_of_a_folder_are_refused_in_a_sentence(
    tmp_path: Path, exported: dict[str, Any], name: str, changes: Any, reason: str
) -> None:
    folder = shutil.copytree(exported["llama"][0], tmp_path / "m")
    file = folder / name
    if changes is None:
        file.unlink()
        file.mkdir()
    else:
        odd = changes if isinstance(changes, str) else json.dumps({**json.loads(file.read_text()), **changes})
        file.write_text(odd)
    assert reason in refusal(folder)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, exported: dict[str, Any]) -> None:
    folder, file, _ = exported["llama"]
    assert "GGUF file already" in refusal(file)
    assert "does not end in .gguf" in refusal(folder, tmp_path / "file.bin")
    assert "q4_k" in refusal(folder, dtype="q4_k")
    (tmp_path / "there.gguf").write_bytes(b"mine")
    assert "--force" in refusal(folder, tmp_path / "there.gguf")


def test_a_damaged_file_is_found_and_not_kept(
    tmp_path: Path, exported: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported["llama"][0]
    monkeypatch.setattr("dex.gguf.tensors.interleave_rows", lambda tensor, head_dim: tensor)
    message = refusal(folder, tmp_path / "wrong.gguf", dtype="f32")
    assert "q_proj.weight back with other numbers" in message


def test_interleaved_rows_are_pairs_of_a_rotation() -> None:
    rows = torch.arange(12.0).reshape(12, 1)  # two heads of six
    assert interleave_rows(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_rounding_is_that_of_the_stored_bytes() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for kind, _ in TYPES.values():
        read = gguf.dequantize(encode(weight, kind), kind)
        assert np.array_equal(rounded(weight, kind).numpy(), read)


# The command


def test_the_command_prints_what_it_compared(exported: dict[str, Any], tmp_path: Path) -> None:
    folder = exported["llama"][0]
    done = run_dex("export", "gguf", folder, "-o", tmp_path / "m.gguf", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["type"] == "f16"
    assert result["bytes"] == (tmp_path / "m.gguf").stat().st_size
    again = run_dex("export", "gguf", folder, "-o", tmp_path / "m.gguf")
    assert again.returncode == 1
    assert "--force" in again.stderr


def test_a_full_disk_is_one_sentence_and_leaves_nothing(exported: dict[str, Any], tmp_path: Path) -> None:
    folder = exported["llama"][0]
    (tmp_path / "m.gguf").write_bytes(b"before")
    done = run_dex("export", "gguf", folder, "-o", tmp_path / "m.gguf", "--force", largest_file=100_000)
    assert done.returncode == 1
    assert "m.gguf could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_bytes() == b"before"


def test_a_kill_while_writing_leaves_the_old_file_and_the_next_run_is_whole(
    exported: dict[str, Any], tmp_path: Path
) -> None:
    folder, file, _ = exported["llama"]
    output = tmp_path / "m.gguf"
    output.write_bytes(b"before")
    process = Dex("export", "gguf", folder, "-o", output, "--force", "--type", "f32", "--name", "llama")
    partial = tmp_path / ".m.partial.gguf"
    deadline = time.monotonic() + 100
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert output.read_bytes() == b"before"
    export_gguf(folder, output, dtype="f32", name="llama", force=True)
    assert output.read_bytes() == file.read_bytes()
    assert not partial.exists()
