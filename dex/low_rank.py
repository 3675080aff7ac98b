"""GaLore and APOLLO of the package pytorch-optimizer (Apache-2.0), for the groups of a whole model.

Their projections are objects in the optimiser's state, which torch.load refuses unless it is told of their class.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from dex.errors import DexError


def galore(groups: list[dict[str, Any]], rank: int, gap: int, scale: float) -> torch.optim.Optimizer:
    from pytorch_optimizer.optimizer.galore import GaLore

    _let_projections_load()
    return GaLore(_with_projection(groups, rank, gap, scale))


def apollo(groups: list[dict[str, Any]], rank: int, gap: int, scale: float) -> torch.optim.Optimizer:
    from pytorch_optimizer.optimizer.apollo import APOLLO

    _let_projections_load()
    return APOLLO(_with_projection(groups, rank, gap, scale), scale_type="channel")


def check_installed(name: str) -> None:
    """Raise DexError if the package of the method `name` is missing."""
    if importlib.util.find_spec("pytorch_optimizer") is None:
        raise DexError(f"method.name {name} needs the package pytorch-optimizer: `pip install pytorch-optimizer`.")


def _let_projections_load() -> None:
    from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

    torch.serialization.add_safe_globals([GaLoreProjector])


def _with_projection(groups: list[dict[str, Any]], rank: int, gap: int, scale: float) -> list[dict[str, Any]]:
    """The same groups, with a projection for the matrices of the layers."""
    settings = {"rank": rank, "update_proj_gap": gap, "scale": scale, "projection_type": "std"}
    return [{**group, **settings} if group["kind"] == "matrices" else group for group in groups]
