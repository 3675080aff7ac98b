"""Figures as words, and tables of them: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dex.evaluation.paired import Interval


def interval(value: Interval, digits: int = 4, sign: bool = False) -> str:
    """The mean and its interval, as a table shows them."""
    plus = "+" if sign else ""
    mean = f"{value.mean:{plus}.{digits}f}"
    if value.low is None or value.high is None:
        return f"{mean} [one group: no interval]"
    return f"{mean} [{value.low:{plus}.{digits}f}, {value.high:{plus}.{digits}f}]"


def p_value(p: float | None) -> str:
    if p is None:
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def terminal(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table for the terminal; the first `words` columns hold words, the others figures."""
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < words else "right", no_wrap=index >= words, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return rendered(table, width=1_000)  # no wider than it has to be, and no cell is broken


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """The same in Markdown."""
    rule = ["---" if index < words else "---:" for index in range(len(header))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, rule, *rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def rendered(table: Table, width: int = 160) -> str:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
