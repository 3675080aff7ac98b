"""Paths of the machine in what is published: they show everybody where a user's files lie, and lead nobody there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dex.console import say
from dex.errors import DexError
from dex.hub.folder import Published
from dex.json_object import read_json

# Absolute, or in a home: all of a value, or somewhere in it, where one name alone is none. A URL has no path of ours.
_PATH = re.compile(
    r"""^(?:~[\w.-]*)?/(?!/)[^:]+|(?:(?<=[\s'"(=,:])|(?<=file://))(?:~[\w.-]*)?/[^/\s'",:;)]+/[^\s'",:;)]+"""
)


def refuse_paths(published: Published, with_paths: bool) -> None:
    """Raise DexError for an absolute path in one of dex's records, or with `with_paths` say that it is published."""
    found = [(name, key, path) for name in published.records for key, path in _paths_in(published, name)]
    if not found:
        return
    name, key, path = found[0]
    more = "" if len(found) == 1 else f", and {len(found) - 1} more"
    if with_paths:
        say(f"published with paths of this machine: {path} ({key} of {name}){more}")
        return
    raise DexError(
        f"{published.path / name} names {path} ({key}{more}), a path of your machine that everybody would see; make "
        "the folder with relative paths or Hub ids, or pass --with-paths to publish it as it is."
    )


def _paths_in(published: Published, name: str) -> list[tuple[str, str]]:
    return [
        (".".join(key), match[0].strip())
        for key, text in _texts(read_json(published.path / name), ())
        for match in _PATH.finditer(text)
    ]


def _texts(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string in a JSON value, with the keys that lead to it."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield (*key, name), name
            yield from _texts(each, (*key, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _texts(each, (*key, str(i)))
