"""APOLLO (arXiv:2412.05270): full fine-tuning with steps scaled as Adam scales a random projection's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.methods.full import Full
from dex.settings import number, whole

if TYPE_CHECKING:
    import torch


class Apollo(Full):
    what: ClassVar[str] = "which trains the model's own weights in a projection"
    shards: ClassVar[tuple[str, ...]] = ()  # projects whole matrices, and has none where they are sharded

    name: Literal["apollo"] = "apollo"  # type: ignore[assignment]
    rank: Annotated[int, whole(above=0)] = 256
    gap: Annotated[int, whole(above=0)] = 200  # updates from one projection to the next
    scale: Annotated[float, number(above=0)] = 1.0

    def check_packages(self) -> None:
        from dex.low_rank import check_installed

        check_installed(self.name)

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from dex.low_rank import apollo

        return apollo(groups, self.rank, self.gap, self.scale)
