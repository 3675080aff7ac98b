"""`--suite manyshot`: what is shown and asked, and that the answers are those of a plain forward pass."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hub_server import HubServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_diff_v1, tiny_diff_v2, tiny_model, tiny_tokenizer, write_tiny

import dex
from dex.errors import DexError
from dex.evaluation import manyshot
from dex.evaluation.answers import Answers
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.labelled import Example, Labelled, read_labelled
from dex.evaluation.records import Result, difference, read_result
from dex.suites import suite_of
from dex.verbs.evaluate import evaluate

LABELS = ["bird", "fish", "fish tank"]  # one is the beginning of another


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int = 30) -> list[dict[str, Any]]:
    return [{"text": f"no {i}", "label": LABELS[i % 3]} for i in range(count)]


def labelled(count: int = 12, items: int = 3) -> Labelled:
    examples = [Example(f"no {i}", i % 3) for i in range(count)]
    return Labelled(LABELS, examples[items:], examples[:items], {})


def suite(data: Path, *more: str) -> Any:
    return suite_of("manyshot", [f"data={data}", "shots=[2,4]", "seeds=2", "orderings=2", "items=4", *more])


# What is shown


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.integers(0, 5), st.data())
def test_more_shots_contain_fewer_and_every_ordering_shows_the_same(
    labels: list[int], seed: int, data: st.DataObject
) -> None:
    pool = [Example(str(i), label) for i, label in enumerate(labels)]
    few = data.draw(st.integers(1, len(pool) - 1))
    many = data.draw(st.integers(few, len(pool)))
    for ordering in ("random 0", "random 1", "sorted"):
        shown, more = (manyshot.demonstrations(pool, k, seed, ordering) for k in (few, many))
        assert [each for each in more if each in shown] == shown
        assert len(shown) == few
        assert set(shown) == set(manyshot.demonstrations(pool, few, seed, "random 2"))
    ordered = [example.label for example in manyshot.demonstrations(pool, many, seed, "sorted")]
    assert ordered == sorted(labels[int(e.text)] for e in manyshot.demonstrations(pool, many, seed, "random 0"))


def test_seeds_draw_other_demonstrations_and_orderings_other_orders() -> None:
    pool = [Example(str(i), 0) for i in range(100)]
    drawn = [manyshot.demonstrations(pool, 20, seed, f"random {i}") for seed in (0, 1) for i in (0, 1)]
    assert drawn[0] != drawn[1]
    assert set(drawn[0]) == set(drawn[1]) != set(drawn[2])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xy")), min_size=1, max_size=30), st.data())
def test_no_test_item_is_among_the_demonstrations(pairs: list[tuple[str, str]], data: st.DataObject) -> None:
    texts = {text for text, _ in pairs}
    items = data.draw(st.integers(1, len(texts)))
    with tempfile.TemporaryDirectory() as place:
        both = [*pairs, ("first", "x"), ("second", "y")]
        file = write_rows(Path(place) / "d.jsonl", [{"text": f" {t}\n", "label": label} for t, label in both])
        found = read(file, items=items)
    shown, asked = {e.text for e in found.pool}, {e.text for e in found.test}
    assert not shown & asked
    assert shown | asked == texts | {"first", "second"}
    assert len(asked) == len(found.test) == items


def read(file: Path | str, items: int = 2, test: str | None = None, **options: Any) -> Labelled:
    defaults: dict[str, Any] = {"config": None, "split": "train", "test_split": None, "revision": None, "seed": 0}
    text, label, names = (options.pop(k, d) for k, d in (("text", "text"), ("label", "label"), ("names", None)))
    return read_labelled(str(file), test, text, label, names, items=items, **{**defaults, **options})


# What is answered


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3", "diff-v1", "diff-v2", "attached"])
def test_a_label_is_chosen_by_its_log_likelihood_in_a_plain_forward_pass(family: str) -> None:
    model = model_of(family)
    tokenizer = tiny_tokenizer(adds_bos=family == "llama")
    data = labelled()
    evaluated = Evaluated("m", model, tokenizer, {}, 4)
    asked = manyshot.asked_of(data, tokenizer, [2, 5], seeds=1, orderings=1)
    records = manyshot.classify(evaluated, asked, data, Answers())
    assert len(records) == 2 * 2 * 3
    for record in records:
        seen = record.details
        shown = manyshot.demonstrations(data.pool, seen["shots"], seen["seed"], seen["ordering"])
        prompt = "".join(f"Text: {e.text}\nLabel: {LABELS[e.label]}\n\n" for e in shown)
        item = data.test[int(record.group.split()[1])]
        whole = [plain(model, tokenizer, f"{prompt}Text: {item.text}\nLabel:", f" {label}\n\n") for label in LABELS]
        assert record.prediction == LABELS[int(np.argmax(whole))]
        assert seen["log_likelihood"] == pytest.approx(max(whole), abs=2e-3)
        assert seen["target_log_likelihood"] == pytest.approx(whole[item.label], abs=2e-3)
        assert record.score == float(record.prediction == seen["target"])
    assert len({record.details["log_likelihood"] for record in records}) == len(records)


def model_of(family: str) -> Any:
    if family == "diff-v1":
        return tiny_diff_v1()
    if family == "diff-v2":
        return tiny_diff_v2()
    if family == "attached":
        from peft import get_peft_model

        model = get_peft_model(tiny_model("llama", seed=3), dex.DexConfig(heads="all"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "dex_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        return model.eval()
    return tiny_model(family, seed=3)


@torch.no_grad()
def plain(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """The log-likelihood of the answer, of the whole text at once."""
    before = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([before + tokenizer(answer, add_special_tokens=False)["input_ids"]])
    scores = model(ids).logits[0].double().log_softmax(-1)
    return float(sum(scores[i - 1, ids[0, i]] for i in range(len(before), ids.shape[1])))


def test_what_comes_out_depends_neither_on_an_interruption_nor_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = str(write_tiny(tmp_path / "a")), write_rows(tmp_path / "d.jsonl", rows())
    (whole,) = evaluate([base], tmp_path / "whole", suite(data))
    real, calls = Answers.add, 0

    def add(self: Answers, answers: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise DexError("No space left")
        real(self, answers)

    monkeypatch.setattr(Answers, "add", add)
    with pytest.raises(DexError, match="No space"):
        evaluate([base], tmp_path / "out", suite(data))
    (resumed,) = evaluate([base], tmp_path / "out", suite(data))
    assert calls == 4 + 1 + 8
    assert [(r.id, r.prompt_hash, r.score) for r in resumed.records] == [
        (r.id, r.prompt_hash, r.score) for r in whole.records
    ]


def test_processes_have_a_prompt_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manyshot, "place", lambda: (0, 2))
    batches = manyshot._batches(3, 40)
    assert sorted(i for batch in batches for i in batch) == list(range(120))
    assert all(len({i // 40 for i in batch}) == 1 for batch in batches)
    assert [batch[0] // 40 for batch in batches] == [0, 1, 0, 1, 0, 1, 2, 2, 2]


# The suite


def test_a_result_has_every_shot_seed_ordering_and_item(tmp_path: Path) -> None:
    models = [str(write_tiny(tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 2))]
    data = write_rows(tmp_path / "d.jsonl", rows())
    a, b = evaluate(models, tmp_path / "out", suite(data))
    assert list(a.tasks) == ["2-shot random", "2-shot sorted", "4-shot random", "4-shot sorted"]
    assert {len(a.of_task(f"{k}-shot random")) for k in (2, 4)} == {2 * 2 * 4}
    assert {len(a.of_task(f"{k}-shot sorted")) for k in (2, 4)} == {2 * 4}
    assert len({record.group for record in a.records}) == 4
    assert difference(a, b, "4-shot sorted").low is not None
    folder = tmp_path / "out" / "a" / "manyshot"
    assert read_result(folder) == a
    assert (folder / "shots.png").read_bytes().startswith(b"\x89PNG")
    for row in a.figures["accuracy"]:
        own = [r.score for r in a.records if all(r.details[k] == row[k] for k in ("shots", "seed", "ordering"))]
        assert row["accuracy"] == np.mean(own)
    assert len(a.figures["accuracy"]) == 2 * 2 * 3


def test_the_spread_over_orderings_is_within_seeds() -> None:
    accuracy = {
        (4, 0, "random 0"): 0.2,
        (4, 0, "random 1"): 0.4,
        (4, 0, "sorted"): 0.1,
        (4, 1, "random 0"): 0.7,
        (4, 1, "random 1"): 0.7,
        (4, 1, "sorted"): 0.5,
        (8, 0, "random 0"): 0.9,
        (8, 0, "sorted"): 0.9,
    }
    found = manyshot.spread(accuracy, 4)
    assert found == pytest.approx(
        {
            "random_mean": 0.5,
            "lowest": 0.2,
            "highest": 0.7,
            "std_over_orderings": 0.1,  # the root of the mean of 0.02 and 0
            "range_over_orderings": 0.1,
            "std_over_seeds": np.std([0.3, 0.7], ddof=1),
            "sorted_mean": 0.3,
            "sorted_minus_random": -0.2,
        }
    )
    one = manyshot.spread(accuracy, 8)
    assert one["std_over_orderings"] is one["range_over_orderings"] is one["std_over_seeds"] is None


def test_shots_longer_than_the_length_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, data = str(write_tiny(tmp_path / "a")), write_rows(tmp_path / "d.jsonl", rows())
    result: Result = evaluate([base], tmp_path / "out", suite(data, "length=120"))[0]
    assert list(result.tasks) == ["2-shot random", "2-shot sorted"]
    longest = result.figures["left_out"]["4"]
    assert 120 < longest < 200
    assert f"left out, as longer than 120 tokens: 4 ({longest} tokens) shots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["length=60"], r"2 shots need \d+ tokens, and length is 60; lower shots or raise length"),
        (["shots=[2,24]"], r"24 shots need \d+ tokens, and a has a context of 512; lower shots, or set length=512"),
        (["shots=[2,27]"], "27 shots are asked for, and without the 4 test items 26 different texts are left"),
        (["items=31"], r"has 30 different texts, fewer than the 31 items; lower items"),
        (
            ["label_column=labels"],
            r"d\.jsonl line 1 has no column 'labels': the columns asked for are text, labels, ",
        ),
        (["names=[bird,fish]"], "the label 'fish tank' is none of names"),
        (["test=nowhere.jsonl"], r"nowhere\.jsonl does not exist"),
        (["split=test"], "split has no effect with the data"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(tmp_path: Path, changes: list[str], said: str) -> None:
    base, data = str(write_tiny(tmp_path / "a")), write_rows(tmp_path / "d.jsonl", rows())
    with pytest.raises(DexError, match=said):
        evaluate([base], tmp_path / "out", suite(data, *changes))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["shots=[4,2]"], "an increasing list of whole numbers above 0"),
        (["test=t.jsonl", "test_split=dev"], "test_split has no effect beside test"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_once(given: list[str], said: str) -> None:
    with pytest.raises(DexError, match=said):
        suite_of("manyshot", ["data=trec", *given])
    with pytest.raises(DexError, match="data is missing"):
        suite_of("manyshot", [])


# Data


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"text": "x"}',
            "line 2 has no column 'label': the columns asked for are text, label, and those there are text",
        ),
        ('{"text": "x", "label": 3}', "is the number 3, and no names are known; set names"),
        ('{"text": "x", "label": 0.5}', "holds 0.5, and a label is text or a whole number"),
        ('{"text": " ", "label": "a"}', "'text' holds no text"),
        ("[1]", "line 2 is not a JSON object"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"text": "t", "label": "a"}) + "\n" + line + "\n")
    with pytest.raises(DexError, match=said):
        read(file)


def test_class_numbers_have_the_names_that_are_given(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "d.jsonl", [{"t": f"x{i}", "y": i % 2} for i in range(6)])
    found = read(file, text="t", label="y", names=["no", "yes", "maybe"])
    assert found.labels == ["no", "yes", "maybe"]
    assert {e.text: e.label for e in [*found.pool, *found.test]} == {f"x{i}": i % 2 for i in range(6)}


def test_test_items_of_a_file_of_their_own_are_not_shown(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", rows(9))
    test = write_rows(tmp_path / "t.jsonl", [rows(9)[3], {"text": "new", "label": "newt"}])
    found = read(data, test=str(test))
    assert {e.text for e in found.test} == {"no 3", "new"}
    assert "no 3" not in {e.text for e in found.pool}
    assert len(found.pool) == 8
    assert found.labels == [*LABELS, "newt"]


def parquet(columns: dict[str, Any], names: dict[str, list[str]]) -> bytes:
    from datasets import ClassLabel, Dataset

    made = Dataset.from_dict(columns)
    for column, classes in names.items():
        made = made.cast_column(column, ClassLabel(names=classes))
    file = io.BytesIO()
    pyarrow.parquet.write_table(made.data.table, file)
    return file.getvalue()


def split_of(split: str, count: int, column: str) -> bytes:
    values = {"text": [f"{split} {i}" for i in range(count)], column: [i % 2 for i in range(count)]}
    return parquet({**values, "other": [0] * count}, {column: ["ABBR", "LOC"]})


@pytest.mark.parametrize("scripted", [True, False])
def test_a_hub_data_set_goes_by_its_name_also_where_a_script_makes_it(
    hub: HubServer, tmp_path: Path, scripted: bool
) -> None:
    splits = {split: split_of(split, count, "coarse_label") for split, count in (("train", 20), ("test", 6))}
    converted = {f"default/{split}/0000.parquet": content for split, content in splits.items()}
    if scripted:
        hub.add_dataset(
            "CogComp/trec", {"trec.py": b"raise SystemExit"}, revisions={"refs/convert/parquet": converted}
        )
        commit = hub.commit_of("CogComp/trec", "refs/convert/parquet", "datasets")
    else:
        hub.add_dataset("CogComp/trec", {f"data/{split}-0.parquet": each for split, each in splits.items()})
        commit = hub.commit_of("CogComp/trec", kind="datasets")
    base = str(write_tiny(tmp_path / "a"))
    chosen = suite_of("manyshot", ["data=trec", "shots=[2]", "seeds=1", "orderings=1", "items=5"])
    (result,) = evaluate([base], tmp_path / "out", chosen)
    assert result.settings["data_content"] == commit
    assert result.figures["labels"] == 2
    assert {record.details["target"] for record in result.records} == {"ABBR", "LOC"}


def test_what_the_hub_lacks_is_one_sentence(hub: HubServer) -> None:
    with pytest.raises(DexError, match="neither a local path nor a data set on the Hub"):
        read("no/such")
    hub.add_dataset("org/scripted", {"scripted.py": b""})
    with pytest.raises(DexError, match=r"made by a script.*no parquet conversion.*\.jsonl"):
        read("org/scripted")
    hub.add_dataset("org/plain", {"data/train-0.parquet": split_of("train", 4, "label")})
    with pytest.raises(DexError, match=r"has no split 'dev'; those there are train|unknown split"):
        read("org/plain", split="dev")
    with pytest.raises(DexError, match=r"\(train\) has no column 'topic'.*those there are text, label, other"):
        read("org/plain", label="topic")
    with hub.unreachable(), pytest.raises(DexError, match=r"could not be read from the Hub.*check the name and the"):
        read("org/plain")
