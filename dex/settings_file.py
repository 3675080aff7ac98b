"""YAML files whose every key is known: reading them, `key.path=value` overrides, and saying what is wrong in them.

    RECIPES = SettingsFile(Recipe, "recipe", {("method",): METHODS})
    RECIPES.load("mine.yaml", ["run.seed=1"])

A sentence names the file, the line, the key, what was given and what is expected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from dex.errors import DexError
from dex.settings import KeyPath, Problem, shown

Settings = TypeVar("Settings", bound=BaseModel)
Place = tuple[str, ...]


class SettingsFile(Generic[Settings]):
    """A kind of file: the settings at its root, its name, and the blocks whose `name` chooses their class."""

    def __init__(
        self,
        root: type[Settings],
        what: str,
        named: Mapping[Place, Mapping[str, Any]] | None = None,
        lists: Mapping[Place, str] | None = None,
        hint: str = "",
        maps: Sequence[Place] = (),
    ) -> None:
        """lists: what a list is one of, for sentences. hint: where to find such a file, for one that is missing.

        maps: blocks whose keys are names of the user's own.
        """
        self.root, self.what, self.named, self.lists, self.hint = root, what, named or {}, lists or {}, hint
        self.maps = maps
        self.keys = _keys_by_block(root)

    def load(self, path: str | Path, overrides: Sequence[str] = ()) -> Settings:
        """Read a file and apply overrides, whose values are YAML. Raises DexError, in one sentence."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise DexError(f"{path} does not exist{self.hint}.") from None
        except IsADirectoryError:
            raise DexError(f"{path} is a folder; a {self.what} is one YAML file.") from None
        except UnicodeDecodeError as error:
            raise DexError(f"{path} is not a {self.what}: byte {error.start} is not UTF-8 text.") from None
        except OSError as error:
            raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
        return self.parse(text, str(path), overrides)

    def parse(self, text: str, name: str, overrides: Sequence[str] = ()) -> Settings:
        """`load` for a text at hand; `name` stands for the file in error sentences."""
        return self._made(_Document(self, name, *self.read_yaml(text, name)), overrides)

    def from_values(self, values: dict[str, Any], name: str) -> Settings:
        """Settings that other settings were put together from."""
        return self._made(_Document(self, name, values, {}), ())

    def from_overrides(self, overrides: Sequence[str], name: str) -> Settings:
        """Settings of the command line alone."""
        return self._made(_Document(self, name, {}, {}), overrides)

    def block(self, **settings: Any) -> Settings:
        """Settings of code. Raises DexError as for a file."""
        try:
            return self.root(**settings)
        except ValidationError as error:
            raise DexError(f"{next(self.problems(error)).sentence}.") from None

    def _made(self, document: _Document, overrides: Sequence[str]) -> Settings:
        for override in overrides:
            document.override(override)
        try:
            return self.root.model_validate(document.values)
        except ValidationError as error:
            raise DexError(document.explain(error)) from None

    def read_yaml(self, text: str, name: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
        """The values, and the place of each key ("line 7"), before anything is checked but that it is YAML."""
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        try:
            values = _with_text_keys(YAML(typ="safe", pure=True).load(text))
            places: dict[KeyPath, str] = {}
            _note_lines(YAML(typ="safe", pure=True).compose(text), (), places, set())
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            problem = str(error.problem or error.context).splitlines()[0]
            raise DexError(f"{name}{where}: this is not valid YAML: {problem}.") from None
        except (YAMLError, ValueError) as error:
            raise DexError(f"{name}: this is not valid YAML: {str(error).splitlines()[0]}.") from None
        except RecursionError:
            raise DexError(f"{name}: this is not a {self.what}: it is nested too deeply, or within itself.") from None
        if values is None:
            raise DexError(f"{name} is empty; a {self.what} has the blocks {self.named_keys(())}.")
        if not isinstance(values, dict):
            blocks = self.named_keys(())
            raise DexError(f"{name} is not a {self.what}: it holds {shown(values)}, not the blocks {blocks}.")
        return values, places

    # --- Saying what is wrong ------------------------------------------------------------------------------

    def problems(self, error: ValidationError) -> Iterator[Problem]:
        for found in error.errors(include_url=False):
            path: KeyPath = tuple(key for key in found["loc"] if not str(key).startswith("<"))
            if found["type"] == "clash":
                yield from found["ctx"]["problems"]
            elif found["type"] == "extra_forbidden":
                tags = [str(key)[1:-1] for key in found["loc"] if str(key).startswith("<")]
                yield Problem(path, self._unknown_key(path, tags[0] if tags else None))
            elif found["type"] == "missing":
                yield Problem(path, f"{dotted(path)} is missing")
            else:
                expected = found["msg"] if found["type"] == "expected" else self._expected(path, found["type"])
                yield Problem(path, f"{dotted(path)}: {shown(found['input'])} was given, {expected}")

    def _unknown_key(self, path: KeyPath, tag: str | None) -> str:
        block, key = self._block(path[:-1]), str(path[-1])
        known = self.keys.get(block, [])
        chosen = self.named.get(block, {}).get(tag or "")
        if chosen is not None:
            if key in known:
                named = f"{'.'.join(block)}.name {tag}"
                return f"{dotted(path)} has no effect with {named}, {chosen.what}; remove it"
            known = list(chosen.model_fields)
        if key in known:  # of the other kind of heads
            return f"{dotted(path)} has no effect beside method.heads.plan; give one of the two"
        elsewhere = [".".join((*place, key)) for place, keys in self.keys.items() if key in keys]
        if near := difflib.get_close_matches(key, known, n=1):
            hint = f"did you mean {dotted((*path[:-1], near[0]))}?"
        elif elsewhere:
            hint = f"did you mean {elsewhere[0]}?"
        else:
            hint = f"{dotted(path[:-1]) or f'a {self.what}'} has {listed(known)}"
        return f"{dotted(path)} is not a key of a {self.what}; {hint}"

    def _expected(self, path: KeyPath, kind: str) -> str:
        what = self.lists.get(self._block(path))
        if what is not None and not isinstance(path[-1], int):
            return f"a list of {what} is expected"
        if path in self.maps:
            return "a block with a name for each is expected"
        if kind == "list_type":
            return "a list is expected"
        if self._block(path) not in self.keys:
            return "it cannot be that"
        return f"a block with {self.named_keys(self._block(path))} is expected"

    def _block(self, path: KeyPath) -> Place:
        """The place of a block, without the indices of lists and the user's own names."""
        place: Place = ()
        own_name = False
        for key in path:
            if isinstance(key, str) and not own_name:
                place = (*place, key)
            own_name = place in self.maps and not own_name
        return place

    def named_keys(self, block: Place) -> str:
        return listed(self.keys[block])


class _Document:
    """The values of one file before validation, and where each was given."""

    def __init__(
        self, kind: SettingsFile[Any], name: str, values: dict[str, Any], places: dict[KeyPath, str]
    ) -> None:
        self.kind, self.name, self.values, self.places = kind, name, values, places

    def override(self, override: str) -> None:
        """Set one `key.path=value`; blocks that are missing on the way are made."""
        path, equals, given = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise DexError(f"{override!r} is not an override; write key.path=value, such as run.seed=1.")
        here: Any = self.values
        done: KeyPath = ()
        for key in keys[:-1]:
            index = self._place_in(here, key, done, override)
            if isinstance(here, dict) and here.get(key) is None:
                here[key] = {}
                self.places[(*done, index)] = "on the command line"
            here, done = here[index], (*done, index)
        index = self._place_in(here, keys[-1], done, override)
        here[index] = _override_value(given, override)
        self._place_on_command_line((*done, index))

    def _place_in(self, here: Any, key: str, path: KeyPath, override: str) -> str | int:
        if isinstance(here, dict):
            return key
        block = dotted(path)
        if not isinstance(here, list):
            raise DexError(f"{override!r} on the command line: {block} is {shown(here)} and has no keys.")
        if not key.isdecimal() or int(key) >= len(here):
            raise DexError(
                f"{override!r} on the command line: {block} is a list of {len(here)}, whose entries are "
                f"{block}.0 to {block}.{len(here) - 1}, so there is no {block}.{key}."
            )
        return int(key)

    def _place_on_command_line(self, path: KeyPath) -> None:
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        self.places[path] = "on the command line"

    def explain(self, error: ValidationError) -> str:
        """The first problem in one sentence, and how many more there are."""
        problems = sorted(self.kind.problems(error), key=self._order)
        first, more = problems[0], len(problems) - 1
        place = self._place_of(first.path)
        where = self.name if place is None else f"{self.name}, {place}"
        rest = f" ({more} more problem{'s' if more > 1 else ''} after this one)" if more else ""
        return f"{where}: {first.sentence}{rest}."

    def _place_of(self, path: KeyPath) -> str | None:
        """Where `path` was given, or else the block that it is or should be in."""
        return next((self.places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.places), None)

    def _order(self, problem: Problem) -> tuple[bool, int]:
        """By line; what is missing last, as an unknown key is often the missing one, misspelt."""
        place = self._place_of(problem.path) or ""
        line = re.search(r"\d+", place)
        return problem.path not in self.places, int(line[0]) if line else 0


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _note_lines(node: Any, path: KeyPath, places: dict[KeyPath, str], seen: set[int]) -> None:
    if node is None or id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))
    for index, item in enumerate(node.value):
        key, child = item if isinstance(item, tuple) else (None, item)
        here = (*path, index if key is None else str(key.value))
        places[here] = f"line {(key or child).start_mark.line + 1}"
        _note_lines(child, here, places, seen)


def _override_value(given: str, override: str) -> Any:
    """The value as YAML has it, but numbers and dates as typed: a revision may be 0123456 or 12e4."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = _with_text_keys(YAML(typ="safe", pure=True).load(given))
    except (YAMLError, ValueError, RecursionError):
        raise DexError(f"{override[:60]!r} on the command line: what follows the = is not valid YAML.") from None
    return value if value is None or isinstance(value, bool | str | list | dict) else given.strip()


def dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def listed(keys: list[str]) -> str:
    *first, last = keys
    return f"{', '.join(first)} and {last}" if first else last


def _keys_by_block(model: type[BaseModel], path: Place = ()) -> dict[Place, list[str]]:
    """The keys of every block, by its path without list indices."""
    keys: dict[Place, list[str]] = {path: list(model.model_fields)}
    for name, field in model.model_fields.items():
        for block in _blocks_in(field.annotation):
            for place, names in _keys_by_block(block, (*path, name)).items():
                keys[place] = list(dict.fromkeys(keys.get(place, []) + names))
    return keys


def _blocks_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in _blocks_in(argument)]
