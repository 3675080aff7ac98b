"""APOLLO (arXiv:2412.05270): full fine-tuning with steps scaled as Adam scales a random projection's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from dex.methods.projected import Projected
from dex.settings import number, whole

if TYPE_CHECKING:
    import torch


class Apollo(Projected):
    name: Literal["apollo"] = "apollo"  # type: ignore[assignment]
    rank: Annotated[int, whole(above=0)] = 256
    scale: Annotated[float, number(above=0)] = 1.0

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from pytorch_optimizer.optimizer import apollo

        return apollo.APOLLO(self.projected(groups), scale_type="channel")
