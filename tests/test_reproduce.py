"""`dex reproduce`: a run and its fold come out the same to the bit, and what is not the same is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from test_lock import SHORT, change_one_weight, lock_in, witness_here
from test_train import TEXT, keep_only_checkpoint, recipe
from tiny import write_tiny
from typer.testing import CliRunner

from dex import cli
from dex.errors import DexError
from dex.evaluation.paired import Interval, paired_difference
from dex.hashing import sha256
from dex.lock import LOCK, BlockScore, Lock, write_lock
from dex.models import load_model
from dex.recipe import parse_recipe
from dex.verbs import fold as fold_module
from dex.verbs import reproduce as module
from dex.verbs.fold import fold
from dex.verbs.reproduce import ORIGINAL, REPRODUCTION, compare_losses, judge, reproduce
from dex.verbs.train import _head_plan, train

ADAPTER, MODEL = "adapter_model.safetensors", "model.safetensors"
STEPS = {"run.tokens": 256, "run.save_every": 128}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, what was folded from it with half of its λ, and the reproduction of both in `out`."""
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "cache"))
        own.setattr(fold_module, "_ask_witness", witness_here)
        train(recipe(folder, **STEPS))
        fold(folder / "run" / "adapter", folder / "folded", lambda_scale=0.5)
        reproduce(folder / "folded", folder / "out")
    return folder


@pytest.fixture(autouse=True)
def _quick(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(made / "cache"))
    monkeypatch.setattr(fold_module, "_ask_witness", witness_here)


@pytest.fixture
def again(made: Path, tmp_path: Path) -> Path:
    """A copy of the folded folder and of its reproduction, to be changed; training is not done again for them."""
    for name in ("folded", "out"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def relock(folder: Path, change: Any, output: Path | None = None) -> None:
    """Change the lock of a folder, and of the output that reproduces it."""
    values = lock_in(folder).to_dict()
    change(values)
    lock = Lock.model_validate(values)
    write_lock(folder, lock)
    if output is not None:
        (output / ORIGINAL).write_text(json.dumps(lock.to_dict()))


def written(output: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output / REPRODUCTION).read_text())
    return values


def test_a_run_and_its_fold_are_made_again_to_the_bit(made: Path) -> None:
    for ours, theirs in (("out/run/adapter", "run/adapter"), ("out/folded", "folded")):
        weights = MODEL if "folded" in ours else ADAPTER
        assert (made / ours / weights).read_bytes() == (made / theirs / weights).read_bytes()
    found = written(made / "out")
    assert found["verdict"] == "the same to the bit"
    assert found["equality_expected"]
    assert found["differences"] == []
    assert found["other_files"] == {"run/adapter": [], "folded": []}
    assert found["held_out_loss"]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert found["lam"]["largest_difference"] == 0.0
    assert found["layers_with_other_heads"] == []


def test_a_reproduction_that_was_stopped_goes_on(again: Path) -> None:
    run, kept = again / "out" / "run", again / "out" / "run" / "checkpoints" / "checkpoint-1"
    keep_only_checkpoint(run, 1)
    shutil.rmtree(again / "out" / "folded")
    (again / "out" / REPRODUCTION).unlink()
    before = kept.stat().st_mtime_ns
    found = reproduce(again / "folded", again / "out")
    assert found["verdict"] == "the same to the bit"
    assert found == written(again / "out")
    assert kept.stat().st_mtime_ns == before
    assert len(json.loads((run / "environment.json").read_text())["starts"]) == 2


def test_a_reproduction_that_is_finished_is_not_made_again(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fold", None)
    monkeypatch.setattr("dex.verbs.train.load_base", None)
    assert reproduce(again / "folded", again / "out") == written(again / "out")


def test_an_adapter_that_was_damaged_meanwhile_is_no_result(again: Path) -> None:
    change_one_weight(again / "out" / "run" / "adapter" / ADAPTER)
    with pytest.raises(DexError, match=rf"{ADAPTER} was changed after its run; pass --force"):
        reproduce(again / "folded", again / "out")


def test_a_folded_folder_that_was_damaged_meanwhile_is_folded_again(made: Path, again: Path) -> None:
    change_one_weight(again / "out" / "folded" / MODEL)
    assert reproduce(again / "folded", again / "out")["verdict"] == "the same to the bit"
    assert (again / "out" / "folded" / MODEL).read_bytes() == (made / "folded" / MODEL).read_bytes()


@pytest.mark.parametrize(("where", "name"), [("folded", MODEL), ("run/adapter", ADAPTER)])
def test_weights_that_come_out_otherwise_are_different_and_named(again: Path, where: str, name: str) -> None:
    """The lock's hash is that of weights of which one has another last bit."""
    other = again / "other"
    shutil.copy(again / "out" / where / name, other)
    change_one_weight(other)

    def change(values: dict[str, Any]) -> None:
        files = values["fold"]["files"] if where == "folded" else values["files"]
        files[name] = sha256(other)

    if where == "folded":
        shutil.copy(other, again / "folded" / MODEL)
    relock(again / "folded", change, again / "out")
    done = CliRunner().invoke(cli.app, ["reproduce", str(again / "folded"), "-o", str(again / "out"), "--json"])
    assert done.exit_code == 1
    assert f"dex: The reproduction is not the original: {where}/{name} came out otherwise" in done.stderr
    assert json.loads(done.stdout) == {"output": str(again / "out"), **written(again / "out")}
    assert written(again / "out")["verdict"] == "different"


def test_what_differs_from_the_original_s_machine_is_said_and_equality_is_not_asked_for(again: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["environment"] |= {"commit": "0" * 40, "cpu": "Another, AVX512"}
        values["environment"]["packages"] |= {"torch": "2.11.0", "liger-kernel": "1.0"}

    relock(again / "folded", change, again / "out")
    arguments = ["reproduce", str(again / "folded"), "-o", str(again / "out")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.stderr
    version = torch.__version__
    for line in (
        f"packages.torch was 2.11.0 and is {version} here",
        "packages.liger-kernel was 1.0 and is not there here",
    ):
        assert line in done.stderr
    assert "cpu was Another, AVX512" in done.stderr
    assert done.stdout.startswith("the same to the bit")
    assert {each["key"] for each in written(again / "out")["differences"]} >= {"packages.torch", "cpu", "commit"}

    relock(again / "folded", lambda values: values["files"].update({ADAPTER: "0" * 64}), again / "out")
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.stderr
    assert "the same within 0.01 nats: " in done.stdout
    assert (
        "do not have the hashes of the lock; held-out loss − the original's is +0.0000 [+0.0000, +0.0000]"
        in done.stdout
    )


def test_other_losses_elsewhere_are_different(again: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["environment"]["cpu"] = "Another"
        values["files"][ADAPTER] = "0" * 64
        for block in values["result"]["losses"]:
            block["score"] -= 0.02

    relock(again / "folded", change, again / "out")
    found = reproduce(again / "folded", again / "out")
    assert found["verdict"] == "different"
    assert found["held_out_loss"]["difference"]["mean"] == pytest.approx(0.02)
    assert found["held_out_loss"]["largest_of_a_block"] == pytest.approx(0.02)
    assert reproduce(again / "folded", again / "out", margin=0.03)["verdict"] == "the same within 0.03 nats"


def test_other_heads_are_named_by_layer(again: Path) -> None:
    relock(again / "folded", lambda values: values["heads"]["heads"][1].reverse(), again / "out")
    found = reproduce(again / "folded", again / "out")
    assert found["layers_with_other_heads"] == [1]
    assert "other heads were chosen in the layers 1" in module.describe(found)


OTHER = {"folded": ["config.json", MODEL]}
NONE, SMALL, LARGE = Interval(0.0, 0.0, 0.0), Interval(1e-4, -0.009, 0.01), Interval(0.0, -0.011, 0.001)


@pytest.mark.parametrize(
    ("files", "difference", "lam", "expected", "verdict"),
    [
        ({"folded": ["config.json"]}, LARGE, 1.0, True, "the same to the bit"),
        (OTHER, NONE, 0.0, True, "different"),
        (OTHER, SMALL, 0.01, False, "the same within 0.01 nats"),
        (OTHER, SMALL, None, False, "the same within 0.01 nats"),
        (OTHER, SMALL, 0.011, False, "different"),
        (OTHER, LARGE, 0.0, False, "different"),
        (OTHER, Interval(-0.009, None, None), 0.0, False, "the same within 0.01 nats"),
        (OTHER, Interval(-0.011, None, None), 0.0, False, "different"),
    ],
)
def test_the_verdict(files: Any, difference: Interval, lam: float | None, expected: bool, verdict: str) -> None:
    distance = None if lam is None else {"largest_difference": lam}
    assert judge(files, difference, distance, expected, 0.01)[0] == verdict


def test_losses_are_compared_block_by_block(made: Path) -> None:
    then = lock_in(made / "run").result
    shifted = [
        BlockScore(**{**block.model_dump(), "score": block.score + 0.1 * (i % 3)})
        for i, block in enumerate(then.losses)
    ]
    found = compare_losses(then, then.model_copy(update={"losses": shifted[::-1]}))
    by_hand = [0.1 * (i % 3) for i in range(len(shifted))]
    weights, groups = [b.weight for b in shifted], [b.group for b in shifted]
    assert found["difference"].mean == pytest.approx(
        paired_difference(by_hand, [0.0] * len(by_hand), weights, groups).mean
    )
    assert found["largest_of_a_block"] == pytest.approx(0.2)
    with pytest.raises(DexError, match="not those of the original"):
        compare_losses(then, then.model_copy(update={"losses": shifted[1:]}))


def test_an_output_that_is_taken_is_left_alone(again: Path) -> None:
    (again / "mine").mkdir()
    (again / "mine" / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(DexError, match=r"mine (exists already|was not written by this command)"):
            reproduce(again / "folded", again / "mine", force=force)
    assert [path.name for path in (again / "mine").iterdir()] == ["thesis.txt"]
    relock(again / "folded", lambda values: values["fold"].update(lambda_scale=0.25))
    with pytest.raises(DexError, match="out exists already"):
        reproduce(again / "folded", again / "out")


def test_a_run_is_not_its_own_reproduction(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DexError, match="cannot be the output"):
        reproduce(made / "run" / "adapter", made)
    shutil.copytree(made / "folded", tmp_path / "folded")
    with pytest.raises(DexError, match="exists already"):
        reproduce(tmp_path / "folded", made)


def test_what_has_no_lock_or_a_damaged_one_is_refused(again: Path) -> None:
    (again / "folded" / LOCK).write_text("{")
    with pytest.raises(DexError, match=r"dex\.lock is damaged"):
        reproduce(again / "folded", again / "new")
    (again / "folded" / LOCK).unlink()
    with pytest.raises(DexError, match=r"folded has no dex\.lock, so nothing says how it was made"):
        reproduce(again / "folded", again / "new")
    assert not (again / "new").exists()


@pytest.mark.parametrize(
    ("folder", "file"), [("run", f"adapter/{ADAPTER}"), ("run/adapter", ADAPTER), ("folded", MODEL)]
)
def test_weights_that_were_changed_after_their_lock_are_refused(
    made: Path, tmp_path: Path, folder: str, file: str
) -> None:
    shutil.copytree(made / folder, tmp_path / "copy")
    change_one_weight(tmp_path / "copy" / file)
    with pytest.raises(DexError, match=rf"{file} was changed after dex\.lock was written"):
        reproduce(tmp_path / "copy", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["base is gone", "base changed", "data is gone", "data changed", "recipe"])
def test_what_cannot_be_repeated_is_refused_by_name_and_writes_nothing(made: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(made / "folded", tmp_path / "folded")
    base, data = tmp_path / "llama", tmp_path / "data.jsonl"
    shutil.copytree(made / "llama", base)
    shutil.copy(made / "data.jsonl", data)

    def change(values: dict[str, Any]) -> None:
        values["recipe"]["model"]["id"] = values["model"]["id"] = str(base)
        values["recipe"]["data"]["train"][0]["source"] = str(data)
        if what == "recipe":
            values["recipe"]["run"]["learning_rate"] = 1.0

    relock(tmp_path / "folded", change)
    sentence = {
        "base is gone": rf"made with model\.id {base}, which is not here",
        "base changed": "its fingerprint was .* here; put the former one back",
        "data is gone": rf"made with data\.train\.0\.source {data}, which is not here",
        "data changed": r"data\.jsonl changed .data\.held_out was",
        "recipe": "learning_rate",
    }[what]
    if "gone" in what:
        (base if "base" in what else data).rename(tmp_path / "elsewhere")
    elif what == "base changed":
        shutil.rmtree(base)
        write_tiny(base, seed=7)
    elif what == "data changed":
        data.write_text(data.read_text().replace("item", "thing"))
    with pytest.raises(DexError, match=sentence):
        reproduce(tmp_path / "folded", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_has_the_threads_of_the_one_that_it_repeats(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.get_num_threads()

    def change(values: dict[str, Any]) -> None:
        values["environment"] |= {"threads": here + 1, "device": f"CPU, {here + 1} threads"}

    seen: list[int] = []

    def stopped(*_: Any, **__: Any) -> dict[str, Any]:
        seen.append(torch.get_num_threads())
        return {"finished": False, "stopped": "terminated", "step": 1, "steps": 2, "go_on": "dex train"}

    monkeypatch.setattr(module, "train", stopped)
    relock(again / "folded", change)
    found = reproduce(again / "folded", again / "new")
    assert (seen, torch.get_num_threads()) == ([here + 1], here)
    command = f"dex reproduce {again / 'folded'} -o {again / 'new'}"
    assert module.describe(found) == f"terminated after step 1; go on with: {command}"
    assert module.refusal(found) is None


def test_neither_limits_of_time_nor_trackers_are_repeated(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "train", lambda recipe, **_: seen.append(recipe) or {"finished": False})
    relock(again / "folded", lambda values: values["recipe"]["run"].update(hours=0.1, track=["tensorboard"]))
    reproduce(again / "folded", again / "new")
    assert (seen[0].run.hours, seen[0].run.track, seen[0].output) == (None, [], str(again / "new" / "run"))


def test_a_head_plan_that_was_a_file_is_read_from_the_lock(made: Path, tmp_path: Path) -> None:
    lock = lock_in(made / "run")
    given = recipe(made, **SHORT, **{"method.heads": "{plan: " + str(tmp_path / "gone.json") + "}"})
    plan = _head_plan(tmp_path / "new", given, load_model(str(made / "llama")), False, lock)
    assert plan is not None
    assert plan.model_dump() == lock.heads


def test_a_base_and_a_data_set_of_the_hub_are_those_of_the_recorded_commits(hub: HubServer, tmp_path: Path) -> None:
    """Both have moved on since; what was prepared is not there any more either."""
    rows = [{"text": TEXT.format("first", n) * (1 + n % 4)} for n in range(60)]
    write_tiny(tmp_path / "base")
    began = hub.add_model("org/base", tmp_path / "base"), hub.add_dataset("org/texts", jsonl(rows))
    given = parse_recipe(
        "model: {id: org/base}\nmethod: {name: attention}\ndata: {train: [{source: org/texts}], block: 32, "
        "held_out: 0.2}\nrun: {tokens: 128, batch_tokens: 64, lr: 1.0e-3}\n"
        f"output: {tmp_path / 'run'}\n",
        "test.yaml",
    )
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(tmp_path / "cache"))
        train(given)
    write_tiny(tmp_path / "base", seed=5)
    hub.add_model("org/base", tmp_path / "base")
    hub.add_dataset("org/texts", jsonl(rows[::-1]))
    assert (hub.commit_of("org/base"), hub.commit_of("org/texts", kind="datasets")) != began
    lock = lock_in(tmp_path / "run")
    assert (lock.model.commit, *lock.data.revisions) == began
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(tmp_path / "another cache"))
        found = reproduce(tmp_path / "run" / "adapter", tmp_path / "out")
    assert found["verdict"] == "the same to the bit"
    assert found["layers_with_other_heads"] is None
    ours, theirs = (folder / "run" / "adapter" / ADAPTER for folder in (tmp_path / "out", tmp_path))
    assert ours.read_bytes() == theirs.read_bytes()


def jsonl(rows: list[dict[str, str]]) -> dict[str, bytes]:
    return {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}
