"""Figures as PNG files, drawn with matplotlib (the extra `report`), each kind in a file of its own.

Colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dex.errors import DexError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def check_matplotlib() -> None:
    """Raise DexError, before any work is done, where figures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DexError("Figures need matplotlib: pip install 'dex-llm[report]'.") from None


def figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of so many inches and its axes, drawn without a screen."""
    made, (axes,) = panels(width, [height])
    return made, axes


def panels(width: float, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """The same with axes below each other, of so many inches each."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, sum(heights)), layout="constrained")
    FigureCanvasAgg(made)
    drawn = list(made.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    for axes in drawn:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return made, drawn


def plain(text: str) -> str:
    """A text as it is: matplotlib reads what stands between dollars as a formula."""
    return text.replace("$", r"\$")


def save(made: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    partial = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without its date and version a figure of the same numbers is the same file.
        made.savefig(partial, format="png", dpi=160, metadata={"Software": None})
        partial.replace(path)
    except OSError as error:
        raise DexError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
