"""Many-shot classification: the label that a model finds likeliest after many labelled examples.

A seed draws a sequence of demonstrations; k shots are its first k, so more shots contain fewer. They are shown in
several random orderings, and sorted by label: each (shots, seed, ordering) is a prompt. All test items are asked
after every prompt, which the model reads once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dex.console import say
from dex.errors import DexError
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.labelled import Example, Labelled
from dex.evaluation.prefix import Prefix
from dex.evaluation.records import Record, Task, prompt_hash
from dex.evaluation.token_ids import encoded, encoded_after, start
from dex.processes import place

QUESTION = "Text: {text}\nLabel:"
# The blank line is part of the answer: no label is favoured for being the beginning of another.
ANSWER = " {label}\n\n"

RANDOM, SORTED = "random", "sorted"
TOGETHER = 16  # test items after one prompt whose answers are kept at once


@dataclass(frozen=True)
class Prompt:
    """The demonstrations of one (shots, seed, ordering) as token ids; `ordering` is "sorted" or "random 0", …"""

    shots: int
    seed: int
    ordering: str
    ids: list[int]

    @property
    def task(self) -> str:
        return task_name(self.shots, self.ordering.split()[0])

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {self.ordering}"


def task_name(shots: int, kind: str) -> str:
    return f"{shots}-shot {kind}"


@dataclass(frozen=True)
class Asked:
    """What a model is asked, in its own tokens: the test items after every prompt, and the labels after each."""

    prompts: list[Prompt]
    questions: list[list[int]]
    labels: list[list[int]]

    def tokens(self, prompt: Prompt) -> int:
        """Of the longest question and label after a prompt."""
        return len(prompt.ids) + max(map(len, self.questions)) + max(map(len, self.labels))


def demonstrations(pool: Sequence[Example], shots: int, seed: int, ordering: str) -> list[Example]:
    """The first `shots` of the seed's sequence, in an ordering.

    Orderings keep their relative order as shots grow. Sorted ones have the order of the labels, and within a label
    that of the sequence.
    """
    sequence = [pool[i] for i in np.random.default_rng(seed).permutation(len(pool))[:shots]]
    if ordering == SORTED:
        return sorted(sequence, key=lambda example: example.label)
    places = np.random.default_rng((seed, int(ordering.split()[1]))).random(len(pool))
    return [sequence[i] for i in np.argsort(places[:shots], kind="stable")]


def prompts_of(
    data: Labelled, tokenizer: PreTrainedTokenizerBase, shots: Sequence[int], seeds: int, orderings: int
) -> Iterator[Prompt]:
    for count in shots:
        for seed in range(seeds):
            for ordering in [*(f"{RANDOM} {i}" for i in range(orderings)), SORTED]:
                shown = demonstrations(data.pool, count, seed, ordering)
                text = "".join((QUESTION + ANSWER).format(text=e.text, label=data.labels[e.label]) for e in shown)
                yield Prompt(count, seed, ordering, start(tokenizer) + encoded(tokenizer, text))


def asked_of(
    data: Labelled, tokenizer: PreTrainedTokenizerBase, shots: Sequence[int], seeds: int, orderings: int
) -> Asked:
    """Raises DexError where the pool has fewer examples than the most shots."""
    if len(data.pool) < shots[-1]:
        raise DexError(
            f"{shots[-1]} shots are asked for, and without the {len(data.test)} test items {len(data.pool)} "
            "different texts are left; lower shots or items, or give more data."
        )
    end = ANSWER.format(label="")
    return Asked(
        list(prompts_of(data, tokenizer, shots, seeds, orderings)),
        [encoded_after(tokenizer, end, QUESTION.format(text=item.text)) for item in data.test],
        [encoded_after(tokenizer, "Label:", ANSWER.format(label=label)) for label in data.labels],
    )


def fitting(asked: Asked, length: int | None, context: int, label: str) -> tuple[Asked, dict[int, int]]:
    """What fits into `length` tokens, and for each number of shots that is left out the tokens it needs.

    Raises DexError where nothing fits, and where something would be longer than the model's context.
    """
    needed: dict[int, int] = {}
    for prompt in asked.prompts:
        needed[prompt.shots] = max(needed.get(prompt.shots, 0), asked.tokens(prompt))
    left_out = {} if length is None else {shots: tokens for shots, tokens in needed.items() if tokens > length}
    kept = {shots: tokens for shots, tokens in needed.items() if shots not in left_out}
    if not kept:
        raise DexError(
            f"{min(needed)} shots need {min(needed.values()):,} tokens, and length is {length:,}; lower shots or "
            "raise length."
        )
    if (most := max(kept.values())) > context:
        raise DexError(
            f"{max(kept)} shots need {most:,} tokens, and {label} has a context of {context:,}; lower shots, or set "
            f"length={context} to leave out what does not fit."
        )
    if left_out:
        said = ", ".join(f"{shots} ({tokens:,} tokens)" for shots, tokens in left_out.items())
        say(f"{label}: left out, as longer than {length:,} tokens: {said} shots")
    prompts = [prompt for prompt in asked.prompts if prompt.shots in kept]
    return Asked(prompts, asked.questions, asked.labels), left_out


def classify(evaluated: Evaluated, asked: Asked, data: Labelled, answers: Answers) -> list[Record]:
    """A record of every test item after every prompt."""
    requests = [(p, q) for p in range(len(asked.prompts)) for q in range(len(asked.questions))]
    labels = prompt_hash(*asked.labels)
    prompts = [prompt_hash(prompt.ids) for prompt in asked.prompts]
    hashes = [prompt_hash(prompts[p], asked.questions[q], labels) for p, q in requests]
    reader = _Reader(evaluated.model, asked, data)
    found = answer_all(
        [
            f"{asked.prompts[p].task}, {asked.prompts[p].name}, item {q}, {own}"
            for (p, q), own in zip(requests, hashes, strict=True)
        ],
        _batches(len(asked.prompts), len(asked.questions)),
        lambda batch: [reader.answer(*requests[i]) for i in batch],
        answers,
        evaluated.label,
        unit="items",
    )
    return [
        _record(asked.prompts[p], q, own, answer, data)
        for (p, q), own, answer in zip(requests, hashes, found, strict=True)
    ]


def _batches(prompts: int, questions: int) -> list[list[int]]:
    """Requests after one prompt, a few at a time. Processes take them in turn, and each has a prompt of its own."""
    _, world = place()
    return [
        list(range(p * questions + first, p * questions + min(first + TOGETHER, questions)))
        for together in range(0, prompts, world)
        for first in range(0, questions, TOGETHER)
        for p in range(together, min(together + world, prompts))
    ]


class _Reader:
    """Answers questions, and reads a prompt only where the question before was after another one."""

    def __init__(self, model: Any, asked: Asked, data: Labelled) -> None:
        self.model, self.asked, self.data = model, asked, data
        self._read: tuple[int, Prefix] | None = None

    def answer(self, prompt: int, question: int) -> list[float]:
        """The likeliest label's index, its log-likelihood, and that of the right one."""
        if self._read is None or self._read[0] != prompt:
            self._read = None  # two caches of a long prompt might not fit
            self._read = prompt, Prefix(self.model, self.asked.prompts[prompt].ids)
        found = self._read[1].log_likelihoods(self.asked.questions[question], self.asked.labels)
        best = int(np.argmax(found))
        return [best, found[best], found[self.data.test[question].label]]


def _record(prompt: Prompt, item: int, own: str, answer: Sequence[float], data: Labelled) -> Record:
    best, likelihood, of_target = answer
    target = data.test[item].label
    details = {
        "target": data.labels[target],
        "log_likelihood": likelihood,
        "target_log_likelihood": of_target,
        "shots": prompt.shots,
        "seed": prompt.seed,
        "ordering": prompt.ordering,
    }
    prediction = data.labels[int(best)]
    name = f"{prompt.name}, item {item}"
    return Record(prompt.task, name, own, prediction, float(best == target), f"item {item}", details=details)


def tasks_of(asked: Asked) -> dict[str, Task]:
    return {prompt.task: Task("acc") for prompt in asked.prompts}


# ---- figures -----------------------------------------------------------------------------------------------


def figures_of(records: Sequence[Record], asked: Asked, left_out: dict[int, int]) -> dict[str, Any]:
    """Accuracy of every prompt, its spread over orderings, and the prompts' lengths in tokens."""
    scores: dict[tuple[int, int, str], list[float]] = {}
    for record in records:
        key = record.details["shots"], record.details["seed"], record.details["ordering"]
        scores.setdefault(key, []).append(record.score)
    accuracy = {key: float(np.mean(values)) for key, values in scores.items()}
    by_shots = sorted({shots for shots, _, _ in accuracy})
    return {
        "prompt": (QUESTION + ANSWER),
        "labels": len(asked.labels),
        "prompt_tokens": {str(shots): _lengths(asked, shots) for shots in by_shots},
        "left_out": {str(shots): tokens for shots, tokens in left_out.items()},
        "accuracy": [
            {"shots": shots, "seed": seed, "ordering": ordering, "accuracy": value}
            for (shots, seed, ordering), value in accuracy.items()
        ],
        "spread": {str(shots): spread(accuracy, shots) for shots in by_shots},
    }


def _lengths(asked: Asked, shots: int) -> dict[str, float]:
    lengths = [len(prompt.ids) for prompt in asked.prompts if prompt.shots == shots]
    return {"mean": float(np.mean(lengths)), "longest": max(lengths)}


def spread(accuracy: dict[tuple[int, int, str], float], shots: int) -> dict[str, float | None]:
    """How much the order of the same demonstrations matters, and which they are.

    std_over_orderings is the root of the mean over seeds of the variance (n − 1) over random orderings; the range is
    the mean over seeds of highest − lowest. std_over_seeds is that of the seeds' means over random orderings. None
    stands for what one ordering or seed leaves open.
    """
    seeds = sorted({seed for count, seed, _ in accuracy if count == shots})
    mixed = [
        [value for (count, s, kind), value in accuracy.items() if (count, s) == (shots, seed) and kind != SORTED]
        for seed in seeds
    ]
    in_order = [accuracy[shots, seed, SORTED] for seed in seeds]
    several = len(mixed[0]) > 1
    means = np.mean(mixed, axis=1)
    return {
        "random_mean": float(means.mean()),
        "lowest": float(np.min(mixed)),
        "highest": float(np.max(mixed)),
        "std_over_orderings": float(np.sqrt(np.var(mixed, axis=1, ddof=1).mean())) if several else None,
        "range_over_orderings": float(np.ptp(mixed, axis=1).mean()) if several else None,
        "std_over_seeds": float(np.std(means, ddof=1)) if len(seeds) > 1 else None,
        "sorted_mean": float(np.mean(in_order)),
        "sorted_minus_random": float(np.mean(in_order) - means.mean()),
    }
