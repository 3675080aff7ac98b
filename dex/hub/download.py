"""The commit that was pushed, downloaded again and compared."""

from __future__ import annotations

import glob
import tempfile
from contextlib import ExitStack
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from dex.errors import DexError
from dex.hashing import sha256
from dex.hub.difference import File
from dex.hub.words import refusals_explained
from dex.models import quiet


def verify_commit(repo_id: str, commit: str, files: list[File]) -> None:
    """Download the pushed files of a commit, not from the cache. Raises DexError for one that differs.

    They go where the client has its own, HF_HOME: the system's folder for temporary files is often small.
    """
    names = [glob.escape(file.name) for file in files]
    with refusals_explained(repo_id, f"downloading commit {commit} to verify it"), ExitStack() as stack:
        Path(constants.HF_HOME).mkdir(parents=True, exist_ok=True)
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="dex-push-", dir=constants.HF_HOME))
        with quiet():
            folder = Path(snapshot_download(repo_id, revision=commit, cache_dir=cache, allow_patterns=names))
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
