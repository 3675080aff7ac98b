"""The commit that was pushed, downloaded again and compared."""

from __future__ import annotations

import tempfile
from pathlib import Path

from huggingface_hub import snapshot_download

from dex.errors import DexError
from dex.hub.difference import File
from dex.hub.words import refusals_explained
from dex.lock import sha256
from dex.models import quiet


def verify_commit(repo_id: str, commit: str, files: list[File]) -> None:
    """Download a commit into a folder of its own, not from the cache. Raises DexError for a file that differs."""
    with (
        tempfile.TemporaryDirectory(prefix="dex-push-") as cache,
        refusals_explained(repo_id, f"downloading commit {commit} to verify it"),
    ):
        with quiet():
            folder = Path(snapshot_download(repo_id, revision=commit, cache_dir=cache))
        different = [
            file.name
            for file in files
            if not (folder / file.name).is_file() or sha256(folder / file.name) != file.sha256
        ]
    if different:
        raise DexError(
            f"Commit {commit} of {repo_id} is not what was pushed: {', '.join(different)} came back with another "
            "SHA-256; push again."
        )
