"""The λ dial: how far the loss at every scale is from that at scale 1, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dex.evaluation.comparison import Difference
from dex.plots import COLOURS, figure, save


def draw(curve: Sequence[tuple[float, Difference | None]], path: Path) -> None:
    """curve: scales by size, each with its difference from scale 1, which has none. Filled marks: shown to differ."""
    made, axes = figure(6.0, 3.8)
    means = [each.difference.mean if each else 0.0 for _, each in curve]
    axes.plot([scale for scale, _ in curve], means, color=COLOURS[0], linewidth=1.2)
    for scale, each in curve:
        shown = each is None or each.verdict in ("better", "worse")
        if each is not None and each.difference.low is not None:
            axes.plot([scale, scale], each.difference[1:], color=COLOURS[0], linewidth=1.6, solid_capstyle="butt")
        mean = each.difference.mean if each else 0.0
        face = COLOURS[0] if shown else "white"
        axes.plot([scale], [mean], "o", color=COLOURS[0], markerfacecolor=face, markersize=5)
    axes.axhline(0, color="black", linewidth=0.8, zorder=1)
    axes.axvline(1, color="0.6", linewidth=0.8, linestyle=":", zorder=1)
    axes.set_xlabel("S, of S · λ (0: no branch, 1: as trained)")
    axes.set_ylabel("held-out loss − that at S = 1")
    save(made, path)
