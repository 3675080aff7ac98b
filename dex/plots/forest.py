"""A forest plot: every difference with its interval, a panel for each suite, the suite's average at its bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dex.evaluation.comparison import Difference, Row
from dex.plots import COLOURS, check_matplotlib, panels, save

MARKERS = ("o", "s", "D", "^", "v")
DECIDED = ("better", "worse")
WIDTH, LINE, AROUND, LEGEND = (
    8.0,
    0.17,
    0.75,
    0.3,
)  # inches: the figure, a difference, a panel's axis, a legend's line


def draw(rows: Sequence[Row], reference: str, path: Path) -> None:
    """Draw the rows' differences from the reference. A filled mark is better or worse, a hollow one neither.

    Raises DexError where there is no matplotlib or the file cannot be written.
    """
    check_matplotlib()
    suites = list(dict.fromkeys(row.suite for row in rows))
    by_suite = [[row for row in rows if row.suite == suite] for suite in suites]
    marks = _legend_of(rows)
    columns = max(1, min(4, 80 // (6 + max(map(len, marks)))))
    heights = [AROUND + LINE * sum(len(row.differences) + 1 for row in of_suite) for of_suite in by_suite]
    heights[0] += LEGEND * math.ceil(len(marks) / columns)
    made, drawn = panels(WIDTH, heights)
    for axes, of_suite in zip(drawn, by_suite, strict=True):
        _panel(axes, of_suite, reference, title=of_suite[0].suite if len(suites) > 1 else "")
    made.legend(marks.values(), marks, loc="outside upper center", ncols=columns, frameon=False)
    save(made, path)


def _panel(axes: Any, rows: Sequence[Row], reference: str, title: str) -> None:
    y, ticks = 0.0, []
    for row in rows:
        if row.task is None:
            axes.axhline(y - 1, color="0.8", linewidth=0.8)
        for index, each in enumerate(row.differences):
            _mark(axes, each, y + index, index)
        ticks.append(y + (len(row.differences) - 1) / 2)
        y += len(row.differences) + 1
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    axes.set_yticks(ticks, [row.name if row.metric is None else f"{row.name} ({row.metric})" for row in rows])
    axes.set_ylim(y - 1.2, -0.8)  # the first task on top
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel(f"difference from {reference} ({_better(rows)})")


def _mark(axes: Any, each: Difference, y: float, index: int) -> None:
    colour, marker = _style(index)
    mean, low, high = each.difference
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
    filled = colour if each.verdict in DECIDED else "white"
    axes.plot([mean], [y], marker, color=colour, markerfacecolor=filled, markersize=5)


def _style(index: int) -> tuple[str, str]:
    return COLOURS[index % len(COLOURS)], MARKERS[index // len(COLOURS) % len(MARKERS)]


def _better(rows: Sequence[Row]) -> str:
    ways = {row.higher_is_better for row in rows}
    if len(ways) > 1:
        return "better is right or left, as the metric has it"
    return "right is better" if ways == {True} else "left is better"


def _legend_of(rows: Sequence[Row]) -> dict[str, Any]:
    """What the legend shows: the models, and a hollow mark where there is one."""
    from matplotlib.lines import Line2D

    marks = {}
    for index, each in enumerate(rows[0].differences):
        colour, marker = _style(index)
        marks[each.model] = Line2D([], [], color=colour, marker=marker, markersize=5)
    if any(each.verdict not in DECIDED for row in rows for each in row.differences):
        marks["hollow: no difference shown"] = Line2D(
            [], [], marker="o", color="0.4", markerfacecolor="white", markersize=5, linestyle="none"
        )
    return marks
