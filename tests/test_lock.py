"""dex.lock: what it holds is what is there, and nothing else can be taken for it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from safetensors.torch import save_file
from test_fold import trained_adapter
from test_train import recipe, write_data

from dex.errors import DexError
from dex.lock import LOCK, Lock, find_lock, read_lock, refuse_other_inputs, write_lock
from dex.pins import local_paths
from dex.recipe import parse_recipe
from dex.recipe_yaml import yaml_lines
from dex.verbs import fold as fold_module
from dex.verbs import fold_witness
from dex.verbs.fold import fold
from dex.verbs.train import train

SECRET = "hf_aTokenThatIsNobodys"
SHORT = {"run.tokens": 256, "run.save_every": 256}


def witness_here(folder: Path, input_ids: torch.Tensor, scratch: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The witness of a fold without its process, which takes seconds and is what tests/test_fold.py is about."""
    (scratch / "folded").mkdir()
    save_file({"input_ids": input_ids}, scratch / "tokens")
    fold_witness.main(str(folder), str(scratch / "tokens"), str(scratch / "folded"), str(dtype).split(".")[1])
    report: dict[str, Any] = json.loads((scratch / "folded" / "report.json").read_text())
    return {**report, "imported_dex": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and what was folded from it; and a run that trained the base's own weights."""
    folder = tmp_path_factory.mktemp("locked")
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "cache"))
        own.setenv("HF_TOKEN", SECRET)
        own.setattr(fold_module, "_ask_witness", witness_here)
        train(recipe(folder, **SHORT))
        fold(folder / "run" / "adapter", folder / "folded")
        train(recipe(folder, "whole", method="{name: full}", **SHORT))
    return folder


@pytest.fixture
def locked(made: Path, tmp_path: Path) -> Path:
    """A copy of the folded folder, to be damaged."""
    return Path(shutil.copytree(made / "folded", tmp_path / "folded"))


def lock_in(folder: Path) -> Lock:
    lock = read_lock(folder)
    assert lock is not None
    return lock


def text_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / LOCK).read_text())
    return values


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_run_and_what_it_trained_have_the_same_lock(made: Path) -> None:
    for run, trained in (("run", "adapter"), ("whole", "model")):
        assert (made / run / LOCK).read_bytes() == (made / run / trained / LOCK).read_bytes()
    assert lock_in(made / "run").fold is None
    assert lock_in(made / "whole").heads is None


def test_a_lock_says_what_the_run_says(made: Path) -> None:
    run = made / "run"
    lock, result, inputs = (
        lock_in(run),
        json.loads((run / "result.json").read_text()),
        json.loads((run / "inputs.json").read_text()),
    )
    assert lock.model.model_dump() == inputs["model"]
    assert (lock.data.packed, lock.data.held_out) == (inputs["data"]["packed"], inputs["data"]["held_out"])
    assert lock.data.cursor.model_dump() == {"tokens": 256, "steps": 2, "blocks": 8, "seed": 0}
    assert lock.heads == json.loads((run / "heads.json").read_text())
    for name in ("method", "tokens", "steps", "trained_parameters", "held_out_loss", "held_out_perplexity", "branch"):
        assert getattr(lock.result, name) == result[name]
    items = [json.loads(line) for line in (run / "held_out" / "items.jsonl").read_text().splitlines()]
    assert [block.model_dump() for block in lock.result.losses] == [
        {key: item[key] for key in ("id", "group", "weight", "score")} for item in items
    ]
    assert lock.environment == result["environment"]
    assert lock.environment["threads"] >= 1


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (("environment",), {}, "environment.commit"),
        (("environment", "threads"), 0, "environment.threads"),
        (("result", "branch"), {}, "result.branch.layers"),
        (("heads",), {}, "version|model"),
        (("data", "revisions"), [], "data.revisions"),
        (("data", "cursor", "seed"), 7, "data.cursor.seed 7"),
        (("data", "cursor", "tokens"), 99, "data.cursor.tokens 99"),
        (("fold", "text"), {}, "fold.text.source"),
        (("fold", "lambda_scale"), float("nan"), "fold.lambda_scale"),
        (("fold", "environment"), {}, "fold.environment.commit"),
    ],
)
def test_a_lock_that_was_edited_is_named_before_any_work(
    locked: Path, place: tuple[str, ...], value: Any, named: str
) -> None:
    values = text_of(locked)
    inner = values
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (locked / LOCK).write_text(json.dumps(values))
    with pytest.raises(DexError, match=named):
        read_lock(locked)


def test_the_recipe_of_a_lock_is_the_run_s_with_every_default(made: Path) -> None:
    lock = lock_in(made / "run")
    again = parse_recipe("\n".join(yaml_lines(lock.recipe)), "lock")
    given = recipe(made, **SHORT)
    assert again == given.model_copy(update={"output": "run"})


@pytest.mark.parametrize(("folder", "weights"), [("run/adapter", "adapter_model"), ("whole/model", "model")])
def test_the_hashes_are_those_of_the_files(made: Path, folder: str, weights: str) -> None:
    files = lock_in(made / folder).files
    assert f"{weights}.safetensors" in files
    assert "tokenizer.json" in files
    assert not {"README.md", LOCK} & files.keys()
    assert files == {name: sha256(made / folder / name) for name in files}


def test_the_configuration_of_an_adapter_has_no_order_of_the_process(made: Path) -> None:
    """PEFT keeps the names in a set, whose order is another one in every process: the file would be another too."""
    config = json.loads((made / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "v_proj"]


def test_a_fold_adds_itself_to_the_lock_of_its_adapter(made: Path) -> None:
    lock, certificate = lock_in(made / "folded"), json.loads((made / "folded" / "certificate.json").read_text())
    assert lock.model_copy(update={"fold": None}) == lock_in(made / "run")
    assert lock.fold is not None
    assert (lock.fold.certificate, lock.fold.text) == (certificate, certificate["text"])
    assert lock.fold.lambda_scale == 1.0
    assert lock.fold.files == {name: sha256(made / "folded" / name) for name in lock.fold.files}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= lock.fold.files.keys()


def test_what_comes_from_no_run_has_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "_ask_witness", witness_here)
    fold(trained_adapter(tmp_path), tmp_path / "folded")
    assert read_lock(tmp_path / "adapter") is None
    assert read_lock(tmp_path / "folded") is None


def test_an_adapter_that_was_trained_on_after_its_run_gives_its_fold_no_recipe(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fold_module, "_ask_witness", witness_here)
    adapter = shutil.copytree(made / "run" / "adapter", tmp_path / "adapter")
    change_one_weight(adapter / "adapter_model.safetensors")
    fold(adapter, tmp_path / "folded")
    assert read_lock(tmp_path / "folded") is None
    assert "is not the file of its dex.lock" in capsys.readouterr().err


def change_one_weight(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_lock_holds_no_token_and_no_path_but_those_of_the_recipe(made: Path) -> None:
    for folder in ("run", "folded", "whole"):
        text = (made / folder / LOCK).read_text()
        assert SECRET not in text
        assert str(made / folder) not in text
        for path in (made / "llama", made / "data.jsonl"):
            text = text.replace(str(path), "")
        assert str(made) not in text
        assert str(Path.home()) not in text


def test_the_paths_that_nobody_else_has_are_named(made: Path) -> None:
    expected = {"model.id": str(made / "llama"), "data.train.0.source": str(made / "data.jsonl")}
    assert local_paths(lock_in(made / "folded")) == expected
    values = text_of(made / "folded")
    values["model"] |= {"id": "org/base", "commit": "0" * 40}
    values["data"]["revisions"] = ["1" * 40]
    values["recipe"]["method"]["heads"] = {"plan": "mine.json"}
    values["fold"]["text"]["source"] = "./mine.txt"
    expected = {"method.heads.plan": "mine.json", "fold.text": "./mine.txt"}
    assert local_paths(Lock.model_validate(values)) == expected


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda values: values.pop("recipe"), "is damaged .recipe: field required"),
        (lambda values: values["fold"].pop("files"), "is damaged .fold.files: field required"),
        (lambda values: values["result"].update(steps="two"), "is damaged .result.steps: "),
        (lambda values: values.update(more=1), "is damaged .more: "),
        (lambda values: values.update(schema=2), "is of schema 2, and this dex reads 1"),
        (lambda values: values.pop("schema"), "is damaged .it is no JSON of dex"),
    ],
)
def test_a_lock_that_is_not_whole_is_refused_and_says_where(locked: Path, damage: Any, sentence: str) -> None:
    values = text_of(locked)
    damage(values)
    (locked / LOCK).write_text(json.dumps(values))
    with pytest.raises(DexError, match=sentence):
        read_lock(locked)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_lock_is_refused(locked: Path, content: bytes) -> None:
    (locked / LOCK).write_bytes(content)
    with pytest.raises(DexError, match=r"dex\.lock is damaged"):
        read_lock(locked)


def test_what_is_written_is_what_is_read(made: Path, tmp_path: Path) -> None:
    lock = lock_in(made / "folded")
    write_lock(tmp_path, lock)
    assert read_lock(tmp_path) == lock
    assert (tmp_path / LOCK).read_bytes() == (made / "folded" / LOCK).read_bytes()


def test_the_lock_of_a_repository_is_found_and_one_without_is_none(hub: HubServer, made: Path) -> None:
    hub.add_model("org/adapted", made / "folded")
    hub.add_model("org/stock", {"config.json": b"{}"})
    assert find_lock("org/adapted") == lock_in(made / "folded")
    assert find_lock("org/stock") is None
    with pytest.raises(DexError, match="org/none is no local folder"):
        find_lock("org/none")


def test_other_inputs_are_refused_by_name(made: Path, tmp_path: Path) -> None:
    lock = lock_in(made / "run")
    inputs = {"model": lock.model.model_dump(), "data": lock.data.model_dump()}
    report = lock.data.report
    refuse_other_inputs(lock, inputs, report)
    for key in ("fingerprint", "content"):
        other = {**inputs, "model": {**inputs["model"], key: "0"}}
        with pytest.raises(DexError, match=f"its {key} was {getattr(lock.model, key)} and is 0 here"):
            refuse_other_inputs(lock, other, report)
    changed = json.loads(json.dumps(report))
    changed["inputs"]["sources"][0]["files"][0][1] = "0"
    other = {**inputs, "data": {**inputs["data"], "packed": "0"}}
    with pytest.raises(DexError, match=r"data\.jsonl changed .data\.packed was"):
        refuse_other_inputs(lock, other, changed)
    with pytest.raises(DexError, match="they became other tokens"):
        refuse_other_inputs(lock, other, report)


def test_a_run_that_went_on_elsewhere_says_so(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path
    write_data(folder)
    shutil.copytree(made / "llama", folder / "llama")
    train(recipe(folder, **SHORT))
    assert lock_in(folder / "run").earlier == []
    starts = json.loads((folder / "run" / "environment.json").read_text())
    starts["starts"][0]["threads"] = 99
    (folder / "run" / "environment.json").write_text(json.dumps(starts))
    (folder / "run" / "result.json").unlink()
    train(recipe(folder, **SHORT))
    lock = lock_in(folder / "run")
    assert lock.earlier == [{**lock.environment, "threads": 99}]
