"""The options of DIFF V1's configuration, as they are given on the command line: NAME=VALUE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from dex.errors import DexError
from dex.layouts.configuration_diff_v1 import DiffV1Config

_WORDS = {"lambda_mode": ("learned", "fixed"), "head_norm": ("rms", "off", "anneal")}
_WHOLE = ("lambda_sign", "head_norm_steps")
_NUMBERS = ("lambda_value", "lambda_std_dev", "head_norm_eps")
NAMES = (*_WORDS, *_WHOLE, *_NUMBERS)


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """`["lambda_mode=fixed", "lambda_value=0"]` as a dict. Raises DexError for what DIFF V1 has not."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in NAMES or not equals:
            raise DexError(f"--option {text} is not one of DIFF V1's: NAME=VALUE with one of {', '.join(NAMES)}.")
        if name in options:
            raise DexError(f"--option {name} is given twice.")
        options[name] = _parse(name, value)
    if options.get("lambda_mode") == "fixed" and "lambda_std_dev" in options:
        raise DexError(
            "--option lambda_std_dev has no effect with lambda_mode fixed, which has no vectors; remove it."
        )
    if options.get("head_norm") == "off" and "head_norm_eps" in options:
        raise DexError("--option head_norm_eps has no effect with head_norm off; remove it.")
    return options


def _parse(name: str, value: str) -> Any:
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise DexError(f"--option {name} is {value!r}; it can be {' or '.join(_WORDS[name])}.")
        return value
    try:
        number = int(value) if name in _WHOLE else float(value)
    except ValueError:
        number = math.nan
    allowed = {
        "lambda_sign": number in (-1, 1),
        "lambda_value": math.isfinite(number),
    }.get(name, number > 0 and math.isfinite(number))
    if not allowed:
        whole = "a whole number above 0" if name in _WHOLE else "a number above 0"
        expected = {"lambda_sign": "-1 or 1", "lambda_value": "a number"}.get(name, whole)
        raise DexError(f"--option {name} is {value!r}; it must be {expected}.")
    return number


def diff_v1_config(**values: Any) -> DiffV1Config:
    """The configuration; options that do not fit each other raise DexError in one sentence."""
    try:
        return DiffV1Config(**values)
    except StrictDataclassError as error:
        raise DexError(str(error.__cause__ or error).strip().splitlines()[-1].strip()) from error
