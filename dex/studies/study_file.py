"""The file of `dex study`: what all runs share, the variants, the seeds, the sweep.

    shared    what every run has: the blocks `model`, `data` and `run` of a recipe
    variants  what each changes: its method, the model it begins with, its own settings of the optimiser
    points    the study once at each of several sizes or budgets
    control   the variant that the others are compared with

Variants get the same data in the same order and the same budget: a variant that changes them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from dex.errors import DexError
from dex.recipe import RECIPES, Recipe
from dex.settings import Block, Problem, YesNo, choice, clash, distinct, expected, number, one_of, text, whole
from dex.settings_file import SettingsFile
from dex.suites import SUITES, AnySuite, read_suite_name

Rate = Annotated[float, number(above=0)]
Seeds = Annotated[
    list[Annotated[int, whole(at_least=0, below=2**32)]], distinct("a list of at least one seed, all different,")
]
Rates = Annotated[list[Rate], distinct("a list of at least one learning rate, all different,")]
Layout = Literal["base", "diff-v1", "diff-v2", "diffllama"]
Fit = Literal["parameters", "tokens"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")

# What a variant may have of its own in `run`: the rest decides the data, their order or the budget.
OWN_RUN = ("weight_decay", "clip", "micro_batch", "gradient_checkpointing", "autocast", "warmup", "decay")


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise expected("a block")
    return dict(value)


Part = Annotated[dict[str, Any], BeforeValidator(_mapping)]  # of a recipe, which is checked when it is put together


class Fresh(Block):
    """A model with fresh weights, made for every seed (`dex init`), in place of model.id."""

    layout: Annotated[Layout, choice(Layout)] = "base"
    like: Annotated[str, text()]  # a folder with a config.json and a tokenizer, or a model
    config: Part = {}  # changes to its configuration: hidden_size, say
    options: Part = {}  # of DIFF V1: lambda_mode, head_norm, …


_FRESH = SettingsFile(Fresh, "block `fresh`")


class Variant(Block):
    about: Annotated[str | None, text(null=True)] = None  # its name in tables; null: its key
    train: YesNo = True  # false: the model as it is
    model: Part = {}
    method: Part = {}
    run: Part = {}
    fresh: Part = {}  # changes to `shared.fresh`
    lr: Annotated[Rates | None, BeforeValidator(lambda v: v if v is None or isinstance(v, list) else [v])] = None


class Point(Block):
    """A size or a budget: changes to `shared`."""

    model: Part = {}
    run: Part = {}
    fresh: Part = {}


class Shared(Block):
    model: Part = {}
    data: Part
    run: Part
    fresh: Part | None = None


class Sweep(Block):
    lr: Rates
    # How often it goes on beyond its edge, by the factor between its last two rates, where the best rate is there.
    extend: Annotated[int, whole(at_least=0)] = 3
    seeds: Annotated[int, whole(above=0)] = 1  # how many of the study's seeds it takes
    point: Annotated[str | None, text(null=True)] = None  # the one point where it is made; null: at each


class Study(Block):
    shared: Shared
    variants: dict[str, Variant]
    control: Annotated[str, text()]
    seeds: Seeds
    sweep: Sweep
    points: dict[str, Point] = {}
    fit: Annotated[Fit | None, choice(Fit, null=True)] = None  # of the loss, over the points
    suites: list[Annotated[AnySuite, BeforeValidator(read_suite_name)]] = []  # beside the held-out loss
    keep_weights: YesNo = False  # of the runs that count; false: figures, logs and records alone are kept
    output: Annotated[str, AfterValidator(lambda path: str(Path(path).expanduser())), text()]

    @model_validator(mode="after")
    def _fits(self) -> Study:
        if problems := list(_problems(self)):
            raise clash(problems)
        return self

    @property
    def point_names(self) -> list[str]:
        return list(self.points) or [""]

    def only(self, names: Sequence[str]) -> Study:
        """The study of these variants and the control. Raises DexError for a name that none has."""
        for name in names:
            if name not in self.variants:
                known = list(self.variants)
                raise DexError(f"{name!r} is not a variant of this study; there is {one_of(name, known)}.")
        kept = {name: own for name, own in self.variants.items() if name in names or name == self.control}
        return self.model_copy(update={"variants": kept})

    def rates(self, variant: str) -> list[float]:
        """The learning rates that the variant's sweep begins with."""
        return sorted(self.variants[variant].lr or self.sweep.lr)

    def recipe(self, point: str, variant: str, lr: float, seed: int, output: Path, model: str | None) -> Recipe:
        """The recipe of one run. Raises DexError, naming the variant, for what does not fit."""
        own, at = self.variants[variant], self.points.get(point, Point())
        shared = self.shared
        values = {
            "model": {**shared.model, **at.model, **own.model, **({"id": model} if model else {})},
            "method": own.method,
            "data": shared.data,
            "run": {**shared.run, **at.run, **own.run, "lr": lr, "seed": seed},
            "output": str(output),
        }
        if not own.method:
            del values["method"]
        return RECIPES.from_values(values, f"variant {variant}")

    def fresh(self, point: str, variant: str) -> Fresh | None:
        """What the variant's model is made like; None where it begins with a pretrained one."""
        if self.shared.fresh is None:
            return None
        parts = [self.shared.fresh, self.points.get(point, Point()).fresh, self.variants[variant].fresh]
        values: dict[str, Any] = {}
        for part in parts:
            config = {**values.get("config", {}), **part.get("config", {})}
            values |= {**part, "config": config}
        return _FRESH.from_values(values, f"variant {variant}")


def _problems(study: Study) -> Iterator[Problem]:
    if not study.variants:
        yield Problem(("variants",), "variants is empty; a study needs at least one")
    if study.control not in study.variants:
        names = ", ".join(study.variants)
        yield Problem(("control",), f"control: {study.control!r} is not one of the variants, {names}")
    elif not study.variants[study.control].train:
        yield Problem(("control",), f"control: {study.control} is not trained; name one that is")
    if study.sweep.seeds > len(study.seeds):
        yield Problem(
            ("sweep", "seeds"), f"sweep.seeds is {study.sweep.seeds}, and there are {len(study.seeds)} seeds"
        )
    of_points = [(("points", name), at.run) for name, at in study.points.items()]
    for place, run in [(("shared",), study.shared.run), *of_points]:
        for key in ("lr", "seed"):
            if key in run:
                path = (*place, "run", key)
                yield Problem(path, f"{'.'.join(path)} has no effect, since the study sets it; remove it")
    for name, variant in study.variants.items():
        for key in variant.run:
            if key not in OWN_RUN:
                yield Problem(
                    ("variants", name, "run", key),
                    f"variants.{name}.run.{key} would give {name} other data, another order or another budget than "
                    f"the rest; a variant may have its own {', '.join(OWN_RUN)}, and learning rates as `lr`",
                )
        if variant.fresh and study.shared.fresh is None:
            yield Problem(("variants", name, "fresh"), f"variants.{name}.fresh has no effect without shared.fresh")
        if not variant.train and (variant.method or variant.run or variant.lr):
            yield Problem(("variants", name), f"variants.{name} is not trained, so method, run and lr have no effect")
        if not variant.train and study.shared.fresh is not None:
            yield Problem(("variants", name), f"variants.{name} is not trained, and shared.fresh begins with nothing")
    if study.fit is not None and len(study.points) < 2:
        yield Problem(("fit",), f"fit is {study.fit}, which needs at least two points")
    if study.fit == "parameters" and study.shared.fresh is None:
        yield Problem(("fit",), "fit is parameters, which needs models of several sizes, as shared.fresh makes them")
    if study.sweep.point is not None and study.sweep.point not in study.points:
        yield Problem(("sweep", "point"), f"sweep.point: {study.sweep.point!r} is not one of the points")
    suites = [suite.name for suite in study.suites]
    if len(set(suites)) < len(suites):
        yield Problem(("suites",), "suites names a suite twice; each is evaluated once")
    for key in (*study.variants, *study.points):
        if not NAME.fullmatch(key):
            yield Problem((), f"{key!r} is not a name; use letters, digits and - _ . +, a letter or digit first")


STUDIES = SettingsFile(
    Study,
    "study",
    {("suites",): SUITES},
    {("suites",): "suites", ("seeds",): "seeds", ("sweep", "lr"): "learning rates"},
    "; `dex recipes ls` lists some to start from",
    maps=[("variants",), ("points",)],
)


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study and apply `key.path=value` overrides. Raises DexError as for a recipe."""
    return STUDIES.load(path, overrides)
