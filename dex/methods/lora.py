"""LoRA (arXiv:2106.09685), as PEFT has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.errors import DexError
from dex.methods.base import Method
from dex.settings import Problem, distinct, number, text, whole

if TYPE_CHECKING:
    from torch import nn

    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject

Targets = Annotated[list[Annotated[str, text()]], distinct("a list of different projections")]


def check_targets(model: nn.Module, targets: list[str], rank: int | None = None) -> None:
    """Raise DexError for a target that no projection of the layers is called, or that is smaller than `rank`."""
    from torch import nn

    layers: Any = model.get_decoder().layers  # type: ignore[operator]
    found = {
        name.rpartition(".")[2]: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)
    }
    for target in targets:
        if target not in found:
            raise DexError(
                f"method.targets has {target!r}, which no projection of this model is called; {', '.join(found)} are."
            )
        size = min(found[target].weight.shape)
        if rank is not None and rank > size:
            raise DexError(f"method.rank is {rank}, and {target} has no more than {size}; lower it, or leave it out.")


class Lora(Method):
    """The paper does not give the rank, alpha and targets of its LoRA; these are ours."""

    what: ClassVar[str] = "which trains low-rank updates"

    name: Literal["lora"] = "lora"
    rank: Annotated[int, whole(above=0)] = 16
    alpha: Annotated[float, number(above=0)] = 32.0  # the update is multiplied by alpha / rank
    targets: Targets = ["q_proj", "k_proj", "v_proj", "o_proj"]

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import Adapter

        check_targets(base.model, self.targets)
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
