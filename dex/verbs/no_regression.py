"""Whether a model is worse than its base, from what `dex eval -o RESULTS` wrote of both."""

from __future__ import annotations

from pathlib import Path

from dex.cards.facts import read_facts
from dex.console import say
from dex.errors import DexError
from dex.json_object import read_json
from dex.lock import LOCK, Lock
from dex.verbs.compare import Model, compare_models, read_models
from dex.verbs.recognise import Identities, all_have, bases_among


def refuse_regression(
    folder: Path, identities: Identities, lock: Lock | None, results: Path, margin: float | None
) -> None:
    """Raise DexError where the folder is worse than its base, or results do not say: they are found by identity."""
    models = [model for each in read_models([results]) for model in each]
    ours = list(filter(identities.is_of, models))
    if not ours:
        raise DexError(
            f"{results} has no result of the model in {folder} (its weights are of none of "
            f"{', '.join(model.label for model in models)}); evaluate it and its base: dex eval BASE {folder} "
            f"-o {results}."
        )
    comparison = compare_models(_base(folder, models, ours, lock, results), ours)
    for note in comparison.notes:
        say(note)
    if (lost := comparison.refusal(margin)) is not None:
        raise DexError(f"{lost.rstrip('.')}; nothing was pushed, as --require-no-regression asks.")


def _base(folder: Path, models: list[Model], ours: list[Model], lock: Lock | None, results: Path) -> Model:
    """The model that ours was made of, by its fingerprint, or by its commit on the Hub."""
    others = [model for model in models if model not in ours]
    found = bases_among(others, ours[0], lock)
    if found is None:
        found = _bases_on_record(folder, others)
    if found is None:
        raise DexError(
            f"Nothing in {folder} says which weights it was made of (it has no {LOCK}), so {results} cannot show "
            "that it is no worse than its base; leave --require-no-regression out, and look at dex compare yourself."
        )
    if len(found) != 1:
        there = ", ".join(model.label for model in others) or "no other model"
        what = "no result of the base" if not found else "several results that may be of the base"
        raise DexError(f"{results} has {what} of {ours[0].label}, only {there}; evaluate both into one folder.")
    return found[0]


def _bases_on_record(folder: Path, others: list[Model]) -> list[Model] | None:
    """Those that may be the base by what `dex convert` wrote of it, or by its commit in card.json; None: unknown."""
    if (folder / "layout.json").is_file() and (base := read_json(folder / "layout.json").get("base")) is not None:
        return [model for model in others if all_have(model, "fingerprint", base["fingerprint"])]
    facts = read_facts(folder)
    if facts is None or facts.base.commit is None:
        return None
    return [model for model in others if all_have(model, "commit", facts.base.commit)]
