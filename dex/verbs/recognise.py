"""Which of the models in results a folder holds, and which is its base: by what they are, never by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dex.errors import DexError
from dex.evaluation.evaluated import adapter_hash
from dex.lock import Lock
from dex.models import ANY, load_model
from dex.verbs.compare import IDENTITY, Model

_WEIGHTS = ("fingerprint", "content")
_MERGED_BY = (*(name for name in IDENTITY if name != "id"), "dtype")


class Identities:
    """Compares the models of results with the one in a folder, which is loaded once a dtype."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._by_dtype: dict[str, dict[str, Any]] = {}
        self._adapter = adapter_hash(folder) if (folder / "adapter_config.json").is_file() else None

    def is_of(self, model: Model) -> bool:
        return all(self.has(result.model) for result in model.results.values())

    def has(self, found: Mapping[str, Any]) -> bool:
        """Is it the model that a result says it is of?"""
        if self._adapter is not None or "adapter" in found:
            return self._adapter is not None and found.get("adapter") == self._adapter
        if found.get("fingerprint") is None:
            return False  # a run's own result, which names no weights
        dtype = str(found.get("dtype", "auto"))
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = dict(load_model(str(self._folder), dtype=dtype, families=ANY).identity())
        # A Hub's model has a commit in place of the hash of its content.
        return all(found.get(key) in (self._by_dtype[dtype][key], None) for key in _WEIGHTS)


def bases_among(others: Sequence[Model], ours: Model, lock: Lock | None) -> list[Model] | None:
    """Those of other models that may be the base of ours; None where nothing says which weights it had.

    A lock names them, and so does the result of an adapter. Of several with the same fingerprint, those count whose
    commit or content is the base's too.
    """
    known = lock.model.model_dump() if lock is not None else _base_of_adapter(ours)
    if known is None:
        return None
    alike = [model for model in others if all_have(model, "fingerprint", known["fingerprint"])]
    exactly = [
        model
        for model in alike
        if any(known[key] is not None and all_have(model, key, known[key]) for key in ("content", "commit"))
    ]
    return exactly or alike


def merged(models: Sequence[Model]) -> list[Model]:
    """Results of the same weights from several folders, together: one suite may lie here and another there.

    Raises DexError for two results of one model on the same suite.
    """
    by_identity: dict[tuple[Any, ...], Model] = {}
    for model in models:
        first = next(iter(model.results.values())).model
        known = first.get("fingerprint") is not None
        key = tuple(first.get(name) for name in _MERGED_BY) if known else (model.label,)
        there = by_identity.setdefault(key, model)
        if there is model:
            continue
        for suite in model.results:
            if suite in there.results:
                raise DexError(
                    f"{there.folders[suite]} and {model.folders[suite]} are both of {suite} on one model; name the "
                    "one that is meant."
                )
        results, folders = {**there.results, **model.results}, {**there.folders, **model.folders}
        by_identity[key] = Model(there.label, results, folders).renamed(there.label)
    return list(by_identity.values())


def _base_of_adapter(model: Model) -> dict[str, Any] | None:
    """An adapter's result has the identity of its base."""
    first = next(iter(model.results.values())).model
    return {key: first.get(key) for key in ("fingerprint", "content", "commit")} if "adapter" in first else None


def all_have(model: Model, key: str, value: Any) -> bool:
    """Is this the value of all results, and are they of a whole model?"""
    each = [result.model for result in model.results.values()]
    return all(one.get(key) == value and "adapter" not in one for one in each)
