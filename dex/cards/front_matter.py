"""The YAML head of a card: what the Hub reads of it, validated here in one sentence with the line.

The Hub verifies the licence, the data sets, the language and the model-index when a card is pushed; so does this,
without a network. Keys that are not named here are free, but nothing may be null.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml as older  # type: ignore[import-untyped]
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from ruamel.yaml import YAML

from dex.cards.languages import is_language
from dex.cards.licence import KNOWN
from dex.errors import DexError
from dex.settings import KeyPath, Problem, choice, clash, did_you_mean, expected, shown
from dex.settings_file import SettingsFile, dotted

README = "README.md"
LONGEST = 200_000  # characters of a head
Relation = Literal["adapter", "finetune", "merge", "quantized"]


def is_hub_id(value: Any) -> bool:
    """Could it be the id of a repository? A path never is."""
    try:
        validate_repo_id(value)
    except (HFValidationError, TypeError):
        return False
    return isinstance(value, str)


def _hub_id(value: Any) -> str:
    if not is_hub_id(value):
        raise expected("a Hub id such as organisation/name, and no path,")
    return str(value)


def _language(value: Any) -> str:
    if not (isinstance(value, str) and is_language(value)):
        raise expected("an ISO 639 code such as en")
    return value


def _licence(value: Any) -> str:
    if not isinstance(value, str) or value not in KNOWN:
        near = did_you_mean(str(value)[:100], KNOWN)
        raise expected(f"a licence that the Hub knows, or `other` with license_name,{near}")
    return value


def _one_or_several(read_one: Callable[[Any], str], *, or_none: bool = True) -> BeforeValidator:
    """A value, or a list of them; a list either way. or_none: the list may be empty."""

    def read(value: Any) -> list[str]:
        given = isinstance(value, list) and (or_none or bool(value))
        return value if given else [read_one(value)]

    return BeforeValidator(read)


def _block(*keys: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise expected(f"a block with {' and '.join(keys)}")
        return value

    return BeforeValidator(read)


def _full_list(what: str) -> BeforeValidator:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or not value:
            raise expected(f"a list of {what}")
        return value

    return BeforeValidator(read)


def _score(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise expected("a number or text")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise expected("text")
    return value


Text = Annotated[str, BeforeValidator(_text)]
HubId = Annotated[str, BeforeValidator(_hub_id)]
HubIds = Annotated[list[HubId], _one_or_several(_hub_id)]
Bases = Annotated[list[HubId], _one_or_several(_hub_id, or_none=False)]  # none is said by leaving the key out
Languages = Annotated[list[Annotated[str, BeforeValidator(_language)]], _one_or_several(_language)]
Texts = Annotated[list[Text], _one_or_several(_text)]


class _Free(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class EvaluatedTask(_Free):
    type: Text


class EvaluatedData(_Free):
    type: Text
    name: Text


class Metric(_Free):
    type: Text
    value: Annotated[int | float | str, BeforeValidator(_score)]


class IndexedResult(_Free):
    task: Annotated[EvaluatedTask, _block("type")]
    dataset: Annotated[EvaluatedData, _block("type", "name")]
    metrics: Annotated[list[Annotated[Metric, _block("type", "value")]], _full_list("metrics")]


class IndexedModel(_Free):
    name: Text
    results: Annotated[
        list[Annotated[IndexedResult, _block("task", "dataset", "metrics")]], _full_list("results, each with a task")
    ]


class FrontMatter(_Free):
    base_model: Bases | None = None
    base_model_relation: Annotated[Relation | None, choice(Relation)] = None
    library_name: Text | None = None
    pipeline_tag: Text | None = None
    license: Annotated[str | None, BeforeValidator(_licence)] = None
    license_name: Text | None = None
    license_link: Text | None = None
    datasets: HubIds | None = None
    language: Languages | None = None
    metrics: Texts | None = None
    tags: Texts | None = None
    model_index: Annotated[
        list[Annotated[IndexedModel, _block("name", "results")]] | None, _full_list("models, each with results")
    ] = Field(default=None, alias="model-index")

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_null(cls, values: Any) -> Any:
        nulls = [path for path, value in _leaves(values) if value is None and path]
        if problems := [Problem(path, f"{dotted(path)} is null; give a value or remove it") for path in nulls]:
            raise clash(problems)
        return values

    @model_validator(mode="after")
    def _fits(self) -> FrontMatter:
        if problems := list(self._problems()):
            raise clash(problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        if self.license == "other" and self.license_name is None:
            yield Problem(("license",), "license is `other`, and there is no license_name; add it, with license_link")
        if self.license_name is not None and self.license != "other":
            yield Problem(
                ("license_name",),
                f"license_name has no effect beside license {shown(self.license)}; remove it, or set license: other",
            )
        if self.base_model_relation is not None and self.base_model is None:
            yield Problem(("base_model_relation",), "base_model_relation is there, and base_model is not; add it")

    def to_dict(self) -> dict[str, Any]:
        """As the YAML has it, without what is not there."""
        return self.model_dump(by_alias=True, exclude_unset=True)


_FILE = SettingsFile(FrontMatter, "card's head")


def read_front_matter(folder: Path) -> FrontMatter:
    """The validated head of a folder's README.md.

    Raises DexError where there is no card, no head, or something in it that the Hub would refuse.
    """
    return parse_front_matter(read_card(folder), str(folder / README))


def glean_front_matter(folder: Path) -> dict[str, Any]:
    """What can be read of the head of somebody else's card: nothing that is wrong with it is an error."""
    try:
        found = REGEX_YAML_BLOCK.search(read_card(folder))
        if found is None:
            return {}
        _refuse_bombs(found[2], README)
        values = YAML(typ="safe", pure=True).load(found[2])
    except Exception:  # anything can be in a card, and a YAML reader can raise anything
        return {}
    return values if isinstance(values, dict) else {}


def line_of(value: Any) -> str | None:
    """A value of such a head, if it is one line of text."""
    return value.strip() if isinstance(value, str) and value.strip().isprintable() and value.strip() else None


def read_card(folder: Path) -> str:
    """The text of README.md. Raises DexError where there is none."""
    path = folder / README
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DexError(f"{folder} has no {README}; write it: dex card {folder}.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DexError(f"{path} cannot be read ({reason}); write it again: dex card {folder} --force.") from None


def parse_front_matter(card: str, name: str) -> FrontMatter:
    """The same for a text at hand; `name` stands for the file in sentences."""
    found = REGEX_YAML_BLOCK.search(card)
    if found is None:
        raise DexError(
            f"{name} has no front matter: its first line must be ---, followed by YAML and another line ---."
        )
    lines_before = len(re.findall(r"\r\n|\r|\n", found[1]))
    yaml = "\n" * lines_before + found[2]
    _refuse_bombs(yaml, name)
    front = _FILE.parse(yaml, name)
    _refuse_other_reading(yaml, name)
    return front


def _refuse_bombs(yaml: str, name: str) -> None:
    """Raise DexError for a head that would keep its readers busy for minutes: aliases in aliases, or a great length.

    Only tokens are read here, which takes a time in proportion to the text.
    """
    if len(yaml) > LONGEST:
        raise DexError(f"{name}: its front matter has {len(yaml):,} characters; the most is {LONGEST:,}.")
    try:
        alias = next((token for token in older.scan(yaml) if isinstance(token, older.AliasToken)), None)
    except older.YAMLError:
        return  # which the reader says with more words
    if alias is not None:
        line = alias.start_mark.line + 1
        raise DexError(f"{name}, line {line}: an alias (*{alias.value}) is in the front matter; write the value out.")


def _refuse_other_reading(yaml: str, name: str) -> None:
    """huggingface_hub reads YAML 1.1, in which `no` is false: what it sends must be what is meant."""
    values, places = _FILE.read_yaml(yaml, name)
    try:
        read = older.safe_load(yaml)
    except older.YAMLError as error:
        raise DexError(f"{name}: huggingface_hub cannot read this YAML: {str(error).splitlines()[0]}.") from None
    for path, value in _leaves(values):
        if (other := _at(read, path)) != value:
            raise DexError(
                f"{name}, {places[path]}: {dotted(path)} is {shown(value)} to some readers of YAML and "
                f"{shown(other)} to others; put it in quotes."
            )


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no block and no list, and where it is."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values
