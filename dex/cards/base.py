"""The model that a folder was made of, as a card names it; its licence and language are those of its own card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dex.cards.facts import Base, Licence, read_facts
from dex.cards.front_matter import glean_front_matter, is_hub_id, line_of
from dex.cards.kind import kind_of
from dex.cards.languages import is_language
from dex.cards.licence import KNOWN, leads_to_licence
from dex.errors import DexError
from dex.json_object import read_json
from dex.models import EMBEDDED, ModelSource, card_folder


def base_of(source: ModelSource, fresh: bool = False) -> Base:
    """What a card says of a base. fresh: only its size was taken.

    Nothing that is wrong with the base's own card is an error here: a run is not lost for it.
    """
    if source.id in EMBEDDED:
        known = EMBEDDED[source.id]
        licence = Licence(id=known.licence)
        base = Base(name=source.id, hub_id=known.hub_id, gguf=known.file, licence=licence, language=[known.language])
    elif source.commit is not None:
        base = Base(name=source.id, hub_id=source.id, commit=source.commit, **_said_by_its_card(card_folder(source)))
    else:
        base = _local_base(source)
    return base.model_copy(update={"scratch": True}) if fresh else base


def _local_base(source: ModelSource) -> Base:
    path, folder = Path(source.id).expanduser(), card_folder(source)
    base = Base(
        name=path.resolve().name,
        gguf=path.name if path.suffix.lower() == ".gguf" else None,
        **_said_by_its_card(folder),
    )
    if folder is None or not (folder / "layout.json").is_file():
        return base
    try:  # what dex laid out is its base still, and what it made afresh has none
        kind, below = kind_of(folder), read_facts(folder)
    except DexError:
        return base
    return base.model_copy(update={"scratch": kind == "fresh", "hub_id": below.base_model if below else None})


def _said_by_its_card(folder: Path | None) -> dict[str, Any]:
    values = glean_front_matter(folder) if folder is not None else {}
    languages = values.get("language")
    given = languages if isinstance(languages, list) else [languages]
    language = [code for code in given if isinstance(code, str) and is_language(code)]
    return {"licence": _licence(values, folder), "language": language}


def _licence(values: dict[str, Any], folder: Path | None) -> Licence | None:
    """None for what is not known: no licence, one that the Hub does not know, or `other` without a name."""
    given = values.get("license")
    licence = given[0] if isinstance(given, list) and len(given) == 1 else given
    name, link = (line_of(values.get(key)) for key in ("license_name", "license_link"))
    if not isinstance(licence, str) or licence not in KNOWN or licence == "unknown":
        return None
    if licence != "other":
        return Licence(id=licence)
    if name is None:
        return None
    there = link is not None and folder is not None and leads_to_licence(link, folder)
    return Licence(id=licence, name=name, link=link if there else None)


def base_on_hub(adapter: Path) -> str | None:
    """The Hub id that PEFT finds an adapter's base by; None where it is a folder, a file or an embedded model."""
    named = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    if not (isinstance(named, str) and is_hub_id(named) and "/" in named):
        return None
    return None if Path(named).exists() else named
