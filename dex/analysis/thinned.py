"""Which of many layers or steps are drawn: every k-th, the first and the last always."""

from __future__ import annotations

MOST_LINES = 12  # of one figure: more cannot be told apart by colour
MOST_POINTS = 400  # of one line: more than a figure has pixels to show, and report.json stays small


def thinned(count: int, most: int) -> list[int]:
    """At most `most` (2 or more) of the indices 0 … count − 1, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    every = -(-(count - 1) // (most - 1))
    return sorted({*range(0, count, every), count - 1})
