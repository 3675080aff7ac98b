"""λ(t) and ‖λ f_D(O)‖/‖O‖ over the steps of the run that made an adapter, from the log.jsonl beside it.

A line of the log holds `lam` and `branch_ratio`, one number for each of the A adapted layers, as
`dex.tuner.callback.DexCallback` logs them; lines without them (a held-out loss on the way) are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dex.analysis.records import Curve, number
from dex.analysis.thinned import MOST_LINES, MOST_POINTS, thinned
from dex.errors import DexError

LOG = "log.jsonl"


def log_beside(adapter: str) -> Path | None:
    """<run>/log.jsonl of the adapter folder <run>/adapter; None if there is none, as for an adapter of the Hub."""
    folder = Path(adapter)
    log = folder.resolve().parent / LOG
    return log if folder.is_dir() and log.is_file() else None


def branch_curves(log: Path, layers: Sequence[int]) -> list[Curve]:
    """`lam_over_steps` and `branch_ratio_over_steps` of the adapted `layers`; none of which the log has nothing.

    Raises DexError for a damaged log, and for one of another adapter, which had another number of layers.
    """
    lines = read_log(log)
    lam = _curve(
        "lam_over_steps",
        "λ over the training",
        "λ(t) of each adapted layer at the logged steps of the run that made the adapter.",
        "λ",
        _values(log, lines, "lam", layers),
        layers,
    )
    ratio = _curve(
        "branch_ratio_over_steps",
        "Branch ratio over the training",
        "‖λ f_D(O)‖/‖O‖ of each adapted layer, as the run measured it on the first micro-batch of each logged step.",
        "‖λ f_D(O)‖/‖O‖",
        _values(log, lines, "branch_ratio", layers),
        layers,
    )
    return [curve for curve in (lam, ratio) if curve is not None]


def read_log(log: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, entry) of every line. Only the last line may be damaged: that is how a kill leaves it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DexError(f"{log} cannot be read: {error.strerror or error}.") from error
    entries = []
    for place, line in enumerate(lines, start=1):
        entry = _entry(line)
        if entry is not None:
            entries.append((place, entry))
        elif place < len(lines):
            raise DexError(
                f"{log}, line {place} is damaged: it is no JSON object with a step; mend or delete the line, or move "
                "the log away to leave the run's curves out."
            )
    return entries


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and _is_step(entry.get("step")) else None


def _values(
    log: Path, lines: Sequence[tuple[int, dict[str, Any]]], key: str, layers: Sequence[int]
) -> dict[float, list[float]]:
    """The values of the adapted layers at every step that has them."""
    found: dict[float, list[float]] = {}
    for place, entry in lines:
        if key not in entry:
            continue
        values = entry[key]
        if not isinstance(values, list) or len(values) != len(layers) or not all(map(_is_number, values)):
            raise DexError(
                f"{log}, line {place} has no {key} for each of the adapter's {len(layers)} layers, so the log is not "
                "that of this adapter's run; move it away to leave the run's curves out."
            )
        found[float(entry["step"])] = values
    return found


def _is_step(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_number(value: Any) -> bool:
    """NaN is one: a λ that diverged. An integer of hundreds of digits is JSON too, and none."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _curve(
    name: str, title: str, meaning: str, y_label: str, values: dict[float, list[float]], layers: Sequence[int]
) -> Curve | None:
    if not values:
        return None
    steps = sorted(values)
    steps = [steps[index] for index in thinned(len(steps), MOST_POINTS)]
    lines = {
        f"layer {layers[index]}": [number(values[step][index]) for step in steps]
        for index in thinned(len(layers), MOST_LINES)
    }
    return Curve(name=name, title=title, meaning=meaning, x_label="step", y_label=y_label, x=steps, lines=lines)
