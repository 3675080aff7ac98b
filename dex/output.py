"""Outputs appear whole or not at all: everything is written beside its place and renamed into it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dex.errors import DexError


def refuse_to_overwrite(path: Path, force: bool, made_here: str | None = None) -> None:
    """Raise before any work is done if `path` holds something that may not be replaced.

    With `force`, a folder is replaced only if it holds the file `made_here`, the mark of the command's own output.
    """
    refuse_file_above(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir()) and path.resolve() != Path.cwd()):
        return
    if path.resolve() == Path.cwd():
        raise DexError("The current folder cannot be the output; name a new one.")
    if path.is_file():
        raise DexError(f"{path} is a file, and the output is a folder; name another output.")
    if not force:
        raise DexError(f"{path} exists already and is not overwritten; choose another output, or pass --force.")
    if made_here is not None and path.is_dir() and not (path / made_here).exists():
        raise DexError(f"{path} was not written by this command (it has no {made_here}), so --force leaves it alone.")


def refuse_output_over(path: Path, model: str) -> None:
    """Raise if `path`, were it replaced, would take the model with it that the command reads, or lies inside it."""
    source, output = Path(model).expanduser(), path.resolve()
    if not source.exists():
        return  # a Hub id
    read = source.resolve()
    if output == read or output in read.parents or read in output.parents:
        raise DexError(
            f"{path} cannot be the output, since it holds or lies in {model}, which is read; name another."
        )


@contextmanager
def whole_folder(path: Path, force: bool = False, made_here: str | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of `path`, on any error it is removed.

    A SIGKILL half-way leaves at most the hidden sibling `.<name>.partial`, which the next call removes.
    """
    refuse_to_overwrite(path, force, made_here)
    partial = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        put_in_place(partial, path)
    except (OSError, SafetensorError) as error:  # safetensors reports even a full disk with a class of its own
        raise DexError(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, path: Path) -> None:
    """Let a folder, whose files are flushed to disk, take the place of `path`; if it cannot, the former one stays."""
    for file in partial.rglob("*"):
        if file.is_file():
            _flush_to_disk(file)
    previous = path.parent / f".{path.name}.previous"
    shutil.rmtree(previous, ignore_errors=True)
    if path.exists():
        path.rename(previous)
    try:
        partial.rename(path)
    except OSError:
        if previous.exists():
            previous.rename(path)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def refuse_file_above(path: Path) -> None:
    """Raise if a folder that `path` would lie in is a file."""
    for parent in path.absolute().parents:
        if parent.exists() and not parent.is_dir():
            raise DexError(
                f"{path} cannot be written, since {parent} is a file and not a folder; name another output."
            )


def refuse_to_overwrite_file(path: Path, force: bool) -> None:
    """The same for a file."""
    refuse_file_above(path)
    if path.is_dir():
        raise DexError(f"{path} is a folder, and the output is a file; name a file.")
    if path.exists() and not force:
        raise DexError(f"{path} exists already and is not overwritten; choose another output, or pass --force.")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole: a reader sees the old content or the new, never a part."""
    partial = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        _flush_to_disk(partial)
        os.replace(partial, path)
    except OSError as error:
        raise DexError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # it would hide the error that brought us here
            partial.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path, force: bool = False) -> Iterator[Path]:
    """Yield the place of a file beside `path`; on success it becomes `path`, on any error it is removed.

    A SIGKILL half-way leaves at most the hidden sibling `.<stem>.partial<suffix>`, which the next call removes.
    """
    refuse_to_overwrite_file(path, force)
    partial = path.parent / f".{path.stem}.partial{path.suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        yield partial
        _flush_to_disk(partial)
        os.replace(partial, path)
    except OSError as error:
        raise DexError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for a JSON value, indented, with a newline at the end."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
