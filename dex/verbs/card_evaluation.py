"""What a card says of results: which of the models are this one, its base and its controls, and the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dex.cards.evaluation import Against, Compared, Evaluation, Score, ScoredSuite, ScoredTask
from dex.cards.facts import read_facts
from dex.errors import DexError
from dex.evaluation.comparison import Row
from dex.evaluation.evaluated import adapter_hash_of
from dex.evaluation.paired import Interval, perplexity
from dex.evaluation.records import Result
from dex.lock import Lock, read_lock
from dex.verbs.compare import Model, compare_models, read_models
from dex.verbs.recognise import Identities, bases_among, merged

_NOT_SHOWN = ("name", "inputs", "tasks", "data", "recipe", "data_of_tasks", "held_out_fingerprint")
Role = Literal["base", "its adapter", "other"]
_OF_DATA = ("block", "held_out", "held_out_tokens", "held_out_per_document")


def evaluation_of(folder: Path, results: Sequence[Path], base_model: str | None = None) -> Evaluation:
    """The scores of the model in a folder, and its paired differences from the base and from each of the others.

    base_model: what the base is called, if the folder does not say it itself.

    Raises DexError where the results do not have this model, or are not of the same items.
    """
    models = merged([model for each in read_models(results) for model in each])
    ours = list(filter(Identities(folder).is_of, models))
    if len(ours) != 1:
        there = ", ".join(model.label for model in (ours or models))
        what = "no result of the model in" if not ours else "several results of the model in"
        raise DexError(
            f"{results[0]} has {what} {folder} (there is {there}); evaluate it as it is now: dex eval {folder} "
            f"-o {results[0]}."
        )
    own, others = ours[0], [model for model in models if model not in ours]
    lock = read_lock(folder)
    bases = bases_among(others, own, lock) or []
    base = bases[0] if len(bases) == 1 else None
    ordered = [*([base] if base else []), *(model for model in others if model is not base)]
    facts = read_facts(folder)
    name_of_base = base_model or ((facts.base_model or facts.base.name) if facts else None)
    names, folded_from = _names(ordered, base, name_of_base), _adapter_in(lock)
    compared = []
    for other, name in zip(ordered, names, strict=True):
        role: Role = "base" if other is base else "other"
        if folded_from is not None and _identity(other).get("adapter") == folded_from:
            role = "its adapter"
        compared.append(_compared(own, other, name, role))
    suites = {name: _scored(result) for name, result in own.results.items()}
    return Evaluation(model=_identity(own), suites=suites, compared=[each for each in compared if each.rows])


def _names(models: Sequence[Model], base: Model | None, name_of_base: str | None) -> list[str]:
    """Short names without the folders that the results lie in, unless two models would share one."""
    short = [name_of_base if model is base and name_of_base else Path(model.label).name for model in models]
    longer = ["/".join(Path(model.label).parts[-2:]) for model in models]
    return [a if short.count(a) == 1 else b for a, b in zip(short, longer, strict=True)]


def _adapter_in(lock: Lock | None) -> str | None:
    """What identifies the adapter that a folder was folded from."""
    return adapter_hash_of(lock.files) if lock is not None and lock.fold is not None else None


def _compared(own: Model, other: Model, name: str, role: Role) -> Compared:
    """What `dex compare` says of the two, on the tasks that both have."""
    reference, ours = other.renamed(name), own.renamed("this model")
    suites = [suite for suite in ours.results if suite in reference.results]
    tasks = {task for suite in suites for task in ours.results[suite].tasks if task in reference.results[suite].tasks}
    if not tasks:
        return Compared(name=name, role=role, model=_identity(other), rows=[], notes=[])
    a, b = (model.with_tasks(sorted(tasks), suites) for model in (reference, ours))
    made = compare_models(a, [b])
    return Compared(
        name=name, role=role, model=_identity(other), rows=[_against(row) for row in made.rows], notes=made.notes
    )


def _against(row: Row) -> Against:
    [ours] = row.differences
    return Against(
        suite=row.suite,
        task=row.task,
        items=row.items,
        other=_score(row.reference),
        difference=_score(ours.difference),
        p_adjusted=ours.p_adjusted,
        verdict=ours.verdict,
    )


def _score(value: Interval) -> Score:
    return Score(**value._asdict())


def _scored(result: Result) -> ScoredSuite:
    tasks = {}
    for name, task in result.tasks.items():
        score = result.score(name)
        tasks[name] = ScoredTask(
            metric=task.metric,
            higher_is_better=task.higher_is_better,
            items=len(result.of_task(name)),
            score=_score(score),
            perplexity=_score(perplexity(score)) if task.metric == "loss" else None,
            **_data_of(result, name),
        )
    average = result.average()
    environment = {key: result.environment.get(key) for key in ("dex", "commit", "device")}
    return ScoredSuite(
        settings=_settings(result),
        tasks=tasks,
        average=_score(average) if average else None,
        environment={key: value for key, value in environment.items() if value is not None},
    )


def _settings(result: Result) -> dict[str, Any]:
    """What decides the items and scores, without what is read off the tasks, and without paths."""
    of_data = {key: value for key, value in _held_out(result).items() if key in _OF_DATA}
    given = of_data or result.settings
    return {
        key: _own_name(value)
        for key, value in given.items()
        if key not in _NOT_SHOWN and isinstance(value, str | int | float) and value != ""
    }


def _held_out(result: Result) -> Mapping[str, Any]:
    """The data block whose held-out part the losses are of, a recipe's or the suite's own."""
    data = (result.settings.get("inputs") or {}).get("data")
    return data[0] if result.suite == "perplexity" and isinstance(data, list) else {}


def _data_of(result: Result, task: str) -> dict[str, Any]:
    """What a task's items are made of: a Hub id and its commit, or a name."""
    of_task = (result.settings.get("data_of_tasks") or {}).get(task) or {}
    if "id" in of_task:
        return {"data": of_task["id"], "data_on_hub": True, "data_commit": of_task["commit"]}
    names = [source["source"] for source in _held_out(result).get("train", [])]
    if not names:
        return {"data": task}
    local = result.settings["inputs"]["data"][-1]
    return {"data": ", ".join(map(_own_name, names)), "data_on_hub": len(names) == 1 and names[0] not in local}


def _identity(model: Model) -> dict[str, Any]:
    """What a model is, without where it lies."""
    first = next(iter(model.results.values())).model
    found = {key: first.get(key) for key in ("commit", "fingerprint", "content", "adapter", "dtype")}
    name = first["id"] if found["commit"] and "adapter" not in first else Path(str(first.get("id"))).name
    return {"name": name, **{key: value for key, value in found.items() if value is not None}}


def _own_name(value: Any) -> Any:
    """A path by its own name alone."""
    if isinstance(value, str) and (value.startswith(("/", "~", ".")) or Path(value).exists()):
        return Path(value).name
    return value
