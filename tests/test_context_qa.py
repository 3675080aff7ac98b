"""`--suite context-qa`: prompts that fit, answers that are plain greedy ones, scores that can be checked by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hub_server import HubServer
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from tiny import tiny_diff_v1, tiny_diff_v2, tiny_model, tiny_tokenizer, write_tiny

import dex
from dex.errors import DexError
from dex.evaluation import context_qa
from dex.evaluation.answers import Answers
from dex.evaluation.context_qa import Prompts, answer_items, scores
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.prefix import Prefix
from dex.evaluation.reading import Item, Kind, Reading, read_task
from dex.evaluation.records import read_result
from dex.suites import suite_of
from dex.verbs.evaluate import evaluate

NEW: dict[Kind, int] = {"question": 6, "summary": 9}
# The parts of the prompts, written out once more: a change of them is a change of every score.
QUESTION = "Read the text and answer the question in as few words as possible.\n\nText:\n{}\n\nQuestion: {}\nAnswer:"
SUMMARY = "Read the text and summarise it.\n\nText:\n{}\n\nSummary:"


def item(context: str, question: str | None = "Who?", name: str = "1") -> Item:
    return Item(name, context, context, question, ("Ann",))


def reading(*items: Item, name: str = "mine") -> Reading:
    return Reading(name, "summary" if items[0].question is None else "question", list(items), "0")


def prompts(length: int = 400, truncate: str = "middle", chat: bool = False, **options: Any) -> Prompts:
    return Prompts(options.get("tokenizer", tiny_tokenizer()), length, NEW, truncate, chat)


def text_of(prompts: Prompts, one: Item) -> str:
    prompt = prompts.of(reading(one), one)
    return str(prompts.tokenizer.decode([*prompt.before, *prompt.after]))


# Prompts


def test_a_text_that_fits_is_shown_whole() -> None:
    assert text_of(prompts(), item("Ann came.")) == QUESTION.format("Ann came.", "Who?")
    assert text_of(prompts(), item("Ann came.", None)) == SUMMARY.format("Ann came.")


def test_a_tokenizer_with_a_bos_puts_it_first_and_once() -> None:
    made = prompts(tokenizer=tiny_tokenizer(adds_bos=True)).of(reading(item("x")), item("x"))
    assert [*made.before, *made.after].count(256) == 1
    assert made.before[0] == 256


def test_in_chat_the_question_is_a_turn_of_the_models_template() -> None:
    asked = QUESTION.removesuffix("\nAnswer:").format("Ann came.", "Who?")
    assert text_of(prompts(chat=True), item("Ann came.")) == f"<|user|>{asked}<eos>"
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(DexError, match="has no chat template; leave chat=true out"):
        prompts(chat=True, tokenizer=bare)
    bare.chat_template = "{{ raise_exception('only in pairs') }}"
    with pytest.raises(DexError, match="chat template fails at a user turn"):
        text_of(prompts(chat=True, tokenizer=bare), item("x"))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 600), st.integers(110, 500), st.sampled_from(["middle", "start"]), st.booleans())
def test_a_prompt_and_its_answer_are_never_longer_than_the_length(
    size: int, length: int, truncate: str, summary: bool
) -> None:
    text = "".join(chr(33 + i % 90) for i in range(size))
    one = item(text, None if summary else "Who?")
    made = prompts(length, truncate)
    prompt = made.of(reading(one), one)
    tokens = len(prompt.before) + len(prompt.after)
    new = NEW["summary" if summary else "question"]
    assert tokens + new <= length
    whole = (SUMMARY.format(text) if summary else QUESTION.format(text, "Who?")).encode()
    assert prompt.cut == len(whole) - tokens  # a token is a byte
    if prompt.cut:
        assert tokens + new > length - context_qa.CUT_TO
    shown = bytes(made.tokenizer.decode([*prompt.before, *prompt.after]), "utf-8")
    head = len(whole[: whole.index(b"Text:\n") + 6])
    tail = len(whole) - whole.rindex(b"\n\n")
    kept = tokens - head - tail
    first = 0 if truncate == "start" or not prompt.cut else (kept + 1) // 2
    if prompt.cut:
        context = text.encode()
        assert shown[head : head + kept] == context[:first] + context[len(context) - (kept - first) :]
        assert truncate == "start" or abs(2 * first - kept) <= 1
    else:
        assert shown == whole


def test_a_question_that_does_not_fit_is_named() -> None:
    one = item("text", "Who" * 40 + "?", "row 7")
    with pytest.raises(DexError, match=r"mine, row 7: length is 150 tokens, and 2\d\d go to the question"):
        prompts(150).of(reading(one), one)


# Answers


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3", "diff-v1", "diff-v2", "attached"])
def test_an_answer_is_the_greedy_one_of_a_plain_forward_pass(family: str) -> None:
    made = {"diff-v1": tiny_diff_v1, "diff-v2": tiny_diff_v2, "attached": attached}
    model = made[family]() if family in made else tiny_model(family, seed=5)
    tokenizer = tiny_tokenizer()
    items = [item("a" * 300, "Who?", "1"), item("a" * 300, "Where?", "2"), item("bc", "Who?", "3")]
    answers = Answers()
    writer = prompts(200)
    answer_items(Evaluated("m", model, tokenizer, {}, 4), [reading(*items)], writer, answers)
    for one in items:
        prompt = writer.of(reading(one), one)
        ids = [*prompt.before, *prompt.after]
        (answer,) = [value for key, value in answers._known.items() if key.startswith(f"mine, {one.id},")]
        assert answer == tokenizer.decode(greedy(model, ids, NEW["question"]), skip_special_tokens=True)


def attached() -> Any:
    model = get_peft_model(tiny_model(seed=5), dex.DexConfig(heads="all"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dex_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def greedy(model: Any, ids: list[int], new: int) -> list[int]:
    """Without a cache, up to the end of the text."""
    found: list[int] = []
    for _ in range(new):
        token = int(model(torch.tensor([[*ids, *found]])).logits[0, -1].argmax())
        if token == 257:
            break
        found.append(token)
    return found


def test_questions_about_one_text_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(Prefix):
        def __init__(self, model: Any, ids: Any, chunk: int = 1024) -> None:
            made.append(len(ids))
            super().__init__(model, ids, chunk)

    monkeypatch.setattr(context_qa, "Prefix", Counted)
    text = "a" * 600  # cut, with questions of different lengths
    items = [item(text, "Who?", "1"), item(text, "Whereabouts?", "2"), item("other", "Who?", "3")]
    evaluated = Evaluated("m", tiny_model(), tiny_tokenizer(), {}, 4)
    answer_items(evaluated, [reading(*items)], prompts(330), Answers())
    assert len(made) == 2


@pytest.mark.parametrize(
    ("written", "question", "summary"),
    [
        (" Ann\nQuestion: Who else?", "Ann", "Ann\nQuestion: Who else?"),
        ("\n Ann came.\n\nText: another", "Ann came.", "Ann came."),
        ("", "", ""),
        ("\n\n", "", ""),
    ],
)
def test_what_a_base_model_writes_after_its_answer_does_not_count(written: str, question: str, summary: str) -> None:
    assert context_qa._own_part(written, "question") == question
    assert context_qa._own_part(written, "summary") == summary


# Scores


@pytest.mark.parametrize(
    ("answer", "references", "f1", "exact"),
    [
        ("The  Eiffel tower!", ["eiffel tower"], 1.0, 1.0),  # case, articles, punctuation and spaces do not count
        ("tower of Paris", ["Eiffel tower", "the tower in Paris"], 2 / 3, 0.0),  # the best reference
        ("in the city of Paris", ["Paris"], 2 * (1 / 4) / (1 / 4 + 1), 0.0),
        ("no no", ["no"], 2 * (1 / 2) / (1 / 2 + 1), 0.0),  # a word counts as often as both have it
        ("", ["Paris"], 0.0, 0.0),
        ("London", ["Paris"], 0.0, 0.0),
    ],
)
def test_answers_are_scored_as_in_squad(answer: str, references: list[str], f1: float, exact: float) -> None:
    assert scores(answer, references, "question") == pytest.approx({"f1": f1, "exact_match": exact})


def test_summaries_are_scored_by_rouge() -> None:
    # "the cat sat" and "the cat lay sat": 3 of 3 and 3 of 4 words; 1 of 2 and 1 of 3 pairs; the longest common 3.
    found = scores("The cats sat", ["a dog", "the cat lay sat"], "summary")
    assert found == pytest.approx({"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 6 / 7})
    assert scores("", ["x"], "summary") == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


# The suite


def folder_of(tmp_path: Path, **tasks: list[dict[str, Any]]) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, rows in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def rows(count: int = 8, question: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "context": f"Text {i // 2}. " + "é and so on " * (i // 2 * 20),
            "question": f"Which {i}?" if question else None,
            "answers": [f"number {i}", str(i)],
        }
        for i in range(count)
    ]


def suite(folder: Path, *more: str) -> Any:
    settings = [f"data={folder}", "items=5", "length=256", "answer_tokens=5", "summary_tokens=9"]
    return suite_of("context-qa", [*settings, *more])


def test_every_answer_is_kept_with_its_scores(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    (result,) = evaluate([base], tmp_path / "out", suite(folder_of(tmp_path, ask=rows(), sum=rows(question=False))))
    assert {name: task.metric for name, task in result.tasks.items()} == {"ask": "f1", "sum": "rougeL"}
    assert len(result.of_task("ask")) == len(result.of_task("sum")) == 5
    for record in result.records:
        kind: Kind = "question" if record.task == "ask" else "summary"
        found = scores(record.prediction, record.details["references"], kind)
        assert {key: record.details[key] for key in found} == found
        assert record.score == found[result.tasks[record.task].metric]
    of_ask = result.figures["tasks"]["ask"]
    assert of_ask["cut"] == sum(r.details["cut_tokens"] > 0 for r in result.of_task("ask")) > 0
    assert of_ask["prompt_tokens"]["longest"] <= 256 - 5
    assert len({record.group for record in result.of_task("ask")}) < 5  # questions about one text
    assert read_result(tmp_path / "out" / "a" / "context-qa") == result


def test_answers_depend_neither_on_the_batch_size_nor_on_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folder = str(write_tiny(tmp_path / "a")), folder_of(tmp_path, ask=rows())
    (whole,) = evaluate([base], tmp_path / "whole", suite(folder), batch_size=7)
    real, calls = Answers.add, 0

    def add(self: Answers, answers: dict[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DexError("No space left")
        real(self, answers)

    monkeypatch.setattr(Answers, "add", add)
    with pytest.raises(DexError, match="No space"):
        evaluate([base], tmp_path / "out", suite(folder), batch_size=1)
    (resumed,) = evaluate([base], tmp_path / "out", suite(folder), batch_size=1)
    assert resumed.records == whole.records


def test_items_are_the_same_for_every_model_and_others_with_another_seed(tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, ask=rows(40)))
    drawn = [[each.id for each in read_task("ask", folder, 10, seed).items] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
    assert {each.id for each in read_task("ask", folder, 40, 0).items} == {f"row {i + 1}" for i in range(40)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["tasks=[asks]"], r"'asks' is not a task of .*one of ask, sum \(did you mean ask\?\)"),
        (["length=4096"], r"length is 4,096 tokens, and a has a context of 512; set length=512 or lower"),
        (["items=9"], r"ask\.jsonl has 8 items, fewer than the 9 asked for"),
        (["truncate=end"], "one of middle, start"),
        (["data=nowhere"], r"nowhere is not a folder with <task>\.jsonl files, whose columns are context, question"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(tmp_path: Path, changes: list[str], said: str) -> None:
    base, folder = str(write_tiny(tmp_path / "a")), folder_of(tmp_path, ask=rows(), sum=rows(question=False))
    with pytest.raises(DexError, match=said):
        evaluate([base], tmp_path / "out", suite(folder, *changes))


def test_an_unknown_task_of_the_hub_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(DexError, match=r"'hotpot' is not a task .*did you mean hotpotqa"):
        suite_of("context-qa", ["tasks=[hotpot]"]).check()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "q", "answers": ["a"]}, "has no column 'context': the columns asked for are context, question"),
        ({"context": "", "question": "q", "answers": ["a"]}, "line 2|row 2: context holds no text"),
        ({"context": "c", "question": "", "answers": ["a"]}, "row 2: question is text, or null"),
        ({"context": "c", "question": "q", "answers": "a"}, "row 2: answers is a list of one or more texts"),
        ({"context": "c", "question": "q", "answers": []}, "row 2: answers is a list"),
        ({"context": "c", "question": None, "answers": ["a"]}, "rows with a question and rows without"),
    ],
)
def test_a_row_in_another_schema_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    folder = folder_of(tmp_path, t=[{"context": "c", "question": "q", "answers": ["a"]}, row])
    with pytest.raises(DexError, match=said):
        read_task("t", str(folder), 1, 0)


# The Hub's data sets, in the forms that they have there

HOTPOT = {
    "id": "5a7a",
    "question": "Which came first?",
    "answer": "Arthur's Magazine",
    "type": "comparison",
    "context": {
        "title": ["Arthur's Magazine", "First for Women"],
        "sentences": [["It began in 1844.", " It ended."], ["It is a magazine."]],
    },
}
HOTPOT_README = b"""---
configs:
- config_name: distractor
  data_files:
  - split: validation
    path: distractor/validation-*
- config_name: fullwiki
  data_files:
  - split: validation
    path: fullwiki/validation-*
---
"""


def qasper_answer(**answer: Any) -> dict[str, Any]:
    empty = {"unanswerable": False, "extractive_spans": [], "yes_no": None, "free_form_answer": "", "evidence": []}
    return {**empty, **answer}


QASPER = {
    "id": "1909.00694",
    "title": "Minimal supervision",
    "abstract": "We propose.",
    "full_text": {"section_name": ["Introduction", None], "paragraphs": [["One.", "Two."], ["Three."]]},
    "qas": {
        "question": ["What is the seed?", "Is it?"],
        "question_id": ["q1", "q2"],
        "answers": [
            {
                "answer": [
                    qasper_answer(extractive_spans=["a", "b"]),
                    qasper_answer(free_form_answer="a vocabulary"),
                    qasper_answer(unanswerable=True),
                ],
                "annotation_id": ["1", "2", "3"],
            },
            {
                "answer": [qasper_answer(yes_no=False), qasper_answer(yes_no=True), qasper_answer(yes_no=False)],
                "annotation_id": ["4", "5", "6"],
            },
        ],
    },
}


def parquet(*rows: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def test_hotpotqa_is_read_in_the_configuration_with_distractors(hub: HubServer) -> None:
    hub.add_dataset(
        "hotpotqa/hotpot_qa",
        {
            "README.md": HOTPOT_README,
            "distractor/validation-0.parquet": parquet(HOTPOT),
            "fullwiki/validation-0.parquet": parquet({**HOTPOT, "answer": "of another"}),
        },
    )
    found = read_task("hotpotqa", None, 1, 0)
    assert found.kind == "question"
    assert found.identity == hub.commit_of("hotpotqa/hotpot_qa", kind="datasets")
    (one,) = found.items
    assert one.context == "Arthur's Magazine\nIt began in 1844. It ended.\n\nFirst for Women\nIt is a magazine."
    assert (one.question, one.answers) == ("Which came first?", ("Arthur's Magazine",))


@pytest.mark.parametrize("as_lists_of_structs", [False, True])
def test_qasper_is_read_from_its_conversion_with_all_annotators_answers(
    hub: HubServer, capsys: pytest.CaptureFixture[str], as_lists_of_structs: bool
) -> None:
    paper = {**QASPER, "qas": turned(QASPER["qas"])} if as_lists_of_structs else QASPER
    converted = {"qasper/test/0000.parquet": parquet(paper), "qasper/train/0000.parquet": parquet(paper, paper)}
    hub.add_dataset(
        "allenai/qasper", {"qasper.py": b"raise SystemExit"}, revisions={"refs/convert/parquet": converted}
    )
    found = read_task("qasper", None, 2, 0)
    assert "reading the Hub's parquet conversion of it" in capsys.readouterr().err
    assert [each.question for each in found.items] == ["What is the seed?", "Is it?"]
    assert [each.answers for each in found.items] == [("a, b", "a vocabulary", "Unanswerable"), ("No", "Yes")]
    assert {each.context for each in found.items} == {
        "Minimal supervision\n\nWe propose.\n\nIntroduction\nOne.\nTwo.\n\nThree."
    }
    assert len({each.group for each in found.items}) == 1


def turned(lists: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def test_xsum_and_multinews_are_summaries(hub: HubServer) -> None:
    xsum = {"document": "It rained.\nA lot.\n", "summary": "Rain.", "id": "1"}
    news = {"document": "One.\n\n ||||| Two. |||||", "summary": "– Both."}
    hub.add_dataset(
        "EdinburghNLP/xsum", {"data/test-0.parquet": parquet(xsum), "data/train-0.parquet": parquet(xsum)}
    )
    hub.add_dataset(
        "alexfabbri/multi_news",
        {"multi_news.py": b""},
        revisions={"refs/convert/parquet": {"default/test/0000.parquet": parquet(news)}},
    )
    (one,), (two,) = (read_task(name, None, 1, 0).items for name in ("xsum", "multinews"))
    assert (one.context, one.question, one.answers) == ("It rained.\nA lot.", None, ("Rain.",))
    assert (two.context, two.question, two.answers) == ("One.\n\nTwo.", None, ("Both.",))


def test_a_row_of_the_hub_in_another_form_is_one_sentence(hub: HubServer) -> None:
    changed = {**HOTPOT, "context": ["a paragraph"]}
    files = {"README.md": HOTPOT_README, "distractor/validation-0.parquet": parquet(changed)}
    hub.add_dataset("hotpotqa/hotpot_qa", files)
    with pytest.raises(DexError, match=r"hotpot_qa \(validation\) row 1 has not the form .* give the data as"):
        read_task("hotpotqa", None, 1, 0)


def test_without_the_hub_the_sentence_says_so(hub: HubServer) -> None:
    with hub.unreachable(), pytest.raises(DexError, match=r"EdinburghNLP/xsum .* could not be read from the Hub"):
        read_task("xsum", None, 1, 0)
