"""What a push changes: files that are new or differ, and files of an earlier push that are to go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from dex.console import Bar
from dex.errors import DexError
from dex.hashing import sha256
from dex.hub.folder import Published, is_of_another_model, is_pushed_kind


@dataclass(frozen=True)
class File:
    """A file as it is when it is hashed: what is small is kept, so that what goes up is what was hashed."""

    name: str
    path: Path
    size: int
    sha256: str
    content: bytes | None = None

    def is_at(self, there: RepoFile | None) -> bool:
        """Is this the file that a repository has under the name?"""
        if there is None or there.size != self.size:
            return False
        if there.lfs is not None:
            return there.lfs.sha256 == self.sha256
        return self.content is not None and there.blob_id == git_hash(self.content)


@dataclass(frozen=True)
class Difference:
    """By name: what is uploaded, what is there already, and what is deleted."""

    changed: list[File]
    unchanged: list[File]
    deleted: list[str]

    @property
    def is_empty(self) -> bool:
        return not self.changed and not self.deleted

    @property
    def files(self) -> list[File]:
        return [*self.changed, *self.unchanged]

    def is_made_in(self, there: dict[str, RepoFile]) -> bool:
        """Does a commit have all of it?"""
        return all(file.is_at(there.get(file.name)) for file in self.files) and there.keys().isdisjoint(self.deleted)


def hash_published(published: Published) -> list[File]:
    """The files with their SHA-256. Raises DexError where one cannot be read."""
    sizes = {name: _size(published.path / name) for name in (*published.weights, *published.others)}
    files = []
    with Bar("hashing", sum(sizes.values()), "bytes") as bar:
        done = 0
        for name, size in sizes.items():
            files.append(_hashed(name, published.path / name, size, large=name in published.weights))
            bar.update(done := done + size)
    return files


def files_to_go(published: Published, there: Iterable[str], of_another: bool) -> list[str]:
    """What of a repository is deleted: what an earlier push left, and of another model all weights and code."""
    kept = {*published.weights, *published.others}
    return sorted(
        name
        for name in there
        if name not in kept and (is_pushed_kind(name) or (of_another and is_of_another_model(name)))
    )


def compare_with(files: list[File], there: dict[str, RepoFile], deleted: list[str]) -> Difference:
    return Difference(
        [file for file in files if not file.is_at(there.get(file.name))],
        [file for file in files if file.is_at(there.get(file.name))],
        deleted,
    )


def refuse_moving(files: list[File]) -> None:
    """Raise DexError if a file is no longer what was hashed."""
    for file in files:
        if file.content is None and (_size(file.path) != file.size or sha256(file.path) != file.sha256):
            raise DexError(
                f"{file.path} changed while it was pushed, and nothing was committed; run the command again."
            )


def _hashed(name: str, path: Path, size: int, large: bool) -> File:
    if large:
        return File(name, path, size, sha256(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
    return File(name, path, len(content), hashlib.sha256(content).hexdigest(), content)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
