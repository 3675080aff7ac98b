"""What `dex analyze` reads: held-out windows, haystacks, and the words that the user names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from dex.analysis import texts
from dex.analysis.subject import SETTINGS, Settings
from dex.analysis.texts import PASSAGE_LENGTH, PASSAGES, read_texts
from dex.data.held_out import is_held_out
from dex.errors import DexError

TOKENIZER = tiny_tokenizer()


def written(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents), encoding="utf-8")
    return str(path)


def settings(**given: Any) -> Settings:
    return SETTINGS.block(**{"length": 64, "sequences": 2, **given})


def test_windows_come_from_documents_that_a_run_holds_out(tmp_path: Path) -> None:
    documents = [f"{index:03} " + "abcdefgh " * 12 for index in range(200)]
    data = written(tmp_path / "text.jsonl", documents)
    found = read_texts(settings(data=data, sequences=5), TOKENIZER, 4096, "m")
    assert found.ids.shape == (5, 64)
    for row in found.ids:
        (origin,) = [each for each in documents if each.startswith(TOKENIZER.decode(row[:4]))]
        assert is_held_out(origin, 0.1)
    everything = read_texts(settings(data=data, held_out=0.0), TOKENIZER, 4096, "m")
    assert TOKENIZER.decode(everything.ids[0][:3]) == "000"


def test_a_passage_ends_with_its_question_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PASSAGE_LENGTH", 600)
    found = read_texts(settings(), TOKENIZER, 4096, "m")
    assert found.no_passages is None
    assert len(found.passages) == PASSAGES
    depths = []
    for passage in found.passages:
        begin, end = passage.span
        line = TOKENIZER.decode(passage.ids[begin:end])
        value = line.strip().removesuffix(".").split()[-1]
        assert passage.queries[0] == 600 - 1
        assert TOKENIZER.decode(passage.ids[600:]) == f" {value}"[:-1]
        assert passage.queries == list(range(599, len(passage.ids)))
        assert line.strip().removesuffix(f" {value}.") == TOKENIZER.decode(passage.ids[:600]).rpartition("\n")[2]
        depths.append(begin)
    assert max(depths) - min(depths) > 100
    assert len(set(depths)) == PASSAGES


def test_a_model_that_cannot_hold_a_haystack_has_no_passages_and_the_report_says_why() -> None:
    found = read_texts(settings(), TOKENIZER, 100, "m")
    assert found.passages == []
    assert found.no_passages is not None
    assert "No haystacks" in found.no_passages
    assert PASSAGE_LENGTH > 100


@given(st.integers(0, 300), st.integers(1, 30), st.booleans())
@hypothesis_settings(max_examples=40, deadline=None)
def test_the_tokens_of_a_span_are_found_wherever_it_stands(place: int, width: int, bos: bool) -> None:
    text = "".join(chr(97 + i * 7 % 26) for i in range(400))
    span = text[:place][-3:] + "XY" * width
    whole = text[:place] + "XY" * width + text[place:]
    tokenizer = tiny_tokenizer(adds_bos=bos)
    passage = texts._around(whole, whole.find(span), span, settings(length=96), tokenizer)
    assert len(passage.ids) == 96
    assert (passage.ids[0] == tokenizer.bos_token_id) == bos
    assert tokenizer.decode(passage.ids[slice(*passage.span)]) == span
    assert passage.queries == list(range(passage.span[1], 96))


def test_the_passage_of_a_span_is_read_from_the_whole_text(tmp_path: Path) -> None:
    data = written(tmp_path / "text.jsonl", ["no " * 100, "yes " * 20 + "the answer is 42. " + "and more " * 20])
    found = read_texts(settings(data=data, span="is 42", held_out=0.0), TOKENIZER, 4096, "m")
    (passage,) = found.passages
    assert TOKENIZER.decode(passage.ids[slice(*passage.span)]) == "is 42"


@pytest.mark.parametrize(
    ("given", "context", "words"),
    [
        ({"length": 128}, 100, ["--length", "100", "128"]),
        ({"sequences": 9}, 4096, ["documents held out (0.1 of them)", "fewer than --sequences 9", "--held-out 0"]),
        ({"sequences": 99, "held_out": 0.0}, 4096, ["windows of 64", "--length or --sequences"]),
        ({"span": "not there at all", "held_out": 0.0}, 4096, ["'not there at all'", "3 documents", "exactly"]),
        ({"span": "word " * 13 + "w", "held_out": 0.0}, 4096, ["more tokens than --length"]),
        ({"data": "nowhere.txt"}, 4096, ["nowhere.txt"]),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    tmp_path: Path, given: dict[str, Any], context: int, words: list[str]
) -> None:
    data = written(tmp_path / "text.jsonl", [f"{i} " + "word " * 60 for i in range(3)])
    with pytest.raises(DexError) as refused:
        read_texts(settings(**{"data": data, **given}), TOKENIZER, context, "m")
    for word in words:
        assert word in str(refused.value)


def test_a_span_at_the_very_end_has_nothing_that_attends_to_it(tmp_path: Path) -> None:
    data = written(tmp_path / "text.jsonl", ["word " * 60 + "the end"])
    with pytest.raises(DexError, match="nothing stands behind it"):
        read_texts(settings(data=data, span="the end", held_out=0.0), TOKENIZER, 4096, "m")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"length": 1}, "length: 1 was given"),
        ({"threshold": float("nan")}, "threshold: nan was given"),
        ({"signs": "squared"}, "signs: 'squared' was given"),
        ({"held_out": 1.0}, "held_out: 1.0 was given"),
    ],
)
def test_a_setting_out_of_range_is_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DexError) as refused:
        settings(**given)
    assert str(refused.value).startswith(sentence)
