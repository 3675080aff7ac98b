"""A grid of values by colour, each written into its cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dex.plots import figure, save

WRITTEN = 144  # cells at most, for their values to be legible
LABELS = 24  # at most on an axis, so that they do not overlap


def draw_heat_map(
    grid: Sequence[Sequence[float]],
    rows: tuple[str, Sequence[object]],
    columns: tuple[str, Sequence[object]],
    title: str,
    path: Path,
    limits: tuple[float, float] | None = None,
) -> None:
    """grid: [rows, columns]. rows, columns: a name, and labels. limits: of the colours; None: the grid's, and 0."""
    height, width = len(grid), len(grid[0])
    values = [value for row in grid for value in row]
    low, high = limits or (min(0.0, *values), max(0.0, *values))
    made, axes = figure(max(4.0, 1.8 + 0.45 * min(width, 40)), max(2.4, 1.2 + 0.35 * min(height, 40)))
    image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, aspect="auto")  # lightness grows with the value
    for axis, (name, labels) in ((axes.yaxis, rows), (axes.xaxis, columns)):
        step = -(-len(labels) // LABELS)
        axis.set_label_text(name)
        axis.set_ticks(range(0, len(labels), step), [str(label) for label in labels[::step]])
    if height * width <= WRITTEN:
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                colour = "black" if value > low + 0.6 * (high - low) else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    made.colorbar(image, ax=axes)
    axes.set_title(title, fontsize=10)
    save(made, path)
