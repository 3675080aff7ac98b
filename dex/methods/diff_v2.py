"""The base laid out as a DIFF Transformer V2 at the run's start, and some of its weights trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from dex.methods.base import Method
from dex.methods.full import Names

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject


class DiffV2(Method):
    what: ClassVar[str] = "which lays the base out as DIFF V2 and trains its attention"
    result: ClassVar[Literal["adapter", "model"]] = "model"
    in_place: ClassVar[bool] = True

    name: Literal["diff-v2"] = "diff-v2"
    # Q too, other than Dex: the layout's second map is a query of its own.
    train: Names = ["q_proj", "k_proj", "v_proj", "o_proj", "lambda_proj"]

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.layouts.to_diff_v2 import to_diff_v2
        from dex.subject import WholeModel, laid_out

        return WholeModel(laid_out(base, to_diff_v2), self.train, recipe.steps)
