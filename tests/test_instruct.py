"""`--suite instruct`: answers that the harness asks for and scores, one by one, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nltk
import pytest
from harness_oracle import plain_harness, write_rows
from lm_eval.tasks import TaskManager
from tiny import tiny_diff_v2, tiny_model, tiny_tokenizer, write_tiny

from dex.errors import DexError
from dex.evaluation import harness_model, harness_tasks
from dex.evaluation.answers import Answers
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.harness import run_harness
from dex.evaluation.harness_tasks import TaskChoice, load_tasks
from dex.evaluation.records import read_result
from dex.suites import suite_of
from dex.suites.base import Outcome
from dex.suites.instruct import PACKAGES_OF_IFEVAL, TASKS, Instruct
from dex.verbs.evaluate import evaluate

TOKENS = 12


def asking(key: int, prompt: str, **instructions: dict[str, Any]) -> dict[str, Any]:
    names = [name.replace("__", ":") for name in instructions]
    return {"key": key, "prompt": prompt, "instruction_id_list": names, "kwargs": list(instructions.values())}


ROWS = [
    asking(1000, "Write no comma.", punctuation__no_comma={}),
    asking(
        1001,
        "Write of the sea, in fewer than 90 words and without the word boat.",
        length_constraints__number_words={"relation": "less than", "num_words": 90},
        keywords__forbidden_words={"forbidden_words": ["boat"]},
    ),
    asking(
        1002,
        "Say tin at least three times, in at least two sentences.",
        keywords__frequency={"keyword": "tin", "frequency": 3, "relation": "at least"},
        length_constraints__number_sentences={"relation": "at least", "num_sentences": 2},
    ),
    asking(1003, "Put it in quotes.", startend__quotation={}),
    asking(
        1004,
        "Use few capital words.",
        change_case__capital_word_frequency={"capital_relation": "less than", "capital_frequency": 30},
    ),
]


@pytest.fixture(autouse=True)
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A splitter of sentences that was trained on nothing, where nltk looks for its own."""
    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    return folder


def tiny(model: Any = None, batch_size: int = 2) -> Evaluated:
    return Evaluated("tiny", model or tiny_model("llama"), tiny_tokenizer(), {"id": "tiny"}, batch_size)


def ran(folder: Path, evaluated: Evaluated, answers: Answers | None = None, chat: bool = True) -> Outcome:
    choice = TaskChoice(["ifeval"], TASKS, None, folder, TOKENS)
    return run_harness(evaluated, answers or Answers(), choice, None, chat)


@pytest.mark.parametrize("name", ["llama", "diff-v2"])
def test_answers_and_scores_are_the_harness_own(tmp_path: Path, name: str) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    evaluated = tiny(tiny_diff_v2() if name == "diff-v2" else None)
    found = ran(folder, evaluated)
    generation = {"max_gen_toks": TOKENS}
    oracle = plain_harness(evaluated, folder, ["ifeval"], shots=None, chat=True, generation=generation)
    samples = oracle["samples"]["ifeval"]
    assert [record.prediction for record in found.records] == [sample["resps"][0][0] for sample in samples]
    assert any(record.prediction for record in found.records)
    for record, sample in zip(found.records, samples, strict=True):
        assert record.details["metrics"] == {metric: sample[metric] for metric in sample["metrics"]}
        assert record.score == float(all(record.details["metrics"]["inst_level_strict_acc"]))
    mean = sum(record.score for record in found.records) / len(ROWS)
    assert mean == oracle["results"]["ifeval"]["prompt_level_strict_acc,none"]
    assert 0 < mean < 1
    assert found.figures["harness"]["ifeval"]["inst_level_loose_acc,none"] == pytest.approx(
        oracle["results"]["ifeval"]["inst_level_loose_acc,none"]
    )


def test_answers_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    alone = ran(folder, tiny(batch_size=1)).records
    assert len({record.prediction for record in alone}) > 1
    for batch_size in (2, 7):
        assert ran(folder, tiny(batch_size=batch_size)).records == alone


def test_what_was_answered_is_not_generated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = write_rows(tmp_path / "data", {"ifeval": ROWS}), tmp_path / "answers.jsonl"
    whole = ran(folder, tiny(), Answers(file)).records
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    asked: list[int] = []
    real = harness_model.HarnessModel._generated

    def noted(self: Any, batch: Any, *rest: Any) -> Any:
        asked.append(len(batch))
        return real(self, batch, *rest)

    monkeypatch.setattr(harness_model.HarnessModel, "_generated", noted)
    assert ran(folder, tiny(), Answers(file)).records == whole
    assert sum(asked) == 2


class Asked:
    """What the harness asks of a model."""

    def __init__(self, prompt: str, **options: Any) -> None:
        self.args = (prompt, options)


def test_a_sampled_answer_is_of_its_prompt_alone_and_differs_when_asked_twice() -> None:
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": TOKENS, "until": []}
    asked = [Asked(prompt, **options) for prompt in ("Tin is", "The sea", "Tin is", "A dog")]
    found = harness_model.HarnessModel(tiny(batch_size=4), Answers()).generate_until(asked)
    assert found[0] != found[2]
    (alone,) = harness_model.HarnessModel(tiny(batch_size=1), Answers()).generate_until(asked[3:])
    assert alone == found[3]


def test_the_command_writes_every_answer(tmp_path: Path) -> None:
    base = str(write_tiny(tmp_path / "a"))
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    suite = suite_of("instruct", [f"data={folder}", "limit=3", f"max_tokens={TOKENS}"])
    (result,) = evaluate([base], tmp_path / "out", suite)
    assert read_result(tmp_path / "out" / "a" / "instruct") == result
    assert [type(record.prediction) for record in result.records] == [str] * 3
    assert result.tasks["ifeval"].metric == "prompt_level_strict_acc"


def test_prompts_without_a_template_are_asked_for_or_refused(tmp_path: Path) -> None:
    folder, evaluated = write_rows(tmp_path / "data", {"ifeval": ROWS}), tiny()
    assert Instruct().chat
    in_template = ran(folder, evaluated).records
    evaluated.tokenizer.chat_template = None
    with pytest.raises(DexError, match="has no chat template; set chat=false"):
        ran(folder, evaluated)
    plain = ran(folder, evaluated, chat=False).records
    assert [record.prompt_hash for record in plain] != [record.prompt_hash for record in in_template]


def test_an_answer_longer_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    choice = TaskChoice(["ifeval"], TASKS, None, folder)
    with pytest.raises(DexError, match=r"up to 1,280 tokens leaves no room .* holds 512; set max_tokens"):
        run_harness(tiny(), Answers(), choice, None, True)


def test_missing_data_of_nltk_are_said_before_any_answer_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    suite = suite_of("instruct", [f"data={folder}"])
    suite.check()
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(DexError, match=r"python -m nltk\.downloader punkt_tab"):
        suite.check()


@pytest.mark.parametrize("package", [*PACKAGES_OF_IFEVAL, "lm_eval"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    with pytest.raises(DexError, match=r"pip install 'dex-llm\[eval\]'"):
        suite_of("instruct").check()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "x"}], "line 1: the task ifeval needs 'key', 'instruction_id_list', 'kwargs'"),
        ([{**ROWS[0], "kwargs": 3}, ROWS[1]], "not of one kind"),
    ],
)
def test_data_of_another_schema_are_refused(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": rows})
    with pytest.raises(DexError, match=said):
        suite_of("instruct", [f"data={folder}"]).check()


def test_examples_are_refused_where_the_task_takes_none(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", {"ifeval": ROWS})
    with pytest.raises(DexError, match="ifeval takes no examples in its prompt"):
        suite_of("instruct", [f"data={folder}", "shots=2"]).check()


@pytest.mark.parametrize(
    ("metric", "more", "said"),
    [
        # The harness only logs this one, and fails when all answers have been generated.
        ("google_bleu", "", "google_bleu of the task made is not the harness' own"),
        ("exact_match", "unsafe_code: true", "runs code that the model writes"),
        ("exact_match", "doc_to_image: q", "asks about images"),
    ],
)
def test_tasks_that_could_only_fail_later_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, more: str, said: str
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "made.yaml").write_text(
        "task: made\ndataset_path: none\noutput_type: generate_until\ntest_split: test\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        f"metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]\n{more}\n"
    )
    manager = TaskManager(include_defaults=False, include_path=str(tmp_path / "tasks"))
    monkeypatch.setattr(harness_tasks, "_index", lambda folders: manager)
    folder = write_rows(tmp_path / "data", {"made": [{"q": "1+1=", "a": "2"}]})
    with pytest.raises(DexError, match=said):
        load_tasks(TaskChoice(["made"], {}, data=folder))
