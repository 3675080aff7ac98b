"""LoRA (arXiv:2106.09685), as PEFT has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.methods.base import Method
from dex.settings import Problem, distinct, number, text, whole

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject

Targets = Annotated[list[Annotated[str, text()]], distinct("a list of different projections")]


class Lora(Method):
    """The paper does not give the rank, alpha and targets of its LoRA; these are ours."""

    what: ClassVar[str] = "which trains low-rank updates"

    name: Literal["lora"] = "lora"
    rank: Annotated[int, whole(above=0)] = 16
    alpha: Annotated[float, number(above=0)] = 32.0  # the update is multiplied by alpha / rank
    targets: Targets = ["q_proj", "k_proj", "v_proj", "o_proj"]

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import Adapter

        return Adapter(base, self.config())

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        if recipe.model.quantise is not None:
            yield Problem(
                ("model", "quantise"),
                f"model.quantise is for dex and attention, whose weights stay whole, and method.name is {self.name}; "
                "remove it",
            )

    def config(self, **options: Any) -> Any:
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets),
            **options,
        )
