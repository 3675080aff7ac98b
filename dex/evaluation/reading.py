"""Texts to read, with what is asked about them: questions with answers, or nothing but a summary.

HotpotQA, Qasper, XSum and MultiNews come from the Hub by name; local tasks are FOLDER/<task>.jsonl with the columns
context, question (null for a summary) and answers (a list, of which the best counts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dex.data.columns import Row, Table, read_table
from dex.errors import DexError
from dex.settings import one_of

LOCAL = ("context", "question", "answers")

Kind = Literal["question", "summary"]


@dataclass(frozen=True)
class Item:
    """`question` is None where a summary is asked for. `group`: items about one text share it."""

    id: str
    group: str
    context: str
    question: str | None
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """One task's items; `identity` is its data's commit or hash."""

    name: str
    kind: Kind
    items: list[Item]
    identity: str


@dataclass(frozen=True)
class Known:
    """Where a task's data lie on the Hub, and what becomes of a row."""

    id: str
    split: str
    columns: tuple[str, ...]
    items: Callable[[Row, str], list[Item]]
    config: str | None = None


def read_task(name: str, folder: str | None, items: int, seed: int) -> Reading:
    """`items` items of a task, drawn by `seed`; in their own order.

    Raises DexError for an unknown task, for data that cannot be read or used, and for fewer items than asked for.
    """
    table, found = _of_folder(name, folder) if folder is not None else _of_hub(name)
    if len(found) < items:
        raise DexError(f"{table.name} has {len(found)} items, fewer than the {items} asked for; lower items.")
    chosen = sorted(np.random.default_rng(seed).permutation(len(found))[:items])
    drawn = [found[i] for i in chosen]
    kinds: set[Kind] = {"summary" if item.question is None else "question" for item in found}
    if len(kinds) > 1:
        raise DexError(f"{table.name} has rows with a question and rows without; put them into two files.")
    return Reading(name, kinds.pop(), drawn, table.identity)


def tasks_in(folder: str) -> list[str]:
    """The tasks of a local folder. Raises DexError where it has none."""
    path = Path(folder).expanduser()
    found = sorted(file.stem for file in path.glob("*.jsonl")) if path.is_dir() else []
    if not found:
        raise DexError(f"{folder} is not a folder with <task>.jsonl files, whose columns are {', '.join(LOCAL)}.")
    return found


def check_tasks(tasks: Sequence[str], folder: str | None) -> None:
    """Raise DexError for a task that there is not."""
    there = tasks_in(folder) if folder is not None else list(KNOWN)
    for task in tasks:
        if task not in there:
            raise DexError(
                f"{task!r} is not a task of {folder or 'the Hub that has a name here'}: {one_of(task, there)}."
            )


def _of_folder(name: str, folder: str) -> tuple[Table, list[Item]]:
    check_tasks([name], folder)
    file = Path(folder).expanduser() / f"{name}.jsonl"
    table = read_table(str(file), LOCAL, config=None, split="train", revision=None)
    return table, [_local_item(row, table.where(i), i) for i, row in enumerate(table.rows)]


def _local_item(row: Row, where: str, index: int) -> Item:
    context, question, answers = (row[column] for column in LOCAL)
    if not isinstance(context, str) or not context.strip():
        raise DexError(f"{where}: context holds no text; mend the row.")
    if question is not None and (not isinstance(question, str) or not question.strip()):
        raise DexError(f"{where}: question is text, or null where a summary is asked for; mend the row.")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise DexError(f"{where}: answers is a list of one or more texts; mend the row.")
    return Item(f"row {index + 1}", context, context, question, tuple(answers))


def _of_hub(name: str) -> tuple[Table, list[Item]]:
    check_tasks([name], None)
    known = KNOWN[name]
    table = read_table(known.id, known.columns, config=known.config, split=known.split, revision=None)
    items = []
    for i, row in enumerate(table.rows):
        try:
            items += known.items(row, f"row {i + 1}")
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise DexError(
                f"{table.where(i)} has not the form that {name} is known in ({type(error).__name__}: {error}); give "
                f"the data as a folder with {name}.jsonl."
            ) from error
    return table, items


# ---- rows of the Hub's data sets ---------------------------------------------------------------------------


def _hotpotqa(row: Row, _: str) -> list[Item]:
    titles, sentences = _lists(row["context"], "title", "sentences")
    paragraphs = [f"{title}\n{''.join(each).strip()}" for title, each in zip(titles, sentences, strict=True)]
    return [Item(row["id"], row["id"], "\n\n".join(paragraphs), row["question"], (row["answer"],))]


def _qasper(row: Row, _: str) -> list[Item]:
    """A paper's questions; the references are all annotators' answers."""
    names, paragraphs = _lists(row["full_text"], "section_name", "paragraphs")
    sections = ["\n".join([name or "", *each]).strip() for name, each in zip(names, paragraphs, strict=True)]
    context = "\n\n".join([row["title"], row["abstract"], *sections])
    items = []
    for name, question, annotators in zip(*_lists(row["qas"], "question_id", "question", "answers"), strict=True):
        answers = [_qasper_answer(answer) for answer in _lists(annotators, "answer")[0]]
        items.append(Item(name, row["id"], context, question, tuple(dict.fromkeys(answers))))
    return items


def _qasper_answer(answer: dict[str, Any]) -> str:
    if answer["unanswerable"]:
        return "Unanswerable"
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    return str(answer["free_form_answer"] or ("Yes" if answer["yes_no"] else "No"))


def _xsum(row: Row, _: str) -> list[Item]:
    return [Item(row["id"], row["id"], row["document"].strip(), None, (row["summary"].strip(),))]


def _multinews(row: Row, where: str) -> list[Item]:
    articles = [each.strip() for each in row["document"].split("|||||")]
    return [Item(where, where, "\n\n".join(filter(None, articles)), None, (row["summary"].strip(" –\n"),))]


def _lists(value: Any, *keys: str) -> list[list[Any]]:
    """The values of each key: a list of structs is stored as a struct of lists by some versions of the client."""
    if isinstance(value, dict):
        return [list(value[key]) for key in keys]
    return [[each[key] for each in value] for key in keys]


KNOWN = {
    "hotpotqa": Known(
        "hotpotqa/hotpot_qa", "validation", ("id", "question", "answer", "context"), _hotpotqa, "distractor"
    ),
    "qasper": Known("allenai/qasper", "test", ("id", "title", "abstract", "full_text", "qas"), _qasper, "qasper"),
    "xsum": Known("EdinburghNLP/xsum", "test", ("id", "document", "summary"), _xsum),
    "multinews": Known("alexfabbri/multi_news", "test", ("document", "summary"), _multinews),
}
