"""What must be right before a folder is published: the card, the licence, and the name of the repository."""

from __future__ import annotations

from pathlib import Path

from dex.cards.facts import read_facts
from dex.cards.front_matter import README, FrontMatter, is_hub_id, read_card, read_front_matter
from dex.cards.kind import kind_of
from dex.cards.licence import Duties, duties_of, has_agreement, has_notice
from dex.errors import DexError


def check_card(folder: Path, repo_id: str) -> FrontMatter:
    """The card's head, if the folder can be published under this name.

    Raises DexError, in one sentence, for a card that is missing or invalid, a base or licence that is not known, and
    duties of the licence that are not met: its words, its copy, its NOTICE, the name of the repository.
    """
    if not is_hub_id(repo_id):
        raise DexError(f"{repo_id!r} is no name of a repository on the Hub; give organisation/name.")
    front = read_front_matter(folder)
    facts = read_facts(folder)
    made_from_nothing = kind_of(folder) == "fresh" or (facts is not None and facts.base.scratch)
    if front.base_model is None and not made_from_nothing:
        raise DexError(
            f"{folder / README} has no base_model, the model on the Hub that this one was made of; say which it is: "
            f"dex card {folder} --base-model organisation/name."
        )
    _check_licence(folder, front)
    duties = duties_of(front.license, front.license_name)
    if duties is not None:
        _check_duties(folder, duties, repo_id)
    return front


def _check_licence(folder: Path, front: FrontMatter) -> None:
    if front.license is None:
        raise DexError(
            f"{folder / README} has no license, and that of the base is not known; say which it is: "
            f"dex card {folder} --license apache-2.0, or --license other --license-name NAME --license-link LINK."
        )
    link = front.license_link
    if front.license == "other" and link is None:
        raise DexError(
            f"{folder / README} has license `other` without a license_link; add it: a URL, or a file of the folder, "
            "such as LICENSE."
        )
    if link is not None and "://" not in link and not (folder / link).is_file():
        raise DexError(f"{folder / README} has license_link {link}, which is not in {folder}; put it there.")


def _check_duties(folder: Path, duties: Duties, repo_id: str) -> None:
    if not any(words in read_card(folder) for words in duties.statements or ("",)):
        raise DexError(
            f"{folder / README} must display “{duties.statements[0]}”, which the {duties.agreement} asks for; add "
            "it, or write the card again: dex card."
        )
    if not has_agreement(folder, duties):
        raise DexError(
            f"{folder} has no copy of the {duties.agreement}, which must go with the model; put the base's LICENSE "
            "file there."
        )
    if not has_notice(folder, duties):
        raise DexError(f"{folder} has no NOTICE file with the line “{duties.notice}”; write it: dex card {folder}.")
    owner, slash, name = repo_id.rpartition("/")
    if not duties.is_met_by_name(name):
        raise DexError(
            f"The {duties.agreement} asks for a name that begins with {duties.prefix}, and {name} does not; "
            f"{owner}{slash}{duties.name_that_would_do(name)} would do."
        )
