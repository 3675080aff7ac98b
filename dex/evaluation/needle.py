"""Retrieval from haystacks: what is asked, how answers are scored, and the figures of a grid depth × length."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from dex.data.sources import Source, identity, pin
from dex.data.tokens import tokenizer_identity
from dex.errors import DexError
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.attention_mass import SPANS, answer_masses
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.haystack import (
    Filler,
    Haystack,
    Wording,
    base_wording,
    chat_wording,
    make_haystack,
    read_filler,
)
from dex.evaluation.prefix import Prefix
from dex.evaluation.records import Record, Task, prompt_hash

VERSION = "1"  # of the haystacks and of how answers are scored
DIGITS = 6  # of a mass that are kept
GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Grid:
    """What is asked: `samples` haystacks for each depth of each length, `queries` of whose needles are asked."""

    lengths: list[int]
    depths: list[int]
    needles: int
    queries: int
    samples: int
    seed: int


@dataclass(frozen=True)
class Item:
    """One needle that is asked for, by its place among its haystack's."""

    name: str  # of its haystack: length, first depth and sample
    length: int
    haystack: Haystack
    which: int

    @property
    def task(self) -> str:
        return task_of(self.length)

    @cached_property
    def prompt_hash(self) -> str:
        return prompt_hash(self.haystack.ids, self.haystack.questions[self.which])

    @property
    def key(self) -> str:
        return f"{self.name}-{self.which}-{self.prompt_hash}"


def task_of(length: int) -> str:
    return f"needle-{length}"


# ---- asking ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asking:
    """How every item is asked of a model; `attention`: its masses are measured too."""

    wording: Wording
    max_new_tokens: int
    attention: bool


def check_context(evaluated: Evaluated, lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise DexError where a prompt and its answer have more tokens than the model has positions."""
    longest = max(lengths)
    if longest + max_new_tokens > evaluated.context:
        raise DexError(
            f"A needle of length {longest} and its answer (max_new_tokens={max_new_tokens}) do not fit the context "
            f"of {evaluated.label}, {evaluated.context} tokens; use lengths of at most "
            f"{evaluated.context - max_new_tokens}."
        )


def wording_of(evaluated: Evaluated, prompting: str) -> Wording:
    if prompting == "chat":
        return chat_wording(evaluated.tokenizer, evaluated.label)
    return base_wording(evaluated.tokenizer)


def items_of(grid: Grid, filler: Filler, wording: Wording, evaluated: Evaluated) -> list[Item]:
    """All items, those of one haystack next to each other.

    The needles that are asked of one haystack stand at different depths: the haystack's own, and the next ones of
    `grid.depths` in turn. So every cell of the grid has samples × queries items.
    """
    items = []
    for length, (at, depth), sample in product(grid.lengths, enumerate(grid.depths), range(grid.samples)):
        depths = [grid.depths[(at + turn) % len(grid.depths)] for turn in range(grid.queries)]
        name = f"{length}-{depth}-{sample}"
        haystack = make_haystack(
            filler, wording, evaluated.tokenizer, length, depths, grid.needles, f"{grid.seed}-{name}"
        )
        items += [Item(name, length, haystack, which) for which in range(grid.queries)]
    return items


def ask(items: Sequence[Item], evaluated: Evaluated, asking: Asking, answers: Answers) -> list[dict[str, Any]]:
    """Each item's answer: its text, and the masses [L, H, C] where they are measured.

    The items of one haystack are computed together, after the haystack, which goes through the model once.
    """
    together: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        together.setdefault(item.name, []).append(index)

    def compute(batch: Sequence[int]) -> list[dict[str, Any]]:
        return answer_haystack([items[i] for i in batch], evaluated, asking)

    shares = [item.length // len(together[item.name]) for item in items]
    found: list[dict[str, Any]] = answer_all(
        [item.key for item in items], list(together.values()), compute, answers, evaluated.label, shares, "tokens"
    )
    return found


def answer_haystack(items: Sequence[Item], evaluated: Evaluated, asking: Asking) -> list[dict[str, Any]]:
    """The answers to the items of one haystack, which goes through the model once."""
    prefix = Prefix(evaluated.model, items[0].haystack.ids)
    return [_answer(item, prefix, evaluated, asking) for item in items]


def _answer(item: Item, prefix: Prefix, evaluated: Evaluated, asking: Asking) -> dict[str, Any]:
    question = item.haystack.questions[item.which]
    ids = prefix.greedy(question, asking.max_new_tokens, evaluated.stop_ids)
    answer: dict[str, Any] = {"text": evaluated.tokenizer.decode(ids, skip_special_tokens=True)}
    if asking.attention:
        value = asking.wording.answer(item.haystack.needles[item.which].value)
        masses = answer_masses(prefix, item.haystack, item.which, value)
        answer["masses"] = np.round(masses.double().numpy(), DIGITS).tolist()
    return answer


# ---- scoring -----------------------------------------------------------------------------------------------


def is_right(answer: str, value: str, others: Sequence[str], prompting: str) -> bool:
    """Whether the first of the haystack's numbers in the answer is the one that was asked for.

    Of a base model, which goes on with text of its own, the first line is its answer. Commas between thousands do
    not matter, other digits beside the value do: 12345678 does not name 1234567.
    """
    text = answer.lstrip().partition("\n")[0] if prompting == "base" else answer
    hidden = {value, *others}
    named = [number for number in NUMBER.findall(GROUPED.sub("", text)) if number in hidden]
    return named[:1] == [value]


def records_of(items: Sequence[Item], found: Sequence[dict[str, Any]], prompting: str) -> list[Record]:
    """The items as a suite's records; the items of a haystack are a group."""
    records = []
    for item, answer in zip(items, found, strict=True):
        needle = item.haystack.needles[item.which]
        others = [each.value for each in item.haystack.needles if each is not needle]
        score = float(is_right(answer["text"], needle.value, others, prompting))
        details = {"length": item.length, "depth": needle.depth, "key": needle.key, "expected": needle.value}
        name = f"{item.name}-{item.which}"
        records.append(Record(item.task, name, item.prompt_hash, answer["text"], score, item.name, details=details))
    return records


def tasks_of(lengths: Sequence[int]) -> dict[str, Task]:
    return {task_of(length): Task("retrieved", version=VERSION) for length in lengths}


# ---- figures -----------------------------------------------------------------------------------------------


def grid_of(records: Sequence[Record], grid: Grid) -> dict[str, Any]:
    """Mean scores and how many items each has, by depth and length."""
    cells = list(_cells(grid, [record.details for record in records]))
    scores = [[float(np.mean([records[i].score for i in cell])) for cell in row] for row in cells]
    counts = [[len(cell) for cell in row] for row in cells]
    return {"depths": grid.depths, "lengths": grid.lengths, "retrieved": scores, "items": counts}


def attention_of(
    found: Sequence[dict[str, Any]], records: Sequence[Record], grid: Grid, signed: bool
) -> dict[str, Any]:
    """Mean masses by layer and head over all items, and by depth and length over all heads."""
    masses = np.array([answer["masses"] for answer in found])  # [items, L, H, C]
    cells = _cells(grid, [record.details for record in records])
    totals = [[masses[cell].mean((0, 1, 2)) for cell in row] for row in cells]  # [depths, lengths] of [C]

    def by_span(values: Any) -> dict[str, Any]:
        return {span: np.round(values[..., at], DIGITS).tolist() for at, span in enumerate(SPANS)}

    return {
        "queries": "those that predict the tokens of the right answer",
        "signed": signed,  # first map − λ · second map, which sums to 1 − λ and not to 1
        "mean": by_span(masses.mean((0, 1, 2))),
        "by_head": by_span(masses.mean(0)),  # [layers][heads]
        "by_cell": {"depths": grid.depths, "lengths": grid.lengths, **by_span(np.array(totals))},
    }


def _cells(grid: Grid, details: Sequence[dict[str, Any]]) -> Iterator[list[list[int]]]:
    """For every depth, for every length: which items are of it."""
    for depth in grid.depths:
        yield [
            [i for i, each in enumerate(details) if (each["depth"], each["length"]) == (depth, length)]
            for length in grid.lengths
        ]


def filler_of(name: str, evaluated: Evaluated, longest: int) -> tuple[Filler, Source]:
    """Four times as much text as the longest haystack has, so that haystacks differ; or all that the source has."""
    source = pin(Source(name))
    return read_filler(source, evaluated.tokenizer, 4 * longest), source


def about_filler(filler: Filler, longest: int) -> dict[str, Any]:
    """`repeats`: how often the longest haystack holds the text, where that is more than once."""
    return {
        "tokens": len(filler.ids),
        "documents": filler.documents,
        "repeats": round(longest / len(filler.ids), 2) if longest > len(filler.ids) else None,
    }


def what_decides(source: Source, evaluated: Evaluated) -> dict[str, Any]:
    """What else the haystacks depend on, for a result's settings."""
    return {"filler_identity": identity(source), "tokenizer": tokenizer_identity(evaluated.tokenizer)}
