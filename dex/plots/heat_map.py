"""A grid of values by colour, each written into its cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dex.plots import figure, plain, save

WRITTEN = 144  # cells at most, for their values to be legible
LABELS = 24  # at most on an axis, so that they do not overlap


def draw_heat_map(
    grid: Sequence[Sequence[float]],
    rows: tuple[str, Sequence[object]],
    columns: tuple[str, Sequence[object]],
    title: str,
    path: Path,
    limits: tuple[float, float] | None = None,
    diverging: bool = False,
) -> None:
    """grid: [rows, columns]; NaN cells stay grey. rows, columns: a name, and labels.

    limits: of the colours; None: the grid's, and 0. diverging: 0 is the middle of the colours, whatever the limits.
    """
    height, width = len(grid), len(grid[0])
    values = [value for row in grid for value in row if not math.isnan(value)]
    low, high = limits or (min([0.0, *values]), max([0.0, *values]))
    if diverging:
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    made, axes = figure(max(4.0, 1.8 + 0.45 * min(width, 40)), max(2.4, 1.2 + 0.35 * min(height, 40)))
    axes.set_facecolor("0.85")
    # Both can be told apart by colour-blind readers; viridis grows lighter with the value.
    image = axes.imshow(grid, cmap="PuOr_r" if diverging else "viridis", vmin=low, vmax=high, aspect="auto")
    for axis, (name, labels) in ((axes.yaxis, rows), (axes.xaxis, columns)):
        step = -(-len(labels) // LABELS)
        axis.set_label_text(name)
        axis.set_ticks(range(0, len(labels), step), [str(label) for label in labels[::step]])
    if height * width <= WRITTEN:
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                if math.isnan(value):
                    continue
                share = (value - low) / ((high - low) or 1.0)
                light = 0.25 < share < 0.75 if diverging else share > 0.6
                colour = "black" if light else "white"
                written = f"{value:.2f}" if limits else f"{value:.2g}"  # shares are between limits
                axes.text(x, y, written, ha="center", va="center", fontsize=8, color=colour)
    made.colorbar(image, ax=axes)
    axes.set_title(plain(title), fontsize=10)
    save(made, path)
