"""`--suite needle`: right answers counted by content, the grid, sharing, resuming, and what is refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forked import run_in_two
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer, write_tiny

from dex.errors import DexError
from dex.evaluation import needle
from dex.evaluation.answers import Answers
from dex.evaluation.attention_mass import SPANS
from dex.evaluation.evaluated import Evaluated, load_evaluated
from dex.evaluation.prefix import Prefix
from dex.evaluation.records import read_result
from dex.suites import suite_of
from dex.verbs.evaluate import evaluate

SMALL = ["lengths=[420, 500]", "depths=[0, 50, 100]", "needles=3", "queries=2", "samples=1", "max_new_tokens=12"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny(tmp_path / "m"))


def small(*more: str) -> Any:
    return suite_of("needle", [*SMALL, *more])


# Scoring


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" 1234567.", True),
        ("The number is 1,234,567, I think.", True),
        ("**1234567**", True),
        ("It is 42: 1234567", True),  # 42 is none of the haystack's
        ("1234567 and 7654321", True),
        ("7654321, 1234567", False),  # another needle's comes first
        ("12345678", False),
        ("01234567", False),
        ("123 4567", False),
        ("", False),
        ("brave-otter", False),
    ],
)
@pytest.mark.parametrize("prompting", ["base", "chat"])
def test_an_answer_is_right_by_its_content(answer: str, right: bool, prompting: str) -> None:
    assert needle.is_right(answer, "1234567", ["7654321"], prompting) is right


def test_of_a_base_model_the_first_line_is_the_answer() -> None:
    text = "9999999.\nThe special magic number for x is 1234567."
    assert not needle.is_right(text, "1234567", ["7654321"], "base")
    assert needle.is_right(text, "1234567", ["7654321"], "chat")
    assert needle.is_right("\n 1234567", "1234567", ["7654321"], "base")


@given(st.integers(1_000_000, 9_999_999), st.integers(1_000_000, 9_999_999), st.text("abc ,.\n", max_size=9))
def test_a_number_counts_however_it_is_written_and_no_other_does(value: int, other: int, words: str) -> None:
    for written in (f"{value}", f"{value:,}"):
        assert needle.is_right(f"{words.replace(',', '')} {written} {words}", str(value), [], "chat")
        if value != other:
            assert not needle.is_right(f"{words} {written} {words}", str(other), [str(value)], "chat")


# The suite, with models that know the answer or know it wrong


class Reader:
    """In `Prefix`'s place: reads the haystack's text, and answers by what stands there."""

    shift: ClassVar[int]  # which needle it answers with: 0 for the one that is asked for, 1 for the next one
    read: ClassVar[list[int]]

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.text = tiny_tokenizer().decode(ids)
        self.read.append(len(ids))

    def greedy(self, question: list[int], max_new_tokens: int, stop: Any) -> list[int]:
        found = [line for line in self.text.split("\n") if line.startswith("The special magic number for ")]
        asked = tiny_tokenizer().decode(question)
        at = next(i for i, line in enumerate(found) if f" {line.split()[5]}" in asked)
        value = found[(at + self.shift) % len(found)].split()[-1]
        ids: list[int] = tiny_tokenizer()(f" {value}")["input_ids"]
        return ids[:max_new_tokens]


@pytest.mark.parametrize("prompting", ["base", "chat"])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_model_that_reads_the_needle_is_right_everywhere_and_one_that_reads_another_nowhere(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompting: str, shift: int
) -> None:
    monkeypatch.setattr(Reader, "shift", shift, raising=False)
    monkeypatch.setattr(Reader, "read", [], raising=False)
    monkeypatch.setattr(needle, "Prefix", Reader)
    (result,) = evaluate([model], tmp_path / "out", small(f"prompting={prompting}", "plot=false", "samples=2"))
    grid = result.figures["grid"]
    assert grid["retrieved"] == [[1.0 - shift] * 2] * 3
    assert grid["items"] == [[2 * 2] * 2] * 3  # samples × queries
    assert Counter((r.details["depth"], r.details["length"]) for r in result.records) == {
        (depth, length): 4 for depth in (0, 50, 100) for length in (420, 500)
    }
    assert len(Reader.read) == 2 * 3 * 2  # the two queries of a haystack share it
    assert {task: result.score(task).mean for task in result.tasks} == {
        "needle-420": 1.0 - shift,
        "needle-500": 1.0 - shift,
    }
    for record in result.records:
        assert (record.details["expected"] in record.prediction) == (shift == 0)
        assert record.group == f"{record.details['length']}-{record.id.split('-')[1]}-{record.id.split('-')[2]}"


def test_a_real_model_answers_as_with_one_whole_prompt_each(model: str, tmp_path: Path) -> None:
    (result,) = evaluate([model], tmp_path / "out", small("attention=true"))
    evaluated = load_evaluated(model, "m", "auto", 1)
    suite = small("attention=true")
    items = items_for(evaluated, suite)
    for item, record in zip(items, result.records, strict=True):
        prompt = torch.tensor([[*item.haystack.ids, *item.haystack.questions[item.which]]])
        assert prompt.shape[1] == item.length == record.details["length"]
        made = evaluated.model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )[0, item.length :]
        assert evaluated.tokenizer.decode(made, skip_special_tokens=True) == record.prediction
    folder = tmp_path / "out" / "m" / "needle"
    assert read_result(folder) == result
    assert sorted(path.name for path in folder.iterdir()) == [
        "attention.png",
        "grid.png",
        "items.jsonl",
        "result.json",
    ]
    assert (folder / "grid.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def items_for(evaluated: Evaluated, suite: Any) -> list[needle.Item]:
    filler, _ = needle.filler_of(suite.filler, evaluated, max(suite.lengths))
    grid = needle.Grid(suite.lengths, suite.depths, suite.needles, suite.queries, suite.samples, suite.seed)
    return needle.items_of(grid, filler, needle.wording_of(evaluated, suite.prompting), evaluated)


def test_the_attention_figures_are_means_of_the_masses(model: str, tmp_path: Path) -> None:
    (result,) = evaluate([model], tmp_path / "out", small("attention=true", "plot=false"))
    found = result.figures["attention"]
    assert found["signed"] is False
    assert sum(found["mean"][span] for span in SPANS) == pytest.approx(1, abs=1e-4)
    for span in SPANS:
        heads = torch.tensor(found["by_head"][span])
        assert heads.shape == (3, 4)
        assert float(heads.mean()) == pytest.approx(found["mean"][span], abs=1e-5)
        assert float(torch.tensor(found["by_cell"][span]).mean()) == pytest.approx(found["mean"][span], abs=1e-5)
    assert torch.tensor(found["by_cell"]["answer"]).shape == (3, 2)


def test_another_model_with_the_same_tokenizer_gets_the_same_prompts(tmp_path: Path) -> None:
    models = [str(write_tiny(tmp_path / "a", "llama")), str(write_tiny(tmp_path / "b", "qwen3", seed=4))]
    a, b = evaluate(models, tmp_path / "out", small("plot=false"))
    assert [(r.id, r.prompt_hash, r.group) for r in a.records] == [(r.id, r.prompt_hash, r.group) for r in b.records]
    assert len({r.prompt_hash for r in a.records}) == len(a.records)


def test_filler_that_was_repeated_is_said(model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A short text. " * 10)
    for filler, repeats in ((str(tmp_path / "short.txt"), pytest.approx(500 / 142, abs=0.01)), ("pydoc", None)):
        (result,) = evaluate([model], tmp_path / f"out-{repeats is None}", small(f"filler={filler}", "plot=false"))
        assert result.figures["filler"]["repeats"] == repeats
        assert result.settings["filler"] == filler
        assert "kind" in result.settings["filler_identity"]


# Going on, and sharing


def test_what_was_answered_is_not_asked_again(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = evaluate([model], tmp_path / "whole", small("plot=false", "attention=true"))[0]
    real, done = needle._answer, 0

    def killed(*args: Any) -> Any:
        nonlocal done
        done += 1
        if done == 6:  # in the middle of the third haystack
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(needle, "_answer", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate([model], tmp_path / "out", small("plot=false", "attention=true"))
    done = 100
    resumed = evaluate([model], tmp_path / "out", small("plot=false", "attention=true"))[0]
    assert done - 100 == len(whole.records) - 4  # two haystacks of two queries were there
    assert resumed.records == whole.records
    assert resumed.figures == whole.figures


def test_processes_share_the_haystacks(model: str, tmp_path: Path) -> None:
    run_in_two(of_one_rank_of_two, model, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["found"] == second["found"]
    assert (first["haystacks"], second["haystacks"]) == (3, 3)
    evaluated = load_evaluated(model, "m", "auto", 1)
    items = items_for(evaluated, small())
    assert ask_all(evaluated, items) == first["found"]


def ask_all(evaluated: Evaluated, items: list[needle.Item]) -> list[Any]:
    asking = needle.Asking(needle.wording_of(evaluated, "base"), 12, attention=False)
    return needle.ask(items, evaluated, asking, Answers())


def of_one_rank_of_two(rank: int, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    evaluated = load_evaluated(model, "m", "auto", 1)
    haystacks = 0

    class Counted(Prefix):
        def __init__(self, *args: Any) -> None:
            nonlocal haystacks
            haystacks += 1
            super().__init__(*args)

    needle.Prefix = Counted  # type: ignore[assignment, misc]  # this process ends here
    found = ask_all(evaluated, items_for(evaluated, small()))
    Path(folder, f"{rank}.json").write_text(json.dumps({"found": found, "haystacks": haystacks}))
    torch.distributed.destroy_process_group()


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["needles=2", "queries=3"], "queries 3 is more than needles 2; ask for as many as there are"),
        (["prompting=chatt"], r"one of base, chat \(did you mean chat\?\)"),
        (["lengths=[]"], "a list of different lengths"),
        (["lengths=[64, 64]"], "a list of different lengths"),
        (["depths=[101]"], "a whole number of at least 0 and of at most 100"),
        (["attention=3"], "true or false is expected"),
        (["lenghts=[64]"], "did you mean lengths"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_loaded(settings: list[str], said: str) -> None:
    with pytest.raises(DexError, match=said):
        suite_of("needle", settings)


def test_a_length_beyond_the_context_is_refused_with_both_named(model: str, tmp_path: Path) -> None:
    said = r"length 501 .*max_new_tokens=12.* the context of m, 512 tokens; use lengths of at most 500\."
    with pytest.raises(DexError, match=said):
        evaluate([model], tmp_path / "out", small("lengths=[501]"))
    with pytest.raises(DexError, match="needles=8 do not fit a length of 500 tokens"):
        evaluate([model], tmp_path / "out2", small("needles=8", "lengths=[500]"))


def test_filler_that_is_not_there_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DexError, match=r"missing\.txt does not exist"):
        evaluate([str(tmp_path / "no model")], tmp_path / "out", small("filler=./missing.txt"))


def test_chat_prompting_without_a_template_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(DexError, match="prompting chat needs a chat template, and m has none; use prompting=base"):
        evaluate([model], tmp_path / "out", small("prompting=chat"))
