"""Hub data sets, streamed with the `datasets` client at a pinned commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dex.data.files import Row, missing_column
from dex.errors import DexError

if TYPE_CHECKING:
    from dex.data.sources import Source


def pin(source: Source) -> Source:
    """The source at the commit that its revision (or the main branch) stands for now. A commit needs no network.

    Raises DexError if the data set or revision does not exist, access is refused, or the Hub cannot be reached.
    """
    if source.revision and re.fullmatch(r"[0-9a-f]{40}", source.revision):
        return source
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.source, revision=source.revision).sha
    except Exception as error:
        raise _explained(source, error) from error
    return replace(source, revision=commit)


def rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a pinned source as they arrive.

    Raises DexError for a configuration, split or column that is not there, and when the stream breaks off.
    """
    column = source.column or "text"
    number = 0
    try:
        for row in _stream(source, column):
            number += 1
            value = row[column] if column in row else missing_column(column, list(row))
            yield Row(f"{source.source} row {number}", value)
    except DexError:
        raise
    except Exception as error:
        reason = _first_line(error)
        raise DexError(f"{source.source} cannot be read after row {number}: {reason}.") from error


def _stream(source: Source, column: str) -> Any:
    import datasets

    try:
        stream = datasets.load_dataset(
            source.source, source.name, split=source.split, revision=source.revision, streaming=True
        )
    except Exception as error:
        raise _explained(source, error) from error
    columns = stream.column_names
    if columns is None:  # features that only the rows themselves will tell
        return stream
    if column not in columns:
        fault = missing_column(column, columns)
        raise DexError(f"{source.source}: {fault.reason}; {fault.detail}.")
    return stream.select_columns([column])


def _explained(source: Source, error: Exception) -> DexError:
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
    return DexError(
        f"{name} is no local path and could not be read from the Hub ({_first_line(error)}); check the name and the "
        "network."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
