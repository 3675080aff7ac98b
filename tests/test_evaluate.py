"""`dex eval`: one folder a model and suite, the same items for all, resumed where it was stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Dex, run_in_two
from tiny import write_tiny

from dex.errors import DexError
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.evaluated import labels
from dex.evaluation.held_out import TASK
from dex.evaluation.paired import Interval
from dex.evaluation.records import (
    Record,
    Result,
    Task,
    difference,
    prompt_hash,
    read_result,
    results_in,
)
from dex.models import load_model
from dex.run_data import cache_dir
from dex.run_folder import used_alone
from dex.suites import SUITES, Suite, suite_of
from dex.verbs import evaluate as verb
from dex.verbs.evaluate import describe, evaluate

SUITE = suite_of("perplexity", ["block=64", "tokens=4_000"])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


# Results


def test_models_are_compared_on_the_same_blocks_and_a_model_with_itself_differs_by_zero(tmp_path: Path) -> None:
    models = [str(write_tiny(tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 2), ("c", 1))]
    a, b, same = evaluate(models, tmp_path / "out", SUITE)
    assert difference(same, a, TASK) == (0.0, 0.0, 0.0)
    between = difference(b, a, TASK)
    assert between.low is not None
    assert between.high is not None
    assert between.low < between.mean < between.high
    assert between.mean == pytest.approx(b.score(TASK).mean - a.score(TASK).mean)
    assert len({record.group for record in a.records}) > 1
    assert "held-out" in describe([a, b, same])


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    (result,) = evaluate([str(write_tiny(tmp_path / "a"))], tmp_path / "out", SUITE)
    folder = tmp_path / "out" / "a" / "perplexity"
    assert sorted(path.name for path in folder.iterdir()) == ["items.jsonl", "result.json"]
    assert read_result(folder) == result
    assert results_in(tmp_path / "out") == [folder] == results_in(folder)
    assert json.loads((folder / "result.json").read_text())["tasks"][TASK]["items"] == len(result.records)


def test_a_result_that_is_there_is_not_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(write_tiny(tmp_path / "a"))
    first = evaluate([base], tmp_path / "out", SUITE)
    written = (tmp_path / "out" / "a" / "perplexity" / "items.jsonl").stat().st_mtime_ns
    assert evaluate([base], tmp_path / "out", SUITE) == first
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "out" / "a" / "perplexity" / "items.jsonl").stat().st_mtime_ns == written


def test_another_model_or_setting_does_not_replace_a_result(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    evaluate([base], tmp_path / "out", SUITE)
    with pytest.raises(DexError, match=r"another block \(64, not 32\)"):
        evaluate([base], tmp_path / "out", suite_of("perplexity", ["block=32", "tokens=4_000"]))
    write_tiny(tmp_path / "a", seed=9)
    with pytest.raises(DexError, match="weights or its dtype differ"):
        evaluate([base], tmp_path / "out", SUITE)
    (replaced,) = evaluate([base], tmp_path / "out", SUITE, force=True)
    assert read_result(tmp_path / "out" / "a" / "perplexity") == replaced


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    (tmp_path / "out" / "a" / "perplexity").mkdir(parents=True)
    (tmp_path / "out" / "a" / "perplexity" / "thesis.txt").write_text("mine")
    with pytest.raises(DexError, match="was not written by dex eval"):
        evaluate([base], tmp_path / "out", SUITE, force=True)
    assert (tmp_path / "out" / "a" / "perplexity" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["org/Llama-3.2-1B", "runs/dex/adapter", "runs/v2/model"], ["Llama-3.2-1B", "dex", "v2"]),
        (["runs/a/adapter", "other/a/adapter"], ["runs-a", "other-a"]),
        (["runs/x/adapter", "runs/x/model"], ["runs-x-adapter", "runs-x-model"]),
    ],
)
def test_a_label_is_the_shortest_name_that_tells_models_apart(models: list[str], expected: list[str]) -> None:
    assert labels(models) == expected


def test_a_model_named_twice_is_refused() -> None:
    with pytest.raises(DexError, match="named twice"):
        labels(["runs/a", "runs/a/"])


def result_of(scores: dict[str, list[float]], **changes: Any) -> Result:
    records = [
        Record(task, str(i), prompt_hash(str(i)), None, score, str(i))
        for task, row in scores.items()
        for i, score in enumerate(row)
    ]
    parts: dict[str, Any] = {"tasks": {task: Task("acc") for task in scores}, "records": records, **changes}
    return Result("lm", "m", {}, {}, **parts)


def test_the_average_counts_every_task_once() -> None:
    result = result_of({"a": [1.0] * 10, "b": [0.0, 1.0]})
    average = result.average()
    assert average is not None
    assert average.mean == pytest.approx(0.75)
    assert average == Interval(0.75, 0.5, 1.0)
    assert result_of({"a": [1.0]}).average() is None


def test_results_of_different_items_are_refused_and_said_which() -> None:
    a = result_of({"t": [1.0, 0.0, 1.0]})
    with pytest.raises(DexError, match="lacks 1 items of m, such as 2"):
        difference(a, result_of({"t": [1.0, 0.0]}), "t")
    other = [Record("t", r.id, "0" * 16 if r.id == "1" else r.prompt_hash, None, r.score, r.group) for r in a.records]
    with pytest.raises(DexError, match="other prompts or weights, such as 1"):
        difference(a, result_of({"t": []}, records=other), "t")
    with pytest.raises(DexError, match=r"acc of version None there, acc_norm of version 1\.0"):
        difference(a, result_of({"t": [1.0, 0.0, 1.0]}, tasks={"t": Task("acc_norm", version="1.0")}), "t")


@pytest.mark.parametrize("damage", ["result.json", "items.jsonl", "half"])
def test_a_damaged_result_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "r"
    result_of({"t": [1.0, 0.0]}).write(folder)
    if damage == "half":
        (folder / "items.jsonl").write_text((folder / "items.jsonl").read_text().splitlines()[0] + "\n")
    else:
        (folder / damage).write_text('{"schema": 1')
    with pytest.raises(DexError, match="evaluate again"):
        read_result(folder)


# Answers


def test_an_answer_is_asked_once_and_found_again(tmp_path: Path) -> None:
    asked: list[int] = []

    def compute(batch: Any) -> list[int]:
        asked.extend(batch)
        return [10 * i for i in batch]

    keys = ["a", "b", "a", "c"]
    first = Answers(tmp_path / "answers.jsonl")
    assert answer_all(keys[:3], [[0, 1], [2]], compute, first, "x") == [0, 10, 0]
    assert asked == [0, 1]
    again = Answers(tmp_path / "answers.jsonl")
    assert answer_all(keys, [[0, 1, 2, 3]], compute, again, "x") == [0, 10, 0, 30]
    assert asked == [0, 1, 3]


@pytest.mark.parametrize("damage", ["garbage", "5", '[["a"], 1]', '["b", null]'])
def test_a_damaged_line_among_answers_is_asked_again_and_the_others_are_not(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file).add({"a": 1, "b": 2, "c": 3})
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], damage, lines[2]]) + "\n")
    left = Answers(file)
    assert [(key in left) for key in "abc"] == [True, False, True]
    assert "1 damaged lines" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 7])
def test_the_line_that_a_kill_cut_is_asked_again_and_nothing_else(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "answers.jsonl"
    Answers(file).add({"a": 1, "b": "ü"})
    file.write_bytes(file.read_bytes()[:-cut])
    left = Answers(file)
    assert "a" in left
    assert "b" not in left
    left.add({"c": 3})
    assert [(key in Answers(file)) for key in "abc"] == [True, False, True]


def test_processes_share_requests_and_all_get_all_answers(tmp_path: Path) -> None:
    run_in_two(of_one_rank_of_two, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == second[0] == [0, 10, 20, 30, 40]
    assert (first[1], second[1]) == ([0, 1, 3, 4], [2])


def of_one_rank_of_two(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    asked: list[int] = []

    def compute(batch: Any) -> list[int]:
        asked.extend(batch)
        return [10 * i for i in batch]

    values = answer_all([str(i) for i in range(5)], [[0, 1], [2], [3, 4]], compute, Answers(), "x")
    Path(folder, f"{rank}.json").write_text(json.dumps([values, asked]))
    torch.distributed.destroy_process_group()


def test_an_evaluation_killed_half_way_goes_on_to_the_same_result(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "a")
    partial = tmp_path / "out" / "a" / ".perplexity.partial" / "answers.jsonl"
    asked = ("--suite", "perplexity", "--set", "block=32", "--batch-size", "1")
    process = Dex("eval", base, *asked, "-o", tmp_path / "out")
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 500):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = partial.stat().st_size
    assert not (tmp_path / "out" / "a" / "perplexity").exists()
    suite = suite_of("perplexity", ["block=32"])
    with pytest.raises(DexError, match="was being evaluated with another block"):
        evaluate([str(base)], tmp_path / "out", SUITE)
    assert partial.stat().st_size == before
    (resumed,) = evaluate([str(base)], tmp_path / "out", suite, batch_size=1)
    (whole,) = evaluate([str(base)], tmp_path / "whole", suite, batch_size=7)
    assert resumed.records[0].score == pytest.approx(whole.records[0].score, rel=1e-5)
    assert [r.score for r in resumed.records] == pytest.approx([r.score for r in whole.records], rel=1e-5)
    assert [path.name for path in (tmp_path / "out" / "a").iterdir()] == ["perplexity"]


def test_a_full_disk_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(write_tiny(tmp_path / "a"))
    real, calls = Answers.add, 0

    def add(self: Answers, answers: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DexError("answers.jsonl could not be written: No space left on device; make room")
        real(self, answers)

    monkeypatch.setattr(Answers, "add", add)
    with pytest.raises(DexError, match="No space left"):
        evaluate([base], tmp_path / "out", SUITE)
    kept = (tmp_path / "out" / "a" / ".perplexity.partial" / "answers.jsonl").read_text().splitlines()
    assert len(kept) == 8
    monkeypatch.undo()


def test_a_kill_before_the_result_takes_its_place_loses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(write_tiny(tmp_path / "a"))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "put_in_place", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate([base], tmp_path / "out", SUITE)
    monkeypatch.undo()
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dex.evaluation.held_out.token_losses", killed)  # nothing is computed again
    evaluate([base], tmp_path / "out", SUITE)
    assert sorted(path.name for path in (tmp_path / "out" / "a" / "perplexity").iterdir()) == [
        "items.jsonl",
        "result.json",
    ]


def test_a_try_without_an_answer_does_not_stand_in_the_way(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    with pytest.raises(DexError, match="do not fit the context"):
        evaluate([base], tmp_path / "out", suite_of("needle", ["lengths=[4096]"]))
    few = ["lengths=[300]", "depths=[0]", "needles=1", "samples=1", "max_new_tokens=2"]
    assert evaluate([base], tmp_path / "out", suite_of("needle", few))[0].records


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"model": 1, "settings": {}}'])
def test_a_damaged_request_is_named_and_its_answers_are_kept(tmp_path: Path, damage: str) -> None:
    partial = tmp_path / "out" / "a" / ".perplexity.partial"
    partial.mkdir(parents=True)
    (partial / "request.json").write_text(damage)
    (partial / "answers.jsonl").write_text('["x", 1]\n')
    with pytest.raises(DexError, match=r"request\.json is damaged"):
        evaluate([str(write_tiny(tmp_path / "a"))], tmp_path / "out", SUITE)
    assert (partial / "answers.jsonl").exists()


def test_two_commands_on_one_output_do_not_work_on_the_same_result(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    folder = tmp_path / "out" / "a" / "perplexity"
    with used_alone(folder, cache_dir()), pytest.raises(DexError, match="Another dex is using"):
        evaluate([base], tmp_path / "out", SUITE)
    assert evaluate([base], tmp_path / "out", SUITE)[0].records


def test_data_that_changed_are_not_taken_for_those_of_the_result(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    rows = [json.dumps({"text": f"sample {i}", "label": "even" if i % 2 else "odd"}) for i in range(12)]
    data = tmp_path / "labelled.jsonl"
    data.write_text("\n".join(rows) + "\n")
    suite = suite_of("manyshot", [f"data={data}", "shots=[2]", "items=2", "seeds=1", "orderings=1"])
    evaluate([base], tmp_path / "out", suite)
    data.write_text("\n".join(reversed(rows)) + "\n")
    with pytest.raises(DexError, match="has changed since"):
        evaluate([base], tmp_path / "out", suite)


@pytest.mark.parametrize("suite", ["perplexity", "needle", "manyshot"])
def test_a_model_whose_logits_are_no_numbers_has_no_score(tmp_path: Path, suite: str) -> None:
    model = load_model(str(write_tiny(tmp_path / "a")))
    with torch.no_grad():
        model.model.lm_head.weight.fill_(torch.nan)
    model.model.save_pretrained(tmp_path / "a")
    rows = [json.dumps({"text": f"sample {i}", "label": "even" if i % 2 else "odd"}) for i in range(12)]
    (tmp_path / "labelled.jsonl").write_text("\n".join(rows) + "\n")
    settings = {
        "perplexity": ["block=64", "tokens=500"],
        "needle": ["lengths=[300]", "depths=[0]", "needles=1", "samples=1"],
        "manyshot": [f"data={tmp_path}/labelled.jsonl", "shots=[2]", "items=2", "seeds=1", "orderings=1"],
    }
    with pytest.raises(DexError, match=r"not numbers|NaN"):
        evaluate([str(tmp_path / "a")], tmp_path / "out", suite_of(suite, settings[suite]))
    assert not (tmp_path / "out" / "a" / suite).exists()


# Suites and their settings


def test_every_suite_says_what_it_is_and_goes_by_its_name() -> None:
    assert "perplexity" in SUITES
    for name, suite in SUITES.items():
        assert suite.model_fields["name"].default == name
        assert suite.what.startswith("which ")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("perplexty", [], "did you mean perplexity"),
        ("perplexity", ["blok=3"], "did you mean block"),
        ("perplexity", ["block=one"], "a whole number above 1 is expected"),
        ("perplexity", ["recipe=r.yaml", "block=9"], "no effect beside recipe"),
        ("perplexity", ["block"], "write key.path=value"),
        ("needle", ["lengths=4096"], "lengths: '4096' was given, a list is expected"),
        ("lm", ["tasks=arc_easy"], "a list is expected"),
        ("lm", ["name=needle"], "name: 'needle' was given"),
        ("needle", ["lengths=" + "[" * 3000], "not valid YAML"),
    ],
)
def test_an_unknown_suite_or_setting_is_refused_with_a_suggestion(name: str, settings: list[str], said: str) -> None:
    with pytest.raises(DexError) as refused:
        suite_of(name, settings)
    assert said in str(refused.value)


def test_several_models_are_loaded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    load = verb.load_evaluated

    def noted(name: str, *rest: Any) -> Any:
        order.append(Path(name).name)
        return load(name, *rest)

    monkeypatch.setattr(verb, "load_evaluated", noted)
    evaluate([str(write_tiny(tmp_path / name)) for name in ("a", "b")], tmp_path / "out", SUITE)
    assert order == ["a", "b"]


def of_a_pair(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for suite in shared_suites(Path(folder)):
        evaluate([f"{folder}/a"], Path(folder, "two"), suite, batch_size=3)
    torch.distributed.destroy_process_group()


def shared_suites(folder: Path) -> list[Suite]:
    few = ["shots=[2, 4]", "items=6", "seeds=1", "orderings=2"]
    return [
        suite_of("perplexity", ["block=64", "tokens=2_000"]),
        suite_of("needle", ["lengths=[300]", "depths=[0, 100]", "needles=2", "samples=2", "max_new_tokens=4"]),
        suite_of("manyshot", [f"data={folder}/labelled.jsonl", *few]),
    ]


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """The whole of `dex eval`, joined as torchrun joins it."""
    write_tiny(tmp_path / "a", max_position_embeddings=1024)
    rows = [{"text": f"sample {i * 37 % 101}", "label": ["odd", "even", "none"][i % 3]} for i in range(24)]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_in_two(of_a_pair, str(tmp_path), port)
    for suite in shared_suites(tmp_path):
        (alone,) = evaluate([str(tmp_path / "a")], tmp_path / "one", suite, batch_size=2)
        together = read_result(tmp_path / "two" / "a" / suite.name)
        assert [(r.task, r.id, r.prompt_hash) for r in together.records] == [
            (r.task, r.id, r.prompt_hash) for r in alone.records
        ]
        assert [r.score for r in together.records] == pytest.approx([r.score for r in alone.records], rel=1e-5)
        assert together.environment["processes"] == 2
