"""What is in a repository now, and whether it may be pushed to."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, RepoCard, hf_hub_download
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from dex.cards.front_matter import README
from dex.errors import DexError
from dex.hub.account import Account
from dex.hub.folder import WEIGHTS, is_model_file
from dex.hub.words import refusals_explained
from dex.lock import LOCK

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_BRANCH = re.compile(
    r"(?!.*(\.\.|//|/\.|\.lock\b))[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}(?<![./])"
)  # what git and URLs take


@dataclass(frozen=True)
class Repository:
    """The state of the branch that is pushed to: its head and its files.

    head is None where the repository does not exist. A branch that does not exist yet has main's state.
    """

    id: str
    branch: str = MAIN
    branch_exists: bool = True
    head: str | None = None
    private: bool | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)


def read_repository(api: HfApi, repo_id: str, revision: str | None) -> Repository:
    """What is there now. Raises DexError for a revision that cannot be pushed to."""
    branch = MAIN if revision is None else revision
    if not branch.startswith("refs/") and not _BRANCH.fullmatch(branch):
        raise _no_branch(branch)
    with refusals_explained(repo_id, "looking at what is there"):
        try:
            info = api.model_info(repo_id)
        except RepositoryNotFoundError:
            _refuse_no_new_branch(branch)
            return Repository(repo_id, branch, branch_exists=branch == MAIN)
        head = info.sha if branch == MAIN else _head_of(api, repo_id, branch)
        state = head or info.sha
        assert state is not None
        return Repository(repo_id, branch, head is not None, state, info.private, files_at(api, repo_id, state))


def files_at(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo_id, revision=revision, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def refuse_repository(api: HfApi, account: Account, repository: Repository, private: bool, create_pr: bool) -> None:
    """Raise DexError for a repository that may not be pushed to as asked."""
    name = repository.id
    if repository.head is None:
        if create_pr:
            raise DexError(
                f"{name} is not on the Hub, so there is nothing to propose a change of; leave --create-pr out."
            )
        if not account.has_namespace_of(name):
            raise DexError(
                f"{name} is not on the Hub, or the token may not see it, and as it is someone else's, {account.name} "
                f"cannot make it; choose a name in {', '.join(account.namespaces)}, or check this one."
            )
        return
    if private and repository.private is False:
        raise DexError(
            f"{name} exists and is public, and --private is for a new one; make it private on its page, or choose "
            "another name."
        )
    if create_pr and not repository.branch_exists:
        raise DexError(f"{name} has no branch {repository.branch}, which a pull request could be against.")
    if not create_pr:
        with refusals_explained(name, "asking whether it may be written to", may_propose=True):
            api.auth_check(name, write=True)


def holds_another_model(repository: Repository) -> bool:
    """Is there a model that dex did not push?"""
    return any(map(is_model_file, repository.files)) and not _is_pushed_by_dex(repository)


def refuse_replacing(repository: Repository, is_adapter: bool, of_another: bool, deleted: list[str]) -> None:
    """Raise DexError for what only --force replaces: a model that dex did not push, and one of the other kind."""
    if of_another:
        raise DexError(
            f"{repository.id} holds another model, which dex did not push (it has no {LOCK}, and its card no tag dex)"
            "; choose another name, or pass --force to replace it."
        )
    of_other_kind = ("config.json", WEIGHTS[False]) if is_adapter else ("adapter_config.json", WEIGHTS[True])
    if any(name in deleted for name in of_other_kind):
        there, here = ("a whole model", "an adapter") if is_adapter else ("an adapter", "a whole model")
        raise DexError(
            f"{repository.id} holds {there}, and this is {here}: {', '.join(deleted)} would be deleted; choose "
            "another name, or pass --force to replace it."
        )


def _refuse_no_new_branch(branch: str) -> None:
    """Raise DexError for a branch that is not there and that nobody would make under this name."""
    if branch.startswith("refs/") or _COMMIT.fullmatch(branch):
        raise _no_branch(branch)


def _no_branch(branch: str) -> DexError:
    return DexError(f"--revision {branch} is no name of a branch, and a push needs one; give a branch.")


def _head_of(api: HfApi, repo_id: str, branch: str) -> str | None:
    """The commit of a branch, or of a pull request's; None for a branch that there is not."""
    if branch.startswith("refs/pr/"):
        try:
            return api.model_info(repo_id, revision=branch).sha
        except RevisionNotFoundError:
            raise DexError(f"{repo_id} has no pull request {branch}; leave --revision out.") from None
    refs = api.list_repo_refs(repo_id)
    if branch in [tag.name for tag in refs.tags]:
        raise DexError(f"--revision {branch} is a tag of {repo_id}, and a push needs a branch; give one.")
    found = {each.name: each.target_commit for each in refs.branches}
    if branch not in found:
        _refuse_no_new_branch(branch)
    return found.get(branch)


def _is_pushed_by_dex(repository: Repository) -> bool:
    if LOCK in repository.files:
        return True
    if README not in repository.files:
        return False
    with (
        refusals_explained(repository.id, "reading its card"),
        tempfile.TemporaryDirectory(prefix="dex-card-") as folder,
    ):
        path = hf_hub_download(repository.id, README, revision=repository.head, cache_dir=folder)
        try:
            card = RepoCard(Path(path).read_text(encoding="utf-8"), ignore_metadata_errors=True)
        except (ValueError, UnicodeDecodeError):
            return False
    tags = card.data.get("tags")
    return isinstance(tags, list) and "dex" in tags
