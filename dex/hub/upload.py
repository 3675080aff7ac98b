"""The upload: large files one by one, then everything in one commit, which is all that anyone sees.

Large files are stored under their hash: what an interrupted push has sent is not sent again. The commit names its
parent, so that it cannot be put on top of what someone else has pushed meanwhile.
"""

from __future__ import annotations

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from dex.console import say
from dex.errors import DexError
from dex.hub.difference import Difference, File, refuse_moving
from dex.hub.repository import MAIN, Repository, files_at, read_repository
from dex.hub.words import explain, refusals_explained

# A .gitignore in the repository would leave files out of the commit, without a word.
_IGNORES_NOTHING = "# nothing\n"


def upload(
    api: HfApi, repository: Repository, difference: Difference, message: str, create_pr: bool
) -> tuple[str, str | None]:
    """Upload and commit what differs; returns the commit, and the URL of the pull request if that is what it is.

    Raises DexError where it does not come to the commit. What is uploaded by then stays for the same command.
    """
    additions = {file.name: _addition(file) for file in difference.changed}
    for file in difference.changed:
        if file.content is None:  # a model's weights; how far it is, on a terminal the client itself shows
            say(f"uploading {file.name} ({file.size:,} bytes)")
            _upload_files(api, repository, [file], additions, create_pr)
    _upload_files(
        api, repository, [file for file in difference.changed if file.content is not None], additions, create_pr
    )
    refuse_moving(difference.changed)
    if not repository.branch_exists:
        make_branch(api, repository)
    deletions = [CommitOperationDelete(name) for name in difference.deleted]
    try:
        commit = api.create_commit(
            repository.id,
            [*additions.values(), *deletions],
            commit_message=message,
            revision=repository.branch,
            parent_commit=repository.head,
            create_pr=create_pr,
        )
    except Exception as error:
        made = None if create_pr else find_commit(api, repository, difference)
        if made is None:
            raise DexError(explain(repository.id, "committing", error, may_propose=not create_pr)) from None
        say("the Hub's answer was lost, and the commit is there")
        return made, None
    return commit.oid, commit.pr_url


def find_commit(api: HfApi, repository: Repository, difference: Difference) -> str | None:
    """The head of the branch if it moved on and has all of it; the Hub may commit and answer with an error."""
    try:
        now = read_repository(api, repository.id, repository.branch)
    except DexError:
        return None
    moved = now.head is not None and now.head != repository.head
    return now.head if moved and difference.is_made_in(now.files) else None


def find_pull_request(
    api: HfApi, repository: Repository, author: str, difference: Difference
) -> tuple[str, str] | None:
    """Commit and URL of an open pull request of the author's that proposes just this."""
    with refusals_explained(repository.id, "looking at its pull requests"):
        open_ones = api.get_repo_discussions(
            repository.id, author=author, discussion_type="pull_request", discussion_status="open"
        )
        for each in open_ones:
            revision = f"refs/pr/{each.num}"
            if difference.is_made_in(files_at(api, repository.id, revision)):
                return str(api.model_info(repository.id, revision=revision).sha), each.url
    return None


def make_branch(api: HfApi, repository: Repository) -> None:
    with refusals_explained(repository.id, f"making the branch {repository.branch}"):
        api.create_branch(repository.id, branch=repository.branch, revision=repository.head)


def _addition(file: File) -> CommitOperationAdd:
    addition = CommitOperationAdd(file.name, file.path if file.content is None else file.content)
    if file.content is None:
        addition.upload_info.sha256 = bytes.fromhex(file.sha256)
    return addition


def _upload_files(
    api: HfApi, repository: Repository, files: list[File], additions: dict[str, CommitOperationAdd], create_pr: bool
) -> None:
    """Upload what the Hub wants to have before the commit: weights, and small files that it says when it is asked."""
    if not files:
        return
    try:
        api.preupload_lfs_files(
            repository.id,
            [additions[file.name] for file in files],
            # A branch that is yet to be made is made last: until the commit, the repository is as it was.
            revision=repository.branch if repository.branch_exists else MAIN,
            create_pr=create_pr,
            free_memory=False,
            gitignore_content=_IGNORES_NOTHING,
        )
    except Exception as error:
        refuse_moving(files)
        doing = f"uploading {', '.join(file.name for file in files)}"
        raise DexError(explain(repository.id, doing, error, may_propose=not create_pr)) from None
