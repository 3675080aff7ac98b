"""GaLore (arXiv:2403.03507): full fine-tuning whose Adam lives in a low-rank projection of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.methods.full import Full
from dex.settings import number, whole

if TYPE_CHECKING:
    import torch


class GaLore(Full):
    """The layers' matrices are projected; embeddings, head and norms are not, as in GaLore's paper."""

    what: ClassVar[str] = "which trains the model's own weights in a projection"
    shards: ClassVar[tuple[str, ...]] = ()  # projects whole matrices, and has none where they are sharded
    plan_note: ClassVar[str | None] = "GaLore's decompositions are not in the operations"

    name: Literal["galore"] = "galore"  # type: ignore[assignment]
    rank: Annotated[int, whole(above=0)] = 128
    gap: Annotated[int, whole(above=0)] = 200  # updates from one projection to the next
    scale: Annotated[float, number(above=0)] = 0.25

    def check_packages(self) -> None:
        from dex.low_rank import check_installed

        check_installed(self.name)

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from dex.low_rank import galore

        return galore(groups, self.rank, self.gap, self.scale)
