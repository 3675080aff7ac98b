"""The commits of a run's model and data: what `main` was when it began, also when it goes on weeks later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from dex.data.embedded import EMBEDDED as EMBEDDED_TEXTS
from dex.data.sources import Source, is_local, pin
from dex.lock import Lock
from dex.models import ANY, EMBEDDED, load_outline
from dex.recipe import Recipe
from dex.run_data import sources


class Pins(NamedTuple):
    model: str | None  # None: local
    data: list[str | None]  # of every source


def pins_of(recipe: Recipe, inputs: Path | None) -> Pins:
    """Those of the run that `inputs` (its inputs.json) began with; of a new run, what the Hub answers now."""
    if inputs is not None and inputs.exists():
        try:
            began = json.loads(inputs.read_text(encoding="utf-8"))
            return Pins(began["model"]["commit"], began["data"]["revisions"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # `check_inputs` says what is wrong with the file
    _, source = load_outline(recipe.model.id, recipe.model.revision, ANY)
    return Pins(source.commit, [pin(each).revision for each in sources(recipe.data)])


def pinned(recipe: Recipe, pins: Pins) -> Recipe:
    """The recipe with every Hub id at its commit."""
    model = recipe.model.model_copy(update={"revision": pins.model})
    train = [
        source.model_copy(update={"revision": revision})
        for source, revision in zip(recipe.data.train, pins.data, strict=True)
    ]
    return recipe.model_copy(update={"model": model, "data": recipe.data.model_copy(update={"train": train})})


def local_paths(lock: Lock) -> dict[str, str]:
    """What a lock names by a path of the machine that it was made on, by key: nobody else has it there.

    A base or a data set that has neither a commit nor a name of dex's own; a chat template, a head plan, and the text
    of the certificate, where they were files.
    """
    recipe, found = lock.recipe, dict[str, str | None]()
    if lock.model.commit is None and lock.model.id not in EMBEDDED:
        found["model.id"] = lock.model.id
    found["model.chat_template"] = recipe["model"]["chat_template"]
    found["method.heads.plan"] = (recipe["method"].get("heads") or {}).get("plan")
    for i, (source, commit) in enumerate(zip(recipe["data"]["train"], lock.data.revisions, strict=True)):
        if commit is None and source["source"] not in EMBEDDED_TEXTS:
            found[f"data.train.{i}.source"] = source["source"]
    if lock.fold and (text := str(lock.fold.text["source"])) not in EMBEDDED_TEXTS and is_local(Source(text)):
        found["fold.text"] = text
    return {key: path for key, path in found.items() if path is not None}
