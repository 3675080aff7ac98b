"""The plan in words: aligned tables, sizes with their unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(number: int) -> str:
    """Bytes, as 1.50 GiB."""
    for unit, factor in UNITS:
        if number >= factor:
            return f"{number / factor:,.2f} {unit}"
    return f"{number} B"


def duration(seconds: float) -> str:
    for unit, factor in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"


def table(columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    """Rows under columns; all but the first column are numbers, aligned at their right."""
    made = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(str, row))
    console = Console(width=160, highlight=False)
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
