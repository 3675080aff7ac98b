"""`--suite lm`: the eleven tasks through the real harness, scored as its own HFLM scores them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_in_two
from harness_oracle import local_tasks, plain_harness, write_rows
from hub_server import HubServer
from peft import get_peft_model
from tiny import tiny_diff_v2, tiny_model, tiny_tokenizer, write_tiny

import dex
from dex.errors import DexError
from dex.evaluation import harness_tasks, likelihood
from dex.evaluation.answers import Answers
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.harness import run_harness
from dex.evaluation.harness_tasks import Known, TaskChoice, load_tasks
from dex.evaluation.records import read_result
from dex.suites import suite_of
from dex.suites.base import Outcome
from dex.suites.lm import TASKS
from dex.verbs.evaluate import evaluate

LETTERS = ["A", "B", "C", "D"]


def arc(question: str, choices: list[str], answer: str) -> dict[str, Any]:
    return {"question": question, "choices": {"text": choices, "label": LETTERS[: len(choices)]}, "answerKey": answer}


ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_challenge": [
        arc("What pulls a stone down?", ["gravity", "the colour of the stone", "a lamp"], "A"),
        arc("Which of these is a metal?", ["wood", "iron", "a wet towel", "air"], "B"),
        arc("What do plants need?", ["light", "noise"], "A"),
    ],
    "arc_easy": [
        arc("Where do fish live?", ["in water", "in the clouds above the town"], "A"),
        arc("What is ice made of?", ["sand", "glass", "water that has become cold"], "C"),
    ],
    "boolq": [
        {"passage": "Tin is a metal. It is soft.", "question": "is tin a metal", "label": 1},
        {"passage": "The hall was built of brick.", "question": "was the hall of wood", "label": 0},
        {"passage": "Two and two are four.", "question": "do two and two make five", "label": 0},
    ],
    "copa": [
        {
            "premise": "The glass broke.",
            "question": "cause",
            "choice1": "It fell from the table.",
            "choice2": "It was full of tea.",
            "label": 0,
        },
        {
            "premise": "It rained all day.",
            "question": "effect",
            "choice1": "The sun shone.",
            "choice2": "The garden was wet.",
            "label": 1,
        },
    ],
    "hellaswag": [
        {
            "activity_label": "Cooking",
            "ctx_a": "A man fills a pot.",
            "ctx_b": "he",
            "endings": ["boils the water.", "sings [laughs] to the moon.", "paints a wall blue.", "sleeps."],
            "label": "0",
        },
        {
            "activity_label": "Sailing",
            "ctx_a": "Two women push a boat.",
            "ctx_b": "they",
            "endings": ["eat the sail.", "jump in and row away.", "are four.", "read the sea aloud."],
            "label": "1",
        },
    ],
    "mnli": [
        {"premise": "A dog runs on grass.", "hypothesis": "An animal moves", "label": 0},
        {"premise": "She reads a book.", "hypothesis": "The book is old.", "label": 1},
        {"premise": "It is night.", "hypothesis": "The sun is up.", "label": 2},
    ],
    "openbookqa": [
        {
            "question_stem": "A magnet attracts",
            "choices": {"text": ["paper", "iron nails", "milk", "salt"], "label": LETTERS},
            "answerKey": "B",
        },
        {
            "question_stem": "The moon shines with",
            "choices": {"text": ["its own fire", "the light of the sun", "oil", "gas"], "label": LETTERS},
            "answerKey": " B",
        },
    ],
    "piqa": [
        {"goal": "Open a jar.", "sol1": "Turn its lid.", "sol2": "Pour water over the floor.", "label": 0},
        {"goal": "Dry a shirt.", "sol1": "Put it in a bucket.", "sol2": "Hang it in the sun.", "label": 1},
    ],
    "wic": [
        {
            "sentence1": "The bank of the river.",
            "sentence2": "She went to the bank with a cheque.",
            "start1": 4,
            "end1": 8,
            "label": 0,
        },
        {"sentence1": "A cold day.", "sentence2": "A cold wind blew.", "start1": 2, "end1": 6, "label": 1},
    ],
    "winogrande": [
        {
            "sentence": "The cup did not fit in the bag because the _ was too big.",
            "option1": "cup",
            "option2": "bag",
            "answer": "1",
        },
        {
            "sentence": "Ann helped Sue, and _ thanked her.",
            "option1": "Ann",
            "option2": "Sue",
            "answer": "2",
        },
    ],
    "wsc": [
        {
            "text": "The man lifted the boy because he was tired .",
            "span1_text": "The boy",
            "span2_text": "he",
            "span2_index": 6,
            "label": 1,
        },
        {
            "text": "Mark told Pete that he would cook .",
            "span1_text": "Pete",
            "span2_text": "he",
            "span2_index": 4,
            "label": 0,
        },
    ],
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of all tasks is that of a few folders: to read all of the harness' takes 16 s."""
    index = harness_tasks._index
    folders = ("arc", "glue", "openbookqa", "piqa", "wikitext", "lambada")
    monkeypatch.setattr(harness_tasks, "_index", lambda asked: index(asked or folders))


def tiny(model: Any = None, batch_size: int = 3, adds_bos: bool = False) -> Evaluated:
    return Evaluated("tiny", model or tiny_model("llama"), tiny_tokenizer(adds_bos), {"id": "tiny"}, batch_size)


def attached() -> Any:
    """An adapter whose K, V, O, W_D and λ have all moved."""
    model = get_peft_model(tiny_model("qwen2"), dex.DexConfig(task_type="CAUSAL_LM", anneal_steps=4))
    draw = torch.Generator().manual_seed(3)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model.eval()


MODELS: dict[str, Callable[[], Any]] = {
    "attached": attached,
    "folded": lambda: attached().merge_and_unload(),
    "diff-v2": tiny_diff_v2,
}


def ran(
    folder: Path, evaluated: Evaluated | None = None, names: Sequence[str] = tuple(TASKS), **options: Any
) -> Outcome:
    choice = TaskChoice(names, options.pop("known", TASKS), options.pop("shots", 0), folder)
    answers, limit, chat = (options.pop(key, None) for key in ("answers", "limit", "chat"))
    assert not options
    return run_harness(evaluated or tiny(), answers or Answers(), choice, limit, bool(chat))


def assert_same_scores(found: Outcome, oracle: dict[str, Any], names: Sequence[str]) -> None:
    """Every item's likelihoods and metrics, and every task's mean, are the harness' own."""
    for name in names:
        own = [record for record in found.records if record.task == name]
        samples = oracle["samples"][name]
        assert [record.id for record in own] == [str(sample["doc_id"]) for sample in samples]
        for record, sample in zip(own, samples, strict=True):
            likelihoods = [each[0] for each in sample["filtered_resps"]]
            assert record.details["log_likelihoods"] == pytest.approx(likelihoods, rel=1e-5, abs=1e-5)
            assert record.details["metrics"] == {metric: sample[metric] for metric in sample["metrics"]}
        metric = found.tasks[name].metric
        mean = sum(record.score for record in own) / len(own)
        assert mean == pytest.approx(oracle["results"][name][f"{metric},none"])


@pytest.mark.parametrize("name", MODELS)
def test_all_eleven_tasks_score_as_the_harness_alone_scores_them(tmp_path: Path, name: str) -> None:
    folder, evaluated = write_rows(tmp_path / "data", ROWS), tiny(MODELS[name]())
    found = ran(folder, evaluated)
    assert len(found.tasks) == 11
    assert_same_scores(found, plain_harness(evaluated, folder, list(TASKS)), list(TASKS))
    for record in found.records:  # the prediction is the choice that was scored
        right = record.details["target"]
        if isinstance(right, int):
            assert record.score == float(record.prediction == right)


def test_a_bos_and_texts_beyond_the_context_are_as_the_harness_has_them(tmp_path: Path) -> None:
    long = {"passage": "Tin is a metal. " * 60, "question": "is tin a metal", "label": 1}
    folder = write_rows(tmp_path / "data", {**ROWS, "boolq": [long, *ROWS["boolq"]]})
    names, evaluated = ["boolq", "hellaswag", "winogrande"], tiny(adds_bos=True)
    found = ran(folder, evaluated, names)
    assert_same_scores(found, plain_harness(evaluated, folder, names), names)
    assert found.figures["truncated_prompts"] == 2  # with "no" and with "yes"


def test_examples_in_the_prompt_are_drawn_as_the_harness_draws_them(tmp_path: Path) -> None:
    names = ["arc_easy", "copa", "hellaswag"]
    folder = write_rows(tmp_path / "data", {name: ROWS[name] for name in names})
    for name in names:
        write_rows(folder, {f"{name}.train": [*ROWS[name], *ROWS[name][:1]]})
    evaluated = tiny()
    found = ran(folder, evaluated, names, shots=2)
    assert_same_scores(found, plain_harness(evaluated, folder, names, shots=2), names)
    plain = ran(folder, evaluated, names)
    assert [r.prompt_hash for r in plain.records] != [r.prompt_hash for r in found.records]


def test_the_chat_template_is_put_around_prompts_on_request_alone(tmp_path: Path) -> None:
    folder, evaluated = write_rows(tmp_path / "data", ROWS), tiny()
    found = ran(folder, evaluated, ["piqa"], chat=True)
    assert_same_scores(found, plain_harness(evaluated, folder, ["piqa"], chat=True), ["piqa"])
    assert found.records[0].prompt_hash != ran(folder, evaluated, ["piqa"]).records[0].prompt_hash
    evaluated.tokenizer.chat_template = None
    with pytest.raises(DexError, match="has no chat template; set chat=false"):
        ran(folder, evaluated, ["piqa"], chat=True)


def test_scores_do_not_depend_on_the_batch_size_or_on_other_tasks(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", ROWS)
    alone = [record for name in TASKS for record in ran(folder, names=[name]).records]
    for batch_size in (1, 7):
        together = ran(folder, tiny(batch_size=batch_size))
        for one, other in zip(alone, together.records, strict=True):
            assert (one.prediction, one.score, one.prompt_hash) == (other.prediction, other.score, other.prompt_hash)
            assert one.details["log_likelihoods"] == pytest.approx(other.details["log_likelihoods"], rel=1e-5)


def test_an_interrupted_run_asks_the_model_for_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = write_rows(tmp_path / "data", ROWS), tmp_path / "answers.jsonl"
    whole = ran(folder, answers=Answers(file))
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-4]) + lines[-4][:9])
    asked: list[int] = []
    real = likelihood.likelihoods_of_batch

    def noted(model: Any, requests: Any, branching: bool) -> Any:
        asked.append(len(requests))
        return real(model, requests, branching)

    monkeypatch.setattr(likelihood, "likelihoods_of_batch", noted)
    again = ran(folder, answers=Answers(file))
    assert sum(asked) == 4
    assert [r.score for r in again.records] == [r.score for r in whole.records]


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", ROWS)
    run_in_two(of_one_rank_of_two, str(tmp_path), str(folder))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    alone = ran(folder, names=["arc_easy", "piqa"]).records
    assert [each[:2] for each in first] == [[record.id, record.score] for record in alone]
    for found, record in zip(first, alone, strict=True):
        assert found[2] == pytest.approx(record.details["log_likelihoods"], rel=1e-5)


def of_one_rank_of_two(rank: int, folder: str, data: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    records = ran(Path(data), names=["arc_easy", "piqa"]).records
    kept = [(record.id, record.score, record.details["log_likelihoods"]) for record in records]
    Path(folder, f"{rank}.json").write_text(json.dumps(kept))
    torch.distributed.destroy_process_group()


def test_the_command_writes_versions_metrics_and_a_record_an_item(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    folder = write_rows(tmp_path / "data", ROWS)
    suite = suite_of("lm", [f"data={folder}", "limit=2"])
    (result,) = evaluate([base], tmp_path / "out", suite)
    assert read_result(tmp_path / "out" / "a" / "lm") == result
    assert len(result.records) == 22
    assert {name: task.metric for name, task in result.tasks.items()} == {
        name: known.metric for name, known in TASKS.items()
    }
    assert result.tasks["boolq"].version == "2.0"
    assert result.settings["harness"].startswith("lm-eval ")
    (kept,) = set(result.settings["data_of_tasks"]["arc_easy"])
    assert kept == "file"


def test_the_hubs_data_set_is_taken_where_no_folder_is_given_and_its_commit_is_kept(hub: HubServer) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in ROWS["arc_easy"])
    card = "---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n  - split: test\n    path: easy.jsonl\n"
    card += "  - split: validation\n    path: easy.jsonl\n  - split: train\n    path: easy.jsonl\n---\n"
    files = {"README.md": card.encode(), "easy.jsonl": rows.encode()}
    commit = hub.add_dataset("allenai/ai2_arc", files)
    choice = TaskChoice(["arc_easy"], TASKS)
    found = run_harness(tiny(), Answers(), choice, None, False)
    assert len(found.records) == 2
    assert found.settings["data_of_tasks"] == {"arc_easy": {"id": "allenai/ai2_arc", "commit": commit}}


def test_a_hub_that_is_not_reached_is_said_and_what_to_do(hub: HubServer) -> None:
    with pytest.raises(DexError, match=r"piqa could not be loaded .*data=FOLDER takes FOLDER/piqa\.jsonl"):
        load_tasks(TaskChoice(["piqa"], TASKS))


def test_an_item_with_another_prompt_choice_or_right_answer_is_another_item(tmp_path: Path) -> None:
    row = ROWS["piqa"][0]
    changed = [row, {**row, "goal": "Close a jar."}, {**row, "sol2": "Wait."}, {**row, "label": 1}]
    records = ran(write_rows(tmp_path / "data", {"piqa": [*changed, row]}), names=["piqa"]).records
    assert len({record.prompt_hash for record in records}) == 4
    assert records[0].prompt_hash == records[-1].prompt_hash


# Bad input


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, known in TASKS.items() for field in known.fields]
)
def test_a_missing_field_is_named_with_its_task_file_and_the_fields_there(
    tmp_path: Path, name: str, field: str
) -> None:
    rows = copy.deepcopy(ROWS[name])
    del rows[1][field]
    folder = write_rows(tmp_path / "data", {name: rows})
    with pytest.raises(DexError) as error:
        suite_of("lm", [f"data={folder}", f"tasks=[{name}]"]).check()
    said = str(error.value)
    assert f"{name}.jsonl, line 2: the task {name} needs '{field}'" in said
    assert all(repr(there) in said for there in rows[1])


@pytest.mark.parametrize("name", TASKS)
def test_the_fields_that_are_asked_for_are_those_that_the_task_reads(tmp_path: Path, name: str) -> None:
    """Rows of these fields alone are enough, and without one of them the task's own code fails or is refused."""
    fields = TASKS[name].fields
    rows = [{field: row[field] for field in fields} for row in ROWS[name]]
    folder = write_rows(tmp_path / "data", {name: rows})
    load_tasks(TaskChoice([name], TASKS, data=folder))
    unknown = {name: Known("acc", TASKS[name].folder, ())}
    for field in fields:
        write_rows(folder, {name: [{key: value for key, value in row.items() if key != field} for row in rows]})
        with pytest.raises(DexError, match=rf"{name}\.jsonl: .*the task {name}") as error:
            load_tasks(TaskChoice([name], unknown, data=folder))
        assert all(f"'{there}'" in str(error.value) for there in fields if there != field)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no rows"),
        ('{"question": ', "line 1 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (json.dumps(arc("Q", ["a", "b"], "C")), "C|schema"),
        (json.dumps({"question": "Q", "choices": ["a", "b"], "answerKey": "A"}), "not of the schema of the task arc"),
        (
            json.dumps(arc("Q", ["a"], "A")) + "\n" + json.dumps({**arc("Q", ["a"], "A"), "question": 3}),
            "not of one kind",
        ),
    ],
)
def test_what_is_no_data_for_the_task_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    (tmp_path / "arc_easy.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DexError, match=said) as error:
        load_tasks(TaskChoice(["arc_easy"], TASKS, data=tmp_path))
    assert "arc_easy.jsonl" in str(error.value)


@pytest.mark.parametrize(("name", "label"), [("boolq", -1), ("mnli", 3), ("hellaswag", "4"), ("piqa", 2)])
def test_a_right_answer_that_is_no_choice_is_refused_and_not_counted_as_wrong(
    tmp_path: Path, name: str, label: Any
) -> None:
    rows = [ROWS[name][0], {**ROWS[name][1], "label": label}]
    folder = write_rows(tmp_path / "data", {name: rows})
    with pytest.raises(DexError, match=rf"{name}\.jsonl, row 2: the right answer is"):
        load_tasks(TaskChoice([name], TASKS, data=folder))


@pytest.mark.usefixtures("few_tasks")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["tasks=[arc_esy]"], "'arc_esy' is not a task of lm-eval .*did you mean arc_easy"),
        (["tasks=[zzzzzzzz]"], "'zzzzzzzz' is not a task of lm-eval"),
        (["tasks=[piqa]", "data=FOLDER"], r"piqa\.jsonl does not exist.*'arc_easy\.jsonl'"),
        (["tasks=[ai2_arc]", "data=FOLDER"], "ai2_arc is a group of tasks"),
        (["tasks=[arc_easy]", "data=FOLDER", "shots=2"], r"arc_easy\.train\.jsonl, which does not exist"),
        (["tasks=[arc_easy, arc_easy]"], "a list of different tasks is expected"),
        (["tasks=[]"], "a list of different tasks is expected"),
        (["limit=0"], "a whole number above 0 or null is expected"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_loaded(
    tmp_path: Path, settings: list[str], said: str
) -> None:
    folder = write_rows(tmp_path / "data", {"arc_easy": ROWS["arc_easy"]})
    with pytest.raises(DexError, match=said):
        suite_of("lm", [each.replace("FOLDER", str(folder)) for each in settings]).check()


def test_a_missing_harness_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DexError, match=r"pip install 'dex-llm\[eval\]'"):
        suite_of("lm").check()


# Other tasks


@pytest.mark.usefixtures("few_tasks")
def test_another_task_by_name_is_scored_by_its_own_first_mean(tmp_path: Path) -> None:
    folder = write_rows(
        tmp_path / "data", {"rte": [{"sentence1": "A.", "sentence2": "B", "label": n} for n in (0, 1)]}
    )
    found, oracle = ran(folder, names=["rte"]), plain_harness(tiny(), folder, ["rte"])
    assert found.tasks["rte"].metric == "acc"
    assert_same_scores(found, oracle, ["rte"])
    write_rows(folder, {"cola": [{"sentence": "It is.", "label": n} for n in (0, 1)]})
    with pytest.raises(DexError, match="The task cola has mcc, none of which is a mean over items"):
        ran(folder, names=["cola"])


@pytest.mark.usefixtures("few_tasks")
def test_whole_texts_are_scored_in_bits_per_byte_as_the_harness_has_them(tmp_path: Path) -> None:
    pages = [" = Tin = \n Tin is a soft metal . \n" * 40, " = Iron = \n It rusts . \n"]
    folder = write_rows(tmp_path / "data", {"wikitext": [{"page": page} for page in pages]})
    found, oracle = ran(folder, names=["wikitext"]), plain_harness(tiny(), folder, ["wikitext"])
    assert found.tasks["wikitext"].metric == "bits_per_byte"
    assert not found.tasks["wikitext"].higher_is_better
    bits = sum(record.score * record.weight for record in found.records) / sum(r.weight for r in found.records)
    assert bits == pytest.approx(oracle["results"]["wikitext"]["bits_per_byte,none"], rel=1e-5)


@pytest.mark.usefixtures("few_tasks")
def test_a_task_of_one_continuation_is_scored_by_accuracy_and_not_by_its_first_number(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", {"lambada_openai": [{"text": "The dog saw the cat"}, {"text": "One two"}]})
    found, oracle = ran(folder, names=["lambada_openai"]), plain_harness(tiny(), folder, ["lambada_openai"])
    assert found.tasks["lambada_openai"].metric == "acc"
    for record, sample in zip(found.records, oracle["samples"]["lambada_openai"], strict=True):
        assert record.details["log_likelihood"] == pytest.approx(sample["perplexity"], rel=1e-5)
        assert record.score == sample["acc"]


def test_the_tokenizer_and_model_are_left_as_they_were(tmp_path: Path) -> None:
    evaluated = tiny()
    evaluated.tokenizer.pad_token = None
    before = {name: tensor.clone() for name, tensor in evaluated.model.state_dict().items()}
    ran(write_rows(tmp_path / "data", ROWS), evaluated, ["piqa"])
    assert evaluated.tokenizer.pad_token is None
    assert all(torch.equal(before[name], tensor) for name, tensor in evaluated.model.state_dict().items())


def test_local_rows_are_read_anew_when_their_file_changes(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", ROWS)
    first = local_tasks(folder, ["piqa"])["piqa"]
    write_rows(folder, {"piqa": ROWS["piqa"][:1]})
    second = local_tasks(folder, ["piqa"])["piqa"]
    assert (len(first.eval_docs), len(second.eval_docs)) == (2, 1)
    assert harness_tasks.data_of(first) != harness_tasks.data_of(second)
