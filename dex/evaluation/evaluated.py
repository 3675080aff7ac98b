"""A model that is evaluated: a stock one, a DIFF model or an attached adapter, loaded alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dex.adapter import is_adapter, load_adapter
from dex.errors import DexError
from dex.models import ANY, device, load_model


@dataclass(frozen=True)
class Evaluated:
    """The model, on its device and in eval mode; `identity` says which it is, and `label` is its short name."""

    label: str
    model: Any  # a PreTrainedModel, or a PeftModel around one
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]
    batch_size: int

    @property
    def stop_ids(self) -> set[int]:
        """The tokens that end an answer: those of the model's generation settings, and the tokenizer's EOS."""
        stock = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        own = getattr(stock.generation_config, "eos_token_id", None)
        given = own if isinstance(own, list) else [own]
        return {int(token) for token in [*given, self.tokenizer.eos_token_id] if token is not None}

    @property
    def context(self) -> int:
        """Tokens that its positions are made for."""
        return int(self.model.config.max_position_embeddings)


def load_evaluated(name: str, label: str, dtype: str, batch_size: int, revision: str | None = None) -> Evaluated:
    """Load a model or an adapter by its Hub id or folder. Raises DexError where it cannot be had."""
    if is_adapter(name):
        if revision is not None:
            raise DexError(f"{name} is an adapter, which names its base's revision itself; leave out --revision.")
        model, base = load_adapter(name, dtype)
        identity: dict[str, Any] = {
            **base.identity(),
            "id": name,
            "base": base.source.id,
            "adapter": adapter_hash(Path(name)),
        }
    else:
        base = load_model(name, revision, dtype, families=ANY)
        model, identity = base.model, base.identity()
    identity["dtype"] = str(base.model.dtype).removeprefix("torch.")
    return Evaluated(label, model.to(device()).eval(), base.tokenizer, identity, batch_size)


_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def adapter_hash(folder: Path) -> str:
    """The identity of an adapter's folder: its configuration and its weights."""
    found = {}
    for name in _ADAPTER:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return adapter_hash_of(found)


def adapter_hash_of(files: Mapping[str, str]) -> str:
    """The same, from the SHA-256 of the files."""
    return hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in _ADAPTER)).hexdigest()[:16]


def names_of(models: str | Path | Sequence[str | Path]) -> list[str]:
    """One model or several, as they are named."""
    return [str(models)] if isinstance(models, str | Path) else [str(model) for model in models]


def labels(models: Sequence[str]) -> list[str]:
    """A short name of each model: the last part of its path that is no mere adapter or model; more, where two agree.

    Raises DexError for a model that is named twice.
    """
    if len({str(Path(model)) for model in models}) < len(models):
        raise DexError("A model is named twice; each is evaluated once.")
    parts = [_telling(model) for model in models]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    # Only such parts tell them apart: runs/x/model and runs/x/adapter.
    return ["-".join(Path(model).parts).strip("/-.") for model in models]


def _telling(model: str) -> tuple[str, ...]:
    path = Path(model)
    if model in (".", "..") or not path.name:
        path = path.resolve()
    parts = tuple(part for part in path.parts if part not in ("/", ".", ".."))
    while len(parts) > 1 and parts[-1] in ("adapter", "model"):
        parts = parts[:-1]
    return parts
