"""Commits of the Hub, as git names them."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Is it the whole hash of a commit, and not a name, which can come to stand for another one?"""
    return _WHOLE.fullmatch(revision) is not None
