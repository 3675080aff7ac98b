"""Reading the JSON objects that dex and its libraries write beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dex.errors import DexError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DexError where the file holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DexError(f"{path} is damaged ({error}); make the folder again.") from error
    if not isinstance(value, dict):
        raise DexError(f"{path} is damaged (it holds no JSON object); make the folder again.")
    return value
