"""The saved state of a preparation: one file, written whole, that says by itself whether it is undamaged."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

STATE = "state"
LIBRARIES = ("tokenizers", "transformers", "datasets", "pyarrow")  # what could read or encode otherwise


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state into the folder. Raises OSError, and leaves the earlier state, if the disk does not take it."""
    body = json.dumps({"versions": _versions(), **state}, ensure_ascii=False).encode()
    partial = folder / f".{STATE}.partial"
    try:
        with partial.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / STATE)
    finally:
        partial.unlink(missing_ok=True)


def has_state(folder: Path) -> bool:
    return (folder / STATE).exists()


def load_state(folder: Path) -> dict[str, Any]:
    """The state that was saved last. Raises ValueError, saying why, if it cannot be used."""
    try:
        digest, _, body = (folder / STATE).read_bytes().partition(b"\n")
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from error
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    state: dict[str, Any] = json.loads(body)
    changed = [name for name, was in state["versions"].items() if _versions().get(name) != was]
    if changed:
        raise ValueError(f"it was made with another version of {' and '.join(changed)}")
    return state


def remove_state(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}
