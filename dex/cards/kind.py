"""What kind of folder a card is of: read off the files that lie in it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dex.errors import DexError
from dex.json_object import read_json
from dex.lock import CERTIFICATE

Kind = Literal["adapter", "lora", "folded", "layout", "fresh", "trained"]
ADAPTERS: tuple[Kind, ...] = ("adapter", "lora")
_ADAPTER_KINDS: dict[str, Kind] = {"DEX": "adapter", "LORA": "lora"}


def kind_of(folder: Path) -> Kind:
    """Raises DexError for a folder that dex did not make."""
    if not folder.is_dir():
        raise DexError(f"{folder} is no folder; name one that dex train, fold, convert or init wrote.")
    if (folder / "adapter_config.json").is_file():
        method = read_json(folder / "adapter_config.json").get("peft_type")
        if not isinstance(method, str) or method not in _ADAPTER_KINDS:
            raise DexError(f"{folder} is an adapter of the method {method}, not DEX or LORA; dex has no card for it.")
        return _ADAPTER_KINDS[method]
    if not (folder / "config.json").is_file():
        raise DexError(f"{folder} is no model (neither config.json nor adapter_config.json is there); name one.")
    if (folder / CERTIFICATE).is_file():
        return "folded"
    if (folder / "layout.json").is_file():
        return "layout" if "divergence" in read_json(folder / "layout.json") else "fresh"
    return "trained"
