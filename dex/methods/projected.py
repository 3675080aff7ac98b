"""What GaLore and APOLLO share: full fine-tuning whose optimiser works in a projection of the layers' matrices.

They are those of the package pytorch-optimizer (Apache-2.0). Embeddings, head and norms are not projected.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, ClassVar

from dex.errors import DexError
from dex.methods.full import Full
from dex.settings import number, whole


class Projected(Full):
    what: ClassVar[str] = "which trains the model's own weights in a projection"
    shards: ClassVar[tuple[str, ...]] = ()  # projects whole matrices, and has none where they are sharded

    rank: Annotated[int, whole(above=0)]
    gap: Annotated[int, whole(above=0)] = 200  # updates from one projection to the next
    scale: Annotated[float, number(above=0)]

    def check_packages(self) -> None:
        if importlib.util.find_spec("pytorch_optimizer") is None:
            raise DexError(
                f"method.name {self.name} needs the package pytorch-optimizer: `pip install pytorch-optimizer`."
            )

    def projected(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same groups, with a projection for the matrices of the layers.

        Projections are objects in the optimiser's state, which torch.load refuses unless it is told of their class.
        """
        import torch
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        torch.serialization.add_safe_globals([GaLoreProjector])
        settings = {
            "rank": self.rank,
            "update_proj_gap": self.gap,
            "scale": self.scale,
            "projection_type": "std",
        }
        return [{**group, **settings} if group["kind"] == "matrices" else group for group in groups]
