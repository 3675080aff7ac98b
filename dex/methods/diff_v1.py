"""The base laid out as a DIFF Transformer V1 at the run's start: "DIFFT-Lam" of the Dex paper, as we understand it.

The paper does not define its DIFFT-Lam. Ours: the layout retrofitted to pretrained weights, exact at the first step,
with λ learned from λ_init and the norm of the heads annealed in (`dex.layouts.to_diff_v1`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dex.methods.base import Method
from dex.methods.full import Names, Share
from dex.settings import Problem, choice

if TYPE_CHECKING:
    from torch import Tensor

    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject

SEQUENCES, LENGTH = 8, 512  # as many positions as `dex convert --layout` fits on by default

Heads = Literal["doubled", "paired"]
Norm = Literal["anneal", "off"]


class DiffV1(Method):
    what: ClassVar[str] = "which lays the base out as DIFF V1 and trains its attention"
    result: ClassVar[Literal["adapter", "model"]] = "model"
    in_place: ClassVar[bool] = True
    shards: ClassVar[tuple[str, ...]] = ("FSDP",)  # under ZeRO its annealing would not be counted

    name: Literal["diff-v1"] = "diff-v1"
    heads: Annotated[Heads, choice(Heads)] = "doubled"
    norm: Annotated[Norm, choice(Norm)] = "anneal"  # calibrated norms: `dex convert --layout`, then `full`
    norm_anneal: Share = None  # over which share of the run; null: half
    train: Names = ["q_proj", "k_proj", "v_proj", "o_proj", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"]

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.layouts.to_diff_v1 import V1Options, to_diff_v1
        from dex.subject import WholeModel, laid_out

        options, text = V1Options(self.heads, self.norm, recipe.run.seed), _text_to_fit_on(recipe, base)
        model = laid_out(base, lambda model: to_diff_v1(model, options, text))
        return WholeModel(model, self.train, recipe.steps, self.norm_anneal)

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        if self.norm == "off" and self.norm_anneal is not None:
            yield Problem(
                ("method", "norm_anneal"),
                "method.norm_anneal has no effect with method.norm off; remove one of the two",
            )


def _text_to_fit_on(recipe: Recipe, base: LoadedModel) -> Tensor:
    """Training text that the scales of the heads are measured on, [N, T]; none for a model without weights."""
    import torch

    from dex.data import calibration
    from dex.run_data import heaviest_source

    if base.model.device.type == "meta":
        return torch.empty(0, 1, dtype=torch.int64)
    return calibration(
        heaviest_source(recipe.data), base.tokenizer, SEQUENCES, LENGTH, recipe.data.held_out
    ).input_ids
