"""Accuracy against the number of shots, with its spread over orderings and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dex.plots import COLOURS, figure, save


def draw_shots(spread: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """spread: of a result's figures, by the number of shots."""
    made, axes = figure(5.5, 3.6)
    shots = [int(count) for count in spread]
    rows = list(spread.values())
    lowest, highest = ([row[key] for row in rows] for key in ("lowest", "highest"))
    axes.fill_between(shots, lowest, highest, color=COLOURS[0], alpha=0.2, linewidth=0)
    label = "random orderings: mean, lowest and highest"
    axes.plot(shots, [row["random_mean"] for row in rows], "o-", color=COLOURS[0], label=label)
    axes.plot(shots, [row["sorted_mean"] for row in rows], "s--", color=COLOURS[1], label="sorted by label: mean")
    axes.set_xscale("log", base=2)
    axes.set_xticks(shots, [str(count) for count in shots])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("shots")
    axes.set_ylabel("accuracy")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    save(made, path)
