"""Hub data sets at a pinned commit, streamed file by file.

The `datasets` client says which files a configuration and split have. JSON and parquet files are then read with the
readers of local files, which look at one column: shards and rows may differ in all the others, as they do in
real data sets, and reading can go on from any row. Other formats are read by the client.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dex.commit import is_commit
from dex.data.files import BrokenOff, DataFile, Kind, Place, Row, first_line, missing_column, rows_of_files
from dex.errors import DexError

if TYPE_CHECKING:
    from dex.data.sources import Source

T = TypeVar("T")

# huggingface_hub retries for half a minute by itself. With these, a connection may be gone for some ten minutes.
RETRIES = 20
RETRY_SECONDS = 5.0
BUFFER = 2**20  # bytes


def pin(source: Source) -> Source:
    """The source at the commit that its revision (or the main branch) stands for now. A commit needs no network.

    Raises DexError if the data set or revision does not exist, access is refused, or the Hub cannot be reached.
    """
    if source.revision and is_commit(source.revision):
        return source
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.source, revision=source.revision).sha
    except Exception as error:
        raise explained(source, error) from error
    return replace(source, revision=commit)


def rows(source: Source, columns: Sequence[str], place: Place = Place()) -> Iterator[tuple[Row, Place]]:  # noqa: B008
    """Yield the rows of a pinned source after `place` as they arrive, each with the place after it.

    Raises DexError for a configuration, split or column that is not there, and BrokenOff when the stream breaks off.
    """
    number = place.rows
    try:
        builder = _builder(source)
        files = _files(builder, source)
        found = _by_the_client(builder, source, columns, place) if files is None else None
        for row, after in found or rows_of_files(files or [], columns, "file", place):
            number = after.rows
            yield row._replace(origin=f"{source.source} row {number}"), after
    except BrokenOff as error:
        raise BrokenOff(f"{source.source} broke off after row {number}: {error}") from error
    except DexError:
        raise
    except Exception as error:
        raise BrokenOff(f"{source.source} cannot be read after row {number}: {first_line(error)}.") from error


def _builder(source: Source) -> Any:
    import datasets

    try:
        return datasets.load_dataset_builder(source.source, source.name, revision=source.revision)
    except Exception as error:
        raise explained(source, error) from error


def _files(builder: Any, source: Source) -> list[DataFile] | None:
    """The files of the split, in their order; None if the client has to read them.

    Raises DexError for a split that is not there.
    """
    by_split = builder.config.data_files or {}
    if by_split and source.split not in by_split:
        there = ", ".join(sorted(map(str, by_split)))
        raise DexError(f"{source.source}: there is no split {source.split!r}; those there are {there}.")
    if getattr(builder.config, "field", None) is not None:
        return None
    files = [_file(str(url)) for url in by_split.get(source.split, [])]
    return [file for file in files if file] if files and all(files) else None


def _file(url: str) -> DataFile | None:
    path = PurePosixPath(url.split("://")[-1])
    opener = _OPENERS.get(path.suffix.lower())
    suffix = PurePosixPath(path.stem if opener else path.name).suffix.lower()
    kind = _KINDS.get(suffix)
    if kind is None or (opener and kind == "parquet"):
        return None
    return DataFile(path.name, url, kind, lambda: _opened(url, opener))


_KINDS: dict[str, Kind] = {
    ".json": "json",
    ".jsonl": "lines",
    ".jsonlines": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
}


def _unzstd(file: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DexError("This data set is compressed with zstd; install its reader: pip install zstandard.") from error
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _unzstd,
    ".zstd": _unzstd,
}


def _opened(url: str, opener: Callable[[IO[bytes]], Any] | None) -> IO[bytes]:
    from datasets.utils.file_utils import xopen

    raw = io.BufferedReader(_Patient(_patiently(lambda: xopen(url, "rb"))), BUFFER)
    return raw if opener is None else io.BufferedReader(opener(raw), BUFFER)


class _Patient(io.RawIOBase):
    """A remote file whose reads are tried again when the connection fails; its place moves with success only."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        data = _patiently(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _patiently(action: Callable[[], T]) -> T:
    """What `action` returns, tried RETRIES times more while the connection fails. Raises BrokenOff after that."""
    for tried in range(RETRIES + 1):
        try:
            return action()
        except Exception as error:
            if not _may_pass(error):
                raise
            if tried == RETRIES:
                raise BrokenOff(f"the connection failed for good ({first_line(error)}).") from error
        time.sleep(RETRY_SECONDS)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """True for a failed connection and for what a busy server answers."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        return status >= 500 or status in (408, 429)
    return isinstance(error, ConnectionError | TimeoutError | HTTPError) and not isinstance(
        error, OfflineModeIsEnabled
    )


def _by_the_client(builder: Any, source: Source, columns: Sequence[str], place: Place) -> Iterator[tuple[Row, Place]]:
    """Rows of formats that have no reader here; rows before `place` are read over."""
    try:
        stream = builder.as_streaming_dataset(split=source.split)
    except Exception as error:
        raise explained(source, error) from error
    there = stream.column_names
    if there is not None:
        column = next((column for column in columns if column in there), None)
        if column is None:
            fault = missing_column(columns, there)
            raise DexError(f"{source.source}: {fault.reason}; {fault.detail}.")
        stream = stream.select_columns([column])
    for number, values in enumerate(stream, start=1):
        if number <= place.rows:
            continue
        column = next((column for column in columns if column in values), None)
        value = missing_column(columns, list(values)) if column is None else values[column]
        yield Row("", value, number), Place(0, number, number)


def explained(source: Source, error: Exception) -> DexError:
    """The one sentence for what the clients raise while a data set is opened."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RevisionNotFoundError

    name = source.source
    status = getattr(error.response, "status_code", None) if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError):
        return DexError(f"{name} is gated: accept its terms on the Hub and log in with `hf auth login`.")
    if isinstance(error, RevisionNotFoundError):
        return DexError(f"{name} has no revision {source.revision!r} on the Hub.")
    if isinstance(error, HFValidationError) or status in (401, 403, 404):
        return DexError(
            f"{name} is neither a local path nor a data set on the Hub that you may read "
            "(a private one needs `hf auth login`)."
        )
    if isinstance(error, DatasetNotFoundError | ValueError):
        # datasets' own words: a revision, configuration or split that is not there (and those that are), or gated
        return DexError(f"{name}: {' '.join(str(error).split()).rstrip('.')}.")
    return BrokenOff(
        f"{name} is no local path and could not be read from the Hub ({first_line(error)}); check the name and the "
        "network."
    )
