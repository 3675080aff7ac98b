"""Labelled texts: the data sets of many-shot classification by name, any other by its columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dex.data.columns import Table, read_table
from dex.errors import DexError


@dataclass(frozen=True)
class Known:
    """Where a data set lies on the Hub."""

    id: str
    text: str
    label: str
    config: str | None = None


KNOWN = {
    "trec": Known("CogComp/trec", "text", "coarse_label"),
    "trec-fine": Known("CogComp/trec", "text", "fine_label"),
    "banking77": Known("PolyAI/banking77", "text", "label"),
    "clinic150": Known("clinc/clinc_oos", "text", "intent", "plus"),
}


@dataclass(frozen=True)
class Example:
    """A text and the index of its label."""

    text: str
    label: int


@dataclass(frozen=True)
class Labelled:
    """Demonstrations are drawn from `pool`; `test` is what is asked. No text of `test` is in `pool`.

    identity: which data these are, for a result's settings.
    """

    labels: list[str]
    pool: list[Example]
    test: list[Example]
    identity: dict[str, str]


def read_labelled(
    data: str,
    test: str | None,
    text: str,
    label: str,
    names: Sequence[str] | None,
    *,
    config: str | None,
    split: str,
    test_split: str | None,
    revision: str | None,
    items: int,
    seed: int,
) -> Labelled:
    """Read demonstrations, and draw `items` test items, by `seed`, from `test`, from a split of `data`, or from it.

    Raises DexError for what cannot be read or used, and where there are fewer test items than asked for.
    """
    table = read_table(data, [text, label], config=config, split=split, revision=revision)
    tables = [table]
    if test is not None:
        tables.append(read_table(test, [text, label], config=None, split="test", revision=None))
    elif test_split is not None:
        tables.append(read_table(data, [text, label], config=config, split=test_split, revision=revision))
    texts, words = zip(*(_columns(each, text, label, names) for each in tables), strict=True)
    labels = _all_labels([label for each in words for label in each], names, table, label)
    index = {name: i for i, name in enumerate(labels)}
    examples = [
        [Example(text, index[word]) for text, word in zip(*each, strict=True)]
        for each in zip(texts, words, strict=True)
    ]
    drawn = _draw(_distinct(examples[-1]), items, seed, tables[-1].name)
    asked = {example.text for example in drawn}
    pool = [example for example in _distinct(examples[0]) if example.text not in asked]
    identity = {"data_content": table.identity, "test_content": tables[-1].identity}
    return Labelled(labels, pool, drawn, identity)


def _columns(table: Table, text: str, label: str, names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Texts and labels in words."""
    texts, labels = [], []
    classes = names or table.classes.get(label)
    for i, row in enumerate(table.rows):
        if not isinstance(row[text], str) or not row[text].strip():
            raise DexError(f"{table.where(i)}: {text!r} holds no text; mend the row, or set text_column to another.")
        texts.append(" ".join(row[text].split()))
        labels.append(_word(row[label], classes, f"{table.where(i)}: {label!r}"))
    return texts, labels


def _word(value: object, classes: Sequence[str] | None, where: str) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    if not isinstance(value, int) or isinstance(value, bool):
        raise DexError(f"{where} holds {value!r}, and a label is text or a whole number; mend the row.")
    if classes is None:
        raise DexError(f"{where} is the number {value}, and no names are known; set names to those of all classes.")
    if not 0 <= value < len(classes):
        raise DexError(f"{where} is the number {value}, and there are {len(classes)} names, from number 0; mend it.")
    return classes[value].strip()


def _all_labels(words: list[str], names: Sequence[str] | None, table: Table, label: str) -> list[str]:
    """All candidates, in the data set's own order or else the alphabet's."""
    known = [name.strip() for name in names or table.classes.get(label) or sorted(set(words))]
    if len(set(known)) < len(known) or not all(known):
        raise DexError(f"The names of the classes of {table.name} are not distinct words; set names to others.")
    if unknown := sorted(set(words) - set(known)):
        raise DexError(f"{table.name}: the label {unknown[0]!r} is none of names; add it there.")
    if len(known) < 2:
        raise DexError(f"{table.name} has one label, {known[0]!r}, in {label!r}, and nothing is to be told apart.")
    return known


def _distinct(examples: Sequence[Example]) -> list[Example]:
    """Each text once, with its first label."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.text, example)
    return list(first.values())


def _draw(examples: Sequence[Example], items: int, seed: int, name: str) -> list[Example]:
    if len(examples) < items:
        raise DexError(f"{name} has {len(examples)} different texts, fewer than the {items} items; lower items.")
    chosen = np.random.default_rng(seed).permutation(len(examples))[:items]
    return [examples[i] for i in sorted(chosen)]
