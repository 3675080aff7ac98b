"""`dex study`: the sweep of every variant, then its seeds at the best rate, the suites, and the report.

Each run is a folder, and one that is done is not done again: the same command goes on where it was stopped, and
several of them on one output (one a GPU, say) share the runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dex.console import say
from dex.errors import DexError
from dex.output import refuse_file_above, write_whole
from dex.recipe_yaml import yaml_lines
from dex.run_data import cache_dir
from dex.run_folder import lock_of
from dex.studies.jobs import Job
from dex.studies.runs import Runs
from dex.studies.study_file import Study, load_study
from dex.studies.work import (
    BUSY,
    STOPPED,
    alone,
    drop_weights,
    in_own_process,
    run_job,
    run_suites,
)

Work = Callable[[Study, Job], str | None]

AS_RUN = "study-as-run.yaml"  # with every default, and the overrides
POLL = 2.0  # seconds between looks at what another `dex study` is doing


def study(study: Study | str | Path, *, report_only: bool = False) -> dict[str, Any]:
    """Make every run that is not done yet, then write the report; returns what report.json holds.

    Where a signal stops it, returns {"finished": False}. `report_only` reports on what there is. Raises DexError.
    """
    from dex.plots import check_matplotlib
    from dex.studies.report import write_report

    study = study if isinstance(study, Study) else load_study(study)
    check_matplotlib()
    output = Path(study.output)
    refuse_file_above(output)
    _check(study)
    runs = Runs(study)
    if not report_only and not (_make(runs, run_job, runs.todo) and _make(runs, run_suites, runs.without_suites)):
        return {"finished": False, "output": study.output}
    with lock_of(output / "report.md", cache_dir()).acquire(timeout=-1):  # others that finish now write them too
        write_whole(output / AS_RUN, "\n".join(yaml_lines(study.model_dump(mode="json"))) + "\n")
        return write_report(runs)


def _check(study: Study) -> None:
    """Refuse, before the first run, what does not fit or is not there: recipes, packages, models, texts."""
    from dex.data.sources import identity, pin
    from dex.models import ANY, load_config, load_outline
    from dex.run_data import sources

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
            if fresh is None:
                load_config(recipe.model.id, recipe.model.revision, ANY)
            else:
                load_outline(fresh.like, None)
    for source in sources(recipe.data):
        identity(pin(source))  # reads what is local, too


def _make(runs: Runs, work: Work, jobs: Callable[[], Iterator[Job]]) -> bool:
    """Do jobs until there are none left; False where a signal stopped one."""
    output = Path(runs.study.output)
    while waiting := list(jobs()):
        job = next((each for each in waiting if _is_free(each, output)), None)
        if job is None:
            time.sleep(POLL)  # another `dex study` has what is left
            continue
        say(f"— {job}   ({len(waiting)} runs known to be left)")
        outcome = in_own_process(work, runs.study, job)
        if outcome == STOPPED:
            return False
        if outcome != BUSY and job in set(jobs()):
            raise DexError(f"{job} left nothing in {job.folder(output)}; look there.")
        for loser in runs.losers():
            drop_weights(loser.folder(output))
    return True


def _is_free(job: Job, output: Path) -> bool:
    """Is no other process at it now?"""
    with alone(job.folder(output)) as is_ours:
        return is_ours


def describe(result: dict[str, Any]) -> str:
    """The lines that are printed."""
    if not result.get("finished", True):
        return "stopped, with a checkpoint; run the same command to go on"
    return Path(result["report"]).read_text(encoding="utf-8")
