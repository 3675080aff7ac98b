"""The control of Dex: K, V and O train alone, without a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from dex.methods.base import Method
from dex.methods.dex import Layers

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject


class Attention(Method):
    what: ClassVar[str] = "which trains K, V and O alone"

    name: Literal["attention"] = "attention"
    layers: Layers = None

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import DexAdapter
        from dex.tuner import DexConfig

        return DexAdapter(base, DexConfig(task_type="CAUSAL_LM", schedule="off", layers_to_transform=self.layers))
