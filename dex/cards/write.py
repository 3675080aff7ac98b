"""Rendering: README.md of a folder from what lies in it, through the template of its kind."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from jinja2 import Environment, PackageLoader, StrictUndefined

from dex import __version__
from dex.cards.base import base_of
from dex.cards.evaluation import Evaluation, Score, read_evaluation
from dex.cards.facts import FACTS, Facts, Told, read_facts
from dex.cards.folder import Folder
from dex.cards.front_matter import README, FrontMatter, parse_front_matter, read_card
from dex.cards.head import ORDER, head_of
from dex.cards.kind import ADAPTERS, Kind, kind_of
from dex.cards.licence import copy_licence_files, duties_of, write_notice
from dex.cards.records import check_records
from dex.cards.view import view_of
from dex.commit import is_commit
from dex.errors import DexError
from dex.evaluation.tables import interval
from dex.json_object import read_json
from dex.lock import Lock, read_lock
from dex.models import ModelSource, card_folder, hub_errors_explained
from dex.output import write_whole

# Of the text before it: a card whose text has another hash was edited by hand.
_MARK = re.compile(r"\n<!-- written by dex; sha256 of the text above: ([0-9a-f]{64}) -->\n*$")


def write_card(
    folder: Path,
    source: ModelSource | None = None,
    *,
    made_from: str | None = None,
    told: Told | None = None,
    evaluation: Evaluation | None = None,
    force: bool = False,
) -> FrontMatter:
    """Write README.md and card.json of a folder, with the base's licence files; returns the card's head.

    source: the model that the folder was made of; without it, the one that the folder names. made_from: the adapter,
    a folder or a Hub id, whose licence files go with it too. told: what no file says; see `told_to`.
    evaluation: what takes the place of evaluation.json.

    Raises DexError for a folder that dex did not make or whose records are damaged, and, unless `force`, for a card
    that was edited by hand.
    """
    kind = kind_of(folder)
    check_records(folder, kind)
    if not force:
        refuse_edited(folder)
    lock = read_lock(folder)
    facts = _facts(folder, kind, lock, source)
    if told is not None:
        facts = facts.model_copy(update={"told": facts.told.updated(told)})
    text = _render(Folder(folder, kind, facts, lock, evaluation or read_evaluation(folder)))
    front = parse_front_matter(text, str(folder / README))
    _bring_licence(folder, front, [made_from, source])
    write_whole(folder / README, _marked(text))
    if evaluation is not None:  # these after the card: if it cannot be written, they are those of the one before
        evaluation.write(folder)
    facts.write(folder)
    return front


def refuse_edited(folder: Path) -> None:
    """Raise DexError for a card that dex did not write, or that was changed since."""
    if not (folder / README).exists():
        return
    text = read_card(folder)
    mark = _MARK.search(text)
    if mark is None or mark[1] != _hash(text[: mark.start()]):
        raise DexError(
            f"{folder / README} was edited by hand, or is not by dex; pass --force to write it anew, or keep a copy."
        )


def _marked(text: str) -> str:
    text = text.rstrip("\n") + "\n"
    return f"{text}\n<!-- written by dex; sha256 of the text above: {_hash(text)} -->\n"


def _hash(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").encode()).hexdigest()


# ---- facts -------------------------------------------------------------------------------------------------


def _facts(folder: Path, kind: Kind, lock: Lock | None, source: ModelSource | None) -> Facts:
    there = read_facts(folder)
    if source is None and there is not None:
        return there
    base = base_of(source or named_source(folder, kind, lock), fresh=kind == "fresh")
    return Facts(base=base, told=there.told if there else Told())


def named_source(folder: Path, kind: Kind, lock: Lock | None) -> ModelSource:
    """The base that the files of a folder name. Raises DexError where none does."""
    if lock is not None:
        return ModelSource(lock.model.id, lock.model.revision, lock.model.commit)
    if kind in ADAPTERS:
        config = read_json(folder / "adapter_config.json")
        return _source(config.get("base_model_name_or_path"), config.get("revision"))
    if kind in ("layout", "fresh"):
        record = read_json(folder / "layout.json")
        named = record.get("base") or record.get("like") or {}
        return ModelSource(str(named.get("id")), named.get("revision"), named.get("commit"))
    raise DexError(
        f"{folder} does not say what it was made of (there is no dex.lock and no {FACTS}), so dex cannot write its "
        "card; make the folder again, or write the card yourself."
    )


def _source(name: object, revision: object) -> ModelSource:
    """Where an adapter says its base is; dex writes the commit as its revision."""
    given = None if revision is None else str(revision)
    return ModelSource(str(name), given, given if given is not None and is_commit(given) else None)


def told_to(adapter: str) -> Told | None:
    """What the card of an adapter was told, in its folder or in its repository; what is made of it says the same.

    Raises DexError where that cannot be read.
    """
    folder = Path(adapter)
    if not folder.exists():
        with hub_errors_explained(adapter, None):
            try:
                folder = Path(hf_hub_download(adapter, FACTS)).parent
            except LocalEntryNotFoundError:  # the Hub was not asked, or not reached
                if try_to_load_from_cache(adapter, FACTS) is not _CACHED_NO_EXIST:
                    raise
                return None
            except EntryNotFoundError:
                return None
    facts = read_facts(folder)
    return facts.told if facts else None


def _bring_licence(folder: Path, front: FrontMatter, origins: list[str | ModelSource | None]) -> None:
    """Copy what the licence wants to go with every copy, from whatever this was made of."""
    for origin in origins:
        place = card_folder(origin) if isinstance(origin, ModelSource) else Path(origin) if origin else None
        if place is not None and place.is_dir():
            copy_licence_files(place, folder)
    if (duties := duties_of(front.license, front.license_name)) is not None:
        write_notice(folder, duties)


# ---- the text ----------------------------------------------------------------------------------------------


def _render(folder: Folder) -> str:
    environment = Environment(
        loader=PackageLoader("dex.model_cards", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "interval": _interval,
        "difference": lambda score: interval(score.interval, sign=True),
        "thousands": lambda number: f"{number:,}",
        "cell": lambda text: str(text).replace("|", "\\|"),
    }
    front_matter = head_of(folder).to_yaml(original_order=ORDER)
    template = environment.get_template(f"{folder.kind}.md.jinja")
    text = template.render(front_matter=front_matter, dex_version=__version__, **view_of(folder))
    return re.sub(r"\n{3,}", "\n\n", text)


def _interval(score: Score, digits: int = 4) -> str:
    return interval(score.interval, digits)
