"""Answers about long texts: prompts, texts cut to fit, greedy answers, and their scores.

F1 and exact match are SQuAD's, from torchmetrics; ROUGE F-measures are rouge_score's, with its stemmer. Of several
references the best counts. All prompts are in `INSTRUCTIONS`, `TEXT` and `ASKED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dex.data.chat import user_turn
from dex.errors import DexError
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.judge import ASKED as JUDGE_ASKED
from dex.evaluation.judge import HIGHEST, RUBRIC, Graded, Judge, Unparsable, grade
from dex.evaluation.prefix import Prefix
from dex.evaluation.reading import Item, Kind, Reading
from dex.evaluation.records import Record, Task, prompt_hash
from dex.evaluation.token_ids import encoded, encoded_after, start

INSTRUCTIONS = {
    "question": "Read the text and answer the question in as few words as possible.",
    "summary": "Read the text and summarise it.",
    "qasper": (
        "Read the paper and answer the question in as few words as possible; if the paper does not say, answer "
        '"Unanswerable".'
    ),
    "xsum": "Read the article and summarise it in one sentence.",
    "multinews": "Read the articles and summarise them together in one paragraph.",
}
TEXT = "{instruction}\n\nText:\n{text}\n\n"
ASKED = {"question": "Question: {question}\nAnswer:", "summary": "Summary:"}
ASKED_IN_CHAT = {"question": "Question: {question}", "summary": "Write the summary and nothing else."}
# What a base model writes after its answer is not the answer's. In chat it says itself where it ends.
ENDS = {"question": "\n", "summary": "\n\n"}

CUT_TO = 64  # tokens: a text that is cut keeps a multiple of it

METRIC = {"question": "f1", "summary": "rougeL"}
JUDGED = "judge"
PLACE = "\ue000"  # private use: where the text will be


@dataclass(frozen=True)
class Prompt:
    """The text with what stands before it, and what stands after it; `cut` is how many of its tokens are left out."""

    before: list[int]
    after: list[int]
    cut: int


class Prompts:
    """Writes prompts of at most `length` tokens, with `new_tokens` of them for the answer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: int, new_tokens: dict[Kind, int], truncate: str, chat: bool
    ) -> None:
        """truncate: "middle" keeps both ends of a text, "start" its end. Raises DexError: chat without a template."""
        self.tokenizer, self.length, self.new_tokens = tokenizer, length, new_tokens
        self.truncate, self.chat = truncate, chat
        if chat and not tokenizer.chat_template:
            raise DexError("The tokenizer has no chat template; leave chat=true out, or evaluate a chat model.")
        self._texts: dict[str, list[int]] = {}

    def of(self, reading: Reading, item: Item) -> Prompt:
        """Raises DexError where not even the question fits."""
        head, tail = self._around(reading, item)
        before = ([] if self.chat else start(self.tokenizer)) + encoded(self.tokenizer, head)
        after = encoded_after(self.tokenizer, "x", tail)
        text = self._texts.get(item.context)
        if text is None:
            self._texts = {item.context: (text := encoded_after(self.tokenizer, "\n", item.context))}
        room = self.length - self.new_tokens[reading.kind] - len(before) - len(after)
        if room < 1:
            raise DexError(
                f"{reading.name}, {item.id}: length is {self.length:,} tokens, and {self.length - room:,} go to the "
                "question, the instruction and the answer; raise length."
            )
        shown = text if len(text) <= room else self._shortened(text, room)
        return Prompt(before + shown, after, len(text) - len(shown))

    def _around(self, reading: Reading, item: Item) -> tuple[str, str]:
        """The prompt's text before and after the item's."""
        instruction = INSTRUCTIONS.get(reading.name, INSTRUCTIONS[reading.kind])
        asked = (ASKED_IN_CHAT if self.chat else ASKED)[reading.kind].format(question=item.question)
        prompt = TEXT.format(instruction=instruction, text=PLACE) + asked
        if self.chat:
            prompt = user_turn(self.tokenizer, prompt)
        parts = prompt.split(PLACE)
        if len(parts) != 2:
            raise DexError(f"{reading.name}, {item.id}: the chat template or the question has U+E000; leave it out.")
        return parts[0], parts[1]

    def _shortened(self, text: list[int], room: int) -> list[int]:
        # Rounded, so that questions of different lengths about one text mostly see the same part of it.
        room = room // CUT_TO * CUT_TO or room
        kept = 0 if self.truncate == "start" else (room + 1) // 2
        return text[:kept] + text[len(text) - (room - kept) :]


# ---- answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """An item with its prompt and what the model answered."""

    reading: Reading
    item: Item
    prompt: Prompt
    hash: str
    answer: str

    @property
    def key(self) -> str:
        return f"{self.reading.name}, {self.item.id}, {self.hash}"


def answer_items(
    evaluated: Evaluated, readings: Sequence[Reading], prompts: Prompts, answers: Answers
) -> list[Answered]:
    """Greedy answers to every item. Questions about one text are asked together, and it is read once."""
    asked = [(reading, item, prompts.of(reading, item)) for reading in readings for item in reading.items]
    hashes = [prompt_hash(prompt.before, prompt.after) for _, _, prompt in asked]
    stop = evaluated.stop_ids

    def compute(batch: Sequence[int]) -> Iterator[str]:
        prefix = Prefix(evaluated.model, asked[batch[0]][2].before)
        for i in batch:
            reading, _, prompt = asked[i]
            found = prefix.greedy(prompt.after, prompts.new_tokens[reading.kind], stop)
            yield str(evaluated.tokenizer.decode(found, skip_special_tokens=True))

    found = answer_all(
        [f"{reading.name}, {item.id}, {own}" for (reading, item, _), own in zip(asked, hashes, strict=True)],
        [list(group) for _, group in groupby(range(len(asked)), key=lambda i: asked[i][2].before)],
        lambda batch: list(compute(batch)),
        answers,
        evaluated.label,
        [len(prompt.before) + len(prompt.after) for _, _, prompt in asked],
        "tokens",
    )
    return [
        Answered(reading, item, prompt, own, answer.strip() if prompts.chat else _own_part(answer, reading.kind))
        for (reading, item, prompt), own, answer in zip(asked, hashes, found, strict=True)
    ]


def _own_part(answer: str, kind: Kind) -> str:
    return answer.strip().split(ENDS[kind])[0].strip()


# ---- scores ------------------------------------------------------------------------------------------------


def scores(answer: str, references: Sequence[str], kind: Kind) -> dict[str, float]:
    """From 0 to 1, by metric."""
    if kind == "question":
        from torchmetrics.functional.text import squad

        target: Any = {"id": "0", "answers": {"text": list(references), "answer_start": [0] * len(references)}}
        found = squad({"id": "0", "prediction_text": answer}, target)
        return {"f1": float(found["f1"]) / 100, "exact_match": float(found["exact_match"]) / 100}
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    best = RougeScorer(names, use_stemmer=True).score_multi(list(references), answer)
    return {name: float(best[name].fmeasure) for name in names}


def records_of(answered: Sequence[Answered]) -> list[Record]:
    """The score of each answer, with the others of its kind and the references in `details`."""
    records = []
    for each in answered:
        item = each.item
        found = scores(each.answer, item.answers, each.reading.kind)
        details = {
            **found,
            "question": item.question,
            "references": list(item.answers),
            "prompt_tokens": len(each.prompt.before) + len(each.prompt.after),
            "cut_tokens": each.prompt.cut,
        }
        score = found[METRIC[each.reading.kind]]
        group = prompt_hash(item.group)
        records.append(Record(each.reading.name, item.id, each.hash, each.answer, score, group, details=details))
    return records


def tasks_of(readings: Sequence[Reading]) -> dict[str, Task]:
    return {reading.name: Task(METRIC[reading.kind]) for reading in readings}


def figures_of(records: Sequence[Record], readings: Sequence[Reading]) -> dict[str, Any]:
    """By task: the mean of every metric, prompt lengths, and how many texts were cut and answers empty."""
    figures: dict[str, Any] = {}
    for reading in readings:
        own = [record for record in records if record.task == reading.name]
        metrics = ("f1", "exact_match") if reading.kind == "question" else ("rouge1", "rouge2", "rougeL")
        lengths = [record.details["prompt_tokens"] for record in own]
        figures[reading.name] = {
            **{metric: float(np.mean([record.details[metric] for record in own])) for metric in metrics},
            "prompt_tokens": {"mean": float(np.mean(lengths)), "longest": max(lengths)},
            "cut": sum(record.details["cut_tokens"] > 0 for record in own),
            "empty": sum(not record.prediction for record in own),
        }
    return figures


# ---- the judge ---------------------------------------------------------------------------------------------


def judged(answered: Sequence[Answered], judge: Judge, answers: Answers, label: str) -> list[Record]:
    """Grades as records of tasks of their own. A reply without a grade is a 0, as `details` say.

    Raises DexError where the judge does not reply, or where over 5 % of its replies are no grade.
    """
    graded = [Graded(_task(each), each.item.answers, each.answer) for each in answered]
    rubric = rubric_hash()
    keys = [f"{JUDGED}, {judge.model}, {rubric}, {each.key}, {prompt_hash(each.answer)}" for each in answered]
    unparsable = Unparsable(len(keys), judge.model)
    unparsable.check([answers[key] for key in keys if key in answers])

    def compute(batch: Sequence[int]) -> list[str]:
        replies = judge.replies([graded[i] for i in batch])
        unparsable.check(replies)
        return replies

    batches = [list(range(first, min(first + 8, len(keys)))) for first in range(0, len(keys), 8)]
    replies = answer_all(keys, batches, compute, answers, f"{label} judged", unit="answers")
    Unparsable(len(keys), judge.model).check(replies)
    return [
        Record(
            f"{each.reading.name} judged",
            each.item.id,
            each.hash,
            each.answer,
            grade(reply) or 0.0,
            prompt_hash(each.item.group),
            details={"reply": reply, "unparsable": grade(reply) is None},
        )
        for each, reply in zip(answered, replies, strict=True)
    ]


def _task(answered: Answered) -> str:
    instruction = INSTRUCTIONS.get(answered.reading.name, INSTRUCTIONS[answered.reading.kind])
    question = answered.item.question
    return instruction if question is None else f"{instruction}\nQuestion: {question}"


def rubric_hash() -> str:
    return prompt_hash(RUBRIC, JUDGE_ASKED, str(HIGHEST))


def judged_tasks(readings: Sequence[Reading]) -> dict[str, Task]:
    return {f"{reading.name} judged": Task(JUDGED) for reading in readings}


def judged_figures(records: Sequence[Record]) -> dict[str, Any]:
    return {"replies": len(records), "unparsable": sum(record.details["unparsable"] for record in records)}
