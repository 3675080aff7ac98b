"""Lines over a common x (tokens, layers, ranks): the mean over seeds, with the range of the seeds as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dex.plots import COLOURS, figure, plain, save

Floats = NDArray[np.float64]
STYLES = ("-", "--", ":", "-.")  # with the colours, 32 lines that can be told apart


def plot_curves(
    curves: Mapping[str, tuple[Sequence[float], Floats]],
    path: Path,
    y: str,
    x: str = "tokens",
    zero: bool = False,
    log_x: bool = False,
    title: str = "",
    points: bool = False,
) -> None:
    """Draw every curve: x [P] and values [S, P] of its seeds. `zero` draws the line y = 0; NaN leaves a gap.

    points: no lines between the values, since x has no order of its own.
    """
    made, axes = figure(8.0, 4.8)
    for i, (name, (at, values)) in enumerate(curves.items()):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        how: dict[str, Any] = (
            {"linestyle": "none", "marker": "o", "markersize": 3.5} if points else {"linestyle": style}
        )
        axes.plot(at, values.mean(axis=0), color=colour, label=plain(name), linewidth=1.4, **how)
        if len(values) > 1:
            axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
    if zero:
        axes.axhline(0.0, color="black", linewidth=0.8)
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(plain(title), fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    save(made, path)


def smoothed(values: Floats, width: int) -> Floats:
    """A running mean over `width` points of each row, [S, P] → [S, P − width + 1]."""
    window = np.ones(width) / width
    return np.stack([np.convolve(row, window, mode="valid") for row in values])
