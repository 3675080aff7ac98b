"""Which runs a study needs, and which of them are done."""

from __future__ import annotations

from collections.abc import Iterator

from dex.errors import DexError
from dex.recipe import load_recipe
from dex.run_folder import RECIPE, refuse_another_recipe
from dex.studies.jobs import Done, Job, read_done
from dex.studies.study_file import Study
from dex.studies.sweep import Swept, sweep_of
from dex.studies.work import recipe_as_it_is


class Runs:
    """Which runs a study needs, given those that are done."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._done: dict[Job, Done] = {}
        self._evaluated: set[Job] = set()  # whose suites have been read, and are whole
        self._bases: dict[str, str] = {}  # what each model's weights are, by its id

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
        """The runs that count and have not been through all suites, with these settings."""
        from dex.verbs.evaluate import different

        for point in self.study.point_names:
            for variant in self.study.variants:
                for job in self.counted(point, variant) or []:
                    found = self.done(job)
                    if found is None or found.diverged or job in self._evaluated:
                        continue
                    there = found.suites()
                    for suite in self.study.suites:
                        result = there.get(suite.name)
                        wanted = {
                            "model": result.model if result else None,
                            "settings": suite.model_dump(mode="json"),
                        }
                        if result is None or different(vars(result), wanted) is not None:
                            yield job
                            break
                    else:
                        self._evaluated.add(job)

    def losers(self) -> Iterator[Job]:
        """The runs that only the sweep was made for, once it is decided."""
        for point in self.study.point_names:
            at = self.study.sweep.point or point
            for variant, own in self.study.variants.items():
                swept = self.swept(point, variant) if own.train else None
                if swept is not None and swept.best is not None:
                    seeds = self.study.seeds[: self.study.sweep.seeds]
                    yield from (
                        Job(at, variant, rate, seed) for rate in swept.losses for seed in seeds if rate != swept.best
                    )

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
        """Raise for a run that was made with other settings, or from another base than the runs beside it."""
        fresh = self.study.fresh(job.point, job.variant)
        if job.lr is not None and job.seed is not None:
            before = load_recipe(found.folder / RECIPE)
            made_from = before.model.id if fresh is not None else None
            now = self.study.recipe(job.point, job.variant, job.lr, job.seed, found.folder, made_from)
            refuse_another_recipe(found.folder, before, now)
            model = now.model.id
        else:
            model = recipe_as_it_is(self.study, job).model.id
        if (fresh.model_dump(mode="json") if fresh else None) != found.fresh:
            raise DexError(f"{found.folder} began with a model of other settings of `fresh`; choose another output.")
        base = found.result.get("model") or {}
        if base and base["id"] != model:
            raise DexError(f"{found.folder} holds a run of {base['id']}, and this is {model}; choose another output.")
        identity = base.get("commit") or base.get("content")
        if identity and self._bases.setdefault(model, identity) != identity:
            raise DexError(
                f"{found.folder} began with other weights of {model} than other runs of this study: the model has "
                "changed meanwhile; delete the runs that are older, or choose another output."
            )
