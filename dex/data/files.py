"""The rows of one .txt, JSON or .parquet file, read piece by piece, from any row on."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from dex.data.json_array import array_values, holds_array
from dex.errors import DexError

JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
SUFFIXES = (".txt", *JSON_LINES, ".parquet")
PARQUET_ROWS = 256  # rows decoded at a time

Kind = Literal["text", "lines", "json", "parquet"]  # json: an array, or else lines


class BrokenOff(DexError):
    """Reading stopped for a reason that may pass, such as a connection: what was read before it stays good."""


class Fault(NamedTuple):
    """Why a row cannot be used; `reason` is counted, `detail` is shown for the first such row."""

    reason: str
    detail: str = ""


class Row(NamedTuple):
    """A row's value as it was found (of any type), or the fault that stands in its place.

    `number` is the row's, from 1; in a text file or one of JSON lines, that of its (last) line.
    """

    origin: str
    value: object
    number: int


class Place(NamedTuple):
    """Where reading goes on: after row `row` of file `file` (from 0), `rows` rows after the source's start."""

    file: int = 0
    row: int = 0
    rows: int = 0


@dataclass(frozen=True)
class DataFile:
    """A file to read rows from: `name` begins their origins, `label` stands in messages."""

    name: str
    label: str
    kind: Kind
    open: Callable[[], IO[bytes]]


def local_file(path: Path, name: str) -> DataFile:
    suffix = path.suffix.lower()
    kind: Kind = "parquet" if suffix == ".parquet" else "lines" if suffix in JSON_LINES else "text"
    return DataFile(name, str(path), kind, lambda: path.open("rb"))


def rows_of_files(
    files: Sequence[DataFile], columns: Sequence[str], documents: str, place: Place
) -> Iterator[tuple[Row, Place]]:
    """Yield the rows after `place`, each with the place after it. A file without rows is a row with a fault.

    Raises DexError as `file_rows` does, and for a file that the system cannot read.
    """
    read = place.rows
    for index in range(place.file, len(files)):
        file, skip = files[index], place.row if index == place.file else 0
        found = skip > 0
        try:
            for row in file_rows(file, columns, documents, skip):
                found, read = True, read + 1
                yield row, Place(index, row.number, read)
        except OSError as error:
            raise BrokenOff(f"{file.label} could not be read: {error.strerror or first_line(error)}.") from error
        if not found:
            read += 1
            yield Row(file.name, Fault("empty file"), 0), Place(index + 1, 0, read)


def file_rows(file: DataFile, columns: Sequence[str], documents: str, skip: int = 0) -> Iterator[Row]:
    """Yield the rows of a file that come after row number `skip`. Blank lines are not rows.

    A row's value is that of the first of `columns` that is there. Raises DexError for text, a JSON array or a parquet
    column that is not UTF-8, a damaged parquet file, a JSON array that breaks off, and for a parquet file without the
    column. What the system or the connection says while the file is read (OSError) is passed on.
    """
    if file.kind == "parquet":
        return _parquet_rows(file, columns, skip)
    if file.kind == "text":
        return {"file": _whole_file, "paragraph": _paragraphs, "line": _single_lines}[documents](file, skip)
    return _json_rows(file, columns, skip)


def missing_column(columns: Sequence[str], there: Sequence[str]) -> Fault:
    wanted = " or ".join(repr(column) for column in columns)
    return Fault(f"no column {wanted}", f"the columns there are {', '.join(there) or 'none'}; name one with `column`")


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _whole_file(file: DataFile, skip: int) -> Iterator[Row]:
    if skip:
        return
    with file.open() as opened:
        raw = opened.read()
    if raw:
        yield Row(file.name, _text(_decoded(raw, 0), file.label), 1)


def _single_lines(file: DataFile, skip: int) -> Iterator[Row]:
    with file.open() as opened:
        for number, line in _text_lines(opened, file, skip):
            if line.strip():
                yield Row(f"{file.name} line {number}", line, number)


def _paragraphs(file: DataFile, skip: int) -> Iterator[Row]:
    start, lines = 0, list[str]()
    with file.open() as opened:
        for number, line in _text_lines(opened, file, skip):
            if line.strip():
                start = start if lines else number
                lines.append(line)
            elif lines:
                yield Row(f"{file.name} line {start}", "\n".join(lines), number)
                lines = []
    if lines:
        yield Row(f"{file.name} line {start}", "\n".join(lines), start + len(lines) - 1)


def _json_rows(file: DataFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    with file.open() as opened:
        if file.kind == "json" and holds_array(opened):
            for number, value in enumerate(array_values(opened, file.label), start=1):
                if number > skip:
                    yield Row(f"{file.name} row {number}", _column(value, columns), number)
            return
        for number, line in _lines(opened, skip):
            if isinstance(line, Fault):
                yield Row(f"{file.name} row {number}", line, number)
            elif line.strip():
                yield Row(f"{file.name} row {number}", _json_value(line, columns), number)


def _json_value(line: str, columns: Sequence[str]) -> object:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: a line of ten thousand brackets
        return Fault("not JSON", str(error))
    return _column(row, columns)


def _column(row: object, columns: Sequence[str]) -> object:
    if not isinstance(row, dict):
        return Fault("not a JSON object", f"it is {type(row).__name__}")
    column = next((column for column in columns if column in row), None)
    return missing_column(columns, list(row)) if column is None else row[column]


def _text_lines(opened: IO[bytes], file: DataFile, skip: int) -> Iterator[tuple[int, str]]:
    for number, line in _lines(opened, skip):
        yield number, _text(line, f"{file.label}, line {number}")


def _text(decoded: str | Fault, where: str) -> str:
    """The text. Raises DexError if it is none: a text file is not skipped over."""
    if isinstance(decoded, Fault):
        raise DexError(f"{where}: {decoded.detail} is {decoded.reason}; convert the file to UTF-8.")
    return decoded


def _lines(opened: IO[bytes], skip: int) -> Iterator[tuple[int, str | Fault]]:
    """(number from 1, line without its end) of a UTF-8 file after line `skip`, one line in memory at a time."""
    offset = 0
    for number, raw in enumerate(opened, start=1):
        if number > skip:
            text = _decoded(raw, offset)
            yield number, text if isinstance(text, Fault) else text.removesuffix("\n").removesuffix("\r")
        offset += len(raw)


def _decoded(raw: bytes, offset: int) -> str | Fault:
    """UTF-8 bytes that begin at `offset` of the file, as text; the file's byte-order mark is left out."""
    if offset == 0 and raw.startswith(codecs.BOM_UTF8):
        raw, offset = raw[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Fault("not UTF-8", f"byte {offset + error.start} of the file")


def _parquet_rows(file: DataFile, columns: Sequence[str], skip: int) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.open() as opened, pyarrow.parquet.ParquetFile(opened, pre_buffer=False) as parquet:
            there = parquet.schema_arrow.names
            column = next((column for column in columns if column in there), None)
            if column is None:
                fault = missing_column(columns, there)
                raise DexError(f"{file.label}: {fault.reason}; {fault.detail}.")
            number, groups = _row_groups_after(parquet.metadata, skip)
            for batch in _batches(parquet, groups, column):
                for value in batch.column(0):
                    number += 1
                    if number > skip:
                        yield Row(f"{file.name} row {number}", value.as_py(), number)
    except UnicodeDecodeError as error:
        raise DexError(f"{file.label} row {number}: byte {error.start} of {column!r} is not UTF-8.") from error
    except (pyarrow.ArrowException, OSError) as error:
        if not _says_damaged(error):
            raise
        raise DexError(
            f"{file.label} cannot be read as parquet (after row {number}): {first_line(error)}."
        ) from error


def _batches(parquet: Any, groups: Iterable[int], column: str) -> Iterator[Any]:
    """Each row group by itself: a batch over several of them would depend on the row at which reading began."""
    for group in groups:
        yield from parquet.iter_batches(batch_size=PARQUET_ROWS, row_groups=[group], columns=[column])


def _says_damaged(error: Exception) -> bool:
    """Is it pyarrow's word on the file's content? It has an OSError for that too, a plain one, without a number."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def _row_groups_after(metadata: object, skip: int) -> tuple[int, list[int]]:
    """(rows before them, the row groups that hold rows after `skip`): groups before are not read at all."""
    before, first = 0, 0
    groups: int = metadata.num_row_groups  # type: ignore[attr-defined]
    while first < groups and before + metadata.row_group(first).num_rows <= skip:  # type: ignore[attr-defined]
        before += metadata.row_group(first).num_rows  # type: ignore[attr-defined]
        first += 1
    return before, list(range(first, groups))
