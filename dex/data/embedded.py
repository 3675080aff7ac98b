"""Text that every Python carries: real, without a download, and the same wherever that build of Python is.

pydoc    the prose of pydoc_data.topics, one document a topic (465,000 characters)
stdlib   the source of the standard library, one document a file (9 MB; without its tests, encodings and pydoc_data)
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

# Not source that people read: tests and their data, tables of characters, what is installed beside the library, and
# pydoc_data, so that a model trained on `stdlib` has not seen `pydoc`.
_NOT_READ = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "site-packages", "dist-packages"}


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return topics


@cache
def _library() -> dict[str, str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    # .parts also holds the folders that a build adds (config-3.11-x86_64…), which differ from machine to machine
    kept = [file for file in files if _NOT_READ.isdisjoint(file.parts) and not file.parts[0].startswith("config-")]
    return {str(file): (root / file).read_text(encoding="utf-8", errors="replace") for file in kept}


EMBEDDED: dict[str, Callable[[], dict[str, str]]] = {"pydoc": _topics, "stdlib": _library}


def texts(name: str) -> list[tuple[str, str]]:
    """(title, text) of each document, sorted by title."""
    return sorted(EMBEDDED[name]().items())
