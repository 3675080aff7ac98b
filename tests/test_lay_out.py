"""`dex convert --layout`: what is written, measured, recorded and refused."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Dex, run_dex
from tiny import FAMILIES, tiny_model, tiny_tokenizer, tokens, write_tiny
from transformers import DiffLlamaForCausalLM

from dex.errors import DexError
from dex.evaluation.held_out import TASK
from dex.layouts.options import parse_options
from dex.layouts.to_diff_v1 import V1Options, to_diff_v1
from dex.layouts.to_diff_v2 import to_diff_v2
from dex.models import ANY, fingerprint, load_model
from dex.suites import suite_of
from dex.tuner import DexConfig
from dex.verbs.convert import Choice, convert
from dex.verbs.evaluate import evaluate
from dex.verbs.lay_out import Target, lay_out

QUICK: dict[str, Any] = {"sequences": 2, "length": 64}
SHORT = ["block=64", "tokens=1_000"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def logits(folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return load_model(str(folder), families=ANY, **options).model(tokens()).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_diff_v2_is_the_base_bit_for_bit_and_says_so(tmp_path: Path, family: str) -> None:
    base = write_tiny(tmp_path / "base", family)
    record = lay_out(str(base), tmp_path / "v2", Target("diff-v2"), **QUICK)
    assert torch.equal(logits(tmp_path / "v2"), logits(base))
    assert record["divergence"]["bit_equal"]
    assert record["divergence"]["loss"] == record["divergence"]["loss_of_the_base"]
    assert json.loads((tmp_path / "v2" / "layout.json").read_text()) == record


@pytest.mark.parametrize("norm", ["anneal", "off"])
def test_doubled_heads_without_the_norm_compute_what_the_base_does(tmp_path: Path, norm: Any) -> None:
    base = write_tiny(tmp_path / "base", "qwen3")
    record = lay_out(str(base), tmp_path / "v1", Target("diff-v1", norm=norm), **QUICK)
    measured = record["divergence"]
    assert measured["max_logit_difference"] <= 1e-5 * measured["largest_logit"]
    assert measured["top1_agreement"] == 1.0


@pytest.mark.parametrize(
    ("layout", "heads"),
    [("diff-v1", "doubled"), ("diff-v1", "paired"), ("diffllama", "paired"), ("diffllama", "doubled")],
)
def test_what_is_recorded_is_the_divergence_of_the_written_folder(tmp_path: Path, layout: str, heads: Any) -> None:
    """Against logits computed here from the two folders, on the same text."""
    base = write_tiny(tmp_path / "base", "llama")
    record = lay_out(str(base), tmp_path / "out", Target(layout, heads), **QUICK)
    from dex.data import Source, calibration

    ids = calibration(Source("pydoc"), tiny_tokenizer(), 2, 64).input_ids[1:]
    a, b = (load_model(str(folder), families=ANY).model for folder in (base, tmp_path / "out"))
    with torch.no_grad():
        p, q = (model(ids).logits.double().log_softmax(-1) for model in (a, b))
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert record["divergence"]["kl"] == pytest.approx(expected, rel=1e-6)
    assert record["divergence"]["loss"] == pytest.approx(
        -q[0, :-1].gather(-1, ids[0, 1:, None]).mean().item(), rel=1e-6
    )
    assert f"{record['divergence']['kl']:.3g}" in (tmp_path / "out" / "README.md").read_text()


def test_a_calibrated_scale_beats_none(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "llama")
    lay_out(str(base), tmp_path / "v1", Target("diff-v1"), sequences=8, length=64)
    calibrated = load_model(str(tmp_path / "v1"), families=ANY).model
    target = logits(base).log_softmax(-1)

    def kl() -> float:
        with torch.no_grad():
            return (target.exp() * (target - calibrated(tokens()).logits.log_softmax(-1))).sum(-1).mean().item()

    best = kl()
    for factor in (0.5, 2.0):
        for layer in calibrated.model.layers:
            layer.self_attn.o_proj.weight.data.mul_(factor)
        assert best < kl()
        for layer in calibrated.model.layers:
            layer.self_attn.o_proj.weight.data.div_(factor)


def test_diff_v1_and_diffllama_become_each_other_exactly(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen2")
    options = parse_options(["head_norm_eps=1e-6"])
    lay_out(str(base), tmp_path / "v1", Target("diff-v1", "paired", options=options), **QUICK)
    lay_out(str(tmp_path / "v1"), tmp_path / "llama", Target("diffllama"), **QUICK)
    record = lay_out(str(tmp_path / "llama"), tmp_path / "back", Target("diff-v1"), **QUICK)
    assert isinstance(load_model(str(tmp_path / "llama"), families=ANY).model, DiffLlamaForCausalLM)
    assert record["divergence"]["max_logit_difference"] <= 1e-5 * record["divergence"]["largest_logit"]
    v1, back = logits(tmp_path / "v1"), logits(tmp_path / "back")
    assert (v1 - back).abs().max() <= 1e-5 * v1.abs().max()


def test_an_odd_number_of_key_value_heads_can_be_doubled(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    for layout in ("diff-v1", "diffllama"):
        record = lay_out(str(base), tmp_path / layout, Target(layout, "doubled"), **QUICK)
        assert record["divergence"]["kl"] > 0.0
    with torch.no_grad():
        a, b = (logits(tmp_path / layout) for layout in ("diff-v1", "diffllama"))
    assert (a - b).abs().max() <= 1e-3 * a.abs().max()  # but for eps: 1e-5 in V1, the base's 1e-6 in DiffLlama


def test_the_tokenizer_and_the_generation_config_travel(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v2", Target("diff-v2"), **QUICK)
    again = load_model(str(tmp_path / "v2"), families=ANY)
    assert again.tokenizer.chat_template == tiny_tokenizer().chat_template
    assert again.model.generation_config.eos_token_id == [257, 258]


def test_models_of_all_layouts_are_evaluated_on_the_same_blocks(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v2", Target("diff-v2"), **QUICK)
    lay_out(str(base), tmp_path / "v1", Target("diff-v1"), **QUICK)
    models = [str(tmp_path / name) for name in ("base", "v2", "v1")]
    losses = [result.score(TASK) for result in evaluate(models, tmp_path / "eval", suite_of("perplexity", SHORT))]
    assert losses[1] == losses[0]
    assert losses[2] != losses[0]


@pytest.mark.parametrize("layout", ["diff-v2", "diff-v1"])
def test_training_the_converted_model_leaves_its_base_alone(layout: str) -> None:
    base = tiny_model("llama")
    with torch.no_grad():
        before = base(tokens()).logits
    made = to_diff_v2(base) if layout == "diff-v2" else to_diff_v1(base, V1Options(), tokens())
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(base(tokens()).logits, before)


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "target", "reason"),
    [
        ("llama", {}, Target("diff-v3"), "'diff-v3' is not a layout"),
        ("llama", {"num_key_value_heads": 1}, Target("diff-v1", "paired"), "1 key/value heads, an odd number"),
        ("llama", {"num_key_value_heads": 1}, Target("diffllama"), "an odd number.*--heads doubled"),
        ("qwen3", {}, Target("diffllama"), "no norm on queries and keys"),
        ("qwen2-sliding", {}, Target("diffllama"), "no sliding-window attention"),
        ("llama", {"mlp_bias": True}, Target("diffllama"), "MLP has no biases"),
        ("llama", {}, Target("diffllama", norm="anneal"), "leave out --norm"),
        ("llama", {}, Target("diff-v2", "doubled"), "leave out --heads"),
        ("llama", {}, Target("diff-v2", seed=1), "and --seed"),
        ("llama", {}, Target("diff-v1", options={"head_norm": "off"}), "chosen with --norm"),
        ("llama", {}, Target("diff-v1", norm="off", options={"head_norm_eps": 1.0}), "head_norm_eps has no effect"),
        ("llama", {}, Target("diff-v1", options={"lambda_mode": "fixed", "lambda_value": 1.0}), "equal maps"),
        ("llama", {"num_key_value_heads": 1}, Target("diffllama", "paired"), "an odd number"),
        ("llama", {}, Target("diff-v1", options={"lambda_value": 0.5}), 'no effect with lambda_mode "learned"'),
        (
            "llama",
            {},
            Target("diff-v1", norm="off", options={"lambda_mode": "fixed", "lambda_value": 1.0}),
            "equal maps of doubled heads cancel",
        ),
    ],
)
def test_what_a_layout_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, family: str, changes: dict[str, Any], target: Target, reason: str
) -> None:
    base = write_tiny(tmp_path / "base", family, **changes)
    with pytest.raises(DexError, match=reason):
        lay_out(str(base), tmp_path / "out", target, **QUICK)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["base"]


def test_a_converted_model_is_not_converted_again(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v2", Target("diff-v2"), **QUICK)
    for layout in ("diff-v2", "diff-v1", "diffllama"):
        with pytest.raises(DexError, match="laid out as diff_v2 already"):
            lay_out(str(tmp_path / "v2"), tmp_path / "out", Target(layout), **QUICK)
    with pytest.raises(DexError, match="is a DIFF model"):
        convert(str(tmp_path / "v2"), tmp_path / "out", DexConfig(task_type="CAUSAL_LM"), None)


def test_an_adapter_is_not_taken_for_a_model(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    convert(str(base), tmp_path / "adapter", DexConfig(task_type="CAUSAL_LM"), Choice(sequences=2, length=48))
    with pytest.raises(DexError, match="is an adapter, not a model"):
        lay_out(str(tmp_path / "adapter"), tmp_path / "out", Target("diff-v2"), **QUICK)


def test_an_annealing_norm_is_not_said_to_be_diffllamas(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v1", Target("diff-v1", norm="anneal"), **QUICK)
    with pytest.raises(DexError, match="still annealing"):
        lay_out(str(tmp_path / "v1"), tmp_path / "out", Target("diffllama"), **QUICK)


def test_force_never_replaces_the_model_that_is_read(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v1", Target("diff-v1"), **QUICK)
    for output in (tmp_path / "v1", tmp_path / "v1" / "inside", tmp_path):
        with pytest.raises(DexError, match="which is read"):
            lay_out(str(tmp_path / "v1"), output, Target("diffllama"), force=True, **QUICK)
    load_model(str(tmp_path / "v1"), families=ANY)


def test_force_does_not_replace_a_file(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DexError, match="is a file, and the output is a folder"):
        lay_out(str(base), tmp_path / "file", Target("diff-v2"), force=True, **QUICK)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lambda_mode": "nonsense"}, "nonsense"),
        ({"num_key_value_heads": 3}, "cannot share 3 key/value heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads of this model is 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads of this model is '4'"),
        ({"lambda_std_dev": -1.0}, "lambda_std_dev must be at least 0"),
        ({"head_norm_steps": 3}, "head_norm_steps has no effect"),
    ],
)
def test_a_config_edited_by_hand_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    base = write_tiny(tmp_path / "base")
    lay_out(str(base), tmp_path / "v1", Target("diff-v1"), **QUICK)
    config = tmp_path / "v1" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(DexError, match=reason):
        lay_out(str(tmp_path / "v1"), tmp_path / "out", Target("diffllama"), **QUICK)


def test_one_token_is_no_text(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    with pytest.raises(DexError, match="both must be at least 2"):
        lay_out(str(base), tmp_path / "out", Target("diff-v2"), sequences=2, length=1)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    (tmp_path / "short.txt").write_text("a" * 70)
    with pytest.raises(DexError, match="one window of 64 tokens, and two are needed"):
        lay_out(str(base), tmp_path / "out", Target("diff-v2"), text=str(tmp_path / "short.txt"), **QUICK)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["lamda_mode=fixed"], "not one of DIFF V1's"),
        (["lambda_mode"], "not one of DIFF V1's"),
        (["lambda_mode=off"], "learned or fixed"),
        (["lambda_sign=0"], "-1 or 1"),
        (["lambda_value=nan"], "a number"),
        (["head_norm_eps=0"], "above 0"),
        (["lambda_sign=1", "lambda_sign=-1"], "given twice"),
        (["head_norm_steps=2.5"], "a whole number above 0"),
        (["lambda_mode=fixed", "lambda_std_dev=1"], "lambda_std_dev has no effect"),
    ],
)
def test_a_wrong_option_is_refused(given: list[str], reason: str) -> None:
    with pytest.raises(DexError, match=reason):
        parse_options(given)


def test_what_diffllama_lacks_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen3")
    lay_out(str(base), tmp_path / "v1", Target("diff-v1", "paired"), **QUICK)
    (tmp_path / "v1" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DexError, match="no norm on queries and keys"):
        lay_out(str(tmp_path / "v1"), tmp_path / "out", Target("diffllama"), **QUICK)


def test_nothing_is_fitted_or_measured_on_what_is_held_out(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    rows = [json.dumps({"text": f"{n} " * 80}) for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = {"text": str(tmp_path / "data.jsonl"), "length": 64}
    texts = [
        lay_out(str(base), tmp_path / f"v2-{share}", Target("diff-v2"), sequences=200, held_out=share, **options)[
            "text"
        ]
        for share in (0.0, 0.5)
    ]
    assert texts[1]["positions"] < 0.8 * texts[0]["positions"]


def test_models_that_differ_in_lambda_alone_have_identities_of_their_own(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    ways = [Target("diff-v1", seed=1), Target("diff-v1", seed=2)]
    ways += [Target("diff-v1", options={"lambda_mode": "fixed", "lambda_value": value}) for value in (0.1, 0.2)]
    for number, target in enumerate(ways):
        lay_out(str(base), tmp_path / str(number), target, **QUICK)
    models = [load_model(str(tmp_path / str(number)), families=ANY).model for number in range(len(ways))]
    assert len({fingerprint(model) for model in models}) == len(ways)


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_tiny(tmp_path / "base")

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", no_space)
    with pytest.raises(DexError, match="No space left on device"):
        lay_out(str(base), tmp_path / "out", Target("diff-v2"), **QUICK)
    assert not (tmp_path / "out").exists()


def test_a_conversion_killed_half_way_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    command = ("convert", base, "--layout", "diff-v2", "-o", tmp_path / "v2", "--length", 64)
    process = Dex(*command, "--sequences", 400)
    partial = tmp_path / ".v2.partial"
    deadline = time.monotonic() + 120
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists()
    assert not (tmp_path / "v2").exists()
    assert run_dex(*command, "--sequences", 2).returncode == 0
    assert (tmp_path / "v2" / "layout.json").exists()
    assert not partial.exists()


def test_a_config_of_irregular_heads_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", "qwen2")
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**values, "num_key_value_heads": 3}))
    (base / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DexError, match="cannot share 3 key/value heads"):
        lay_out(str(base), tmp_path / "out", Target("diff-v2"), **QUICK)
