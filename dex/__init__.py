"""dex: retrofit pretrained Llama and Qwen models with differential attention output, and fold it back.

`import dex` makes "DEX" a method of PEFT, and has a function for every command:

    dex.train("recipe.yaml")
    dex.fold("runs/mine/adapter", "folded")
    dex.evaluate(["org/base", "folded"], "results", dex.suite("perplexity", recipe="recipe.yaml"))
    dex.compare(["results"], against="base")

It costs nothing until PEFT is imported: the names are loaded when they are first used, so that `dex --help` need not
wait for torch. What a user did wrong is a `DexError`, in one sentence.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from dex.adapter import load_adapter as load_adapter
    from dex.data import Source as Source
    from dex.errors import DexError as DexError
    from dex.heads import HeadPlan as HeadPlan
    from dex.models import load_model as load_model
    from dex.recipe import Recipe as Recipe
    from dex.recipe import load_recipe as load_recipe
    from dex.studies.study_file import Study as Study
    from dex.studies.study_file import load_study as load_study
    from dex.suites import suite as suite
    from dex.tuner import DexConfig as DexConfig
    from dex.tuner import DexModel as DexModel
    from dex.tuner.callback import DexCallback as DexCallback
    from dex.tuner.scaling import scale_lambda as scale_lambda
    from dex.verbs.analyze import analyze as analyze
    from dex.verbs.card import write_card as write_card
    from dex.verbs.compare import compare as compare
    from dex.verbs.convert import Choice as Choice
    from dex.verbs.convert import choose_heads as choose_heads
    from dex.verbs.convert import convert as convert
    from dex.verbs.convert import write_plan as write_plan
    from dex.verbs.dial import dial as dial
    from dex.verbs.doctor import doctor as doctor
    from dex.verbs.dry_run import dry_run as dry_run
    from dex.verbs.evaluate import evaluate as evaluate
    from dex.verbs.export_gguf import export_gguf as export_gguf
    from dex.verbs.fold import fold as fold
    from dex.verbs.fold import fold_at_scales as fold_at_scales
    from dex.verbs.init import init as init
    from dex.verbs.lay_out import Target as Target
    from dex.verbs.lay_out import lay_out as lay_out
    from dex.verbs.plan import plan as plan
    from dex.verbs.plan import plan_model as plan_model
    from dex.verbs.push import push as push
    from dex.verbs.reproduce import reproduce as reproduce
    from dex.verbs.study import study as study
    from dex.verbs.train import train as train

__version__ = "0.1.0"

_HOMES = {
    # Dex as a method of PEFT.
    "dex.tuner": ("DexConfig", "DexModel"),
    "dex.tuner.callback": ("DexCallback",),
    "dex.tuner.scaling": ("scale_lambda",),
    "dex.adapter": ("load_adapter",),
    "dex.heads": ("HeadPlan",),
    "dex.errors": ("DexError",),
    # What the commands are given.
    "dex.models": ("load_model",),
    "dex.data": ("Source",),
    "dex.recipe": ("Recipe", "load_recipe"),
    "dex.suites": ("suite",),
    "dex.studies.study_file": ("Study", "load_study"),
    # The commands.
    "dex.verbs.convert": ("Choice", "choose_heads", "convert", "write_plan"),
    "dex.verbs.lay_out": ("Target", "lay_out"),
    "dex.verbs.init": ("init",),
    "dex.verbs.plan": ("plan", "plan_model"),
    "dex.verbs.dry_run": ("dry_run",),
    "dex.verbs.train": ("train",),
    "dex.verbs.fold": ("fold", "fold_at_scales"),
    "dex.verbs.dial": ("dial",),
    "dex.verbs.evaluate": ("evaluate",),
    "dex.verbs.compare": ("compare",),
    "dex.verbs.analyze": ("analyze",),
    "dex.verbs.study": ("study",),
    "dex.verbs.card": ("write_card",),
    "dex.verbs.push": ("push",),
    "dex.verbs.reproduce": ("reproduce",),
    "dex.verbs.export_gguf": ("export_gguf",),
    "dex.verbs.doctor": ("doctor",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dex' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


@wrapt.when_imported("peft")
def _register_with_peft(_: ModuleType) -> None:
    importlib.import_module("dex.tuner")
