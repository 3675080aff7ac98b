"""`dex analyze`, whole: any of our models, one or two, to a folder that says all; and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import run  # noqa: F401
from test_fold import trained_adapter
from tiny import tiny_diff_v2, tiny_tokenizer, write_tiny
from tokenizers import AddedToken

from dex.analysis import room, texts
from dex.analysis.records import ModelReport, Report
from dex.analysis.sections import SECTIONS
from dex.analysis.subject import SETTINGS
from dex.errors import DexError, NotFinite
from dex.models import load_model
from dex.verbs import analyze as verb
from dex.verbs.fold import fold

SMALL = SETTINGS.block(length=64, sequences=3, held_out=0.0)
QUICK = ("branch", "attention", "importance")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a trained adapter on it, the adapter folded, and a DIFF V2: base/, adapter/, folded/, v2/."""
    folder = tmp_path_factory.mktemp("models")
    fold(str(trained_adapter(folder)), folder / "folded")
    tiny_diff_v2().save_pretrained(folder / "v2")
    tiny_tokenizer().save_pretrained(folder / "v2")
    return folder


@pytest.fixture(autouse=True, scope="module")
def _short_needles() -> Iterator[None]:
    """A byte a token: four needles take more than the passages that real tokenizers have."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(texts, "PASSAGE_LENGTH", 320)
        patched.setattr(texts, "PASSAGES", 2)
        yield


@pytest.fixture(scope="module")
def side_by_side(models: Path, _short_needles: None) -> tuple[Report, Path]:
    """The whole report of the base and its adapter, and its folder."""
    output = models / "side-by-side"
    return verb.analyze([str(models / "base"), str(models / "adapter")], output, SMALL), output


def test_an_adapter_beside_its_base_gives_numbers_a_page_figures_and_a_schema(
    side_by_side: tuple[Report, Path],
) -> None:
    made, output = side_by_side
    written = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert Report.model_validate(written) == made
    assert json.loads((output / "report.schema.json").read_text()) == Report.model_json_schema()
    page = (output / "report.html").read_text(encoding="utf-8")
    assert all(model.overview[0] in page for model in made.models)
    base, tuned = made.models
    assert (base.kind, tuned.kind) == ("a stock Llama", "a Dex adapter")
    assert set(base.left_out) == {"branch"}
    assert set(tuned.sections) == set(SECTIONS) == {*base.sections, *base.left_out}
    drawn = {path.name for path in (output / "figures").glob("*.png")}
    assert {"base-entropy.png", f"{tuned.label}-entropy.png"} <= drawn
    assert f"{tuned.label}-minus-base-entropy.png" in drawn
    (entropy,) = (one for one in made.differences if one.name == "entropy")
    of_base, of_tuned = (torch.tensor(values_of(model, "entropy")) for model in made.models)
    torch.testing.assert_close(torch.tensor(entropy.values), of_tuned - of_base, atol=2e-5, rtol=1e-4)
    assert entropy.values != [[0.0] * 4] * 3  # K was trained, so the maps differ


def values_of(model: ModelReport, name: str) -> Any:
    statistic = model.statistic(name)
    assert statistic is not None
    return statistic.values


def test_every_statistic_is_defined_in_the_documentation(models: Path, side_by_side: tuple[Report, Path]) -> None:
    documented = (Path(__file__).parents[1] / "docs" / "analysis.md").read_text(encoding="utf-8")
    diff = verb.analyze([str(models / "v2")], models / "v2-out", SMALL, sections=["attention", "maps"], figures=False)
    found = {
        statistic.name
        for model in [*side_by_side[0].models, *diff.models]
        for findings in model.sections.values()
        for statistic in [*findings.statistics, *findings.curves, *findings.tables]
    }
    assert len(found) > 70
    assert [name for name in sorted(found) if f"`{re.sub('[0-9](?=_per)', 'B', name)}`" not in documented] == []


def test_a_folded_model_is_known_for_one_and_keeps_its_adapters_attention(models: Path) -> None:
    both = [str(models / "adapter"), str(models / "folded")]
    made = verb.analyze(both, models / "folded-out", SMALL, sections=QUICK, figures=False)
    assert made.models[1].kind == "a stock Llama, folded from a Dex adapter"
    for name in ("entropy", "first_token_mass", "dex_lam"):
        first, second = (torch.tensor(values_of(model, name)) for model in made.models)
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


def test_a_diff_model_is_introduced_with_its_differential_heads(models: Path) -> None:
    both = [str(models / "v2"), str(models / "base")]
    made = verb.analyze(both, models / "diff-out", SMALL, sections=["maps", "attention"], figures=False)
    assert made.models[0].overview[0].startswith("v2 is a DIFF Transformer V2: 3 layers of 4 differential heads, ")
    assert any("λ" in sentence and "v2 alone" in sentence for sentence in made.not_compared)


def test_the_same_command_gives_the_same_numbers(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "base"))
    made = [
        verb.analyze([base], tmp_path / name, SMALL, sections=QUICK, batch_size=size, figures=False)
        for name, size in (("a", 1), ("b", 1), ("c", 3))
    ]
    again, batched = (each.models[0].sections for each in made[1:])
    assert again == made[0].models[0].sections
    for name in ("entropy", "importance", "answer_mass"):
        one, other = (
            next(s.values for f in found.values() for s in f.statistics if s.name == name)
            for found in (again, batched)
        )
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-5, rtol=1e-4)


def test_the_command_prints_the_overview_or_one_json_object(tmp_path: Path, run: Any) -> None:  # noqa: F811
    base = str(write_tiny(tmp_path / "base"))
    options = ["--length", "48", "--sequences", "2", "--held-out", "0", "--only", "attention", "--no-figures"]
    code, out, _ = run("analyze", base, "-o", tmp_path / "out", *options)
    assert code == 0
    assert out.startswith("base is a stock Llama: 3 layers of 4 heads")
    assert not (tmp_path / "out" / "figures").exists()
    code, out, _ = run("analyze", base, "-o", tmp_path / "out", *options, "--force", "--json")
    assert code == 0
    assert json.loads(out)["models"]["base"]["kind"] == "a stock Llama"


def test_force_deletes_no_folder_of_another_command_no_base_and_no_text(models: Path, tmp_path: Path) -> None:
    """dex study writes a report.json as well."""
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "report.json").write_text("{}")
    text = tmp_path / "text"
    text.mkdir()
    (text / "report.schema.json").write_text("{}")
    (text / "a.txt").write_text("words " * 100)
    base, adapter = str(models / "base"), str(models / "adapter")
    for model, output, data in (
        (base, tmp_path / "study", "pydoc"),
        (adapter, models / "base", "pydoc"),
        (adapter, models / "base" / "inside", "pydoc"),
        (base, text, str(text)),
    ):
        with pytest.raises(DexError):
            verb.analyze([model], output, SETTINGS.block(data=data, length=64, held_out=0.0), force=True)
    assert (tmp_path / "study" / "report.json").exists()
    assert (text / "a.txt").exists()
    assert (models / "base" / "config.json").exists()


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / r"$\frac{$"))
    verb.analyze([base], tmp_path / "out", SMALL, sections=["attention"])
    assert list((tmp_path / "out" / "figures").glob("*-entropy.png"))


def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(tmp_path: Path, run: Any) -> None:  # noqa: F811
    base = write_tiny(tmp_path / "base")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    out = ["-o", tmp_path / "out"]
    small = ["--length", "48", "--sequences", "2", "--held-out", "0"]
    for arguments, words in (
        ([base, *out, "--only", "attention,mapz"], ["'mapz'", "maps"]),
        ([base, *out, "--length", "100000"], ["--length 512"]),
        ([base, *out, *small, "--span", "there is no such passage"], ["there is no such passage"]),
        ([base, "-o", tmp_path / "full"], ["full exists already"]),
        ([base, "-o", tmp_path / "full", "--force"], ["was not written by this command"]),
        ([base, "-o", base], ["base"]),
        ([tmp_path / "gpt", *out], ["gpt2"]),
        ([tmp_path / "nowhere", *out], ["nowhere"]),
        ([base, base, *out], ["named twice"]),
        ([base, *out, "--threshold", "1e-300"], ["threshold: 1e-300"]),
        ([base, *out, "--signs", "squared"], ["signs: 'squared'"]),
        ([base, *out, "--dtype", "bf16"], ["'bf16'", "bfloat16"]),
    ):
        held_out = () if "--span" not in arguments else ("--held-out", "0")
        given = [each for each in arguments if each not in held_out]
        code, _, err = run("analyze", *given)
        assert code == 1, given
        lines = [line for line in err.splitlines() if line.startswith("dex: ")]
        assert len(lines) == 1, err
        for word in words:
            assert word in lines[0]
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_two_models_that_read_other_tokens_are_not_put_side_by_side(tmp_path: Path) -> None:
    first, second = (str(write_tiny(tmp_path / name)) for name in ("a", "b"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<other>", special=True)]})
    tokenizer.save_pretrained(second)
    with pytest.raises(DexError, match="b has another tokenizer than a"):
        verb.analyze([first, second], tmp_path / "out", SMALL, sections=["attention"])
    assert not (tmp_path / "out").exists()


def test_a_model_whose_weights_are_no_numbers_is_refused_by_every_section(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base")
    from safetensors.torch import load_file, save_file

    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for section in SECTIONS:
        if section == "branch":
            continue  # it does not apply to a stock model
        with pytest.raises(NotFinite, match=r"not numbers|not finite"):
            verb.analyze([str(base)], tmp_path / "out", SMALL, sections=[section])
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("share", "without", "length", "advice"),
    [
        (1.0, False, 128, "; --batch-size 1 --length 128 would fit"),
        (1.0, True, 64, "64 --only branch,attention,maps,example,redundancy,outliers,quantised,landscape would"),
        (0.0, True, 64, "; at most about 0 million parameters would, in bfloat16"),
    ],
)
def test_a_model_that_does_not_fit_the_memory_is_refused_with_what_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, without: bool, length: int, advice: str
) -> None:
    base = str(write_tiny(tmp_path / "base"))
    loaded = load_model(base).model
    names = [name for name in SECTIONS if name != "importance"] if without else list(SECTIONS)
    work = room.working_bytes(loaded.config, room.Work(names, length, 1))
    free = int(share * (4 * loaded.num_parameters() + work))
    monkeypatch.setattr(room, "available", lambda: free)
    with pytest.raises(DexError) as refused:
        verb.analyze([base], tmp_path / "out", SETTINGS.block(length=512))
    assert advice in str(refused.value)
    assert "are free" in str(refused.value)
