"""A recipe as YAML text, the way that other readers of YAML see it too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

PLAIN = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
# Words that YAML 1.1 reads as booleans are quoted too, so that other readers see `off` as we do.
NOT_PLAIN = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def yaml_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from yaml_lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for item in value:
                first, *others = yaml_lines(item)
                yield f"{indent}  - {first}"
                yield from (f"{indent}    {line}" for line in others)
        elif isinstance(value, list):
            yield f"{indent}{key}: [{', '.join(_yaml_scalar(item) for item in value)}]"
        else:
            yield f"{indent}{key}: {_yaml_scalar(value)}"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in NOT_PLAIN
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # 1e-05 is a string in YAML 1.1
    return json.dumps(value)
