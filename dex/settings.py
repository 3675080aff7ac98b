"""The blocks of a recipe and the values in them: each reader returns a value in its type or says what is expected.

    class Run(Block):
        tokens: Annotated[int, whole(above=0)]

Everything that is wrong becomes one sentence: `expected` for one value, `Problem` for settings that do not fit
each other. No torch here, so that a recipe is refused at once.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

KeyPath = tuple[str | int, ...]


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(NamedTuple):
    """Two settings that do not fit: where the one to change is, and the sentence that names both."""

    path: KeyPath
    sentence: str


def clash(problems: Iterable[Problem]) -> PydanticCustomError:
    found = list(problems)
    return PydanticCustomError("clash", "{sentence}", {"sentence": found[0].sentence, "problems": found})


def shown(value: Any) -> str:
    """A value as a sentence names it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "a block" if value else "an empty block"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


class _Range(NamedTuple):
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        return not (
            (self.above is not None and value <= self.above)
            or (self.at_least is not None and value < self.at_least)
            or (self.below is not None and value >= self.below)
            or (self.at_most is not None and value > self.at_most)
        )

    def __str__(self) -> str:
        bounds = {
            "above": self.above,
            "of at least": self.at_least,
            "below": self.below,
            "of at most": self.at_most,
        }
        named = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        return f" {' and '.join(named)}" if named else ""


def expected(what: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{what} is expected", {"what": what})


def whole(null: bool = False, word: str | None = None, **bounds: float) -> BeforeValidator:
    """Read a whole number; also null, or one word, where the setting has one."""
    limits = _Range(**bounds)
    what = f"a whole number{limits}{f' or {word}' if word else ''}{' or null' if null else ''}"

    def read(value: Any) -> int | str | None:
        if (value is None and null) or (word is not None and value == word):
            return word if value is not None else None
        number = _as_float(value)
        if number is None or not number.is_integer() or not limits.holds(number):
            raise expected(what)
        return int(value) if isinstance(value, int) else _as_int(str(value), number)

    return BeforeValidator(read)


def number(null: bool = False, **bounds: float) -> BeforeValidator:
    """Read a finite number. Text counts if it is one: parsers of YAML 1.1 take 1e-4 for a string."""
    limits = _Range(**bounds)

    def read(value: Any) -> float | None:
        if value is None and null:
            return None
        number = _as_float(value)
        if number is None or not limits.holds(number):
            raise expected(f"a number{limits}{' or null' if null else ''}")
        return number

    return BeforeValidator(read)


def _as_float(value: Any) -> float | None:
    """The finite number that `value` is or spells; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_int(text: str, number: float) -> int:
    try:
        return int(text)  # exact beyond 2**53, where the float is not
    except ValueError:
        return int(number)


def text(null: bool = False) -> BeforeValidator:
    """Read a name, path or id: printable, on one line, not empty."""

    def read(value: Any) -> str | None:
        if value is None and null:
            return None
        if not isinstance(value, str):
            hint = "" if value is None or isinstance(value, dict | list) else " (put it in quotes)"
            raise expected(f"text{' or null' if null else ''}{hint}")
        if not value.strip() or not value.isprintable():
            raise expected("printable text on one line")
        return value

    return BeforeValidator(read)


def choice(literal: Any, null: bool = False) -> BeforeValidator:
    """Read one of the words of a Literal; also null, where the setting has it."""
    words = list(get_args(literal))

    def read(value: Any) -> str | None:
        if value is None and null:
            return None
        if value in words:
            return str(value)
        raise expected(one_of(str(value), [*words, "null"] if null else words))

    return BeforeValidator(read)


def one_of(given: str, words: list[str]) -> str:
    """The words there are, and which of them may have been meant."""
    return f"one of {', '.join(words)}{did_you_mean(given, words)}"


def did_you_mean(given: str, words: Iterable[str]) -> str:
    """The word that may have been meant, as the end of a clause; nothing where none is near."""
    near = difflib.get_close_matches(given, sorted(words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise expected("true or false")
    return value


YesNo = Annotated[bool, BeforeValidator(_yes_or_no)]


def distinct(what: str, at_least: int = 1) -> AfterValidator:
    """A list without twins; or null, which `what` has to say."""

    def check(values: list[Any] | None) -> list[Any] | None:
        if values is not None and (len(values) < at_least or len(set(values)) < len(values)):
            raise expected(what)
        return values

    return AfterValidator(check)
