"""`dex study`: the sweep of every variant, then its seeds at the best rate, the suites, and the report.

Each run is a folder, and one that is done is not done again: the same command goes on where it was stopped, and
several of them on one output (one a GPU, say) share the runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dex.console import say
from dex.errors import DexError
from dex.output import refuse_file_above, write_whole
from dex.recipe_yaml import yaml_lines
from dex.run_data import cache_dir
from dex.run_folder import RECIPE, lock_of, refuse_another_recipe
from dex.study.jobs import RECORD, Done, Job, read_done
from dex.study.study_file import Study
from dex.study.sweep import Swept, sweep_of
from dex.study.work import BUSY, STOPPED, drop_weights, in_own_process, run_job, run_suites

POLL = 2.0  # seconds between looks at what another `dex study` is doing


class Runs:
    """Which runs a study needs, given those that are done."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._done: dict[Job, Done] = {}

    def done(self, job: Job) -> Done | None:
        """The record of a run. Raises DexError if its folder holds a run with other settings."""
        if job not in self._done:
            found = read_done(job, self.study)
            if found is None:
                return None
            self._refuse_another(job, found)
            self._done[job] = found
        return self._done[job]

    def swept(self, point: str, variant: str) -> Swept:
        """The variant's sweep at a point, as far as it has come."""
        at = self.study.sweep.point or point

        def loss(rate: float, seed: int) -> float | None:
            found = self.done(Job(at, variant, rate, seed))
            return None if found is None else found.loss

        return sweep_of(self.study, variant, loss)

    def counted(self, point: str, variant: str) -> list[Job] | None:
        """The runs that count: every seed at the best rate. None while the sweep is not done."""
        if not self.study.variants[variant].train:
            return [Job(point, variant)]
        best = self.swept(point, variant).best
        return None if best is None else [Job(point, variant, best, seed) for seed in self.study.seeds]

    def todo(self) -> Iterator[Job]:
        """The runs to make now, the sweeps first; more of them follow when a sweep is done."""
        places = [(point, variant) for point in self.study.point_names for variant in self.study.variants]
        seen: set[Job] = set()
        for point, variant in places:
            if self.study.variants[variant].train:
                at = self.study.sweep.point or point
                for rate, seed in self.swept(point, variant).missing:
                    seen.add(job := Job(at, variant, rate, seed))
                    yield job
        for point, variant in places:
            for job in self.counted(point, variant) or []:
                if job not in seen and self.done(job) is None:
                    seen.add(job)
                    yield job

    def without_suites(self) -> Iterator[Job]:
        """The runs that count and have not been through all suites."""
        for point in self.study.point_names:
            for variant in self.study.variants:
                for job in self.counted(point, variant) or []:
                    found = self.done(job)
                    if found is None or found.diverged:
                        continue
                    if {suite.name for suite in self.study.suites} - found.suites().keys():
                        yield job

    def all_counted(self) -> dict[tuple[str, str], list[Done]]:
        """The runs that count and are done, by point and variant."""
        places = [(point, variant) for point in self.study.point_names for variant in self.study.variants]
        return {
            (point, variant): [
                found for job in self.counted(point, variant) or [] if (found := self.done(job)) is not None
            ]
            for point, variant in places
        }

    def _refuse_another(self, job: Job, found: Done) -> None:
        if job.lr is None or job.seed is None:
            return
        from dex.recipe import load_recipe

        before = load_recipe(found.folder / RECIPE)
        model = before.model.id if self.study.fresh(job.point, job.variant) is not None else None
        now = self.study.recipe(job.point, job.variant, job.lr, job.seed, found.folder, model)
        refuse_another_recipe(found.folder, before, now)


def study(study: Study, *, report_only: bool = False) -> dict[str, Any]:
    """Make every run that is not done yet, then write the report; returns what report.json holds.

    Where a signal stops it, returns {"finished": False}. `report_only` reports on what there is. Raises DexError.
    """
    from dex.plots import check_matplotlib
    from dex.study.report import write_report

    check_matplotlib()
    output = Path(study.output)
    refuse_file_above(output)
    _check(study)
    write_whole(output / "study.yaml", "\n".join(yaml_lines(study.model_dump(mode="json"))) + "\n")
    runs = Runs(study)
    if not report_only:
        if not (_make(runs, run_job, runs.todo) and _make(runs, run_suites, runs.without_suites)):
            return {"finished": False, "output": study.output}
        if not study.keep_weights:
            _drop_all(runs)
    with lock_of(output / "report.md", cache_dir()).acquire(timeout=-1):  # others that finish now write it too
        return write_report(runs)


def _check(study: Study) -> None:
    """Refuse, before the first run, every variant whose recipe does not fit, and what a suite lacks."""
    for suite in study.suites:
        suite.check()
    for point in study.point_names:
        for variant, own in study.variants.items():
            fresh = study.fresh(point, variant)
            recipe = study.recipe(
                point,
                variant,
                study.rates(variant)[0],
                study.seeds[0],
                Path(study.output),
                "fresh" if fresh else None,
            )
            if own.train:
                recipe.method.check_packages()


def _make(runs: Runs, work: Any, jobs: Any) -> bool:
    """Do jobs until there are none left; False where a signal stopped one."""
    busy: set[Job] = set()
    made = 0
    while True:
        waiting = list(jobs())
        if not waiting:
            return True
        job = next((each for each in waiting if each not in busy), None)
        if job is None:
            time.sleep(POLL)  # another `dex study` has what is left
            busy.clear()
            continue
        say(f"— {job}   ({len(waiting)} runs known to be left)")
        outcome = in_own_process(work, runs.study, job)
        made += 1
        if outcome == STOPPED:
            return False
        if outcome == BUSY:
            busy.add(job)
        elif job in set(jobs()):
            raise DexError(f"{job} left nothing in {job.folder(Path(runs.study.output))}; look there.")


def _drop_all(runs: Runs) -> None:
    """Weights are many times the size of all that is reported."""
    for record in list((Path(runs.study.output) / "runs").rglob(RECORD)):
        drop_weights(record.parent)


def describe(result: dict[str, Any]) -> str:
    """The lines that are printed."""
    if not result.get("finished", True):
        return "stopped, with a checkpoint; run the same command to go on"
    return Path(result["report"]).read_text(encoding="utf-8")
