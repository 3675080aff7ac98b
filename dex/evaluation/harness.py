"""lm-evaluation-harness in this process, on a loaded model: its tasks, prompts and metrics, our records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dex.errors import DexError
from dex.evaluation.answers import Answers
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.harness_tasks import (
    Known,
    TaskChoice,
    bars_off,
    data_of,
    harness_version,
    load_tasks,
    seed_harness,
)
from dex.evaluation.records import Record, Task, prompt_hash
from dex.suites.base import Outcome

BITS = "bits_per_byte"


def run_harness(evaluated: Evaluated, answers: Answers, choice: TaskChoice, limit: int | None, chat: bool) -> Outcome:
    """Score the first `limit` items of every task.

    chat: prompts are put into the tokenizer's chat template. Raises DexError where that is missing, and for what
    `load_tasks` refuses.
    """
    if chat and evaluated.tokenizer.chat_template is None:
        raise DexError(f"The tokenizer of {evaluated.label} has no chat template; set chat=false for plain prompts.")
    loaded = load_tasks(choice)
    from lm_eval.evaluator import evaluate

    from dex.evaluation.harness_model import HarnessModel

    model = HarnessModel(evaluated, answers)
    seed_harness()
    with bars_off():
        found = evaluate(
            model,
            {"tasks": loaded},
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    tasks, records = {}, []
    for name, task in loaded.items():
        samples = found["samples"][name]
        metric = metric_of(name, task, samples[0], choice.known)
        tasks[name] = Task(metric, bool(task.higher_is_better()[metric]), str(task.VERSION))
        records += records_of(name, task, samples, metric)
    figures = {"harness": _numbers(found["results"]), "truncated_prompts": model.truncated}
    settings = {"harness": harness_version(), "data_of_tasks": {name: data_of(task) for name, task in loaded.items()}}
    return Outcome(tasks, records, figures, settings)


# Records


def metric_of(name: str, task: Any, sample: Mapping[str, Any], known: Mapping[str, Known]) -> str:
    """The metric that is the task's score: the stated one, or the first of its own that is a mean over items.

    Raises DexError where there is none, as for a correlation.
    """
    if name in known:
        return known[name].metric
    declared: list[str] = list(sample["metrics"])
    for metric in declared:
        if _is_mean(task, metric) and item_score(sample[metric]) is not None:
            return metric
    if BITS in declared:
        return BITS
    raise DexError(
        f"The task {name} has {', '.join(declared)}, none of which is a mean over items; leave this task out."
    )


def _is_mean(task: Any, metric: str) -> bool:
    return getattr(task.aggregation().get(metric), "__name__", None) == "mean"


def item_score(value: Any) -> float | None:
    """One item's score, a number; None for what is but a part of a score of all items."""
    return None if value is None or isinstance(value, tuple | list | dict | str) else float(value)


def records_of(name: str, task: Any, samples: Sequence[Mapping[str, Any]], metric: str) -> list[Record]:
    """A record an item. Where a task reads answers in several ways (filters), the first counts."""
    counted = samples[0]["filter"]
    others: dict[int, dict[str, Any]] = {}
    for sample in samples:
        if sample["filter"] != counted:
            own = {f"{each},{sample['filter']}": _plain(sample[each]) for each in sample["metrics"]}
            others.setdefault(sample["doc_id"], {}).update(own)
    return [
        _record(name, task, sample, metric, others.get(sample["doc_id"], {}))
        for sample in samples
        if sample["filter"] == counted
    ]


def _record(name: str, task: Any, sample: Mapping[str, Any], metric: str, others: dict[str, Any]) -> Record:
    metrics = {each: _plain(sample[each]) for each in sample["metrics"]}
    details = {"target": _plain(sample["target"]), "metrics": metrics | others}
    score, weight = item_score(sample[metric]), 1.0
    if score is None:  # BITS, of which an item has the log-likelihood of its text and how many bytes that has
        log_likelihood, size = sample[metric]
        score, weight = -log_likelihood / size / math.log(2), float(size)
    prediction, more = _answer(task, sample, metric)
    item = str(sample["doc_id"])
    # Item 7 of one task is not alike to item 7 of another, so the group has the task's name.
    return Record(name, item, _asked(sample), prediction, score, f"{name} {item}", weight, details | more)


def _answer(task: Any, sample: Mapping[str, Any], metric: str) -> tuple[Any, dict[str, Any]]:
    """What the model answered, and what else is kept of it."""
    kind = task.get_config("output_type") or task.OUTPUT_TYPE
    if kind == "multiple_choice":
        choices = task.doc_to_choice(sample["doc"])
        likelihoods = [each[0] for each in sample["filtered_resps"]]
        own = likelihoods[: len(choices)]  # those of the choices without a context may follow
        lengths = [len(choice) for choice in choices] if metric == "acc_norm" else [1] * len(choices)
        chosen = max(range(len(own)), key=lambda i: own[i] / lengths[i])
        return chosen, {"log_likelihoods": likelihoods}
    response = sample["resps"][0][0]
    if kind == "generate_until":
        read = sample["filtered_resps"][0]
        return response, {} if read == response else {"read_as": _plain(read)}
    if kind == "loglikelihood":
        return None, {"log_likelihood": response[0], "is_greedy": response[1]}
    return None, {"log_likelihood": response}


def _asked(sample: Mapping[str, Any]) -> str:
    """Of prompts and choices, of how an answer was to be generated, and of the right one: with another it would be
    another item.
    """
    parts = [part for arguments in sample["arguments"] for part in arguments]
    texts = [part if isinstance(part, str) else json.dumps(part, sort_keys=True) for part in parts]
    return prompt_hash(*texts, json.dumps(_plain(sample["target"])))


def _numbers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The harness' own means of every metric ("acc,none"), without the errors that it was not asked for."""
    return {
        name: {
            key: float(value) for key, value in own.items() if isinstance(value, int | float) and "stderr" not in key
        }
        for name, own in results.items()
    }


def _plain(value: Any) -> Any:
    """As JSON has it: numpy's numbers are floats, tuples lists."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list) or type(value).__name__ == "ndarray":
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return float(value)
