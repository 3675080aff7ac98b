"""What the files that a suite reads are: a short hash of each, by its path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from dex.errors import DexError


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """Raises DexError for one that cannot be read."""
    found = {}
    for path in files:
        try:
            with path.open("rb") as file:
                found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        except OSError as error:
            raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
    return found


def local_files(folder: str | None) -> list[Path]:
    """The tables of a local folder; none for what comes from the Hub."""
    return [] if folder is None else sorted(Path(folder).expanduser().glob("*.jsonl"))
