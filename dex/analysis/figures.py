"""The main figures as PNG files for papers: each headline statistic by layer and head or by layer, and each curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dex.analysis.differences import statistics
from dex.analysis.records import Curve, ModelReport, Report, Statistic
from dex.plots.curves import Floats, plot_curves
from dex.plots.heat_map import draw_heat_map


def draw_figures(report: Report, folder: Path) -> list[Path]:
    """Write figures/<model>-<statistic>.png and the like; of two models also their differences."""
    made = []
    for model in report.models:
        for statistic in statistics(model):
            if statistic.headline:
                made += _draw(statistic, model.label, folder)
        made += [_draw_curve(curve, model, folder) for found in model.sections.values() for curve in found.curves]
    if len(report.models) == 2:
        name = f"{report.models[1].label} minus {report.models[0].label}"
        for statistic in report.differences:
            if statistic.headline:
                made += _draw(statistic, name, folder)
    return made


def _draw(statistic: Statistic, of: str, folder: Path) -> list[Path]:
    """Of a number for the model there is nothing to draw."""
    path = folder / f"{_file_name(of)}-{statistic.name}.png"
    title = f"{of}: {statistic.title}" + (f" ({statistic.unit})" if statistic.unit else "")
    if statistic.over == "head":
        grid = np.array(statistic.values, dtype=np.float64)  # None becomes NaN
        rows, columns = ("layer", range(len(grid))), ("head", range(len(grid[0])))
        draw_heat_map(grid.tolist(), rows, columns, title, path, diverging=statistic.diverging)
        return [path]
    if statistic.over == "layer":
        values = _row(statistic.values)
        plot_curves(
            {of: (range(values.shape[1]), values)}, path, statistic.unit or statistic.title, "layer", title=title
        )
        return [path]
    return []


def _draw_curve(curve: Curve, model: ModelReport, folder: Path) -> Path:
    path = folder / f"{_file_name(model.label)}-{curve.name}.png"
    title = f"{model.label}: {curve.title}"
    lines = {label: (curve.x, _row(values)) for label, values in curve.lines.items()}
    plot_curves(lines, path, curve.y_label, curve.x_label, title=title, points=curve.points)
    return path


def _row(values: Any) -> Floats:
    return np.array([values], dtype=np.float64)  # None becomes NaN


def _file_name(label: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in label)
