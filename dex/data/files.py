"""The rows of one .txt, .jsonl or .parquet file, read piece by piece."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dex.errors import DexError

JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
SUFFIXES = (".txt", *JSON_LINES, ".parquet")
PARQUET_ROWS = 256  # rows decoded at a time


class Fault(NamedTuple):
    """Why a row cannot be used; `reason` is counted, `detail` is shown for the first such row."""

    reason: str
    detail: str = ""


class Row(NamedTuple):
    """A row's text as it was found (of any type), or the fault that stands in its place."""

    origin: str
    value: object


def file_rows(path: Path, name: str, column: str, documents: str) -> Iterator[Row]:
    """Yield the rows of a file; origins begin with `name`. Blank lines are not rows.

    Raises DexError for bytes that are not UTF-8, for an unreadable parquet file and for a parquet file without the
    column.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(path, name, column)
    if suffix in JSON_LINES:
        return _json_rows(path, name, column)
    return {"file": _whole_file, "paragraph": _paragraphs, "line": _single_lines}[documents](path, name)


def missing_column(column: str, columns: list[str]) -> Fault:
    there = ", ".join(columns) or "none"
    return Fault(f"no column {column!r}", f"the columns there are {there}; name one with `column`")


def _whole_file(path: Path, name: str) -> Iterator[Row]:
    raw = path.read_bytes()
    if raw:
        yield Row(name, _decoded(raw, path, 0))


def _single_lines(path: Path, name: str) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            yield Row(f"{name} line {number}", line)


def _paragraphs(path: Path, name: str) -> Iterator[Row]:
    start, lines = 0, list[str]()
    for number, line in _lines(path):
        if line.strip():
            start = start if lines else number
            lines.append(line)
        elif lines:
            yield Row(f"{name} line {start}", "\n".join(lines))
            lines = []
    if lines:
        yield Row(f"{name} line {start}", "\n".join(lines))


def _json_rows(path: Path, name: str, column: str) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            yield Row(f"{name} row {number}", _json_value(line, column))


def _json_value(line: str, column: str) -> object:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: a line of ten thousand brackets
        return Fault("not JSON", str(error))
    if not isinstance(row, dict):
        return Fault("not a JSON object", f"it is {type(row).__name__}")
    return row[column] if column in row else missing_column(column, list(row))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end) of a UTF-8 file, one line in memory at a time."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = _decoded(raw, path, offset, f", line {number}")
            yield number, text.removesuffix("\n").removesuffix("\r")
            offset += len(raw)


def _decoded(raw: bytes, path: Path, offset: int, where: str = "") -> str:
    """UTF-8 bytes that begin at `offset` of the file, as text; the file's byte-order mark is left out."""
    if offset == 0 and raw.startswith(codecs.BOM_UTF8):
        raw, offset = raw[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = offset + error.start
        raise DexError(f"{path}{where}: byte {byte} is not UTF-8; convert the file to UTF-8.") from error


def _parquet_rows(path: Path, name: str, column: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            if column not in columns:
                fault = missing_column(column, columns)
                raise DexError(f"{path}: {fault.reason}; {fault.detail}.")
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    yield Row(f"{name} row {number}", value.as_py())
    except UnicodeDecodeError as error:
        raise DexError(f"{path} row {number}: byte {error.start} of {column!r} is not UTF-8.") from error
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DexError(f"{path} cannot be read as parquet (after row {number}): {reason}.") from error
