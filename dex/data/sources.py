"""Where text comes from: embedded text, files, folders and Hub data sets, read lazily as documents."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dex.data import hub
from dex.data.chat import ChatTemplate, Rendered, Span, clean
from dex.data.embedded import EMBEDDED, texts
from dex.data.files import SUFFIXES, Fault, Place, Row, local_file, rows_of_files
from dex.errors import DexError
from dex.hashing import sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SKIPPED_SHARE = 0.05  # more than this share of unusable rows stops the run
CHECK_EARLY = 1000  # rows after which the share is watched, so that an endless stream of faults stops too
START = Place()


@dataclass(frozen=True)
class Source:
    """One data set and how to read it.

    `source` is "pydoc" or "stdlib" (`dex.data.embedded`), a .txt, .jsonl or .parquet file, a folder of those, or a
    Hub data set id. `column` is the column that is read: by default "text", or of chat data "messages" or else
    "conversations". `split`, `name` (the configuration) and `revision` belong to Hub data sets. `documents` says how
    a .txt file is cut: the whole file, blank-line-separated paragraphs, or lines. `format` "chat" is conversations,
    whose assistant turns alone are targets. `too_long` says what becomes of a document that is longer than a block:
    it goes on in the next one (split), ends with its first block (truncate) or is left out (drop).
    """

    source: str
    weight: float = 1.0
    column: str | None = None
    split: str = "train"
    name: str | None = None
    revision: str | None = None
    documents: Literal["file", "paragraph", "line"] = "file"
    format: Literal["text", "chat"] = "text"
    too_long: Literal["split", "truncate", "drop"] = "split"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read, the first that is there."""
        if self.column is not None:
            return (self.column,)
        return ("text",) if self.format == "text" else ("messages", "conversations")


@dataclass(frozen=True)
class Document:
    """A text with \\n line ends and no byte-order mark; `origin` names the file and row it comes from.

    `spans` are the assistant turns of a conversation, None for plain text, all of which is a target.
    """

    text: str
    origin: str
    spans: tuple[Span, ...] | None = None


class Outcome(NamedTuple):
    """What one row became, and the place after it."""

    origin: str
    value: Document | Fault
    place: Place


@dataclass
class Skipped:
    """How many rows were read and how many of them could not be used: reason → (count, first row)."""

    rows: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.reasons.values())

    def add(self, fault: Fault, origin: str) -> None:
        first = f"{origin}: {fault.reason}" + (f" ({fault.detail})" if fault.detail else "")
        count, first = self.reasons.get(fault.reason, (0, first))
        self.reasons[fault.reason] = (count + 1, first)

    def check(self, source: str) -> None:
        """Raise DexError, naming the first fault, if over 5 % of the rows so far could not be used."""
        if self.count <= SKIPPED_SHARE * self.rows:
            return
        counts = ", ".join(f"{reason}: {count}" for reason, (count, _) in self.reasons.items())
        first = next(iter(self.reasons.values()))[1]
        raise DexError(
            f"{source}: {self.count} of {self.rows} rows cannot be used ({counts}), and at most 5 % may be skipped; "
            f"the first is {first}. Mend these rows or leave them out."
        )

    def note(self, outcome: Outcome, source: str) -> None:
        """Count a row. Raises DexError as `check` does, once there are rows enough to tell."""
        self.rows += 1
        if isinstance(outcome.value, Fault):
            self.add_later(outcome.value, outcome.origin, source)

    def add_later(self, fault: Fault, origin: str, source: str) -> None:
        """Count the fault of a row that was counted before, and check as `note` does."""
        self.add(fault, origin)
        if self.rows >= CHECK_EARLY:
            self.check(source)

    def check_end(self, source: str) -> None:
        """`check`, at the end of a source, which must have rows."""
        self.check(source)
        if self.rows == 0:
            raise DexError(f"{source} holds no rows.")

    def summary(self) -> dict[str, Any]:
        """The counter as JSON, for reports."""
        reasons = {reason: {"rows": count, "first": first} for reason, (count, first) in self.reasons.items()}
        return {"rows_read": self.rows, "rows_skipped": self.count, "reasons": reasons}

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> Skipped:
        reasons = {reason: (int(each["rows"]), str(each["first"])) for reason, each in summary["reasons"].items()}
        return cls(int(summary["rows_read"]), reasons)


def read_documents(
    source: Source, skipped: Skipped | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[Document]:
    """Yield the documents of a source one by one; rows that cannot be used are counted in `skipped`.

    Chat data needs the tokenizer, for its chat template. Raises DexError if the source cannot be read, holds nothing,
    or has more than 5 % unusable rows.
    """
    skipped = Skipped() if skipped is None else skipped
    for outcome in outcomes(source, tokenizer):
        skipped.note(outcome, source.source)
        if isinstance(outcome.value, Document):
            yield outcome.value
    skipped.check_end(source.source)


def outcomes(
    source: Source, tokenizer: PreTrainedTokenizerBase | None = None, place: Place = START
) -> Iterator[Outcome]:
    """Yield what becomes of each row after `place`: a document, or the fault for which it cannot be used."""
    source = pin(source)
    template = ChatTemplate(tokenizer, source.source) if source.format == "chat" else None
    for row, after in _rows(source, place):
        value = _text(row.value) if template is None else template.render(row.value)
        if isinstance(value, str):
            yield Outcome(row.origin, Document(value, row.origin), after)
        elif isinstance(value, Rendered):
            yield Outcome(row.origin, Document(value.text, row.origin, value.spans), after)
        else:
            yield Outcome(row.origin, value, after)


def is_local(source: Source) -> bool:
    """True for what is read without a network: embedded text, and every source that is (or looks like) a path."""
    if source.source in EMBEDDED or os.path.exists(_path(source)):  # unlike Path.exists, never an exception
        return True
    looks_like_path = source.source.startswith(("/", ".", "~")) or source.source.count("/") > 1
    return looks_like_path or _path(source).suffix.lower() in SUFFIXES


def pin(source: Source) -> Source:
    """The source with its revision resolved to a commit (Hub), or unchanged (local); bad settings are refused.

    Raises DexError for a path or data set that does not exist, and for settings that the source cannot use.
    """
    _refuse_unused_settings(source)
    return source if is_local(source) else hub.pin(source)


def identity(source: Source) -> dict[str, Any]:
    """What decides the documents of a pinned source, as JSON: its settings and a hash of its content (or commit)."""
    settings = {
        "column": source.column,
        "weight": source.weight,
        "documents": source.documents,
        "format": source.format,
        "too_long": source.too_long,
    }
    if source.source in EMBEDDED:
        content = hashlib.sha256(repr(texts(source.source)).encode("utf-8", "surrogatepass")).hexdigest()
        return {"kind": source.source, "python": sys.version.split()[0], "content": content, **settings}
    if is_local(source):
        files = [[name, sha256(path)] for name, path in _files(source)]
        return {"kind": "files", "files": files, **settings}
    settings |= {"name": source.name, "split": source.split}
    return {"kind": "hub", "id": source.source, "commit": source.revision, **settings}


def _rows(source: Source, place: Place) -> Iterator[tuple[Row, Place]]:
    if source.source in EMBEDDED:
        return (
            (Row(f"{source.source}: {title}", text, number), Place(0, number, number))
            for number, (title, text) in enumerate(texts(source.source), start=1)
            if number > place.row
        )
    if is_local(source):
        files = [local_file(path, name) for name, path in _files(source)]
        return rows_of_files(files, source.columns, source.documents, place)
    return hub.rows(source, source.columns, place)


def _files(source: Source) -> list[tuple[str, Path]]:
    """(name for origins, path) of each file, sorted by name."""
    path = _path(source)
    supported = ", ".join(SUFFIXES)
    if not os.path.exists(path):
        raise DexError(f"{path} does not exist; give a file ({supported}), a folder of such files, or a Hub id.")
    if path.is_dir():
        found = [(file.relative_to(path), file) for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
        visible = [(name.as_posix(), file) for name, file in found if file.is_file() and not _is_hidden(name)]
        if not visible:
            raise DexError(f"{path} is a folder without any supported file ({supported}).")
        return sorted(visible)
    if path.suffix.lower() not in SUFFIXES:
        raise DexError(f"{path} has an extension that is not read; supported are {supported}.")
    if path.stat().st_size == 0:
        raise DexError(f"{path} is empty.")
    return [(path.name, path)]


def _path(source: Source) -> Path:
    return Path(os.path.expanduser(source.source))


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _text(value: object) -> str | Fault:
    """A row's text with \\n line ends and no byte-order mark, or why it cannot be used."""
    if isinstance(value, Fault):
        return value
    if value is None:
        return Fault("null")
    if not isinstance(value, str):
        return Fault("not text", f"it holds {type(value).__name__}")
    text = clean(value)
    if isinstance(text, str) and not text.strip():
        return Fault("empty")
    return text


def _refuse_unused_settings(source: Source) -> None:
    """A setting that would silently do nothing is an error."""
    if not source.source.strip():
        raise DexError("A data source has no name; give pydoc, a path or a Hub id.")
    if not (math.isfinite(source.weight) and source.weight > 0):
        raise DexError(f"{source.source}: weight must be a positive number, not {source.weight}.")
    if source.documents not in ("file", "paragraph", "line"):
        raise DexError(f"{source.source}: documents must be file, paragraph or line, not {source.documents!r}.")
    if source.format not in ("text", "chat"):
        raise DexError(f"{source.source}: format must be text or chat, not {source.format!r}.")
    if source.too_long not in ("split", "truncate", "drop"):
        raise DexError(f"{source.source}: too_long must be split, truncate or drop, not {source.too_long!r}.")
    if not is_local(source):
        return
    if source.format == "chat" and (source.source in EMBEDDED or _path(source).suffix.lower() == ".txt"):
        raise DexError(f"{source.source}: format cannot be chat for plain text; chat data is .jsonl or .parquet.")
    given = [key for key in ("name", "revision") if getattr(source, key) is not None]
    given += ["split"] if source.split != "train" else []
    given += ["column"] if source.source in EMBEDDED and source.column is not None else []
    if given:
        what = source.source if source.source in EMBEDDED else "a local path"
        raise DexError(f"{source.source}: {' and '.join(given)} cannot be set for {what}; remove the setting.")
