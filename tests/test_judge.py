"""The judge: what it is sent, how strictly it is read, and that answers outlive it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_server import JudgeServer
from tiny import write_tiny

from dex.errors import DexError
from dex.evaluation import context_qa
from dex.evaluation import judge as judging
from dex.evaluation.judge import Graded, Judge, grade
from dex.evaluation.records import read_result
from dex.suites import suite_of
from dex.verbs.evaluate import evaluate

KEY = "sk-test-9f3c1b"
ONE = Graded("Answer.", ["Paris", "the city of Paris"], "Lyon")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(judging, "RETRIES", 2)
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


def judge_at(url: str, variable: str = "OPENAI_API_KEY") -> Judge:
    return Judge(url, "grader", variable, "answers.jsonl")


def unused_url() -> str:
    server = JudgeServer()
    server.close()
    return server.url


# Replies


@pytest.mark.parametrize(("reply", "expected"), [("0", 0.0), ("4", 1.0), (" 3\n", 0.75), ("1", 0.25)])
def test_a_digit_is_a_grade(reply: str, expected: float) -> None:
    assert grade(reply) == expected


@given(st.text())
def test_anything_else_is_none(reply: str) -> None:
    assert (grade(reply) is not None) == (reply.strip() in list("01234"))


@pytest.mark.parametrize("reply", ["5", "-1", "4.", "4/4", "Score: 4", "44", "", "²", "٣", "four"])
def test_what_only_looks_like_a_grade_is_none(reply: str) -> None:
    assert grade(reply) is None


# Requests


def test_the_judge_is_sent_the_rubric_the_references_and_the_answer(server: JudgeServer) -> None:
    assert judge_at(server.url).replies([ONE]) == ["4"]
    (asked,) = server.requests
    assert asked["model"] == "grader"
    assert asked["temperature"] == 0
    rubric, sent = (message["content"] for message in asked["messages"])
    assert "one digit from 0 to 4" in rubric
    assert all(part in sent for part in ("Answer.", "- Paris\n- the city of Paris", "ANSWER\nLyon"))
    assert server.keys == [f"Bearer {KEY}"]


def test_replies_come_in_the_order_of_the_answers(server: JudgeServer) -> None:
    server.reply = lambda asked: asked.rsplit("\n", 1)[1]
    graded = [Graded("t", ["r"], str(i % 5)) for i in range(23)]
    assert judge_at(server.url).replies(graded) == [str(i % 5) for i in range(23)]


@pytest.mark.parametrize("faults", [[429, 200], [500, 503, 200], [None, 200], [None, 429, 200]])
def test_what_may_pass_is_tried_again(server: JudgeServer, faults: list[int | None]) -> None:
    server.faults = list(faults)
    assert judge_at(server.url).replies([ONE]) == ["4"]
    assert len(server.requests) == len(faults)


@pytest.mark.parametrize(
    ("faults", "said", "asked"),
    [
        ([401], r"refuses the request \(401: OPENAI_API_KEY holds no key that it takes\)", 1),
        ([404], "has no model 'grader' or is no OpenAI-compatible URL", 1),
        ([429] * 3, r"is too busy or its quota is used up \(429, after 2 more tries\)", 3),
        ([500] * 3, r"failed \(Error code: 500", 3),
        ([None] * 3, "cannot be reached", 3),
    ],
)
def test_a_dead_judge_is_one_sentence_without_the_key(
    server: JudgeServer, faults: list[int | None], said: str, asked: int
) -> None:
    server.faults = list(faults)
    with pytest.raises(DexError, match=said) as raised:
        judge_at(server.url).replies([ONE])
    assert "the answers are kept in answers.jsonl, and the same command goes on" in str(raised.value)
    assert KEY not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(server.requests) == asked


def test_where_nothing_listens_nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DexError, match="cannot be reached"):
        judge_at(unused_url()).replies([ONE])


def test_a_judge_that_does_not_reply_in_time_is_said(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "TIMEOUT", 0.2)
    server.reply = lambda asked: time.sleep(1) or "4"  # type: ignore[func-returns-value]
    with pytest.raises(DexError, match="did not reply within 0 s"):
        judge_at(server.url).replies([ONE])


def test_a_server_of_something_else_is_said(server: JudgeServer) -> None:
    with pytest.raises(DexError, match="OpenAI-compatible"):
        judge_at(server.url.removesuffix("/v1")).replies([ONE])


def test_without_a_key_none_is_sent_and_its_variable_is_named(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert judge_at(server.url).replies([ONE]) == ["4"]
    server.faults = [401]
    with pytest.raises(DexError, match="OPENAI_API_KEY is not set"):
        judge_at(server.url).replies([ONE])


# Within an evaluation


def folder_of(tmp_path: Path, count: int = 6) -> Path:
    rows = [{"context": f"Fact {i}.", "question": f"Which {i}?", "answers": [f"f {i}"]} for i in range(count)]
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def suite(folder: Path, url: str, items: int = 6, model: str = "grader") -> Any:
    settings = [f"data={folder}", f"items={items}", "length=256", "answer_tokens=4"]
    return suite_of("context-qa", [*settings, f"judge.url={url}", f"judge.model={model}"])


@pytest.mark.parametrize("how", ["refused", 401, 429, 500])
def test_the_answers_outlive_a_dead_judge_and_only_the_judging_is_done_again(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str | int
) -> None:
    base, folder, out = str(write_tiny(tmp_path / "a")), folder_of(tmp_path), tmp_path / "out"
    server.faults = [int(how)] * 100 if how != "refused" else []
    kept = out / "a" / ".context-qa.partial" / "answers.jsonl"
    with pytest.raises(DexError, match="the answers are kept in") as raised:
        evaluate([base], out, suite(folder, unused_url() if how == "refused" else server.url))
    assert str(kept) in str(raised.value)
    assert len(kept.read_text().splitlines()) == 6
    server.faults = []

    def no_more(*_: Any) -> None:
        raise AssertionError("the model was asked again")

    monkeypatch.setattr(context_qa, "Prefix", no_more)
    (result,) = evaluate([base], out, suite(folder, server.url))
    assert result.score("facts judged").mean == 1.0
    assert len(result.of_task("facts")) == len(result.of_task("facts judged")) == 6
    assert [r.prediction for r in result.of_task("facts")] == [r.prediction for r in result.of_task("facts judged")]
    assert result.figures["judge"] == {"replies": 6, "unparsable": 0}


def test_grades_are_asked_once(server: JudgeServer, tmp_path: Path) -> None:
    base, folder, out = str(write_tiny(tmp_path / "a")), folder_of(tmp_path, 20), tmp_path / "out"
    server.reply = lambda asked: "2"
    server.faults = [200] * 16 + [401] * 4
    with pytest.raises(DexError, match="401"):
        evaluate([base], out, suite(folder, server.url, 20))
    before = len(server.requests)
    assert 17 <= before <= 20  # four at once: a refusal may come before the others are sent
    server.faults = []
    (result,) = evaluate([base], out, suite(folder, server.url, 20))
    assert len(server.requests) == before + 4  # of the batches of 8, 8 and 4, the last one again
    assert {record.score for record in result.of_task("facts judged")} == {0.5}


def test_replies_without_a_grade_count_as_zero_up_to_five_percent(server: JudgeServer, tmp_path: Path) -> None:
    base, folder = str(write_tiny(tmp_path / "a")), folder_of(tmp_path, 20)
    server.reply = lambda asked: "I would say 3." if "Which 7?" in asked else "4"
    (result,) = evaluate([base], tmp_path / "out", suite(folder, server.url, 20))
    assert result.figures["judge"] == {"replies": 20, "unparsable": 1}
    by_id = {record.id: record for record in result.of_task("facts judged")}
    assert by_id["row 8"].score == 0.0
    assert by_id["row 8"].details == {"reply": "I would say 3.", "unparsable": True}
    assert result.score("facts judged").mean == pytest.approx(19 / 20)


def test_more_replies_without_a_grade_are_refused_and_a_mended_judge_goes_on(
    server: JudgeServer, tmp_path: Path
) -> None:
    base, folder, out = str(write_tiny(tmp_path / "a")), folder_of(tmp_path, 20), tmp_path / "out"
    server.reply = lambda asked: "I cannot say."
    with pytest.raises(DexError, match=r"of 20 replies at most 5 % .* and 8 are, such as 'I cannot say\.'; mend"):
        evaluate([base], out, suite(folder, server.url, 20))
    assert len(server.requests) == 8
    server.reply = lambda asked: "1"
    (result,) = evaluate([base], out, suite(folder, server.url, 20))
    assert result.score("facts judged").mean == 0.25


def test_the_key_and_the_url_are_in_no_file(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder, out = str(write_tiny(tmp_path / "a")), folder_of(tmp_path), tmp_path / "out"
    server.faults = [500] * 100
    with pytest.raises(DexError):
        evaluate([base], out, suite(folder, server.url))
    during = [path for path in out.rglob("*") if path.is_file()]
    assert len(during) == 2
    texts = [path.read_text() for path in during]
    server.faults = []
    (result,) = evaluate([base], out, suite(folder, server.url))
    texts += [path.read_text() for path in out.rglob("*") if path.is_file()]
    assert not any(KEY in text or server.url in text for text in [*texts, *capsys.readouterr()])
    assert result.settings["judge"] == {"model": "grader"}
    assert read_result(out / "a" / "context-qa") == result
    # The same judge elsewhere is the same result; another judge is not.
    assert evaluate([base], out, suite(folder, unused_url())) == [result]
    with pytest.raises(DexError, match="another judge"):
        evaluate([base], out, suite(folder, server.url, model="other"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["judge.url=localhost:8000", "judge.model=g"], "a URL such as http://localhost:8000/v1 is expected"),
        (["judge.url=http://me:secret@host/v1", "judge.model=g"], "judge.url holds a user, a password or a query"),
        (["judge.url=http://host/v1", "judge.model=g", f"judge.key_variable={KEY}"], "never the key itself"),
        (["judge.url=http://host/v1"], "judge.model is missing"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_without_repeating_a_secret(settings: list[str], said: str) -> None:
    with pytest.raises(DexError, match=said) as raised:
        suite_of("context-qa", settings)
    assert KEY not in str(raised.value)
    assert "secret" not in str(raised.value)
