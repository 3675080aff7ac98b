"""The configuration of a Dex adapter, saved as adapter_config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from peft import PeftConfig

from dex.errors import DexError
from dex.heads import HeadPlan
from dex.layer import ANNEALED, Schedule, ScheduleName, WDInit, lambda_init

TARGETS = ("k_proj", "v_proj", "o_proj")


class DexPeftType(StrEnum):
    """PEFT's own enum of method names is closed, and its loaders read `.value`: so a str that has one."""

    DEX = "DEX"


@dataclass
class DexConfig(PeftConfig):
    """Configuration of a Dex adapter (arXiv:2505.16333).

    Args:
        heads: the heads that get the branch: a `HeadPlan`, the path of one, "all", or one list per layer.
        schedule: λ(t): "paper" (Eq. 4), "land" (rises to λ_init and stays), "fixed" (constant), or "off"
            (no branch: K, V and O are trained alone, the control).
        anneal_steps: T_a in optimiser steps, for "paper" and "land". The paper does not give it; `DexCallback`
            and `dex train` set half of the run.
        lam: the constant λ of "fixed"; λ_init(l) of each layer if None.
        sign: "minus", O − λ f_D(O), or the control "plus", O + λ f_D(O). Either way the λ that is reported is what
            is subtracted: with "plus", λ_init and `lam` count negative.
        w_d_init: "kaiming" (torch's default for a linear layer) or "zeros".
        w_d_per: "layer", one W_D shared by the layer's selected heads, as in the paper, or "head", one for each.
        train_kvo: False freezes K, V and O and trains the branch alone.
        layers_to_transform: the layers to adapt, as in `LoraConfig`; all if None.
    """

    heads: Any = "all"
    schedule: ScheduleName = "paper"
    anneal_steps: int | None = None
    lam: float | None = None
    sign: Literal["minus", "plus"] = "minus"
    w_d_init: WDInit = "kaiming"
    w_d_per: Literal["layer", "head"] = "layer"
    train_kvo: bool = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: str | None = None
    target_modules: set[str] | list[str] | None = field(default=None, metadata={"help": "Set by Dex itself."})
    base_quantised: str | None = field(default=None, metadata={"help": "How the base was quantised; set by dex."})
    base_fingerprint: str | None = field(default=None, metadata={"help": "The base's weights; set by Dex itself."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = DexPeftType.DEX
        if isinstance(self.layers_to_transform, int):
            self.layers_to_transform = [self.layers_to_transform]
        targets = set(TARGETS if self.train_kvo else TARGETS[-1:])
        if self.target_modules is not None and set(self.target_modules) != targets:
            raise DexError(f"target_modules={self.target_modules} cannot be chosen: Dex adapts {sorted(targets)}.")
        self.target_modules = targets
        self._plan: HeadPlan | None = None  # not a field: not saved, and checked only where it is first used
        if isinstance(self.heads, Path) or (isinstance(self.heads, str) and self.heads != "all"):
            self.heads = HeadPlan.load(Path(self.heads))
        if isinstance(self.heads, HeadPlan):
            self.use_plan(self.heads)
        self._check()

    def use_plan(self, plan: HeadPlan) -> None:
        """Take the heads of a plan; attaching to another model than the plan's is then refused."""
        self._plan, self.heads = plan, plan.heads

    def _check(self) -> None:
        if self.schedule not in ("paper", "land", "fixed", "off"):
            raise DexError(f"schedule={self.schedule!r} is not one of 'paper', 'land', 'fixed', 'off'.")
        if self.w_d_init not in ("kaiming", "zeros"):
            raise DexError(f"w_d_init={self.w_d_init!r} is not one of 'kaiming', 'zeros'.")
        if self.sign not in ("minus", "plus"):
            raise DexError(f"sign={self.sign!r} is not one of 'minus', 'plus'.")
        if self.w_d_per not in ("layer", "head"):
            raise DexError(f"w_d_per={self.w_d_per!r} is not one of 'layer', 'head'.")
        if self.anneal_steps is not None and self.anneal_steps < 1:
            raise DexError(f"anneal_steps={self.anneal_steps} is not a number of optimiser steps; give 1 or more.")
        if self.anneal_steps is not None and self.schedule not in ANNEALED:
            raise DexError(
                f"anneal_steps={self.anneal_steps} has no effect with schedule={self.schedule!r}; "
                "it is for schedule='paper' and schedule='land'."
            )
        if self.lam is not None and not math.isfinite(self.lam):
            raise DexError(f"lam={self.lam} is not a finite number.")
        if self.lam is not None and self.schedule != "fixed":
            raise DexError(f"lam={self.lam} has no effect with schedule={self.schedule!r}; use schedule='fixed'.")
        if self.schedule == "off" and not self.train_kvo:
            raise DexError(
                "schedule='off' with train_kvo=False leaves nothing to train; set one of the two otherwise."
            )
        self._refuse_dead_branch()

    def _refuse_dead_branch(self) -> None:
        """A branch at λ = 0 for good has no gradient in W_D, and with W_D = 0 none in λ: it never trains."""
        if self.schedule == "fixed" and self.lam == 0:
            raise DexError("schedule='fixed' with lam=0 is a branch that never trains; use schedule='off' for none.")
        if self.schedule == "fixed" and self.w_d_init != "zeros":
            raise DexError(
                "schedule='fixed' with w_d_init='kaiming' would change the model before any training; "
                "use w_d_init='zeros', which starts as the base."
            )
        # Eq. 4 is 0 at t=0 and, with λ_learn = 0, from T_a on: with T_a = 1 it is never anything else.
        if self.schedule == "paper" and self.w_d_init == "zeros" and self.anneal_steps == 1:
            raise DexError(
                "w_d_init='zeros' with schedule='paper' and anneal_steps=1 is a branch that never trains, "
                "as λ(t) never leaves 0; use w_d_init='kaiming' or a longer annealing."
            )

    def layer_heads(self, layer_idx: int, num_heads: int) -> list[int]:
        """The heads S of a layer."""
        if self.schedule == "off":
            return []
        return list(range(num_heads)) if self.heads == "all" else list(self.heads[layer_idx])

    def layer_schedule(self, layer_idx: int) -> Schedule:
        lam = lambda_init(layer_idx) if self.lam is None else self.lam
        return Schedule(self.schedule, lam if self.sign == "minus" else -lam, self.anneal_steps)
