"""Haystacks: as long as asked for to the token, the needles verbatim at their depths, one BOS."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from dex.data.sources import Source
from dex.errors import DexError
from dex.evaluation.haystack import (
    KEYS,
    Filler,
    Haystack,
    Wording,
    base_wording,
    chat_wording,
    make_haystack,
    read_filler,
    sentence,
)

TEMPLATE = (
    "<bos>{% for message in messages %}<|user|>{{ message['content'] | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
KINDS = ["bytes", "merges", "words"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """One token a byte; a BPE with merges, also over line ends; and one that marks beginnings, as SentencePiece."""
    if kind == "bytes":
        made = tiny_tokenizer(adds_bos=True)
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        if kind == "merges":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1)])
            alphabet = sorted(set("".join(topics.values())))
        special = ["<bos>", "<eos>", "<|user|>", "<unk>"]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        lines = [line for text in topics.values() for line in text[:3000].splitlines(keepends=True)]
        backend.train_from_iterator(lines, trainer)
        bos = backend.token_to_id("<bos>")
        backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
        made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


@cache
def filler_of(kind: str) -> Filler:
    return read_filler(Source("pydoc"), tokenizer_of(kind), 9000)


@cache
def wording_of(kind: str, prompting: str) -> Wording:
    tokenizer = tokenizer_of(kind)
    return base_wording(tokenizer) if prompting == "base" else chat_wording(tokenizer, "m")


def haystack_of(kind: str, prompting: str, length: int, depths: list[int], needles: int, seed: str = "0") -> Haystack:
    wording = wording_of(kind, prompting)
    return make_haystack(filler_of(kind), wording, tokenizer_of(kind), length, depths, needles, seed)


@pytest.mark.parametrize("prompting", ["base", "chat"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1100, 2500),
    depths=st.lists(st.integers(0, 100), min_size=1, max_size=3),
    others=st.integers(0, 5),
    seed=st.text(max_size=4),
)
def test_every_prompt_has_the_length_asked_for_and_the_needles_verbatim(
    kind: str, prompting: str, length: int, depths: list[int], others: int, seed: str
) -> None:
    tokenizer = tokenizer_of(kind)
    haystack = haystack_of(kind, prompting, length, depths, len(depths) + others, seed)
    text = tokenizer.decode(haystack.ids)
    assert len({needle.key for needle in haystack.needles}) == len(haystack.needles) == len(depths) + others
    for needle in haystack.needles:
        line = sentence(needle.key, needle.value)
        assert text.count(line) == text.count(needle.value) == text.count(needle.key) == 1
        assert tokenizer.decode(haystack.ids[slice(*needle.span)]).strip() == line
    assert [needle.depth for needle in haystack.needles] == depths + [None] * others
    assert len(haystack.questions) == len(depths)
    for question, needle in zip(haystack.questions, haystack.needles, strict=False):
        assert len(haystack.ids) + len(question) == length
        prompt = [*haystack.ids, *question]
        assert prompt.count(tokenizer.bos_token_id) == 1
        assert prompt[0] == tokenizer.bos_token_id
        assert needle.key in tokenizer.decode(question)


def filler_before(haystack: Haystack, needle: int) -> float:
    """The share of the filler that stands before a needle."""
    spans = [each.span for each in haystack.needles]
    start = spans[needle][0]
    before = start - haystack.opening - sum(end - begin for begin, end in spans if end <= start)
    return before / (len(haystack.ids) - haystack.opening - sum(end - begin for begin, end in spans))


@pytest.mark.parametrize("prompting", ["base", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_depths_of_0_and_100_are_the_very_ends_and_others_the_nearest_word(kind: str, prompting: str) -> None:
    for seed in "abc":
        haystack = haystack_of(kind, prompting, 2000, [0, 50, 100], 8, seed)
        first, middle, last = haystack.needles[:3]
        assert first.span[0] == haystack.opening
        assert last.span[1] == len(haystack.ids)
        assert filler_before(haystack, 1) == pytest.approx(0.5, abs=0.05)
        before = tokenizer_of(kind).decode(haystack.ids[: middle.span[0]])
        assert before[-1].isspace() or haystack_text_goes_on_with_space(kind, haystack, middle.span[1])
        assert min(filler_before(haystack, i) for i in range(3, 8)) > 0
        assert max(filler_before(haystack, i) for i in range(3, 8)) < 1


def haystack_text_goes_on_with_space(kind: str, haystack: Haystack, place: int) -> bool:
    tokenizer = tokenizer_of(kind)
    until, further = (tokenizer.decode(haystack.ids[:end]) for end in (place, place + 1))
    return further[len(until) :][:1].isspace()


def test_what_stands_between_the_needles_is_the_text_as_it_is() -> None:
    haystack = haystack_of("bytes", "base", 1500, [30], 4)
    text = haystack.ids
    for begin, end in sorted((needle.span for needle in haystack.needles), reverse=True):
        text = text[:begin] + text[end:]
    filler = tokenizer_of("bytes").decode(filler_of("bytes").ids)
    assert tokenizer_of("bytes").decode(text[haystack.opening :]) in filler + filler


def test_a_seed_draws_the_same_haystack_and_another_seed_another() -> None:
    one, same, other = (haystack_of("merges", "base", 1200, [50], 4, seed) for seed in ("1", "1", "2"))
    assert one == same
    assert one.ids != other.ids
    assert {n.value for n in one.needles}.isdisjoint({n.value for n in other.needles})


def test_special_tokens_that_the_filler_spells_out_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one <bos> two <eos><|user|> three " * 50)
    tokenizer = tokenizer_of("bytes")
    filler = read_filler(Source(str(tmp_path / "a.txt")), tokenizer, 5000)
    haystack = make_haystack(filler, base_wording(tokenizer), tokenizer, 900, [100], 2, "0")
    assert sum(token >= 256 for token in haystack.ids) == 1
    (tmp_path / "b.txt").write_text("<bos><eos>")
    with pytest.raises(DexError, match=r"no tokens but special ones; give another text\.$"):
        read_filler(Source(str(tmp_path / "b.txt")), tokenizer, 100)


@given(st.integers(1, 60), st.integers(1, 200), st.integers(0, 1000))
def test_filler_that_is_too_short_begins_anew(size: int, length: int, seed: int) -> None:
    words = sorted({0, *random.Random(seed).sample(range(size), min(size, 5))})
    ids, cuts = Filler(list(range(size)), words, 1).part(length, random.Random(seed))
    assert len(ids) == length
    assert all((a + 1) % size == b for a, b in pairwise(ids))
    assert cuts == [place for place, token in enumerate(ids) if token in words]
    assert cuts[0] == 0


def test_filler_is_read_only_as_far_as_it_is_wanted(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    filler = read_filler(Source(str(tmp_path)), tokenizer_of("bytes"), 1000)
    assert filler.documents == 2
    assert filler.ids.count(ord("c")) == 0


@pytest.mark.parametrize("prompting", ["base", "chat"])
def test_needles_that_do_not_fit_are_refused(prompting: str) -> None:
    with pytest.raises(DexError, match=r"needles=8 do not fit a length of 300 tokens: .* take \d+.*; use fewer"):
        haystack_of("bytes", prompting, 300, [50], 8)
    with pytest.raises(DexError, match=r"needles=5000 is more than there are keys of one length"):
        haystack_of("bytes", prompting, 300, [50], 5000)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has none; use prompting=base"),
        ("{{ raise_exception('no') }}", "fails at a user turn \\(no\\); ask without it"),
        ("hello", "does not show a user turn once"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "does not show a user turn once"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(template: str | None, said: str) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DexError, match=said):
        chat_wording(tokenizer, "m")


def test_chat_prompts_are_what_the_template_makes_of_the_whole_turn() -> None:
    tokenizer = tokenizer_of("bytes")
    haystack = haystack_of("bytes", "chat", 1500, [40], 3)
    prompt = tokenizer.decode([*haystack.ids, *haystack.questions[0]])
    content = prompt.removeprefix("<bos><|user|>").partition("<eos>")[0]
    turn = [{"role": "user", "content": content}]
    assert tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == prompt


def test_keys_are_different_words() -> None:
    assert len(set(KEYS)) == len(KEYS) > 4000
    assert not [a for a, b in pairwise(sorted(KEYS)) if b.startswith(a)]
