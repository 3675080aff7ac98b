"""What kind of folder a card is of: read off the files that lie in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from dex.errors import DexError

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
    if (folder / "certificate.json").is_file():
        return "folded"
    if (folder / "layout.json").is_file():
        return "layout" if "divergence" in read_json(folder / "layout.json") else "fresh"
    return "trained"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DexError where the file holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DexError(f"{path} is damaged ({error}); make the folder again.") from error
    if not isinstance(value, dict):
        raise DexError(f"{path} is damaged (it holds no JSON object); make the folder again.")
    return value
