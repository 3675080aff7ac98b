"""Whether a model is worse than its base, from what `dex eval -o RESULTS` wrote of both."""

from __future__ import annotations

from pathlib import Path

from dex.errors import DexError
from dex.hub.folder import Published
from dex.lock import Lock
from dex.verbs.compare import Model, compare_models, read_models
from dex.verbs.recognise import Identities, bases_among


def refuse_regression(published: Published, lock: Lock | None, results: Path, margin: float | None) -> None:
    """Raise DexError where the folder is worse than its base, or results do not say: they are found by identity."""
    models = [model for each in read_models([results]) for model in each]
    ours = list(filter(Identities(published.path).is_of, models))
    if not ours:
        raise DexError(
            f"{results} has no result of the model in {published.path} (its weights are of none of "
            f"{', '.join(model.label for model in models)}); evaluate it and its base: dex eval BASE "
            f"{published.path} -o {results}."
        )
    base = _base(models, ours, lock, results)
    if (lost := compare_models(base, ours).refusal(margin)) is not None:
        raise DexError(f"{lost.rstrip('.')}; nothing was pushed, as --require-no-regression asks.")


def _base(models: list[Model], ours: list[Model], lock: Lock | None, results: Path) -> Model:
    """The model that ours was made of, by its fingerprint; without a record of that, the only other one."""
    others = [model for model in models if model not in ours]
    known = bases_among(others, ours[0], lock)
    found = others if known is None else known
    if len(found) != 1:
        there = ", ".join(model.label for model in others) or "no other model"
        what = "no result of the base" if not found else "several results that may be of the base"
        raise DexError(f"{results} has {what} of {ours[0].label}, only {there}; evaluate both into one folder.")
    return found[0]
