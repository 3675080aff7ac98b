"""What a push changes: files that are new or differ, and files of an earlier push that are to go."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.hf_api import RepoFile

from dex.console import Bar
from dex.errors import DexError
from dex.hub.folder import Published, is_pushed_kind
from dex.lock import sha256


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
        return self.content is not None and there.blob_id == _git_hash(self.content)


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


def compare_with(files: list[File], there: dict[str, RepoFile]) -> Difference:
    names = {file.name for file in files}
    return Difference(
        [file for file in files if not file.is_at(there.get(file.name))],
        [file for file in files if file.is_at(there.get(file.name))],
        sorted(name for name in there if name not in names and is_pushed_kind(name)),
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


def _git_hash(content: bytes) -> str:
    """The name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
