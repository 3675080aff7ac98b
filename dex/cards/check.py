"""What must be right before a folder is published: the card, the licence, and the name of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from dex.cards.base import base_on_hub
from dex.cards.facts import read_facts
from dex.cards.front_matter import README, FrontMatter, is_hub_id, read_card, read_front_matter
from dex.cards.kind import ADAPTERS, kind_of
from dex.cards.licence import Duties, duties_of, has_agreement, has_notice, leads_to_licence
from dex.errors import DexError


def check_card(folder: Path, repo_id: str) -> FrontMatter:
    """The card's head, if the folder can be published under this name.

    Raises DexError, in one sentence, for a card that is missing or invalid, a base or licence that is not known, an
    adapter's base that is another one in its configuration, and duties of the licence that are not met: its words,
    its copy, its NOTICE, the name of the repository.
    """
    if not is_hub_id(repo_id):
        raise DexError(f"{repo_id!r} is no name of a repository on the Hub; give organisation/name.")
    front = read_front_matter(folder)
    facts, kind = read_facts(folder), kind_of(folder)
    made_from_nothing = kind == "fresh" or (facts is not None and facts.base.scratch)
    if front.base_model is None and not made_from_nothing:
        raise DexError(
            f"{folder / README} has no base_model, the model on the Hub that this one was made of; say which it is: "
            f"dex card {folder} --base-model organisation/name."
        )
    if kind in ADAPTERS:
        for base_model in front.base_model or []:
            refuse_other_base(folder, base_model)
    _check_licence(folder, front)
    duties = duties_of(front.license, front.license_name)
    if duties is not None:
        _check_duties(folder, duties, repo_id)
    return front


def refuse_other_base(adapter: Path, base_model: str) -> None:
    """Raise DexError where an adapter's card would name another model on the Hub than PEFT loads."""
    loaded = base_on_hub(adapter)
    if loaded is not None and base_model != loaded:
        raise DexError(
            f"The base_model of {adapter} on a card cannot be {base_model}, since PEFT loads {loaded}, which "
            f"adapter_config.json names; let the card name that too: dex card {adapter} --base-model {loaded}."
        )


def _check_licence(folder: Path, front: FrontMatter) -> None:
    if front.license in (None, "unknown"):
        raise DexError(
            f"{folder / README} has {'no license' if front.license is None else 'license unknown'}, and "
            "whoever loads the model has to know what they may do with it; say which it is: "
            f"dex card {folder} --license apache-2.0, or --license other --license-name NAME --license-link LINK."
        )
    link = front.license_link
    if front.license == "other" and link is None:
        raise DexError(
            f"{folder / README} has license `other` without a license_link; add it: a URL, or a file of the folder, "
            "such as LICENSE."
        )
    if link is not None and not leads_to_licence(link, folder):
        raise DexError(
            f"{folder / README} has license_link {link}, which is no URL and no licence file in {folder}; give a URL "
            "(https://…), or put the text there as LICENSE and name that."
        )


def _displayed(card: str) -> str:
    """A card without its head and its comments, which nobody sees."""
    return re.sub(r"<!--.*?(-->|\Z)", "", REGEX_YAML_BLOCK.sub("", card, count=1), flags=re.DOTALL)


def _check_duties(folder: Path, duties: Duties, repo_id: str) -> None:
    text = _displayed(read_card(folder))
    if not any(words in text for words in duties.statements or ("",)):
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
