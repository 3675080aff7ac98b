"""The report of a study: report.json, report.md, and figures beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dex.environment import environment
from dex.evaluation.comparison import Difference, Row, Verdict
from dex.evaluation.held_out import TASK
from dex.evaluation.paired import Interval
from dex.evaluation.tables import interval
from dex.output import write_json, write_whole
from dex.plots import forest
from dex.plots.curves import plot_curves, smoothed
from dex.studies.jobs import Done
from dex.studies.outcome import outcome

if TYPE_CHECKING:
    from dex.studies.runs import Runs

NEAR = 0.1  # of the largest difference
SMOOTHED = 0.1  # of the run's updates: a batch's loss says more about the batch than about the model


def write_report(runs: Runs) -> dict[str, Any]:
    """Write everything into the study's output; returns what report.json holds."""
    output = Path(runs.study.output)
    found = {**outcome(runs), "report": str(output / "report.md"), "environment": environment()}
    figures = list(_figures(runs, found, output))
    write_whole(output / "report.md", "\n".join(_lines(runs, found, figures)) + "\n")
    write_json(output / "report.json", found)
    return found


# --- words and tables ---------------------------------------------------------------------------------------


def _lines(runs: Runs, found: Mapping[str, Any], figures: Sequence[Path]) -> Iterator[str]:
    study = runs.study
    seeds = f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}"
    yield f"{len(study.variants)} variants, {seeds}, against `{study.control}`; {_budget(runs, found)}."
    if not found["whole"]:
        yield ""
        yield "**Not all runs are done: this is what there is.**"
    for point, at in found["points"].items():
        if point:
            yield from ("", f"## {point}")
        yield from _tables(at, study.control)
    if found["fit"]:
        yield from _fit_table(found["fit"], study.control)
    yield ""
    yield from (f"![{path.stem}]({path.name})" for path in figures)


def _budget(runs: Runs, found: Mapping[str, Any]) -> str:
    sources = ", ".join(str(source["source"]) for source in runs.study.shared.data["train"])
    tokens = " or ".join(f"{each:,}" for each in sorted({at["tokens"] for at in found["points"].values()}))
    return f"{tokens} tokens a run of {sources}, the same batches in the same order for the same seed"


def _tables(at: Mapping[str, Any], control: str) -> Iterator[str]:
    for task, figures in at["tasks"].items():
        yield from ("", *_task_table(task, figures, at["variants"], control))
    yield from ("", *_run_table(at["variants"]))
    yield from ("", *_sweep_table(at["variants"]))


def _task_table(task: str, figures: Mapping[str, Any], variants: Mapping[str, Any], control: str) -> Iterator[str]:
    better = "higher" if figures["higher_is_better"] else "lower"
    name = "held-out loss" if task == TASK else f"{task} ({figures['metric']})"
    yield f"### {name}: {better} is better"
    yield ""
    yield "| variant | mean | − control | over items | over seeds | over both | p (Holm) | |"
    yield "|---|---|---|---|---|---|---|---|"
    for each, own in figures["variants"].items():
        yield _task_row(variants[each], own, figures["higher_is_better"], each == control)
    floor = figures["noise_floor"]
    if floor["rms"] is not None:
        yield ""
        yield (
            f"Noise floor: two seeds of the control differ by {floor['rms']:.4f} (root mean square; at most "
            f"{floor['largest']:.4f})."
        )


def _task_row(variant: Mapping[str, Any], own: Mapping[str, Any], higher: bool, is_control: bool) -> str:
    diverged = f" ({len(variant['diverged'])} diverged)" if variant["diverged"] else ""
    of_seeds = f", {len(own['scores'])} seed{'s' if len(own['scores']) > 1 else ''}" if variant["trained"] else ""
    difference = own["difference"]
    if difference is None:
        cells = ["control" if is_control else "not comparable", "", "", "", "", ""]
    else:
        parts = [_brackets(difference[key]) for key in ("over_items", "over_seeds", "over_both")]
        p = difference.get("p_holm")
        cells = [f"{difference['mean']:+.4f}", *parts, "" if p is None else f"{p:.3g}", verdict(difference, higher)]
    return f"| {variant['about']}{of_seeds}{diverged} | {own['score']['mean']:.4f} | {' | '.join(cells)} |"


def verdict(difference: Mapping[str, Any], higher_is_better: bool) -> Verdict:
    """Better or worse only where the items, the seeds and Holm's p all say so."""
    p = difference.get("p_holm")
    if p is None:
        return "not tested"
    clear = [_excludes_zero(difference[key]) for key in ("over_items", "over_seeds")]
    if p >= 0.05 or not all(clear):
        return "no difference shown"
    return "better" if (difference["mean"] > 0) == higher_is_better else "worse"


def _excludes_zero(value: Mapping[str, float | None]) -> bool:
    return value["low"] is not None and value["high"] is not None and not value["low"] <= 0 <= value["high"]


def _brackets(value: Mapping[str, float | None]) -> str:
    return "" if value["low"] is None else f"[{value['low']:+.4f}, {value['high']:+.4f}]"


def _run_table(variants: Mapping[str, Any]) -> Iterator[str]:
    yield "| variant | rate | trained parameters | λ at the end | branch ratio | tokens/s | peak MiB |"
    yield "|---|---|---|---|---|---|---|"
    for own in variants.values():
        if not own["trained"]:
            continue
        branch, rate = own["branch"], own["tokens_per_second"]
        peak = own["peak_memory"]["device"] or own["peak_memory"]["host"]
        cells = [
            own["about"],
            f"{own['sweep']['best']:g}" if own["sweep"]["best"] else "",
            f"{own['trained_parameters']:,}" if own["trained_parameters"] else "",
            f"{branch['lam_low']:+.4f} to {branch['lam_high']:+.4f}" if branch else "",
            f"{branch['ratio']:.1e}{_inert(branch)}" if branch else "",
            f"{rate:,.0f}" if rate else "",
            f"{peak / 2**20:,.0f}" if peak else "",
        ]
        yield f"| {' | '.join(cells)} |"


def _inert(branch: Mapping[str, Any]) -> str:
    return f" (inert in {branch['inert']} of {branch['of']})" if branch["inert"] else ""


def _sweep_table(variants: Mapping[str, Any]) -> Iterator[str]:
    """The held-out loss at every rate that was tried; the best one is bold."""
    swept = [own for own in variants.values() if own["sweep"]]
    rates = sorted({float(rate) for own in swept for rate in own["sweep"]["losses"]})
    yield f"| sweep: held-out loss at | {' | '.join(f'{rate:g}' for rate in rates)} |"
    yield f"|---|{'---|' * len(rates)}"
    for own in swept:
        losses, best = own["sweep"]["losses"], own["sweep"]["best"]
        cells = [_swept_cell(losses[key], rate == best) if (key := f"{rate:g}") in losses else "" for rate in rates]
        edge = " (best at the edge)" if own["sweep"]["at_edge"] else ""
        yield f"| {own['about']}{edge} | {' | '.join(cells)} |"


def _swept_cell(loss: float | None, best: bool) -> str:
    text = "diverged" if loss is None else f"{loss:.4f}"
    return f"**{text}**" if best else text


def _fit_table(fit: Mapping[str, Any], control: str) -> Iterator[str]:
    slope = Interval(**fit["slope"])
    yield from ("", f"### Loss against {fit['over']}", "")
    yield (
        f"ln loss = a − b ln {fit['over']}, one b for all: {interval(slope)}. Intervals draw the seeds; of few "
        "seeds they are narrow."
    )
    yield ""
    if not fit["savings"]:
        yield f"The loss is not shown to fall with {fit['over']} here, so there is no savings ratio."
        return
    yield f"| variant | {fit['over']} for the same loss, of the control's |"
    yield "|---|---|"
    yield f"| {control} | 1 |"
    for name, ratio in fit["savings"].items():
        yield f"| {name} | {interval(Interval(**ratio), 3)} |"
    if fit["left_out"]:
        yield ""
        yield f"Left out, since runs are missing or diverged: {', '.join(fit['left_out'])}."


# --- figures ------------------------------------------------------------------------------------------------


def _figures(runs: Runs, found: Mapping[str, Any], output: Path) -> Iterator[Path]:
    for point, at in found["points"].items():
        mark = f"-{point}" if point else ""
        counted = {
            name: [done for done in each if not done.diverged and done.job.lr is not None]
            for (where, name), each in runs.all_counted().items()
            if where == point
        }
        about = {name: at["variants"][name]["about"] for name in counted}
        yield from _forest(at, about, output / f"forest{mark}.png")
        yield from _training(counted, about, runs.study.control, output, mark)
        yield from _lam(counted, about, output / f"lam{mark}.png")
    if found["fit"]:
        curves = {
            name: (found["fit"]["x"][name], np.array(losses).T) for name, losses in found["fit"]["losses"].items()
        }
        path = output / "fit.png"
        plot_curves(curves, path, "held-out loss", found["fit"]["over"], log_x=True)
        yield path


def _training(
    counted: Mapping[str, list[Done]], about: Mapping[str, str], control: str, output: Path, mark: str
) -> Iterator[Path]:
    """The training loss, and its difference from the control's on the same batches."""
    curves = {name: curve for name, done in counted.items() if (curve := _losses(done)) is not None}
    seeds = {name: [each.job.seed for each in done] for name, done in counted.items()}
    if not curves:
        return
    shown = {about[name]: curve for name, curve in curves.items()}
    path = output / f"curves{mark}.png"
    plot_curves({name: _smooth(*curve) for name, curve in shown.items()}, path, "training loss, smoothed")
    yield path
    if control not in curves:
        return
    base = curves[control][1]
    less = {
        about[name]: _smooth(at, values - base)
        for name, (at, values) in curves.items()
        if name != control and values.shape == base.shape and seeds[name] == seeds[control]
    }
    if less:
        path = output / f"curves-against-control{mark}.png"
        plot_curves(less, path, "training loss − control's, same batches", zero=True)
        yield path


def _losses(done: Sequence[Done]) -> tuple[list[float], Any] | None:
    logs = [[line for line in each.log() if "loss" in line] for each in done]
    if not logs or len({len(log) for log in logs}) != 1 or not logs[0]:
        return None
    return [line["tokens"] for line in logs[0]], np.array([[line["loss"] for line in log] for log in logs])


def _smooth(at: Sequence[float], values: Any) -> tuple[Sequence[float], Any]:
    width = max(1, round(SMOOTHED * len(at)))
    return at[width - 1 :], smoothed(values, width)


def _lam(counted: Mapping[str, list[Done]], about: Mapping[str, str], path: Path) -> Iterator[Path]:
    """λ over training, the mean over the layers that have one."""
    curves = {}
    for name, done in counted.items():
        logs = [[line for line in each.log() if line.get("lam") and "loss" in line] for each in done]
        if logs and logs[0] and len({len(log) for log in logs}) == 1:
            lam = np.array([[line["lam"] for line in log] for log in logs])  # [S, P, L]
            has_branch = (lam != 0).any(axis=(0, 1))
            if has_branch.any():
                curves[about[name]] = ([line["tokens"] for line in logs[0]], lam[:, :, has_branch].mean(axis=2))
    if curves:
        plot_curves(curves, path, "λ, mean over layers", zero=True)
        yield path


def _forest(at: Mapping[str, Any], about: Mapping[str, str], path: Path) -> Iterator[Path]:
    """The differences from the control on held-out text, with their intervals over seeds and over items."""
    task = at["tasks"].get(TASK)
    if task is None:
        return
    rows = []
    for name, own in task["variants"].items():
        found = own["difference"]
        if found is not None and at["variants"][name]["trained"]:
            score, is_so = Interval(**own["score"]), verdict(found, task["higher_is_better"])
            over = [(f"over {what}", Interval(**found[f"over_{what}"])) for what in ("seeds", "items")]
            marks = [
                Difference(what, score, each, "t", found["p"], found.get("p_holm"), is_so) for what, each in over
            ]
            rows.append(Row("", about[name], None, task["higher_is_better"], 0, 0, score, marks))
    if rows:
        forest.draw(_near_and_far(rows), about[at["control"]], path)
        yield path


def _near_and_far(rows: Sequence[Row]) -> list[Row]:
    """In two panels, if some differences are so large that the others could not be seen beside them."""
    reach = [
        max(abs(bound) for each in row.differences for bound in each.difference if bound is not None) for row in rows
    ]
    near = [each < NEAR * max(reach) for each in reach]
    if not any(near):
        return list(rows)
    titles = {True: f"within {NEAR * max(reach):.2g} of the control", False: "further away"}
    panels = [replace(row, suite=titles[is_near]) for row, is_near in zip(rows, near, strict=True)]
    return sorted(panels, key=lambda row: row.suite != titles[True])
