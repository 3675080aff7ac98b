"""`dex push`, with the real client, against the tests' own Hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from forked import Dex, run_dex
from hub_server import HubServer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_tokenizer, tokens
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dex import quiet
from dex.adapter import attach, save_adapter
from dex.cards.evaluation import Evaluation
from dex.cards.facts import Base, Facts
from dex.cli import app
from dex.errors import DexError
from dex.evaluation.evaluated import load_evaluated
from dex.evaluation.records import Record, Result, Task
from dex.hub.words import explain
from dex.layouts.to_diff_v2 import to_diff_v2
from dex.lock import LOCK, hash_files
from dex.models import LoadedModel, ModelSource, save_model
from dex.tuner import DexConfig
from dex.verbs import push as verb
from dex.verbs.compare import Model
from dex.verbs.no_regression import _bases_on_record
from dex.verbs.push import Pushed, push

TOKEN = "hf_" + "pushTests" * 4
REPO, BASE = "me/model", "org/base"
CARD = f"""---
base_model: {BASE}
license: apache-2.0
library_name: transformers
tags:
- dex
---

# A model of the tests
"""


# Folders as dex makes them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """folded, sharded, diff, adapter: each whole, with a card."""
    root = tmp_path_factory.mktemp("folders")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    save_model(model, tokenizer, root / "folded")
    model.save_pretrained(root / "sharded", max_shard_size="250KB")
    tokenizer.save_pretrained(root / "sharded")
    for name in ("folded", "sharded"):
        (root / name / "certificate.json").write_text('{"passed": true}')
    save_model(to_diff_v2(tiny_model()), tokenizer, root / "diff")
    (root / "diff" / "layout.json").write_text('{"layout": "diff-v2", "divergence": {}}')
    base = LoadedModel(tiny_model(), tokenizer, ModelSource(BASE))
    base.model.name_or_path = BASE  # as load_model does
    save_adapter(attach(base, DexConfig(task_type="CAUSAL_LM", heads=[[0], [1], [2]])), base, root / "adapter")
    (root / "adapter" / "card.json").unlink(missing_ok=True)
    for folder in root.iterdir():
        (folder / "README.md").write_text(CARD)
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """A folded model, to be changed at will."""
    return Path(shutil.copytree(folders / "folded", tmp_path / "folded"))


@pytest.fixture
def me(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub, with a user whose token is set."""
    hub.sign_in(TOKEN, "me", orgs={"lab": "write", "readers": "read"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited between its tries."""
    waited: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waited.append)
    return waited


def files_on(hub: HubServer, repo: str = REPO, branch: str = "main") -> dict[str, bytes]:
    """What anyone sees, without what the Hub itself put there."""
    found = hub.repos["models", repo].commits[hub.commit_of(repo, branch)]
    return {name: content for name, content in found.items() if name != ".gitattributes"}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def uploads(hub: HubServer) -> list[str]:
    return [request for request in hub.requests if request.startswith("PUT ")]


def asked_about(hub: HubServer) -> int:
    """How often the Hub was asked how files are to go up."""
    return sum("/preupload/" in request for request in hub.requests)


def writes(hub: HubServer) -> list[str]:
    """Requests that change something."""
    reading = ("/api/validate-yaml", "/preupload/", "/paths-info/")
    return [
        each for each in hub.requests if not each.startswith(("GET", "HEAD")) and not any(x in each for x in reading)
    ]


def refusal(folder: Path, repo: str = REPO, **options: Any) -> str:
    with pytest.raises(DexError) as caught:
        push(folder, repo, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert TOKEN not in said
    return said


# What arrives


def test_a_folded_model_arrives_whole_and_loads(me: HubServer, folders: Path) -> None:
    before = files_in(folders / "folded")
    pushed = push(folders / "folded", REPO, verify=True)
    assert files_on(me) == before == files_in(folders / "folded")
    assert pushed.commit == me.commit_of(REPO)
    assert pushed.verified
    assert pushed.url == f"{me.url}/{REPO}/commit/{pushed.commit}"
    loaded = AutoModelForCausalLM.from_pretrained(REPO)
    local = AutoModelForCausalLM.from_pretrained(folders / "folded")
    assert torch.equal(loaded(input_ids=tokens()).logits, local(input_ids=tokens()).logits)


def test_an_adapter_arrives_and_loads_onto_its_base(me: HubServer, folders: Path) -> None:
    me.add_model(BASE, folders / "folded")
    push(folders / "adapter", REPO)
    assert files_on(me) == files_in(folders / "adapter")
    base = AutoModelForCausalLM.from_pretrained(BASE)
    loaded = PeftModel.from_pretrained(base, REPO)
    local = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), str(folders / "adapter"))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens()).logits, local(input_ids=tokens()).logits)


def test_a_diff_model_arrives_with_its_code(me: HubServer, folders: Path) -> None:
    push(folders / "diff", REPO)
    assert files_on(me) == files_in(folders / "diff")
    assert {"configuration_diff_v2.py", "modeling_diff_v2.py"} <= files_on(me).keys()
    loaded = AutoModelForCausalLM.from_pretrained(REPO, trust_remote_code=True)
    local = to_diff_v2(tiny_model())
    assert torch.equal(loaded(input_ids=tokens()).logits, local(input_ids=tokens()).logits)


def test_the_command_prints_the_commit_and_never_the_token(me: HubServer, folders: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folders / "folded", tmp_path / "folded")
    done = run_dex("push", folder, REPO, "--verify", "--json", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["commit"] == me.commit_of(REPO)
    refused = run_dex("push", folder, "someone/else", "--json", HF_TOKEN=TOKEN)
    assert refused.returncode == 1
    said = [done.stdout, done.stderr, refused.stdout, refused.stderr]
    places = [Path(os.environ["HF_HOME"]), tmp_path]
    kept = [path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()]
    assert not any(TOKEN in text for text in said)
    assert not any(TOKEN.encode() in content for content in kept)


def test_a_repeated_push_finds_nothing_to_do(
    me: HubServer, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = push(folders / "folded", REPO)
    me.requests.clear()
    second = push(folders / "folded", REPO, verify=True)
    assert (second.commit, second.uploaded) == (first.commit, {})
    assert writes(me) == []
    assert "nothing to push" in capsys.readouterr().err


def test_only_what_changed_goes_up(me: HubServer, folder: Path) -> None:
    push(folder, REPO)
    assert asked_about(me) == 2  # the weights, and all else together
    (folder / "README.md").write_text(CARD + "\nMore words.\n")
    me.requests.clear()
    assert list(push(folder, REPO).uploaded) == ["README.md"]
    assert uploads(me) == []
    assert asked_about(me) == 1
    assert files_on(me) == files_in(folder)


def test_what_an_earlier_push_left_goes_in_the_same_commit(me: HubServer, folders: Path) -> None:
    first = push(folders / "sharded", REPO)
    repo = me.repos["models", REPO]
    assert len([name for name in files_on(me) if name.startswith("model-")]) > 2
    repo.commit("main", {**repo.commits[str(first.commit)], "figure.png": b"theirs", "LICENSE": b"theirs"})
    commits = len(repo.commits)
    push(folders / "folded", REPO)
    assert files_on(me) == {**files_in(folders / "folded"), "figure.png": b"theirs", "LICENSE": b"theirs"}
    assert len(repo.commits) == commits + 1
    assert "model-00001-of" not in "".join(files_on(me))


def test_what_is_no_part_of_the_model_stays_here_and_is_named(
    me: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LICENSE.txt", "NOTICE", "use_policy.md"):
        (folder / name).write_text("You may.")
    published = files_in(folder)
    private = (".env", "optimizer.pt", "train.py", "model-00009-of-00009.safetensors")
    private += ("License_keys.txt", "notice-private.txt", "LICENSE.bak", "licences.json")
    for name in private:
        (folder / name).write_text(TOKEN)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "trainer_state.json").write_text("{}")
    push(folder, REPO)
    assert files_on(me) == published
    said = capsys.readouterr().err
    assert all(name in said for name in (*private, "checkpoints/"))


def test_a_gitignore_of_the_repository_leaves_nothing_out(me: HubServer, folders: Path) -> None:
    me.add_model(REPO, {".gitignore": b"*.safetensors\n*.json\n"})
    push(folders / "folded", REPO)
    assert files_on(me) == {**files_in(folders / "folded"), ".gitignore": b"*.safetensors\n*.json\n"}


def test_large_files_go_up_in_parts_where_the_hub_asks_for_it(me: HubServer, folders: Path) -> None:
    me.parts_of = 1 << 17
    push(folders / "folded", REPO)
    assert len(uploads(me)) > 2
    assert files_on(me) == files_in(folders / "folded")


def test_a_private_repository_is_made_private(me: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert push(folders / "folded", "lab/secret", private=True, verify=True).private
    assert push(folders / "folded", "lab/secret").private  # and stays so
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        huggingface_hub.model_info("lab/secret")


def test_a_branch_is_made_with_its_commit_and_main_stays(me: HubServer, folder: Path) -> None:
    main = push(folder, REPO).commit
    (folder / "README.md").write_text(CARD + "\nv2\n")
    pushed = push(folder, REPO, revision="v2")
    assert (pushed.commit, main) == (me.commit_of(REPO, "v2"), me.commit_of(REPO))
    assert files_on(me, branch="v2") == files_in(folder)
    assert push(folder, REPO, revision="v2").commit == pushed.commit
    assert me.repos["models", REPO].branches.keys() == {"main", "v2"}


def test_a_pull_request_is_opened_once(me: HubServer, folder: Path, folders: Path) -> None:
    main = me.add_model("someone/model", {**files_in(folders / "sharded"), LOCK: b"{}"})
    pushed = push(folder, "someone/model", create_pr=True, verify=True)
    assert pushed.pull_request == f"{me.url}/someone/model/discussions/1"
    assert files_on(me, "someone/model", "refs/pr/1") == files_in(folder)
    assert me.commit_of("someone/model") == main
    again = push(folder, "someone/model", create_pr=True)
    assert (again.pull_request, again.commit) == (pushed.pull_request, pushed.commit)
    assert len(me.repos["models", "someone/model"].pull_requests) == 1


@pytest.mark.parametrize("certificate", ['{"passed": false}', "{}", None])
def test_a_fold_without_its_certificate_is_not_published(
    me: HubServer, folder: Path, certificate: str | None
) -> None:
    (folder / LOCK).write_text(json.dumps(lock_of(folder)))
    place = folder / "certificate.json"
    place.write_text(certificate) if certificate else place.unlink()
    assert "certificate.json is not" in refusal(folder)
    assert writes(me) == []


@pytest.mark.parametrize("tags", ["indexing", "5", "{a: dex}"])
def test_a_card_whose_tags_only_look_like_ours_is_someone_s_own(me: HubServer, folder: Path, tags: str) -> None:
    me.add_model(REPO, {"config.json": b"{}", "README.md": f"---\ntags: {tags}\n---\n".encode()})
    assert "another model" in refusal(folder)
    assert writes(me) == []


@pytest.mark.parametrize("name", ["a b", "v1/../x", "-x", "", "x/", "é", "x" * 300, "v1.lock"])
def test_a_branch_that_git_would_refuse_is_refused_before_anything_is_uploaded(
    me: HubServer, folder: Path, name: str
) -> None:
    push(folder, REPO)
    before = len(me.requests)
    assert "is no name of a branch" in refusal(folder, revision=name)
    assert not [request for request in me.requests[before:] if "preupload" in request or "/branch/" in request]


def test_a_token_written_into_the_card_while_it_is_checked_is_not_published(
    me: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: Any) -> None:
        with (folder / "README.md").open("a") as file:
            file.write(TOKEN)

    monkeypatch.setattr(verb, "_let_the_hub_check", slow)
    assert "access token" in refusal(folder)
    monkeypatch.setattr(verb, "_let_the_hub_check", lambda *_: (folder / "README.md").write_text(CARD + "another"))
    (folder / "README.md").write_text(CARD)
    assert "changed while it was checked" in refusal(folder)
    assert writes(me) == []


def test_a_dry_run_says_what_would_go_up_and_writes_nothing(me: HubServer, folders: Path) -> None:
    seen = push(folders / "folded", REPO, dry_run=True)
    assert seen.uploaded == {name: len(content) for name, content in files_in(folders / "folded").items()}
    assert writes(me) == []
    assert me.repos == {}
    assert "nothing was uploaded" in verb.describe(seen)


# What is refused, before anything is uploaded


def _is_a_run(folder: Path) -> None:
    shutil.copytree(folder, folder / "adapter")
    (folder / "recipe.yaml").write_text("{}")


def _is_unfinished(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("{}")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _split_in_vain(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _is_of_no_dex(folder: Path) -> None:
    (folder / "certificate.json").unlink()


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8") and None


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (shutil.rmtree, "does not exist"),
        (_is_a_run, "dex fold"),
        (_is_unfinished, "not finished"),
        (_remove("config.json"), "no model"),
        (_remove("model.safetensors"), "has no model.safetensors"),
        (_truncate, "damaged or incomplete"),
        (_split_in_vain, "has no model-00001-of-00002.safetensors"),
        (_remove("tokenizer.json"), "no tokenizer"),
        (_is_of_no_dex, "not known to be made by dex"),
        (_remove("README.md"), "has no README.md"),
        (_write("README.md", CARD.replace("base_model:", "base_model: ''\nx:")), "base_model"),
        (_write("README.md", f"{CARD}\nexport HF_TOKEN=hf_{'a1' * 17}\n"), "access token"),
        (_write("LICENSE", f"token: {TOKEN}"), "access token"),
    ],
)
def test_a_folder_that_cannot_be_published_is_refused_without_a_request(
    me: HubServer, folder: Path, spoil: Callable[[Path], Any], word: str
) -> None:
    spoil(folder)
    assert word in refusal(folder)
    assert me.requests == []


def test_a_file_is_no_folder(me: HubServer, folder: Path) -> None:
    assert "is a file" in refusal(folder / "config.json")


def test_an_adapter_of_a_local_base_is_refused(me: HubServer, folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "adapter", tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    for base in (str(folders / "folded"), "smollm2-135m-instruct"):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
        assert "no model on the Hub" in refusal(folder)
    assert me.requests == []


def lock_of(folder: Path) -> dict[str, Any]:
    """dex.lock of a folded folder."""
    model = {"id": BASE, "revision": None, "commit": None, "fingerprint": "0" * 16, "content": None}
    interval = {"mean": 1.0, "low": None, "high": None}
    environment = {"commit": None, "packages": {}, "device": "CPU, 1 threads", "threads": 1}
    return {
        "schema": 1,
        "recipe": {"run": {"seed": 0, "tokens": 1}},
        "model": model,
        "data": {
            "revisions": [],
            "packed": "",
            "held_out": "",
            "report": {},
            "cursor": {"tokens": 1, "steps": 1, "blocks": 1, "seed": 0},
        },
        "heads": None,
        "environment": environment,
        "result": {
            "method": "dex",
            "tokens": 1,
            "steps": 1,
            "trained_parameters": 1,
            "held_out_loss": interval,
            "held_out_perplexity": interval,
            "branch": None,
            "losses": [],
        },
        "files": {"adapter_model.safetensors": "0" * 64},
        "fold": {
            "text": {"source": "pydoc"},
            "lambda_scale": 1.0,
            "certificate": json.loads((folder / "certificate.json").read_text()),
            "environment": environment,
            "files": hash_files(folder),
        },
    }


OF_THIS_MACHINE = {
    LOCK: {"model": {"id": "/srv/base"}},
    "heads.json": {"data": {"source": "~someone/texts"}},
    "certificate.json": {"passed": True, "text": {"source": "/srv/my texts.txt"}},
    "layout.json": {"reasons": {"no text": {"first": "row 3 of /srv/data/rows.jsonl: no text"}}},
}


@pytest.mark.parametrize("name", OF_THIS_MACHINE)
def test_paths_of_the_machine_are_published_only_if_that_is_asked_for(
    me: HubServer, folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    values = OF_THIS_MACHINE[name]
    content = (
        {**lock_of(folder), "model": {**lock_of(folder)["model"], "id": "/srv/base"}} if name == LOCK else values
    )
    (folder / name).write_text(json.dumps(content))
    said = refusal(folder)
    path = {LOCK: "/srv/base", "heads.json": "~someone/texts", "certificate.json": "/srv/my texts.txt"}.get(
        name, "/srv/data/rows.jsonl"
    )
    assert f"{folder / name} names {path} (" in said
    assert "--with-paths" in said
    assert me.requests == []
    push(folder, REPO, with_paths=True)
    assert f"published with paths of this machine: {path}" in capsys.readouterr().err
    assert name in files_on(me)


def test_names_that_are_no_paths_of_the_machine_are_published(me: HubServer, folder: Path) -> None:
    names = ["data/rows.jsonl", "./texts", "org/name", "https://host/a/b", "and/or", "a / b", "1/2", "</s>", "~ 3/4"]
    (folder / "heads.json").write_text(json.dumps({"names": names, **dict.fromkeys(names)}))
    push(folder, REPO)
    assert "heads.json" in files_on(me)


@pytest.mark.parametrize("kind", ["folded", "adapter"])
def test_results_of_other_weights_are_not_published(me: HubServer, folders: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(folders / kind, tmp_path / kind))
    me.add_model(BASE, folders / "folded")
    identity = load_evaluated(str(folder), "ours", "auto", 1).identity
    own = {key: value for key, value in identity.items() if value is not None and key not in ("id", "base")}
    Evaluation(model=own, suites={}, compared=[]).write(folder)
    push(folder, REPO)
    assert "evaluation.json" in files_on(me)
    weights = next(folder.glob("*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    me.requests.clear()
    assert "evaluation.json, whose results the card shows, is of other weights" in refusal(folder)
    assert writes(me) == []


def test_weights_that_are_not_those_of_the_lock_are_refused(
    me: HubServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / LOCK).write_text(json.dumps(lock_of(folder)))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    push(folder, REPO)
    assert f"changed since {LOCK} was written: chat_template.jinja" in capsys.readouterr().err
    save_model(tiny_model(seed=1), tiny_tokenizer(), folder)
    me.requests.clear()
    assert f"model.safetensors is not what {LOCK} says" in refusal(folder)
    assert writes(me) == []


@pytest.mark.parametrize(
    ("role", "repo", "options", "word"),
    [
        ("read", REPO, {}, "may only read"),
        ("write", "someone/model", {}, "someone else's"),
        ("write", "someone/model", {"create_pr": True}, "not on the Hub"),
        ("write", "no-owner", {}, "organisation/name"),
        ("write", REPO, {"revision": "refs/pr/1"}, "give a branch"),
    ],
)
def test_what_a_token_may_not_do_is_said_before_any_upload(
    hub: HubServer,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    repo: str,
    options: dict[str, Any],
    word: str,
) -> None:
    hub.sign_in(TOKEN, "me", role=role, orgs={"readers": "read"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert word in refusal(folders / "folded", repo, **options)
    assert writes(hub) == []


def test_a_missing_or_wrong_token_is_said(hub: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no token" in refusal(folders / "folded")
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "does not accept the token (401)" in refusal(folders / "folded")


def test_a_fine_grained_token_without_the_right_is_said(me: HubServer, folders: Path) -> None:
    push(folders / "folded", REPO)
    me.fail("/auth-check/write", 403)
    assert "or pass --create-pr" in refusal(folders / "sharded")
    me.fail("/repos/create", 403)
    said = refusal(folders / "folded", "me/new")
    assert "may not do this to me/new (403" in said
    assert "--create-pr" not in said
    me.fail("/commit/main", 403)
    assert "--create-pr" not in refusal(folders / "sharded", create_pr=True)


def test_what_may_be_written_to_is_for_the_hub_to_say_and_not_for_a_role(
    hub: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sign_in(TOKEN, "me", orgs={"readers": "read"}, granted={"readers/model", "someone/model"})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for repo in ("readers/model", "someone/model"):
        hub.add_model(repo, {})
        push(folders / "adapter", repo)
        assert files_on(hub, repo) == files_in(folders / "adapter")
    assert "may not do this to readers/new (403" in refusal(folders / "adapter", "readers/new")
    assert ("models", "readers/new") not in hub.repos


def test_a_repository_that_the_token_may_not_see_is_not_said_to_have_moved(me: HubServer, folders: Path) -> None:
    me.add_model("me/hidden", {}, private=True)
    assert "me/hidden exists, and this token may not see it" in refusal(folders / "adapter", "me/hidden")


def test_a_repository_that_may_not_be_pushed_to_is_refused(me: HubServer, folders: Path) -> None:
    folder = folders / "folded"
    kept = {"LICENSE": b"theirs", "onnx/model.bin": b"theirs", "figure.png": b"theirs"}
    weights = ("model.safetensors", "other.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json")
    theirs = dict.fromkeys(("config.json", *weights, "modeling_other.py", "card.json"), b"{}")
    me.add_model(REPO, {**theirs, **kept, "README.md": b"# theirs"})
    assert "exists and is public" in refusal(folder, private=True)
    assert "holds another model" in refusal(folder)
    main = me.commit_of(REPO)
    assert "no name of a branch" in refusal(folder, revision=main)
    assert "no branch v9" in refusal(folder, revision="v9", create_pr=True)
    assert writes(me) == []
    commits = len(me.repos["models", REPO].commits)
    push(folder, REPO, force=True)
    assert files_on(me) == {**files_in(folder), **kept}
    assert len(me.repos["models", REPO].commits) == commits + 1
    assert push(folder, REPO).commit == me.commit_of(REPO)  # its card says now that it is dex's


@pytest.mark.parametrize(
    ("there", "here", "word"),
    [
        ("folded", "adapter", "a whole model, and this is an"),
        ("adapter", "folded", "an adapter, and this is a whole"),
    ],
)
def test_the_other_kind_is_replaced_only_if_that_is_asked_for(
    me: HubServer, folders: Path, there: str, here: str, word: str
) -> None:
    push(folders / there, REPO)
    said = refusal(folders / here)
    assert word in said
    assert next((folders / there).glob("*.safetensors")).name in said
    assert files_on(me) == files_in(folders / there)
    push(folders / here, REPO, force=True)
    assert files_on(me) == files_in(folders / here)


def test_a_card_that_the_hub_refuses_is_not_uploaded(
    me: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub_writes.card_errors", lambda content: ["“license” is one that nobody knows"])
    assert "nobody knows" in refusal(folders / "folded")
    assert me.repos == {}


def test_without_a_network_that_is_said(me: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with me.unreachable():
        assert "could not be reached" in refusal(folders / "folded")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(folders / "folded")


# What goes wrong on the way


@pytest.mark.parametrize("path", ["/lfs/object/", "/objects/batch", "/preupload/"])
@pytest.mark.parametrize("fault", ["429", "500", "dropped", "halfway"])
def test_a_fault_that_passes_is_not_noticed(
    me: HubServer, folders: Path, waits: list[float], path: str, fault: str
) -> None:
    if fault.isdigit():
        me.fail(path, int(fault), times=2, Retry_After="7")
    else:
        me.drop(path, times=2, after_bytes=100 if fault == "halfway" else 0)
    push(folders / "folded", REPO)
    assert files_on(me) == files_in(folders / "folded")
    assert len(waits) == 2
    assert (waits == [8.0, 8.0]) == fault.isdigit()  # as the Hub asks, and a second


@pytest.mark.parametrize("path", ["/lfs/object/", "/lfs/verify/", "/commit/main", "/repos/create", "/whoami-v2"])
@pytest.mark.parametrize("fault", ["429", "500", "dropped"])
def test_a_fault_that_stays_ends_in_a_sentence_and_the_same_command_goes_on(
    me: HubServer, folders: Path, waits: list[float], path: str, fault: str
) -> None:
    if fault.isdigit():
        me.fail(path, int(fault), Retry_After="30")
    else:
        me.drop(path)
    said = refusal(folders / "sharded")
    assert "run the same command again" in said
    assert fault not in ("429",) or "in 30 s" in said
    assert not me.repos or files_on(me) == {}
    kept = set(me.objects)
    me.faults.clear()
    me.requests.clear()
    push(folders / "sharded", REPO)
    assert files_on(me) == files_in(folders / "sharded")
    assert not any(sha in request for sha in kept for request in uploads(me))


@pytest.mark.parametrize("fault", ["500", "dropped"])
def test_a_commit_whose_answer_is_lost_is_found(me: HubServer, folders: Path, fault: str) -> None:
    if fault.isdigit():
        me.fail("/commit/main", 500, times=1, answered=True)
    else:
        me.drop("/commit/main", times=1, answered=True)
    pushed = push(folders / "folded", REPO)
    assert pushed.commit == me.commit_of(REPO)
    assert files_on(me) == files_in(folders / "folded")


def at_request(hub: HubServer, path: str, do: Callable[[], Any], then: Callable[[], Any]) -> Any:
    """What `do` returns; when its request for `path` comes, `then` happens before the answer."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(do()))
    with hub.held(path) as hold:
        thread.start()
        assert hold.reached.wait(60)
        then()
    thread.join(60)
    return results[0]


def test_a_push_of_someone_else_meanwhile_is_not_overwritten(me: HubServer, folder: Path) -> None:
    push(folder, REPO)
    repo = me.repos["models", REPO]
    theirs = {**files_in(folder), "theirs": b"x"}
    (folder / "README.md").write_text(CARD + "\nours\n")
    said = at_request(me, "/commit/main", lambda: refusal(folder), lambda: repo.commit("main", theirs, "theirs"))
    assert "has moved while it was being pushed to (412" in said
    assert files_on(me) == theirs
    push(folder, REPO)
    assert files_on(me) == {**files_in(folder), "theirs": b"x"}


@pytest.mark.parametrize("path", ["/lfs/object/", "/lfs/verify/"])
def test_a_file_that_changes_during_the_upload_is_not_committed(me: HubServer, folder: Path, path: str) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()

    def change() -> None:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    said = at_request(me, path, lambda: refusal(folder), change)
    assert f"{file} changed while it was pushed" in said
    assert files_on(me) == {}
    push(folder, REPO)
    assert files_on(me) == files_in(folder)


def test_a_card_that_changes_during_the_upload_goes_up_as_it_was_checked(me: HubServer, folder: Path) -> None:
    before = files_in(folder)
    at_request(me, "/lfs/verify/", lambda: push(folder, REPO), lambda: (folder / "README.md").write_text("---\n"))
    assert files_on(me) == before


def test_a_killed_push_shows_nothing_and_goes_on(me: HubServer, folders: Path, folder: Path) -> None:
    first = push(folder, REPO)
    seen = files_on(me)
    shards = sorted((folders / "sharded").glob("model-*.safetensors"))
    held_back = hashlib.sha256(shards[1].read_bytes()).hexdigest()
    with me.held(f"/lfs/object/{held_back}", lost=True) as hold:
        killed = Dex("push", folders / "sharded", REPO, HF_TOKEN=TOKEN)
        assert hold.reached.wait(120), killed.stderr
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(60) == -signal.SIGKILL
    assert me.commit_of(REPO) == first.commit
    assert files_on(me) == seen
    me.requests.clear()
    push(folders / "sharded", REPO, verify=True)
    assert len(uploads(me)) == len(shards) - 1  # the first was there
    assert files_on(me) == files_in(folders / "sharded")


def test_an_upload_that_fails_leaves_no_new_branch(me: HubServer, folder: Path) -> None:
    push(folder, REPO)
    (folder / "README.md").write_text(CARD + "\nv2\n")
    me.fail("/preupload/", 403)
    refusal(folder, revision="v2")
    assert me.repos["models", REPO].branches.keys() == {"main"}


def test_a_commit_that_comes_back_otherwise_is_said(
    me: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tampered(repo: str, commit: str, files: Any) -> None:
        me.repos["models", repo].commits[commit]["config.json"] += b" "
        verify_commit(repo, commit, files)

    verify_commit = verb.verify_commit
    monkeypatch.setattr(verb, "verify_commit", tampered)
    assert "is not what was pushed: config.json" in refusal(folders / "folded", verify=True)


def test_verifying_fetches_what_was_pushed_and_not_into_the_folder_for_temporary_files(
    me: HubServer, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me.add_model(REPO, {"figure.png": b"theirs"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    assert push(folders / "adapter", REPO, verify=True).verified
    fetched = [request.rsplit("/", 1)[-1] for request in me.requests if request.startswith("GET /me/model/resolve")]
    assert sorted(fetched) == sorted(files_in(folders / "adapter"))
    assert not list(Path(os.environ["HF_HOME"]).glob("dex-push-*"))


@pytest.mark.parametrize("token", [TOKEN, "hf_" + "someOther" * 4])
def test_what_the_hub_says_is_shown_without_the_token(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = explain(REPO, "committing", RuntimeError(f"bad header Bearer {token}\nand more"))
    assert token not in said
    assert "Bearer <token>" in said
    said = explain(REPO, "committing", RuntimeError("x" * 180 + f" {token}"))  # cut in its middle
    assert token[:15] not in said


# A model that is worse


def results_of(folder: Path, base: str | Path, output: Path, worse_by: float, documents: int = 40) -> Path:
    """What `dex eval base folder -o output` writes, with a loss that is given."""
    for label, model, loss in (("base", base, 1.0), ("ours", folder, 1.0 + worse_by)):
        identity = load_evaluated(str(model), label, "auto", 1).identity
        records = [Record("text", str(i), "x", None, loss + 0.01 * (i % 3), group=str(i)) for i in range(documents)]
        result = Result("perplexity", label, identity, {}, {"text": Task("loss", higher_is_better=False)}, records)
        result.write(output / label / "perplexity")
    return output


@pytest.mark.parametrize("kind", ["folded", "adapter"])
def test_a_model_that_is_worse_than_its_base_is_not_published(
    me: HubServer, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, base = Path(shutil.copytree(folders / kind, tmp_path / kind)), tmp_path / "base"
    save_model(tiny_model(seed=0 if kind == "adapter" else 3), tiny_tokenizer(), base)
    commit = me.add_model(BASE, base)
    worse = results_of(folder, BASE, tmp_path / "worse", 0.5)
    if kind == "folded":
        assert "says which weights it was made of" in refusal(folder, require_no_regression=worse)
        Facts(base=Base(name=BASE, hub_id=BASE, commit=commit)).write(folder)
    said = refusal(folder, require_no_regression=worse)
    assert "A regression from base: ours on text; nothing was pushed" in said
    few = results_of(folder, BASE, tmp_path / "few", 0.5, documents=5)
    said = refusal(folder, require_no_regression=few)
    assert "cannot show a regression from base: text (5 of them); evaluate on more, or give --margin" in said
    assert "text has 5 groups of items" in capsys.readouterr().err
    assert writes(me) == []
    better = results_of(folder, BASE, tmp_path / "better", -0.1)
    push(folder, REPO, require_no_regression=better, margin=0.05)
    assert files_on(me) == files_in(folder)


def test_results_of_another_model_do_not_count(me: HubServer, folders: Path, folder: Path, tmp_path: Path) -> None:
    save_model(tiny_model(seed=3), tiny_tokenizer(), tmp_path / "base")
    results = results_of(folders / "diff", tmp_path / "base", tmp_path / "results", 0.0)
    assert "has no result of the model in" in refusal(folder, require_no_regression=results)
    results = results_of(folder, tmp_path / "base", tmp_path / "others", 0.0)
    (folder / LOCK).write_text(json.dumps(lock_of(folder)))
    assert "no result of the base of ours" in refusal(folder, require_no_regression=results)
    assert writes(me) == []


def test_the_base_of_what_was_laid_out_is_on_record(tmp_path: Path) -> None:
    results = [Result("s", name, {"fingerprint": name}, {}, {}, []) for name in ("one", "two")]
    one, two = (Model(result.label, {"s": result}, {}) for result in results)
    assert _bases_on_record(tmp_path, [one, two]) is None
    (tmp_path / "layout.json").write_text('{"base": {"fingerprint": "two"}}')
    assert _bases_on_record(tmp_path, [one, two]) == [two]


# The command line


@pytest.mark.parametrize("idle", [{"margin": 0.1}, {"dry_run": True, "verify": True}, {"commit_message": " "}])
def test_an_idle_option_is_a_mistake_in_python_too(me: HubServer, folders: Path, idle: dict[str, Any]) -> None:
    assert next(reversed(idle)) in refusal(folders / "adapter", **idle)
    assert me.requests == []


@pytest.mark.parametrize("given", [None, "1"])
def test_transfers_are_shown_unless_the_user_wants_no_bars(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", bars := "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    if given is None:
        monkeypatch.delenv(bars)
    for place in ("logging.disable", "warnings.simplefilter"):
        monkeypatch.setattr(place, lambda _: None)
    monkeypatch.setattr(quiet, "_set_here", set())
    quiet.quiet_libraries()
    assert os.environ[bars] == "1"
    quiet.show_transfers()
    assert os.environ.get(bars) == given


def test_the_options_reach_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    done = Pushed("a/b", "v2", "c" * 40, "url", None, {}, [], [], [], False, False, False, False)

    def record(*arguments: Any, **options: Any) -> Pushed:
        calls.append((arguments, options))
        return done

    monkeypatch.setattr(verb, "push", record)
    options = ["--private", "--revision", "v2", "--create-pr", "--commit-message", "words", "--with-paths", "--force"]
    given = ["--require-no-regression", "results", "--margin", "0.1"]
    run = CliRunner().invoke(app, ["push", "folder", "a/b", *options, *given])
    assert run.exit_code == 0, run.output
    assert "c" * 40 in run.output
    assert calls == [
        (
            (Path("folder"), "a/b"),
            {
                "private": True,
                "revision": "v2",
                "create_pr": True,
                "commit_message": "words",
                "verify": False,
                "require_no_regression": Path("results"),
                "margin": 0.1,
                "dry_run": False,
                "with_paths": True,
                "force": True,
            },
        )
    ]
    for idle in (["--margin", "0.1"], ["--dry-run", "--verify"], ["--commit-message", " "]):
        assert CliRunner().invoke(app, ["push", "folder", "a/b", *idle]).exit_code == 2
