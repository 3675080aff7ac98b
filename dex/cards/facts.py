"""card.json: what a card needs and no other file of a folder says: the base, its licence, what the user told.

A folder that is made of another one (folded from an adapter, say) takes over what that one was told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dex.errors import DexError
from dex.output import write_json

FACTS = "card.json"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Licence(_Frozen):
    """As a card names it: an id of the Hub, or `other` with a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


class Base(_Frozen):
    """The model that a folder was made of.

    name: its Hub id, or the own name of a local folder or file, never its path. hub_id: what `base_model` of a card
    is. gguf: the file that its weights were read from. scratch: they were random, so the base is no model to name.
    licence, language: what its own card says.
    """

    name: str
    hub_id: str | None = None
    commit: str | None = None
    gguf: str | None = None
    scratch: bool = False
    licence: Licence | None = None
    language: list[str] = []


class Told(_Frozen):
    """What `dex card` was told, because no file says it. It counts before what the base's card says."""

    base_model: str | None = None
    licence: Licence | None = None
    language: list[str] = []

    def updated(self, other: Told) -> Told:
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})


class Facts(_Frozen):
    base: Base
    told: Told = Told()

    @property
    def base_model(self) -> str | None:
        return None if self.base.scratch else self.told.base_model or self.base.hub_id

    @property
    def commit(self) -> str | None:
        """Of base_model: a base that was told another id is on record at a commit of its own, and not of that."""
        return self.base.commit if self.base_model == self.base.hub_id else None

    @property
    def licence(self) -> Licence | None:
        return self.told.licence or (None if self.base.scratch else self.base.licence)

    @property
    def language(self) -> list[str]:
        return self.told.language or ([] if self.base.scratch else self.base.language)

    def write(self, folder: Path) -> None:
        base, told = (each.model_dump(exclude_none=True, exclude_defaults=True) for each in (self.base, self.told))
        write_json(folder / FACTS, {"schema": 1, "base": base, "told": told})


def read_facts(folder: Path) -> Facts | None:
    """What card.json of a folder holds, None without one. Raises DexError for a damaged one."""
    path = folder / FACTS
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Facts(base=values["base"], told=values["told"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise DexError(f"{path} is damaged ({reason}); delete it, and write the card again: dex card.") from error
