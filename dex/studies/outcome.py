"""What a study's runs came to: rates, losses, differences, λ, branch, time and memory of every variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dex.evaluation.records import Result
from dex.evaluation.significance import holm
from dex.studies.differences import Difference, difference, noise_floor, over_seeds
from dex.studies.jobs import Done
from dex.studies.scaling import scaling
from dex.studies.sweep import Swept

if TYPE_CHECKING:
    from dex.studies.runs import Runs


def outcome(runs: Runs) -> dict[str, Any]:
    """What report.json holds."""
    study, counted = runs.study, runs.all_counted()
    points = {point: _point(runs, point, counted) for point in study.point_names}
    return {
        "control": study.control,
        "seeds": study.seeds,
        "whole": all(
            len(counted[point, name]) == (len(study.seeds) if own.train else 1)
            for point in study.point_names
            for name, own in study.variants.items()
        ),
        "points": points,
        "fit": _fit(runs, counted) if study.fit else None,
    }


def _point(runs: Runs, point: str, counted: Mapping[tuple[str, str], list[Done]]) -> dict[str, Any]:
    study = runs.study
    variants = {name: _variant(runs, point, name, counted[point, name]) for name in study.variants}
    tasks: dict[str, Any] = {}
    for suite in [None, *(suite.name for suite in study.suites)]:
        results = {name: _results(counted[point, name], suite) for name in study.variants}
        if results[study.control]:
            tasks |= _tasks(results, study.control, suite)
    _adjust(tasks)
    tokens = study.recipe(point, study.control, 1.0, study.seeds[0], Path(study.output), "any").run.tokens
    return {"tokens": tokens, "variants": variants, "tasks": tasks, "control": study.control}


def _variant(runs: Runs, point: str, name: str, done: Sequence[Done]) -> dict[str, Any]:
    own = runs.study.variants[name]
    whole = [each for each in done if not each.diverged]
    swept = runs.swept(point, name) if own.train else None
    return {
        "about": own.about or name,
        "trained": own.train,
        "sweep": _sweep(swept) if swept else None,
        "seeds": [each.job.seed for each in done],
        "diverged": {str(each.job.seed): each.diverged for each in done if each.diverged},
        "trained_parameters": _first(whole, "trained_parameters"),
        "branch": _branch(whole),
        "tokens_per_second": _mean([each.result.get("tokens_per_second") for each in whole]),
        "seconds": _mean([each.seconds for each in whole]),
        "peak_memory": {
            kind: max([value for each in whole if (value := each.memory.get(kind))], default=None)
            for kind in ("host", "device")
        },
    }


def _sweep(swept: Swept) -> dict[str, Any]:
    """The losses by rate; null for a rate that diverged."""
    losses = {
        f"{rate:g}": loss if np.isfinite(loss) else None for rate, loss in swept.losses.items() if not np.isnan(loss)
    }
    return {"losses": losses, "best": swept.best, "at_edge": swept.at_edge}


def _branch(done: Sequence[Done]) -> dict[str, Any] | None:
    """λ at the end over layers and seeds, the mean branch ratio, and how many seeds ended inert."""
    branches = [each.result["branch"] for each in done if each.result.get("branch")]
    if not branches:
        return None
    lam = [value for branch in branches for value in branch["lam"]]
    ratios = [branch["mean_ratio"] for branch in branches]
    inert = sum(bool(branch["inert"]) for branch in branches)
    return {
        "lam_low": min(lam),
        "lam_high": max(lam),
        "ratio": float(np.mean(ratios)),
        "inert": inert,
        "of": len(ratios),
    }


def _results(done: Sequence[Done], suite: str | None) -> dict[int | None, Result]:
    """The results of a suite by seed; of None, the run's own held-out part. Runs that diverged have none."""
    found: dict[int | None, Result] = {}
    for each in done:
        if not each.diverged:
            result = each.held_out() if suite is None else each.suites().get(suite)
            if result is not None:
                found[each.job.seed] = result
    return found


def _tasks(results: Mapping[str, dict[int | None, Result]], control: str, suite: str | None) -> dict[str, Any]:
    """Every task of a suite: each variant's mean scores, and its difference from the control."""
    found = {}
    for task, about in next(iter(results[control].values())).tasks.items():
        scores = {name: {str(seed): run.mean(task) for seed, run in each.items()} for name, each in results.items()}
        means = {name: list(each.values()) for name, each in scores.items()}
        found[task if suite is None else f"{suite}: {task}"] = {
            **asdict(about),
            "noise_floor": asdict(noise_floor(means[control])),
            "variants": {
                name: {
                    "scores": scores[name],
                    "score": over_seeds(means[name])._asdict(),
                    "own_noise": asdict(noise_floor(means[name])),
                    "difference": None if name == control else _difference(difference(each, results[control], task)),
                }
                for name, each in results.items()
                if each
            },
        }
    return found


def _difference(found: Difference | None) -> dict[str, Any] | None:
    return (
        None
        if found is None
        else {
            "mean": found.mean,
            "per_seed": found.per_seed,
            "over_items": found.over_items._asdict(),
            "over_seeds": found.over_seeds._asdict(),
            "over_both": found.over_both._asdict(),
            "p": found.p,
        }
    )


def _adjust(tasks: Mapping[str, Any]) -> None:
    """Holm's adjustment over all tasks and all variants of a point: one family, as in `dex compare`."""
    found = [each["difference"] for task in tasks.values() for each in task["variants"].values()]
    compared = [each for each in found if each is not None and each["p"] is not None]
    for each, p in zip(compared, holm([each["p"] for each in compared]), strict=True):
        each["p_holm"] = p


def _fit(runs: Runs, counted: Mapping[tuple[str, str], list[Done]]) -> dict[str, Any] | None:
    """The scaling fit over the variants that have every point and seed."""
    study = runs.study
    losses, x = {}, {}
    for name, own in study.variants.items():
        table = [counted[point, name] for point in study.point_names]
        if not own.train or any(len(row) < len(study.seeds) or any(each.diverged for each in row) for row in table):
            continue
        losses[name] = np.array([[each.loss for each in row] for row in table])
        key = "trained_parameters" if study.fit == "parameters" else "tokens"
        x[name] = [float(row[0].result[key]) for row in table]
    if study.control not in losses:
        return None
    fitted = scaling(x, losses, study.control)
    return {
        "over": study.fit,
        "slope": fitted.slope._asdict(),
        "savings": {name: ratio._asdict() for name, ratio in fitted.savings.items()},
        "x": x,
        "losses": {name: values.tolist() for name, values in losses.items()},
        "left_out": [name for name, own in study.variants.items() if own.train and name not in losses],
    }


def _first(done: Sequence[Done], key: str) -> Any:
    return done[0].result.get(key) if done else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
