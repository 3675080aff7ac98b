"""The model card: every kind of folder, its head as the Hub reads it, licences, results, cards edited by hand."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run
from test_compare import result_of
from test_train import recipe
from tiny import write_tiny

import dex
from dex.cards import check_card, read_front_matter
from dex.cards import write_card as render
from dex.cards.base import base_of
from dex.cards.evaluation import Evaluation, ScoredSuite, ScoredTask, read_evaluation
from dex.cards.facts import Base, Facts, Licence, read_facts
from dex.cards.folder import Folder
from dex.cards.front_matter import parse_front_matter
from dex.cards.head import head_of
from dex.cards.kind import kind_of
from dex.cards.languages import TWO_LETTERS
from dex.cards.licence import DUTIES, KNOWN, Duties, duties_of, has_notice, write_notice
from dex.cards.write import told_to
from dex.errors import DexError
from dex.evaluation.paired import Interval
from dex.evaluation.records import read_result
from dex.evaluation.tables import interval
from dex.lock import read_lock
from dex.models import EMBEDDED, ModelSource
from dex.suites import suite_of
from dex.verbs.card import write_card
from dex.verbs.compare import compare
from dex.verbs.convert import convert
from dex.verbs.evaluate import evaluate
from dex.verbs.fold import fold
from dex.verbs.init import init
from dex.verbs.lay_out import Target, lay_out
from dex.verbs.train import train

__all__ = ["run"]  # the fixture of test_cli

ASKED = "dex card --help says how to tell it"
KINDS = {
    "adapter": "dex/adapter",
    "lora": "lora/adapter",
    "folded": "folded",
    "layout": "v2",
    "fresh": "fresh",
    "trained": "scratch/model",
}
NOTICE_3_2 = DUTIES["llama3.2"].notice
BASE_CARD = "---\nlicense: llama3.2\nlanguage:\n- en\n- de\ntags:\n- x\n---\n\n# Base\n"
LLAMA_FILES = {
    "README.md": BASE_CARD,
    "LICENSE.txt": f"LLAMA 3.2 COMMUNITY\n  LICENSE AGREEMENT\n… within a “Notice” text file: “{NOTICE_3_2}”\n",
    "USE_POLICY.md": "# Policy\n",
}


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of every kind, made by dex from a local base whose card has a Llama licence."""
    folder = tmp_path_factory.mktemp("cards")
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "cache"))
        short = {"run.tokens": 256, "run.save_every": 256}
        run = recipe(folder, "dex", **short)
        put(folder / "llama", LLAMA_FILES)
        train(run)
        one = {"run.tokens": 128, "run.save_every": 128}
        train(recipe(folder, "lora", method="{name: lora, rank: 2}", **one))
        told = shutil.copytree(folder / "dex" / "adapter", folder / "told")
        write_card(told, language=["en", "de"])
        fold(str(told), folder / "folded")
        lay_out(str(folder / "llama"), folder / "v2", Target("diff-v2"), length=32, sequences=2)
        init("diff-v1", str(folder / "llama"), folder / "fresh")
        train(recipe(folder, "scratch", **{"model.id": folder / "fresh", "method": "{name: full}"}, **one))
    return folder


@pytest.fixture
def folders(originals: Path, tmp_path: Path) -> Path:
    """A copy of them, for tests that write."""
    for name in KINDS.values():
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def head(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = metadata_load(folder / "README.md")
    return found


def has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_null, value.values() if isinstance(value, dict) else value))
    return value is None


# Every kind of folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_every_kind_of_folder_is_what_the_hub_takes(originals: Path, kind: str) -> None:
    folder = originals / KINDS[kind]
    assert kind_of(folder) == kind
    found = head(folder)
    assert not has_null(found)
    assert ModelCard.load(folder / "README.md").data.to_dict() == found
    adapter = kind in ("adapter", "lora")
    assert found["library_name"] == ("peft" if adapter else "transformers")
    assert found["pipeline_tag"] == "text-generation"
    assert "base_model" not in found  # a local one has no id on the Hub
    if kind in ("fresh", "trained"):
        assert not {"license", "language"} & found.keys()  # its weights are of no other model
    else:
        assert (found["license"], found["language"]) == ("llama3.2", ["en", "de"])
    assert str(originals) not in card(folder)
    assert str(originals) not in (folder / "card.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_the_body_has_its_sections_and_lines_that_load_it(originals: Path, kind: str) -> None:
    text = card(originals / KINDS[kind])
    sections = ["Results", "Licence", "Limits", "Citation"]
    sections += ["Recipe"] if kind in ("adapter", "lora", "folded", "trained") else []
    sections += {"folded": ["Certificate", "The branch", "Heads"], "adapter": ["The branch", "Heads"]}.get(kind, [])
    sections += ["Divergence from the base"] if kind == "layout" else []
    assert sorted(re.findall(r"^## (.*)$", text, re.M)) == sorted(sections)
    assert "Not evaluated." in text
    assert "2505.16333" in text
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code
    compile(code[1], "card", "exec")
    assert ("import dex\n" in code[1] or "import dex.adapter" in code[1]) == (kind in ("adapter", "lora"))
    assert ("KeyError: 'DEX'" in text) == (kind == "adapter")
    assert ("trust_remote_code=True" in text) == (kind in ("layout", "fresh", "trained"))


@pytest.mark.parametrize(
    ("kind", "changes", "tags", "name"),
    [
        ("adapter", {}, "dex differential-attention adapter", "x-dex-adapter"),
        ("adapter", {"schedule": "off"}, "dex adapter", "x-control-adapter"),
        ("lora", {}, "dex lora adapter", "x-lora-adapter"),
        ("folded", {}, "dex differential-attention", "x-dex"),
        ("folded", {"method": "attention"}, "dex", "x-control"),
        ("folded", {"method": "lora"}, "dex", "x-lora"),
        ("layout", {}, "dex differential-attention diff-v2", "x-diff-v2"),
        ("fresh", {}, "dex differential-attention diff-v1", "x-diff-v1-fresh"),
        ("fresh", {"model_type": "llama"}, "dex", "x-fresh"),
        ("trained", {}, "dex differential-attention diff-v1", "x-diff-v1-trained"),
        ("trained", {"model_type": "llama"}, "dex", "x-full-trained"),
    ],
)
def test_tags_and_name_say_what_the_model_is(
    originals: Path, tmp_path: Path, kind: str, changes: dict[str, Any], tags: str, name: str
) -> None:
    path = shutil.copytree(originals / KINDS[kind], tmp_path / "folder")
    lock = read_lock(path)
    if "method" in changes:
        assert lock
        lock = lock.model_copy(update={"result": lock.result.model_copy(update=changes)})
    elif changes:
        [file] = [each for each in path.glob("*config.json") if each.name in ("config.json", "adapter_config.json")]
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    score = ScoredTask(
        metric="acc", higher_is_better=True, items=1, score={"mean": 1.0, "low": None, "high": None}, data="t"
    )  # type: ignore[arg-type]
    suite = ScoredSuite(settings={}, tasks={"t": score}, average=None, environment={})
    evaluation = Evaluation(model={}, suites={"lm": suite}, compared=[])
    found = head_of(Folder(path, kind_of(path), Facts(base=Base(name="x")), lock, evaluation)).to_dict()
    assert (found["tags"], found["model-index"][0]["name"]) == (tags.split(), name)


def test_figures_of_a_card_are_those_of_the_files(originals: Path) -> None:
    result = json.loads((originals / "dex" / "result.json").read_text())
    certificate = json.loads((originals / "folded" / "certificate.json").read_text())
    plan = json.loads((originals / "dex" / "heads.json").read_text())
    text, folded = card(originals / "dex" / "adapter"), card(originals / "folded")
    loss = Interval(**result["held_out_loss"])
    assert f"| held-out loss, nats per token | {interval(loss)} |" in text
    assert f"| held-out loss of the adapter as trained, nats per token | {interval(loss)} |" in folded
    assert f"| trained parameters | {result['trained_parameters']:,} |" in text
    assert f"{result['branch']['mean_ratio']:.1e} on average" in text
    assert f"{certificate['branch']['mean_ratio']:.1e} on average" in folded
    assert f"{certificate['folded_against_attached']['kl']:.3g}" in folded
    assert f"{sum(map(len, plan['heads']))} of 12 heads have the branch, chosen by `entropy`" in text
    assert "lr: 0.001" in text


def test_a_model_trained_from_fresh_weights_says_so_and_asks_for_no_base(folders: Path) -> None:
    folder = folders / KINDS["trained"]
    assert "trained from scratch" in card(folder)
    write_card(folder, license="mit")
    assert check_card(folder, "me/mine").license == "mit"


def test_what_is_made_of_a_model_on_the_hub_names_it_at_its_commit(tmp_path: Path, hub: Any) -> None:
    base = put(write_tiny(tmp_path / "base"), LLAMA_FILES)
    commit = hub.add_model("org/Llama-tiny", base)
    config = dex.DexConfig(task_type="CAUSAL_LM", schedule="off")
    convert("org/Llama-tiny", tmp_path / "adapter", config, None)  # type: ignore[arg-type]
    found, text = head(tmp_path / "adapter"), card(tmp_path / "adapter")
    assert (found["base_model"], found["base_model_relation"]) == ("org/Llama-tiny", "adapter")
    assert (found["license"], found["language"]) == ("llama3.2", ["en", "de"])
    assert f'from_pretrained("org/Llama-tiny", revision="{commit}")' in text
    assert "import dex\n" in text
    assert (tmp_path / "adapter" / "LICENSE.txt").read_text() == LLAMA_FILES["LICENSE.txt"]
    assert (tmp_path / "adapter" / "USE_POLICY.md").exists()
    check_card(tmp_path / "adapter", "me/Llama-tiny-dex")
    lay_out("org/Llama-tiny", tmp_path / "v2", Target("diff-v2"), length=32, sequences=2)
    assert head(tmp_path / "v2")["base_model_relation"] == "finetune"
    write_card(tmp_path / "v2", base_model="org/another")
    assert f"| base | `org/Llama-tiny` at commit `{commit}`, named `org/another` |" in card(tmp_path / "v2")
    write_card(tmp_path / "v2", base_model="org/Llama-tiny")
    assert f"| base | `org/Llama-tiny` at commit `{commit}` |" in card(tmp_path / "v2")
    # The card of an adapter names what PEFT loads.
    with pytest.raises(DexError, match="cannot be org/another, since PEFT loads org/Llama-tiny"):
        write_card(tmp_path / "adapter", base_model="org/another")
    put(tmp_path / "adapter", {"README.md": text.replace("base_model: org/Llama-tiny", "base_model: org/another")})
    with pytest.raises(DexError, match=r"dex card .*adapter --base-model org/Llama-tiny"):
        check_card(tmp_path / "adapter", "me/Llama-tiny-dex")
    # What was laid out is its base still: trained further, it names the same model.
    render(shutil.copytree(tmp_path / "v2", tmp_path / "other"), ModelSource(str(tmp_path / "v2")), force=True)
    assert head(tmp_path / "other")["base_model"] == "org/Llama-tiny"


def test_what_an_adapter_on_the_hub_was_told_is_none_only_where_nothing_is_there(
    originals: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_model("org/bare", {"adapter_config.json": b"{}"})
    hub.add_model("org/told", {"card.json": b'{"schema": 1, "base": {"name": "x"}, "told": {"base_model": "a/b"}}'})
    assert told_to("org/bare") is None
    hub.fail("/resolve/", status=500, times=20)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(DexError, match="org/told"):
        told_to("org/told")
    hub.faults.clear()
    told = told_to("org/told")
    assert told
    assert told.base_model == "a/b"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert told_to("org/bare") is None  # as the Hub said before
    with pytest.raises(DexError, match="HF_HUB_OFFLINE is set"):
        told_to("org/never-seen")


def test_a_folder_without_card_json_asks_the_hub_for_what_its_base_says(
    tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_model("org/Llama-tiny", put(write_tiny(tmp_path / "base"), LLAMA_FILES))
    folder = tmp_path / "adapter"
    convert("org/Llama-tiny", folder, dex.DexConfig(task_type="CAUSAL_LM", schedule="off"), None)  # type: ignore[arg-type]
    (folder / "card.json").unlink()
    write_card(folder)
    assert (head(folder)["base_model"], head(folder)["license"]) == ("org/Llama-tiny", "llama3.2")
    config = json.loads((folder / "adapter_config.json").read_text())
    for revision, said in (("c" * 40, "licence and language of the base are not known"), (None, None)):
        put(
            folder,
            {
                "adapter_config.json": json.dumps(
                    {**config, "base_model_name_or_path": "org/gone", "revision": revision}
                )
            },
        )
        (folder / "card.json").unlink()
        if said is None:  # without a commit there is nothing to name
            with pytest.raises(DexError, match="org/gone is no local folder or file"):
                write_card(folder)
        else:
            write_card(folder)
            assert said in capsys.readouterr().err
            assert "license" not in head(folder)


def test_the_facts_of_the_embedded_model_are_in_the_card(originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / "dex" / "adapter", tmp_path / "adapter")
    front = render(folder, ModelSource("smollm2-135m-instruct"), force=True)
    known = EMBEDDED["smollm2-135m-instruct"]
    assert (front.base_model, front.license, front.language) == ([known.hub_id], "apache-2.0", ["en"])
    assert known.file in card(folder)
    assert "load_adapter" in card(folder)  # the Hub's weights are not those of the file


def test_data_sets_are_those_of_the_hub_alone(originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / "dex" / "adapter", tmp_path / "adapter")
    assert "datasets" not in head(folder)
    lock = json.loads((folder / "dex.lock").read_text())
    [source] = lock["recipe"]["data"]["train"]
    lock["recipe"]["data"]["train"] = [source, {**source, "source": "org/text"}, {**source, "source": "org/text"}]
    lock["data"]["revisions"] = [None, "a" * 40, "a" * 40]
    (folder / "dex.lock").write_text(json.dumps(lock))
    write_card(folder)
    assert head(folder)["datasets"] == ["org/text"]


# What the user tells


def test_what_a_card_was_told_stays_and_goes_with_what_is_made_of_it(folders: Path) -> None:
    adapter = folders / "dex" / "adapter"
    with pytest.raises(DexError, match=r"has no base_model.*--base-model organisation/name"):
        check_card(adapter, "me/Llama-mine")
    write_card(adapter, base_model="meta-llama/Llama-3.2-1B", language="fr")
    write_card(adapter)
    assert head(adapter)["base_model"] == "meta-llama/Llama-3.2-1B"
    assert head(adapter)["language"] == ["fr"]
    assert 'from_pretrained("meta-llama/Llama-3.2-1B")' in card(adapter)
    check_card(adapter, "me/Llama-mine")
    folded = folders / "folded"
    facts = read_facts(folded)
    assert facts
    assert facts.told.language == ["en", "de"]  # as its adapter was
    render(folded, told=told_to(str(adapter)))
    assert head(folded)["base_model"] == "meta-llama/Llama-3.2-1B"
    assert head(folded)["language"] == ["fr"]
    write_card(folded, license="other", license_name="mine", license_link="LICENSE.txt")
    assert (head(folded)["license_name"], head(folded)["language"]) == ("mine", ["fr"])
    facts = read_facts(folded)
    assert facts
    assert facts.licence == Licence(id="other", name="mine", link="LICENSE.txt")


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"license": "apache"}, r"no licence that the Hub knows \(did you mean apache-2\.0"),
        ({"license": "other"}, "needs a name and a link"),
        ({"license": "other", "license_name": "mine", "license_link": "/etc/passwd"}, "link /etc/passwd is no URL"),
        ({"license_name": "mine"}, "add --license other"),
        ({"license": "mit", "license_name": "mine"}, "leave out yours"),
        ({"base_model": "/home/me/base"}, "no id of a model on the Hub"),
        ({"base_model": "base"}, "no id of a model on the Hub"),
        ({"license": "other", "license_name": "mine", "license_link": "nofile"}, "link nofile is no URL"),
        ({"base_model": "runs/demo/base"}, "no id of a model on the Hub"),
        ({"language": "english"}, "no code of a language"),
        ({"results": "nowhere"}, "does not exist"),
    ],
)
def test_what_cannot_be_told_is_refused_and_nothing_is_written(
    originals: Path, told: dict[str, Any], reason: str
) -> None:
    folder = originals / "folded"
    before = card(folder), (folder / "card.json").read_text()
    with pytest.raises(DexError, match=reason):
        write_card(folder, **told)
    assert (card(folder), (folder / "card.json").read_text()) == before


def test_a_card_edited_by_hand_is_overwritten_only_with_force(folders: Path) -> None:
    folder = folders / "folded"
    again = card(folder)
    write_card(folder)
    assert card(folder) == again
    (folder / "README.md").write_bytes(again.replace("\n", "\r\n").encode())  # a checkout's line ends are no edit
    write_card(folder)
    put(folder, {"README.md": again.replace("# A model", "# My model")})
    with pytest.raises(DexError, match="edited by hand"):
        write_card(folder, license="mit")
    assert "# My model" in card(folder)
    write_card(folder, license="mit", force=True)
    assert head(folder)["license"] == "mit"


def test_a_folder_that_dex_did_not_make_gets_no_card(tmp_path: Path) -> None:
    stock = write_tiny(tmp_path / "stock")
    with pytest.raises(DexError, match="does not say what it was made of"):
        write_card(stock)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DexError, match="is no model"):
        write_card(tmp_path / "empty")
    with pytest.raises(DexError, match="is no folder"):
        write_card(tmp_path / "nothing")
    assert not (stock / "card.json").exists()


def test_the_command_prints_path_and_head_and_asks_for_what_is_not_known(folders: Path, run: Any) -> None:
    code, out, _ = run("card", folders / "v2", "--language", "en", "--language", "fr", "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["path"] == str(folders / "v2" / "README.md")
    assert shown["front_matter"]["language"] == ["en", "fr"]
    code, out, _ = run("card", folders / "v2")
    assert (code, out) == (0, f"written to {shown['path']}; not evaluated; not known: base_model ({ASKED})\n")
    code, out, err = run("card", folders / "v2", "--license", "lgpl-4")
    assert (code, out) == (1, "")
    assert "(did you mean lgpl?)" in err


# Licences


def test_the_duties_of_a_llama_licence_are_met_or_asked_for(folders: Path) -> None:
    folder = folders / "folded"
    write_card(folder, base_model="meta-llama/Llama-3.2-1B")
    assert "**Built with Llama**" in card(folder)
    assert (folder / "NOTICE").read_text() == f"{NOTICE_3_2}\n"
    assert check_card(folder, "me/Llama-3.2-1B-dex").license == "llama3.2"
    with pytest.raises(DexError, match=r"begins with Llama, and dex-3.2 does not; me/Llama-dex-3.2 would do"):
        check_card(folder, "me/dex-3.2")
    (folder / "NOTICE").rename(folder / "kept")
    with pytest.raises(DexError, match="no NOTICE file"):
        check_card(folder, "me/Llama-x")
    (folder / "kept").rename(folder / "Notice.txt")
    put(folder, {"README.md": card(folder).replace("**Built with Llama**", "")})
    with pytest.raises(DexError, match="must display “Built with Llama”"):
        check_card(folder, "me/Llama-x")
    write_card(folder, force=True)
    put(folder, {"LICENSE.txt": "Apache License, Version 2.0"})
    with pytest.raises(DexError, match=r"no copy of the Llama 3\.2 Community License"):
        check_card(folder, "me/Llama-x")


@pytest.mark.parametrize(
    ("licence", "statement", "name", "refused"),
    [
        ("llama2", None, "anything", None),
        ("llama3", "Built with Meta Llama 3", "llama-3-x", "Llama-x"),
        ("llama3.1", "Built with Llama", "Llama-x", "my-llama"),
        ("llama3.3", "Built with Llama", "Llama3", "Lama"),
        ("llama4", "Built with Llama", "Llama", "x"),
        ("qwen", "Built with Qwen", "anything", None),
        ("qwen-research", "Built with Qwen", "anything", None),
        ("tongyi-qianwen", None, "anything", None),
    ],
)
def test_every_licence_with_duties_has_them(
    folders: Path, licence: str, statement: str | None, name: str, refused: str | None
) -> None:
    folder, duties = folders / "folded", DUTIES[licence]
    put(folder, {"LICENSE.txt": duties.agreement.upper()})
    told = {"license": licence}
    if licence not in KNOWN:
        told = {"license": "other", "license_name": licence, "license_link": "LICENSE.txt"}
    write_card(folder, base_model="org/base", **told)  # type: ignore[arg-type]
    assert (statement or "Built with") in card(folder) or statement is None
    assert duties.notice in (folder / "NOTICE").read_text()
    check_card(folder, f"me/{name}")
    if refused is not None:
        with pytest.raises(DexError, match="would do"):
            check_card(folder, f"me/{refused}")


@given(
    st.sampled_from([*DUTIES.values()]),
    st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9]|[-_.][A-Za-z0-9]){0,20}", fullmatch=True),
)
@settings(max_examples=50, deadline=None)
def test_the_name_that_would_do_does(duties: Duties, name: str) -> None:
    if not duties.is_met_by_name(name):
        better = duties.name_that_would_do(name)
        assert duties.is_met_by_name(better)
        validate_repo_id(f"me/{better}")


def test_a_notice_keeps_what_was_there_and_has_the_line_of_the_agreement_itself(tmp_path: Path) -> None:
    duties = duties_of("other", "Qwen-Research")
    assert duties
    line = (
        "Qwen is licensed under the Qwen RESEARCH LICENSE AGREEMENT, Copyright (c) 2026 Other. All Rights Reserved."
    )
    put(tmp_path, {"LICENSE": f'Qwen RESEARCH LICENSE AGREEMENT … "{line}"; and', "notice.md": "Ours."})
    write_notice(tmp_path, duties)
    write_notice(tmp_path, duties)
    assert (tmp_path / "notice.md").read_text() == f"Ours.\n{line}\n"
    assert has_notice(tmp_path, duties)


@pytest.mark.parametrize(
    "base_card",
    [
        None,
        "# no head",
        "---\nlicense: [a\n---\n",
        "---\n- 3\n---\n",
        "---\nlicense: none-such\nlanguage: english\n---\n",
        "---\nlicense: other\n---\n",
        "---\nlicense: null\nlanguage: [null, 3]\n---\n",
        "---\nlicense: [mit, apache-2.0]\n---\n",
        "---\n" + "a: &a [*a]\n---\n",
        b"\xff\xfe",
    ],
)
def test_a_base_without_a_readable_licence_costs_no_run_and_is_said(folders: Path, base_card: Any) -> None:
    base = write_tiny(folders / "base") if not (folders / "base").exists() else folders / "base"
    if base_card is not None:
        (base / "README.md").write_bytes(base_card if isinstance(base_card, bytes) else base_card.encode())
    folder = folders / "v2"
    front = render(folder, ModelSource(str(base)), force=True)
    assert (front.license, front.language) == (None, None)
    assert "The licence of the base is not on record." in card(folder)
    write_card(folder, base_model="org/base")
    with pytest.raises(DexError, match=r"has no license.*--license other"):
        check_card(folder, "me/x")


def test_a_licence_of_its_own_comes_with_its_name_and_the_file_it_links_to(folders: Path) -> None:
    own = {"README.md": "---\nlicense: other\nlicense_name: ours\nlicense_link: LICENSE\nlanguage: no\n---\n"}
    base = put(write_tiny(folders / "base"), {**own, "LICENSE": "Do."})
    front = render(folders / "v2", ModelSource(str(base)), force=True)
    assert (front.license, front.license_name, front.license_link) == ("other", "ours", "LICENSE")
    assert front.language == ["no"]
    assert head(folders / "v2")["language"] == ["no"]  # and not false, which YAML 1.1 makes of it
    write_card(folders / "v2", base_model="org/base")
    check_card(folders / "v2", "me/x")
    (folders / "v2" / "LICENSE").unlink()
    with pytest.raises(DexError, match="license_link LICENSE, which is no URL and no licence file in"):
        check_card(folders / "v2", "me/x")


@pytest.mark.parametrize(
    "link",
    ["/etc/passwd", "../LICENSE", "file:///etc/passwd", "javascript://x/", "https://", "http://[x", "config.json"],
)
def test_a_link_that_leads_nowhere_is_no_licence(originals: Path, tmp_path: Path, link: str) -> None:
    folder = shutil.copytree(originals / "folded", tmp_path / "folded")
    (tmp_path / "LICENSE").touch()
    other = f"license: other\nlicense_name: x\nlicense_link: {link}"
    put(folder, {"README.md": VALID.replace("license: apache-2.0", other)})
    with pytest.raises(DexError, match="is no URL and no licence file in"):
        check_card(folder, "me/mine")
    (base := tmp_path / "base").mkdir()
    put(base, {"README.md": f"---\n{other}\n---\n"})
    assert base_of(ModelSource(str(base))).licence == Licence(id="other", name="x")
    put(folder, {"README.md": VALID.replace("license: apache-2.0", other.replace(link, "https://example.org/x"))})
    assert check_card(folder, "me/mine").license_link == "https://example.org/x"


def test_a_licence_that_is_unknown_is_none(originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / "folded", tmp_path / "folded")
    put(folder, {"README.md": VALID.replace("apache-2.0", "unknown")})
    with pytest.raises(DexError, match=r"license unknown, .* dex card"):
        check_card(folder, "me/mine")


# Results


@pytest.fixture(scope="module")
def results(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dex eval` writes of the base, the adapter, the folded model and another one; and what lm would write."""
    folder = tmp_path_factory.mktemp("results")
    models = [originals / name for name in ("llama", "dex/adapter", "folded", "lora/adapter")]
    suite = suite_of("perplexity", [f"data={originals / 'data.jsonl'}", "block=32", "held_out=0.3", "tokens=600"])
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "cache"))
        evaluate([str(model) for model in models], folder / "out", suite)
    lm = {"tasks": ["arc_easy"], "shots": 5, "chat": False, "harness": "lm-eval 0.4.13"}
    lm["data_of_tasks"] = {"arc_easy": {"id": "allenai/ai2_arc", "commit": "b" * 40}}
    for label, right in (("llama", 20), ("folded", 31)):
        model = read_result(folder / "out" / label / "perplexity").model
        scores = {"arc_easy": [1.0] * right + [0.0] * (40 - right)}
        result_of(label, scores, model=model, settings=lm).write(folder / "lm" / label / "lm")
    return folder


@pytest.mark.parametrize("kind", ["folded", "adapter"])
def test_a_card_has_the_numbers_of_compare(originals: Path, folders: Path, results: Path, kind: str) -> None:
    folder, label = folders / KINDS[kind], {"folded": "folded", "adapter": "dex"}[kind]
    made = write_card(folder, results=results / "out")
    text, own = card(folder), read_result(results / "out" / label / "perplexity")
    assert made["evaluated"]
    assert f"| {interval(own.score('held-out'))} |" in text
    against_base = compare([results / "out" / "llama", results / "out" / label], against="llama").rows[0]
    assert (
        f"{interval(against_base.differences[0].difference, sign=True)} | {against_base.differences[0].verdict}"
        in text
    )
    against_control = compare([results / "out" / "lora", results / "out" / label], against="lora").rows[0]
    assert interval(against_control.differences[0].difference, sign=True) in text
    assert "| llama (base) | perplexity |" in text
    assert "| lora | perplexity |" in text
    assert ("| dex (its adapter) | perplexity |" in text) == (kind == "folded")
    assert str(results) not in text
    assert str(originals) not in text + (folder / "evaluation.json").read_text()
    metrics = {each.metric_type: each.metric_value for each in ModelCard(text).data.eval_results}
    assert metrics == {"loss": own.mean("held-out"), "perplexity": pytest.approx(2.718281828 ** own.mean("held-out"))}
    assert "held-out loss" not in text  # which Results has, with the interval of other draws
    write_card(folder)
    assert card(folder) == text  # the results stay with the folder


def test_the_model_index_has_metric_shots_and_harness(folders: Path, results: Path) -> None:
    folder = folders / "folded"
    write_card(folder, results=[results / "lm", results / "out"])
    [model] = head(folder)["model-index"]
    entry = next(each for each in model["results"] if each["dataset"]["name"] == "arc_easy")
    assert entry["dataset"] == {
        "name": "arc_easy",
        "type": "allenai/ai2_arc",
        "config": "arc_easy",
        "revision": "b" * 40,
    }
    [metric] = entry["metrics"]
    assert (metric["type"], metric["value"], metric["name"]) == ("acc", 31 / 40, "acc (5-shot)")
    assert (metric["args"]["shots"], metric["args"]["harness"]) == (5, "lm-eval 0.4.13")
    assert not has_null(model)
    assert ModelCard.load(folder / "README.md").data.to_dict() == head(folder)
    evaluation = read_evaluation(folder)
    assert evaluation
    losses = [each["dataset"] for each in model["results"] if each["dataset"]["name"] != "arc_easy"]
    assert losses == [{"name": "data.jsonl, held-out documents", "type": "text"}]  # no id on the Hub
    assert {row.suite for row in evaluation.compared[0].rows} == {"lm", "perplexity"}
    assert "harness lm-eval 0.4.13" in card(folder)


def test_results_of_another_model_are_refused(folders: Path, results: Path) -> None:
    with pytest.raises(DexError, match=r"no result of the model in .*v2"):
        write_card(folders / "v2", results=results / "out")
    weights = folders / "dex" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DexError, match="no result of the model"):
        write_card(folders / "dex" / "adapter", results=results / "out")
    with pytest.raises(DexError, match="named twice"):
        write_card(folders / "folded", results=[results / "out", results / "out"])


def test_what_was_not_evaluated_is_said(folders: Path, results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "out" / "folded", tmp_path / "only" / "folded")
    write_card(folders / "folded", results=tmp_path / "only")
    assert "The base was not evaluated on these items." in card(folders / "folded")
    assert "No control, and no other model, was evaluated on these items." in card(folders / "folded")
    (folders / "folded" / "evaluation.json").write_text("{}")
    with pytest.raises(DexError, match=r"evaluation\.json is damaged"):
        write_card(folders / "folded")


# Cards edited by hand

VALID = """---
base_model: org/base
base_model_relation: finetune
license: apache-2.0
language:
- en
datasets: [org/text]
model-index:
- name: mine
  results:
  - task:
      type: text-generation
    dataset: {type: org/text, name: Text}
    metrics:
    - {type: loss, value: 2.5}
---

# Mine
"""


def test_a_valid_card_of_ones_own_is_taken(originals: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(originals / "folded", tmp_path / "folded")
    put(folder, {"README.md": VALID})
    front = check_card(folder, "me/mine")
    assert front.to_dict()["model-index"] == yaml.safe_load(VALID.split("---")[1])["model-index"]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            "base_model: org/base",
            "base_model: /home/me/base",
            r"line 2: base_model: '/home/me/base' was given, a Hub id",
        ),
        ("base_model: org/base", "base_model: [org/base, ./base]", r"line 2: base_model\.1: './base' was given"),
        ("license: apache-2.0", "license:", r"line 4: license is null"),
        ("- en", "-", r"line 6: language\.0 is null"),
        ("- en", "- english", r"line 6: language\.0: 'english' was given, an ISO 639 code"),
        ("- en", "- no", r"line 6: language\.0 is 'no' to some readers of YAML and false to others"),
        ("license: apache-2.0", "license: apache", r"line 4: license: 'apache' was given.*did you mean apache-2\.0"),
        ("license: apache-2.0", "license: other", r"line 4: license is `other`, and there is no license_name"),
        ("license: apache-2.0", "license: mit\nlicense_name: x", r"line 5: license_name has no effect"),
        ("license: apache-2.0", "license: mit\nlicense: mit", r"line 5, column 1: this is not valid YAML"),
        ("license: apache-2.0", "\tlicense: mit", r"line 4, column 1: this is not valid YAML"),
        ("finetune", "child", r"line 3: base_model_relation: 'child' was given, one of adapter"),
        ("[org/text]", "[data/my/text]", r"line 7: datasets\.0: 'data/my/text' was given, a Hub id"),
        (", value: 2.5", "", r"line 15: model-index\.0\.results\.0\.metrics\.0\.value is missing"),
        ("{type: org/text, name: Text}", "text", r"line 13: .*dataset: 'text' was given, a block with type and name"),
        ("- name: mine\n  results:", "- results:", r"line 9: model-index\.0\.name is missing"),
        ("- name: mine", "  name: mine", r"line 8: model-index: a block was given, a list of models"),
        ("---\nbase", "base", r"has no front matter"),
        ("license: apache-2.0", "license: [apache-2.0]", r"line 4: license: a list was given, a licence that"),
        ("base_model: org/base", "base_model: []", r"line 2: base_model: an empty list was given, a Hub id"),
        ("- en", "- &a en\n- *a", r"line 7: an alias \(\*a\) is in the front matter"),
        ("- en", f"- {'e' * 200_000}", r"its front matter has 200,\d+ characters"),
    ],
)
def test_a_card_edited_into_what_the_hub_refuses_is_said_with_its_line(
    tmp_path: Path, before: str, after: str, reason: str
) -> None:
    assert before in VALID
    put(tmp_path, {"README.md": VALID.replace(before, after, 1)})
    with pytest.raises(DexError, match=reason) as caught:
        read_front_matter(tmp_path)
    assert str(tmp_path / "README.md") in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_card_that_is_gone_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(DexError, match=r"has no README.md; write it: dex card"):
        read_front_matter(tmp_path)
    (tmp_path / "README.md").write_bytes(b"\xff\xff")
    with pytest.raises(DexError, match="is not UTF-8 text"):
        read_front_matter(tmp_path)


WORDS = st.text("aé中0-:#&*!|>'\"%@`,[]{}?~. no", min_size=1, max_size=12).filter(lambda text: text.strip() != "")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "license": st.sampled_from(sorted(KNOWN - {"other"})),
            "language": st.lists(st.sampled_from(sorted(TWO_LETTERS)), min_size=1, max_size=3),
            "base_model": st.sampled_from(["org/base", "base", "a/b.c_d-e"]),
            "library_name": WORDS,
            "tags": st.lists(WORDS, min_size=1, max_size=3, unique=True),
            "anything": WORDS,
        },
    ).filter(bool)
)
@settings(max_examples=40, deadline=None)
def test_what_huggingface_hub_writes_of_a_head_is_read_as_it_was_meant(values: dict[str, Any]) -> None:
    text = str(ModelCard(f"---\n{yaml.safe_dump(values, allow_unicode=True)}---\n"))
    found = parse_front_matter(text, "README.md").to_dict()
    several = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    assert {key: value if isinstance(value, list) else [value] for key, value in found.items()} == several


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    Facts(base={"name": "x", "scratch": True}, told={"language": ["en"]}).write(tmp_path)  # type: ignore[arg-type]
    assert read_facts(tmp_path) == Facts(base={"name": "x", "scratch": True}, told={"language": ["en"]})  # type: ignore[arg-type]
    (tmp_path / "card.json").write_text("[]")
    with pytest.raises(DexError, match=r"card\.json is damaged"):
        read_facts(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[" * 100_000])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("folded", "certificate.json"),
        ("layout", "layout.json"),
        ("adapter", "adapter_config.json"),
        ("lora", "adapter_config.json"),
        ("trained", "config.json"),
        ("folded", "card.json"),
        ("folded", "evaluation.json"),
    ],
)
def test_a_damaged_record_is_named_in_a_sentence(folders: Path, kind: str, name: str, text: str) -> None:
    folder = folders / KINDS[kind]
    whole = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    keep = {key: whole[key] for key in ("peft_type", "divergence") if text == "{}" and key in whole}
    put(folder, {name: json.dumps(keep) if text == "{}" else text})
    with pytest.raises(DexError, match=re.escape(f"{folder / name} is damaged")) as caught:
        write_card(folder)
    assert "\n" not in str(caught.value)


def test_words_in_a_comment_are_not_displayed(folders: Path) -> None:
    folder = folders / "folded"
    write_card(folder, base_model="meta-llama/Llama-3.2-1B")
    put(folder, {"README.md": card(folder).replace("**Built with Llama**", "<!-- Built with Llama -->")})
    with pytest.raises(DexError, match="must display"):
        check_card(folder, "me/Llama-x")


def test_a_card_that_cannot_be_written_leaves_what_was_told_before(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise DexError(f"{path} could not be written: No space left on device.")

    folder = folders / "v2"
    before = (folder / "card.json").read_text()
    monkeypatch.setattr("dex.cards.write.write_whole", full)
    with pytest.raises(DexError, match="No space left"):
        write_card(folder, license="mit")
    assert (folder / "card.json").read_text() == before
