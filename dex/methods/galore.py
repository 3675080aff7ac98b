"""GaLore (arXiv:2403.03507): full fine-tuning whose Adam lives in a low-rank projection of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.methods.projected import Projected
from dex.settings import number, whole

if TYPE_CHECKING:
    import torch


class GaLore(Projected):
    plan_note: ClassVar[str | None] = "GaLore's decompositions are not in the operations"

    name: Literal["galore"] = "galore"  # type: ignore[assignment]
    rank: Annotated[int, whole(above=0)] = 128
    scale: Annotated[float, number(above=0)] = 0.25

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from pytorch_optimizer.optimizer import galore

        return galore.GaLore(self.projected(groups))
