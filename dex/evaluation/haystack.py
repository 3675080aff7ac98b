"""Haystacks: sentences with a number each (the needles) in running text, exactly as many tokens as asked for.

    … filler …
    The special magic number for brave-otter is 4028715.
    … filler …

All is put together from token ids: retokenised text would join tokens, and the length and the needles' places would
move. What is drawn depends on the seed and the tokenizer alone, so every model with that tokenizer gets the same.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from transformers import PreTrainedTokenizerBase

from dex.data.chat import user_turn
from dex.data.sources import Source, read_documents
from dex.data.tokens import special_ids
from dex.errors import DexError
from dex.evaluation.token_ids import encoded, encoded_after, start
from dex.tokenizer import without_truncation_or_padding

ADJECTIVES = (  # split, since a literal list would have a line for each  # noqa: SIM905
    "amber ancient bold brave bright brisk calm clever cosy crisp curly daring eager fair fancy fierce gentle giant "
    "golden grand happy hidden honest humble jolly kind lively lonely loyal lucky mellow mighty modest narrow noble "
    "odd pale patient plain polite proud quick quiet rapid rare royal rustic shy silent silver sleepy slender smart "
    "solid sturdy subtle sunny swift tall tame tidy tiny vivid warm wise witty young"
).split()
NOUNS = (  # noqa: SIM905
    "acorn anchor apple badger barrel basket beacon beaver bottle bridge button cactus candle canyon carrot castle "
    "cedar cherry comet copper cottage cricket desert dolphin falcon feather ferry forest garden glacier hammer "
    "harbor helmet heron island jacket kettle ladder lantern lemon lizard magnet marble meadow mirror monkey orchard "
    "otter oyster pebble pepper pigeon pillow planet pocket puzzle rabbit ribbon river rocket saddle salmon sparrow "
    "spider temple thunder ticket tiger tractor turtle valley violin walnut window wizard"
).split()
KEYS = [f"{adjective}-{noun}" for adjective, noun in product(ADJECTIVES, NOUNS)]

INTRODUCTION = "The text below holds several special magic numbers. Remember them; you will be asked about them.\n\n"
CUT = "\ue000"  # private use: stands for the haystack while a chat template is applied
CHARACTERS = 16  # of a document are read for each token that is wanted: more than a token has on average


def sentence(key: str, value: str) -> str:
    return f"{beginning(key)} {value}."


def beginning(key: str) -> str:
    return f"The special magic number for {key} is"


# ---- around the haystack -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wording:
    """How a model is asked.

    opening: the ids before the haystack. question: the ids after it, for a key. answer: a value as its ids would
    follow.
    """

    opening: list[int]
    question: Callable[[str], list[int]]
    answer: Callable[[str], list[int]]


def base_wording(tokenizer: PreTrainedTokenizerBase) -> Wording:
    """The needle's own beginning, which the model continues."""
    return Wording(
        start(tokenizer),
        lambda key: encoded_after(tokenizer, ".", f"\n{beginning(key)}"),
        lambda value: encoded_after(tokenizer, "is", f" {value}"),
    )


def chat_wording(tokenizer: PreTrainedTokenizerBase, label: str) -> Wording:
    """One user turn in the tokenizer's chat template. Raises DexError if there is none, or it cannot be used."""
    if tokenizer.chat_template is None:
        raise DexError(f"prompting chat needs a chat template, and {label} has none; use prompting=base.")

    def rendered(key: str) -> tuple[str, str]:
        question = f"\n\nWhat is the special magic number for {key}? Answer with the number alone."
        before, cut, after = user_turn(tokenizer, f"{INTRODUCTION}{CUT}{question}").partition(CUT)
        if not cut or CUT in after:
            raise DexError(f"The chat template of {label} does not show a user turn once; use prompting=base.")
        return before, after

    opening = encoded(tokenizer, rendered(KEYS[0])[0])
    return Wording(
        opening,
        lambda key: encoded_after(tokenizer, ".", rendered(key)[1]),
        lambda value: encoded_after(tokenizer, "\n", value),
    )


# ---- filler ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Filler:
    """Running text: its ids, and where in them words begin (ascending, 0 first)."""

    ids: list[int]
    words: list[int]
    documents: int

    def part(self, length: int, draw: random.Random) -> tuple[list[int], list[int]]:
        """`length` ids from a drawn place on, and where words begin in them; after the end comes the beginning."""
        begin = draw.choice(self.words)
        at = bisect.bisect_left(self.words, begin)
        ids = self.ids[begin:] + self.ids[:begin]
        words = [word - begin for word in self.words[at:]]
        words += [word - begin + len(ids) for word in self.words[:at]]
        times = -(-length // len(ids))
        places = (turn * len(ids) + word for turn in range(times) for word in words)
        return (ids * times)[:length], [place for place in places if place < length]


def read_filler(source: Source, tokenizer: PreTrainedTokenizerBase, wanted: int) -> Filler:
    """The first documents of a source, until they have `wanted` tokens; all of them where they have fewer.

    Special tokens that a text spells out (BOS, the end of a turn) are left out.
    """
    special = set(special_ids(tokenizer).tolist())
    between = encoded_after(tokenizer, ".", "\n\n")
    ids, words, documents = list[int](), list[int](), 0
    for document in read_documents(source):
        for token, begins_word in _tokens(document.text[: CHARACTERS * wanted], tokenizer):
            if token not in special:
                if begins_word or not ids:
                    words.append(len(ids))
                ids.append(token)
        ids += between
        documents += 1
        if len(ids) >= wanted:
            break
    if not words:
        raise DexError(f"The filler {source.source} has no tokens but special ones; give another text.")
    return Filler(ids, words, documents)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, bool]]:
    """The tokens of a text, and whether a word begins with each, or with the white space in it."""
    with without_truncation_or_padding(tokenizer):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        (token, begin == 0 or text[begin - 1].isspace() or text[begin : begin + 1].isspace())
        for token, (begin, _) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    ]


# ---- needles in it -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needle:
    """A key and its value; `span` is where its line stands among the haystack's ids.

    depth: that was asked for, in percent of the filler before it; None for a needle that is not asked.
    """

    key: str
    value: str
    depth: int | None
    span: tuple[int, int]


@dataclass(frozen=True)
class Haystack:
    """`ids` followed by one of `questions` is a prompt; all prompts of a haystack have the same length.

    needles: those that are asked first, in the order of `questions`. opening: how many of the ids stand before it.
    """

    ids: list[int]
    opening: int
    needles: list[Needle]
    questions: list[list[int]]


def make_haystack(
    filler: Filler,
    wording: Wording,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    depths: Sequence[int],
    needles: int,
    seed: str,
) -> Haystack:
    """A prompt of exactly `length` tokens, question included.

    depths: of the needles that are asked, in percent: 0 is before all filler, 100 behind it, others at the nearest
    beginning of a word. The other needles stand in between, at drawn places. Raises DexError where they do not fit.
    """
    draw = random.Random(seed)
    keys, questions = _keys(wording, needles, draw)
    values = [str(value) for value in draw.sample(range(1_000_000, 10_000_000), needles)]
    lines = [
        encoded_after(tokenizer, ".", f"\n{sentence(key, value)}\n") for key, value in zip(keys, values, strict=True)
    ]
    fixed = len(wording.opening) + len(questions[0]) + sum(map(len, lines))
    if length < fixed + needles:
        raise DexError(
            f"needles={needles} do not fit a length of {length} tokens: they and what asks for one take {fixed}, and "
            "filler has to stand between them; use fewer needles or greater lengths."
        )
    text, words = filler.part(length - fixed, draw)
    places = [_at_depth(depth, words, len(text)) for depth in depths]
    inner = [word for word in words if word > 0] or [len(text)]
    places += [draw.choice(inner) for _ in range(needles - len(depths))]
    ids, spans = _insert(lines, places, text, wording.opening)
    given = [*depths, *[None] * (needles - len(depths))]
    found = [Needle(*each) for each in zip(keys, values, given, spans, strict=True)]
    return Haystack(ids, len(wording.opening), found, questions[: len(depths)])


def _keys(wording: Wording, count: int, draw: random.Random) -> tuple[list[str], list[list[int]]]:
    """Different keys whose questions are equally long, so that one haystack serves them all."""
    by_length: dict[int, list[tuple[str, list[int]]]] = {}
    for key in draw.sample(KEYS, len(KEYS)):
        question = wording.question(key)
        group = by_length.setdefault(len(question), [])
        group.append((key, question))
        if len(group) == count:
            return [each for each, _ in group], [each for _, each in group]
    most = max(map(len, by_length.values()))
    raise DexError(f"needles={count} is more than there are keys of one length in this tokenizer, {most}; use fewer.")


def _at_depth(depth: int, words: Sequence[int], length: int) -> int:
    """The beginning of a word that is nearest to the depth; the very ends of the filler for 0 and 100."""
    place = depth * length / 100
    ends = [0, length] if depth in (0, 100) else words
    return min(ends, key=lambda each: abs(each - place))


def _insert(
    lines: Sequence[list[int]], places: Sequence[int], text: Sequence[int], opening: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Opening and text with every line at its place, and where each line stands.

    Of lines at one place the earlier comes first, but for the end, where it comes last: what is asked is at the end.
    """
    ids, spans, done = list(opening), dict[int, tuple[int, int]](), 0
    order = range(len(lines))
    for which in sorted(order, key=lambda i: (places[i], -i if places[i] == len(text) else i)):
        ids += text[done : places[which]]
        done = places[which]
        spans[which] = (len(ids), len(ids) + len(lines[which]))
        ids += lines[which]
    return [*ids, *text[done:]], [spans[which] for which in order]
