"""`dex card FOLDER`: write the card of a folder again, with results and with what no file says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dex.cards import write_card as render
from dex.cards.check import refuse_other_base
from dex.cards.evaluation import EVALUATION, Evaluation
from dex.cards.facts import Licence, Told, read_facts
from dex.cards.front_matter import README, is_hub_id
from dex.cards.kind import ADAPTERS, Kind, kind_of
from dex.cards.languages import is_language
from dex.cards.licence import KNOWN, leads_to_licence
from dex.cards.records import check_records
from dex.cards.write import named_source, refuse_edited
from dex.console import say
from dex.errors import DexError
from dex.lock import read_lock
from dex.models import ANY, EMBEDDED, ModelSource, card_folder, load_outline
from dex.settings import did_you_mean
from dex.verbs.card_evaluation import evaluation_of


def write_card(
    folder: str | Path,
    *,
    results: str | Path | Sequence[str | Path] = (),
    license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    base_model: str | None = None,
    language: str | Sequence[str] = (),
    force: bool = False,
) -> dict[str, Any]:
    """Write README.md of a folder that dex made; returns its path and its front matter.

    results: folders that `dex eval -o` wrote, in which this model, its base and others (controls) are found by what
    they are; the scores and paired differences are kept in evaluation.json. The rest is what no file says: it is
    kept in card.json, and goes with what is folded from an adapter. force: also over a card that was edited by hand.

    Raises DexError for a folder that dex did not make, results without this model, and what the Hub would refuse.
    """
    path = Path(folder)
    kind = kind_of(path)
    check_records(path, kind)
    if not force:
        refuse_edited(path)
    languages = [language] if isinstance(language, str) else language
    told = _told(license, license_name, license_link, base_model, languages)
    _refuse_for_this_folder(path, kind, told)
    places = [Path(results)] if isinstance(results, str | Path) else [Path(place) for place in results]
    evaluation: Evaluation | None = evaluation_of(path, places, base_model) if places else None
    source = None if read_facts(path) else _with_its_card(named_source(path, kind, read_lock(path)))
    front = render(path, source, told=told, evaluation=evaluation, force=True)
    return {"path": str(path / README), "evaluated": (path / EVALUATION).exists(), "front_matter": front.to_dict()}


def describe(made: dict[str, Any]) -> str:
    """What is printed: the path, and what is not known yet."""
    front = made["front_matter"]
    lacking = [key for key in ("base_model", "license") if key not in front]
    asked = f"; not known: {', '.join(lacking)} (dex card --help says how to tell it)" if lacking else ""
    return f"written to {made['path']}{'' if made['evaluated'] else '; not evaluated'}{asked}"


def _told(
    license: str | None, name: str | None, link: str | None, base_model: str | None, language: Sequence[str]
) -> Told:
    if license is None and (name is not None or link is not None):
        raise DexError("A licence's name or link has no effect without the licence; add --license other.")
    if license is not None and license not in KNOWN:
        near = did_you_mean(license, KNOWN)
        raise DexError(
            f"{license!r} is no licence that the Hub knows{near}; give one, or `other` with a name and a link."
        )
    if license == "other" and (name is None or link is None):
        raise DexError("A licence `other` needs a name and a link (a URL, or a file of the folder); give both.")
    if license not in (None, "other") and (name is not None or link is not None):
        raise DexError(f"The licence {license} has its name and link on the Hub; leave out yours, or use `other`.")
    if base_model is not None and not (is_hub_id(base_model) and "/" in base_model):
        raise DexError(f"{base_model!r} is no id of a model on the Hub; give organisation/name.")
    if odd := [code for code in language if not is_language(code)]:
        raise DexError(f"{odd[0]!r} is no code of a language; give an ISO 639 code, such as en.")
    given: dict[str, Any] = {
        "licence": Licence(id=license, name=name, link=link) if license is not None else None,
        "base_model": base_model,
        "language": list(language) or None,
    }
    return Told(**{key: value for key, value in given.items() if value is not None})


def _refuse_for_this_folder(folder: Path, kind: Kind, told: Told) -> None:
    """Raise DexError for what the check before a push would refuse."""
    link = told.licence.link if told.licence else None
    if link is not None and not leads_to_licence(link, folder):
        raise DexError(
            f"--license-link {link} is no URL and no licence file in {folder}; give a URL (https://…), or put the "
            "text there as LICENSE and name that."
        )
    if kind in ADAPTERS and told.base_model is not None:
        refuse_other_base(folder, told.base_model)


def _with_its_card(source: ModelSource) -> ModelSource:
    """The base of a folder that has no card.json yet, at its commit; its own card is fetched, if it can be had."""
    local = source.id in EMBEDDED or Path(source.id).exists() or not is_hub_id(source.id)
    if source.commit is None and local:
        return source
    if source.commit is None:
        source = load_outline(source.id, source.revision, ANY)[1]
    try:
        card_folder(source, fetch=True)
    except DexError as error:
        say(f"licence and language of the base are not known: {error}")
    return source
