"""Dex (arXiv:2505.16333): K, V and O train, with W_D and λ of the chosen heads. The equations: dex/layer.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from dex.methods.base import Method
from dex.settings import Block, Problem, YesNo, choice, distinct, number, text, whole

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject

Criterion = Literal["entropy", "importance", "random", "all", "none"]
Schedule = Literal["paper", "land", "fixed", "off"]
Sign = Literal["minus", "plus"]
WdInit = Literal["kaiming", "zeros"]
WdPer = Literal["layer", "head"]


class ScoredHeads(Block):
    criterion: Annotated[Criterion, choice(Criterion)] = "entropy"
    per_layer: Annotated[int | Literal["half"], whole(above=0, word="half")] = "half"
    # The paper does not give its calibration set; 64 sequences of the training data are ours.
    sequences: Annotated[int, whole(above=0)] = 64
    length: Annotated[int, whole(above=1)] = 512
    seed: Annotated[int, whole(at_least=0, below=2**32)] = 0


class PlannedHeads(Block):
    plan: Annotated[str, text()]  # a file that `dex heads` wrote


def _kind_of_heads(value: Any) -> str | None:
    if isinstance(value, PlannedHeads) or (isinstance(value, Mapping) and "plan" in value):
        return "<plan>"
    return "<scored>" if isinstance(value, ScoredHeads | Mapping) else None


Heads = Annotated[
    Annotated[ScoredHeads, Tag("<scored>")] | Annotated[PlannedHeads, Tag("<plan>")],
    Discriminator(_kind_of_heads),
]
Layers = Annotated[
    list[Annotated[int, whole(at_least=0)]] | None,
    distinct("a list of different layer indices, or null for all layers,"),
]


class LrScale(Block):
    """Multipliers of the learning rate for Dex's own parameters."""

    w_d: Annotated[float, number(above=0)] = 1.0
    lam: Annotated[float, number(at_least=0)] = 1.0


class Dex(Method):
    what: ClassVar[str] = "which trains K, V, O and its branch"

    name: Literal["dex"] = "dex"
    heads: Heads = ScoredHeads()
    schedule: Annotated[Schedule, choice(Schedule)] = "paper"
    # T_a as a share of the run. The paper does not give it; half of the run is ours.
    anneal: Annotated[float, number(above=0, at_most=1)] = 0.5
    lam: Annotated[float | None, number(null=True)] = None  # for `fixed`; null: λ_init of each layer
    sign: Annotated[Sign, choice(Sign)] = "minus"  # plus: O + λ f_D(O), a control
    w_d_init: Annotated[WdInit, choice(WdInit)] = "kaiming"
    w_d_per: Annotated[WdPer, choice(WdPer)] = "layer"  # the paper's; head: one W_D for each selected head
    lr_scale: LrScale = LrScale()
    train_kvo: YesNo = True  # false: W_D and λ alone
    layers: Layers = None

    def anneal_steps(self, steps: int) -> int:
        """T_a in updates, at least 1, of a run of `steps`."""
        return max(1, round(self.anneal * steps))

    def heads_to_choose(self) -> ScoredHeads | PlannedHeads | None:
        return None if self.schedule == "off" else self.heads

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import DexAdapter
        from dex.tuner import DexConfig

        config = DexConfig(
            task_type="CAUSAL_LM",
            schedule=self.schedule,
            anneal_steps=self.anneal_steps(recipe.steps) if self.schedule in ("paper", "land") else None,
            lam=self.lam,
            sign=self.sign,
            w_d_init=self.w_d_init,
            w_d_per=self.w_d_per,
            train_kvo=self.train_kvo,
            layers_to_transform=self.layers,
        )
        return DexAdapter(base, config, plan, lr_scale={"w_d": self.lr_scale.w_d, "lam": self.lr_scale.lam})

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        heads = self.heads
        if isinstance(heads, ScoredHeads):
            if heads.criterion in ("all", "none") and heads.per_layer != "half":
                yield Problem(
                    ("method", "heads", "per_layer"),
                    f"method.heads.per_layer {heads.per_layer} has no effect with method.heads.criterion "
                    f"{heads.criterion}; remove it",
                )
            if heads.criterion == "none" and self.schedule != "off":
                yield Problem(
                    ("method", "heads", "criterion"),
                    f"method.heads.criterion none leaves nothing for method.schedule {self.schedule} to act on; "
                    "choose heads, or schedule: off",
                )
        if self.schedule == "off" and not self.train_kvo:
            yield Problem(
                ("method", "train_kvo"),
                "method.train_kvo false with method.schedule off leaves nothing to train; change one of the two",
            )
        yield from self._idle_settings()
        yield from self._dead_branch(recipe.steps)

    def _idle_settings(self) -> Iterator[Problem]:
        if self.schedule != "fixed" and self.lam is not None:
            yield Problem(
                ("method", "lam"),
                f"method.lam is only for method.schedule fixed, and the schedule is {self.schedule}; remove it",
            )
        if self.schedule == "fixed" and self.lr_scale.lam != 1:
            yield Problem(
                ("method", "lr_scale", "lam"),
                f"method.lr_scale.lam {self.lr_scale.lam:g} has no effect with method.schedule fixed, whose λ is not "
                "trained; remove it",
            )
        if self.schedule == "off" and self.sign == "plus":
            yield Problem(
                ("method", "sign"),
                "method.sign plus has no effect with method.schedule off, which has no branch; remove it",
            )
        if self.schedule == "off" and self.w_d_per == "head":
            yield Problem(
                ("method", "w_d_per"),
                "method.w_d_per head has no effect with method.schedule off, which has no branch; remove it",
            )

    def _dead_branch(self, steps: int) -> Iterator[Problem]:
        """A constant λ wants W_D = 0, and W_D = 0 wants a λ that is not 0 throughout (both gradients would be 0)."""
        if self.schedule == "fixed" and self.w_d_init == "kaiming":
            yield Problem(
                ("method", "w_d_init"),
                "method.schedule fixed with method.w_d_init kaiming would not start as the base model, since λ is "
                "not 0 at the first step; use w_d_init: zeros",
            )
        elif self.schedule == "fixed" and self.lam == 0:
            yield Problem(
                ("method", "lam"),
                "method.lam 0 with method.w_d_init zeros is a branch that never leaves 0; give another lam",
            )
        elif self.schedule in ("paper", "land") and self.w_d_init == "zeros" and not self._lam_leaves_zero(steps):
            yield Problem(
                ("method", "w_d_init"),
                f"method.w_d_init zeros with method.schedule {self.schedule} is a branch that never leaves 0 in a "
                f"run of {steps} updates (run.tokens / run.batch_tokens) with annealing over "
                f"{self.anneal_steps(steps)} (method.anneal {self.anneal:g}); lengthen them, or use kaiming",
            )

    def _lam_leaves_zero(self, steps: int) -> bool:
        """Is λ(t) ever not 0 while W_D is? `paper` only at 0 < t < T_a, `land` at every t > 0."""
        return (self.anneal_steps(steps) if self.schedule == "paper" else steps) > 1
