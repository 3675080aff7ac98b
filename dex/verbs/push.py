"""`dex push FOLDER REPO`: publish a folded model, an adapter or a DIFF model on the Hub.

Everything that can be wrong is said before anything is uploaded: folder, card, licence, token, repository, dex.lock.
Then come large files, which an interrupted push leaves where the same command finds them, and one commit, before
which nobody sees any of it. The local folder is only read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from dex import __version__
from dex.cards import check_card
from dex.cards.evaluation import EVALUATION, read_evaluation
from dex.cards.front_matter import README, read_card
from dex.cards.kind import Kind
from dex.console import say
from dex.errors import DexError
from dex.hub.account import sign_in
from dex.hub.difference import Difference, compare_with, files_to_go, hash_published
from dex.hub.download import verify_commit
from dex.hub.folder import read_published, refuse_changed, refuse_secrets, refuse_uncertified
from dex.hub.paths import refuse_paths
from dex.hub.repository import (
    Repository,
    holds_another_model,
    read_repository,
    refuse_replacing,
    refuse_repository,
)
from dex.hub.upload import find_pull_request, make_branch, upload
from dex.hub.words import refusals_explained
from dex.lock import read_lock
from dex.verbs.no_regression import refuse_regression
from dex.verbs.recognise import Identities

_WHAT: dict[Kind, str] = {
    "adapter": "Dex adapter",
    "lora": "LoRA adapter",
    "folded": "Folded model",
    "layout": "DIFF model",
    "fresh": "Untrained model",
    "trained": "Trained model",
}


@dataclass(frozen=True)
class Pushed:
    """What was pushed, or would be. Files by name; sizes in bytes; commit is None for a dry run of a new repository.

    uploaded are the files that differ from what was there, deleted those of an earlier push that are no longer part
    of the model, left_out what lies in the folder and is not published.
    """

    repo: str
    branch: str
    commit: str | None
    url: str
    pull_request: str | None
    uploaded: dict[str, int]
    unchanged: list[str]
    deleted: list[str]
    left_out: list[str]
    private: bool | None
    created: bool
    verified: bool
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def push(
    folder: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    verify: bool = False,
    require_no_regression: str | Path | None = None,
    margin: float | None = None,
    dry_run: bool = False,
    with_paths: bool = False,
    force: bool = False,
) -> Pushed:
    """Publish a folder that dex made as the repository `repo` ("organisation/name"), in one commit.

    private: of a repository that is made. revision: a branch, made if it is not there. create_pr: propose the commit.
    verify: download the commit again and compare SHA-256. require_no_regression: results of `dex eval`, of the base
    and of this folder; margin is that of `dex compare`. dry_run: check everything, upload nothing. with_paths: also
    records that name absolute paths of this machine. force: replace a model that dex did not push, or one of another
    kind. The token is HF_TOKEN, or that of `hf auth login`.

    Raises DexError, in one sentence, for whatever stops it; the same command then goes on.
    """
    _refuse_idle(margin, require_no_regression, verify, dry_run, commit_message)
    path = Path(folder)
    published = read_published(path)
    card = _checked_card(path, repo)
    lock = read_lock(path)
    refuse_uncertified(path, lock)
    refuse_paths(published, with_paths)
    api = HfApi(library_name="dex", library_version=__version__)
    account = sign_in(api, repo)
    there = read_repository(api, repo, revision)
    refuse_repository(api, account, there, private, create_pr)
    of_another = holds_another_model(there)
    deleted = files_to_go(published, there.files, of_another)
    if not force:
        refuse_replacing(there, published.is_adapter, of_another, deleted)
    _let_the_hub_check(path, repo)
    files = hash_published(published)
    for file in files:
        if file.content is not None:  # what goes up, which may have changed since the folder was looked at
            refuse_secrets(file.path, file.content)
    if lock is not None:
        refuse_changed(published, lock, {file.name: file.sha256 for file in files})
    if next(file.content for file in files if file.name == README) != card:
        raise DexError(
            f"{path / README} changed while it was checked, and nothing was uploaded; run the command again."
        )
    identities = Identities(path)
    _refuse_other_evaluation(path, identities)
    if require_no_regression is not None:
        refuse_regression(path, identities, lock, Path(require_no_regression), margin)
    if published.left_out:
        say(f"not published: {', '.join(published.left_out)}")
    difference = compare_with(files, there.files, deleted)
    seen = Pushed(
        repo=repo,
        branch=there.branch,
        commit=there.head,
        url=f"{api.endpoint}/{repo}",
        pull_request=None,
        uploaded={file.name: file.size for file in difference.changed},
        unchanged=[file.name for file in difference.unchanged],
        deleted=difference.deleted,
        left_out=published.left_out,
        private=private if there.private is None else there.private,
        created=False,
        verified=False,
        dry_run=dry_run,
    )
    if dry_run:
        return seen
    created = there.head is None
    if created:
        there = _create(api, there, private)
    message = commit_message or f"{_WHAT[published.kind]}, pushed with dex {__version__}"
    commit, pull_request = _bring(api, there, difference, message, account.name if create_pr else None)
    if verify:
        verify_commit(repo, commit, files)
    url = f"{seen.url}/commit/{commit}"
    return replace(seen, commit=commit, url=url, pull_request=pull_request, created=created, verified=verify)


def _checked_card(folder: Path, repo: str) -> bytes:
    """The card, as it was when it was checked."""
    check_card(folder, repo)
    return (folder / README).read_bytes()


def _refuse_idle(
    margin: float | None,
    require_no_regression: str | Path | None,
    verify: bool,
    dry_run: bool,
    commit_message: str | None,
) -> None:
    if margin is not None and require_no_regression is None:
        raise DexError("margin has no effect without require_no_regression; give that too, or leave margin out.")
    if verify and dry_run:
        raise DexError("verify has no effect beside dry_run, which uploads nothing; leave one of them out.")
    if commit_message is not None and not commit_message.strip():
        raise DexError("commit_message is empty; say what the commit is, or leave it out.")


def _refuse_other_evaluation(folder: Path, identities: Identities) -> None:
    """The card's results are those of evaluation.json, and the weights may have been made again since."""
    evaluation = read_evaluation(folder)
    if evaluation is not None and not identities.has(evaluation.model):
        raise DexError(
            f"{folder / EVALUATION}, whose results the card shows, is of other weights than those in {folder}; "
            f"evaluate them as they are now, and write the card again: dex card {folder} --results RESULTS."
        )


def _let_the_hub_check(folder: Path, repo: str) -> None:
    """The Hub's own validation of the card."""
    with refusals_explained(repo, "validating the card"):
        try:
            ModelCard(read_card(folder)).validate()
        except ValueError as error:
            raise DexError(f"The Hub refuses {folder / README}: {_messages(str(error))}; mend it.") from None


def _messages(answer: str) -> str:
    """What the Hub has against a card, on one line."""
    try:
        return "; ".join(str(error["message"]) for error in json.loads(answer)["errors"])
    except (ValueError, KeyError, TypeError):
        return " ".join(answer.split())


def _create(api: HfApi, repository: Repository, private: bool) -> Repository:
    existed = False
    with refusals_explained(repository.id, "making the repository"):
        try:
            api.create_repo(repository.id, private=private or None)
        except HfHubHTTPError as error:
            existed = error.response.status_code == 409
            if not existed:
                raise
    made = read_repository(api, repository.id, repository.branch)
    if existed and made.head is None:
        raise DexError(
            f"{repository.id} exists, and this token may not see it; use one that may, or choose another name."
        )
    if existed:
        raise DexError(
            f"{repository.id} was made meanwhile; run the same command again, which looks at what is there."
        )
    if made.head is None:
        raise DexError(f"{repository.id} was made, and is not there yet; run the command again in a moment.")
    return made


def _bring(
    api: HfApi, there: Repository, difference: Difference, message: str, proposed_by: str | None
) -> tuple[str, str | None]:
    """See that the branch, or a pull request, has the files; returns the commit and the request's URL."""
    assert there.head is not None
    if difference.is_empty:
        say(f"nothing to push: {there.id} has these files")
        if not there.branch_exists:
            make_branch(api, there)
        return there.head, None
    if proposed_by is None:
        return upload(api, there, difference, message, create_pr=False)
    if (found := find_pull_request(api, there, proposed_by, difference)) is not None:
        say(f"nothing to push: {found[1]} proposes these files")
        return found
    return upload(api, there, difference, message, create_pr=True)


def describe(pushed: Pushed) -> str:
    """The lines that are printed."""
    done = "would be " if pushed.dry_run else ""
    lines = [f"{size:>16,}  {name} {done}uploaded" for name, size in pushed.uploaded.items()]
    lines += [f"{'':16}  {name} {done}deleted" for name in pushed.deleted]
    if pushed.unchanged:
        lines.append(f"{'':16}  {len(pushed.unchanged)} files are there already")
    total = f"{sum(pushed.uploaded.values()):,} bytes in {len(pushed.uploaded)} files"
    if pushed.dry_run:
        return "\n".join([*lines, f"{total} would go to {pushed.repo}, branch {pushed.branch}; nothing was uploaded"])
    if pushed.verified:
        lines.append("verified: the commit was downloaded again, and every file has the SHA-256 of the one here")
    lines.append(f"commit {pushed.commit}\n{pushed.pull_request or pushed.url}")
    return "\n".join(lines)
