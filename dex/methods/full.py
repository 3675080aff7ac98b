"""Full fine-tuning: a model's own weights, of any layout, all of them or those of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dex.methods.base import Method
from dex.settings import distinct, number, text

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject

# Weights, each by a part of its name such as q_proj or lambda_q1; null: all.
Names = Annotated[
    list[Annotated[str, text()]] | None, distinct("a list of different names, or null for all weights,")
]
Share = Annotated[float | None, number(null=True, above=0, at_most=1)]


class Full(Method):
    what: ClassVar[str] = "which trains the model's own weights"
    result: ClassVar[Literal["adapter", "model"]] = "model"
    any_layout: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    shards: ClassVar[tuple[str, ...]] = ("FSDP",)  # under ZeRO the annealing of a DIFF V1 would not be counted

    name: Literal["full"] = "full"
    train: Names = None
    # For a DIFF V1 whose norm anneals: over which share of the run. null: half, if it is such a model.
    norm_anneal: Share = None

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import WholeModel

        return WholeModel(base, self.train, recipe.steps, self.norm_anneal)
