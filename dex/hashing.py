"""The hash of a file's content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dex.errors import DexError


def sha256(path: Path) -> str:
    """SHA-256 in hex, read in pieces. Raises DexError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
