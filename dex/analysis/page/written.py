"""Numbers as the page writes them; base.js has the same rules in `written`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

UNDEFINED = "–"
SMALLEST = 1e-3  # smaller values are written with an exponent


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, whole numbers whole: "0.123", "12.3", "−1.50e−5", "12,345"; "–" for None."""
    if value is None:
        return UNDEFINED
    size = abs(value)
    if size != 0 and size < SMALLEST:
        text = f"{value:.{digits - 1}e}".replace("e-0", "e-")
    elif float(value).is_integer() and size < 1e9:
        text = f"{value:,.0f}"
    elif size < 10**digits:
        text = fixed(value, max(0, digits - 1 - math.floor(math.log10(size))))
    else:
        text = f"{value:,.0f}" if size < 1e9 else f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e+", "e")
    return text.replace("-", "−")


def fixed(value: float | None, decimals: int) -> str:
    """With so many decimals, so that the numbers of a column stand under each other."""
    return UNDEFINED if value is None else f"{value:,.{decimals}f}".replace("-", "−")


def decimals_of(values: Iterable[float | None]) -> int | None:
    """Decimals that give a column's middling value four digits; None: some value would then be written as 0."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes or all(float(size).is_integer() for size in sizes):
        return 0
    decimals = min(6, max(0, 3 - math.floor(math.log10(sizes[len(sizes) // 2]))))
    return decimals if sizes[0] >= 0.5 * 10**-decimals else None


def column(values: list[float | None]) -> list[str]:
    """A column of numbers that line up, or of four digits each where they lie too far apart for that."""
    decimals = decimals_of(values)
    return [number(value, digits=4) if decimals is None else fixed(value, decimals) for value in values]


def cells(values: list[str | float | None]) -> list[str]:
    """A column of a `Table`: words as they are, and numbers that line up."""
    numbers = iter(column([value for value in values if not isinstance(value, str)]))
    return [value if isinstance(value, str) else next(numbers) for value in values]


def setting(value: Any) -> str:
    """A setting or a fact of the environment: words as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
