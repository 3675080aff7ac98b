"""Lines over training, one a variant: the mean over its seeds, with the range of the seeds as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dex.plots import COLOURS, figure, save

Floats = NDArray[np.float64]
STYLES = ("-", "--", ":", "-.")  # with the colours, 32 lines that can be told apart


def plot_curves(
    curves: Mapping[str, tuple[Sequence[float], Floats]],
    path: Path,
    y: str,
    x: str = "tokens",
    zero: bool = False,
    log_x: bool = False,
) -> None:
    """Draw every curve: x [P] and values [S, P] of its seeds. `zero` draws the line y = 0."""
    made, axes = figure(8.0, 4.8)
    for i, (name, (at, values)) in enumerate(curves.items()):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(at, values.mean(axis=0), color=colour, linestyle=style, label=name, linewidth=1.4)
        if len(values) > 1:
            axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    if zero:
        axes.axhline(0.0, color="black", linewidth=0.8)
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    save(made, path)


def smoothed(values: Floats, width: int) -> Floats:
    """A running mean over `width` points of each row, [S, P] → [S, P − width + 1]."""
    window = np.ones(width) / width
    return np.stack([np.convolve(row, window, mode="valid") for row in values])
