"""Rows with several columns, read whole: an evaluation's items, from a JSON-lines file or a Hub data set.

A row that cannot be used is refused, not skipped: an evaluation of other items would be another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dex.console import say
from dex.data import hub
from dex.data.files import JSON_LINES, BrokenOff, first_line
from dex.data.sources import Source, is_local
from dex.errors import DexError

CONVERTED = "refs/convert/parquet"  # the branch where the Hub keeps a data set's conversion to parquet

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows with the columns that were asked for.

    name: for sentences. identity: the commit, or a hash of the file. classes: of a column of class indices, the
    names of the classes, where the data set has them.
    """

    name: str
    rows: list[Row]
    identity: str
    classes: dict[str, list[str]]

    def where(self, index: int) -> str:
        return f"{self.name} row {index + 1}"


def read_table(source: str, columns: Sequence[str], *, config: str | None, split: str, revision: str | None) -> Table:
    """The rows of a .jsonl file, or of one split of a Hub data set. `config`, `split`, `revision` are a Hub's.

    Raises DexError for what cannot be read, a row that lacks a column, and a table without rows.
    """
    of_hub = Source(source, split=split, name=config, revision=revision)
    table = _local(Path(os.path.expanduser(source)), columns) if is_local(of_hub) else _of_hub(of_hub, columns)
    if not table.rows:
        raise DexError(f"{table.name} holds no rows.")
    return table


def _local(path: Path, columns: Sequence[str]) -> Table:
    if path.suffix.lower() not in JSON_LINES:
        raise DexError(f"{path} is not a table that is read; give a file of JSON lines (.jsonl) or a Hub id.")
    rows = [_selected(row, columns, f"{path} line {number}") for number, row in json_lines(path)]
    return Table(str(path), rows, hashlib.sha256(path.read_bytes()).hexdigest()[:16], {})


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """The number and the row of every line that is not blank. Raises DexError for one that is no JSON object."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DexError(f"{path}: byte {error.start} is not UTF-8; convert the file.") from None
    except OSError as error:
        raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _parsed(line, f"{path} line {number}")


def _parsed(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DexError(f"{where} is not JSON ({first_line(error)}); mend the line.") from None
    if not isinstance(row, dict):
        raise DexError(f"{where} is not a JSON object with columns; it is {type(row).__name__}.")
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DexError(f"{where} holds half a character (a lone surrogate), which is no text; mend it.") from None
    return row


def _selected(row: Row, columns: Sequence[str], where: str) -> Row:
    if lacking := [column for column in columns if column not in row]:
        raise DexError(missing(where, lacking, columns, list(row)))
    return {column: row[column] for column in columns}


def missing(where: str, lacking: Sequence[str], columns: Sequence[str], there: Sequence[str]) -> str:
    return (
        f"{where} has no column {' and '.join(map(repr, lacking))}: the columns asked for are {', '.join(columns)}, "
        f"and those there are {', '.join(there) or 'none'}."
    )


def _of_hub(source: Source, columns: Sequence[str]) -> Table:
    pinned = hub.pin(source)
    try:
        builder = _builder(pinned, None)
    except RuntimeError:
        pinned = _converted(source)
        builder = _builder(pinned, source.name or "default")
    try:
        return _streamed(builder, pinned, columns)
    except DexError:
        raise
    except Exception as error:
        raise BrokenOff(f"{source.source} ({source.split}) cannot be read: {first_line(error)}.") from error


def _converted(source: Source) -> Source:
    """The parquet conversion of a data set that is made by a script of its own, which is not run any more."""
    try:
        pinned = hub.pin(replace(source, revision=CONVERTED))
    except BrokenOff:
        raise
    except DexError as error:
        raise DexError(
            f"{source.source} is made by a script, which the datasets client does not run, and the Hub has no "
            f"parquet conversion of it ({CONVERTED}); give the data as a .jsonl file."
        ) from error
    say(f"{source.source} is made by a script; reading the Hub's parquet conversion of it")
    return pinned


def _builder(source: Source, folder: str | None) -> Any:
    """Raises RuntimeError where a script makes the data set, else DexError."""
    import datasets

    config = source.name if folder is None else None
    try:
        return datasets.load_dataset_builder(source.source, config, revision=source.revision, data_dir=folder)
    except Exception as error:
        if isinstance(error, RuntimeError) and "scripts are no longer supported" in str(error):
            raise
        raise hub.explained(source, error) from error


def _streamed(builder: Any, source: Source, columns: Sequence[str]) -> Table:
    from datasets import ClassLabel

    name = f"{source.source} ({source.split})"
    streams = builder.as_streaming_dataset()
    if source.split not in streams:
        raise DexError(f"{source.source} has no split {source.split!r}; those there are {', '.join(streams)}.")
    stream = streams[source.split]
    there = stream.column_names or list(next(iter(stream), {}))
    if lacking := [column for column in columns if column not in there]:
        raise DexError(missing(name, lacking, columns, there))
    rows = [dict(row) for row in stream.select_columns(list(columns))]
    features = stream.features or {}
    classes = {c: list(features[c].names) for c in columns if isinstance(features.get(c), ClassLabel)}
    return Table(name, rows, str(source.revision), classes)
