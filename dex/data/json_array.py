"""The elements of a file that is one JSON array, read one by one: such files may be larger than the memory."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import IO

from dex.errors import DexError

CHUNK = 2**20  # bytes read at a time
LONGEST = 2**28  # characters of one element; beyond it the file is broken rather than long
BETWEEN = " \t\r\n,"


def holds_array(file: IO[bytes]) -> bool:
    """True if the file's first character is "["; its place is left as it was (it must be buffered)."""
    assert isinstance(file, io.BufferedReader)
    return file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def array_values(file: IO[bytes], label: str) -> Iterator[object]:
    """Yield the elements. Raises DexError, naming the element, where the file is not JSON or is cut off."""
    decoder, parser = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
    text, place, count, ended = "", 0, -1, False  # count is -1 before the opening bracket
    while True:
        while place < len(text) and text[place] in BETWEEN:
            place += 1
        if count < 0 and place < len(text):
            count, place = 0, place + 1
            continue
        if text[place : place + 1] == "]":
            return
        try:
            value, end = parser.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            value, end = error, len(text)
        if end < len(text):  # at the very end, a number could go on
            yield value
            count, place = count + 1, end
            continue
        if ended or len(text) - place > LONGEST:
            raise DexError(
                f"{label} is not JSON or is cut off after row {max(count, 0)} of its array; mend the file."
            )
        # As much again as is there already: a long element is parsed few times over.
        raw = file.read(max(CHUNK, len(text) - place))
        ended = not raw
        text, place = text[place:] + _decoded(decoder, raw, label, count), 0


def _decoded(decoder: codecs.IncrementalDecoder, raw: bytes, label: str, count: int) -> str:
    try:
        return decoder.decode(raw, final=not raw)
    except UnicodeDecodeError as error:
        raise DexError(f"{label} is not UTF-8 after row {max(count, 0)}; convert the file to UTF-8.") from error
