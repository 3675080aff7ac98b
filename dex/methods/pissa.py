"""PiSSA (arXiv:2404.02948), as PEFT has it: LoRA that starts as the principal part of the weights.

What is left of the weights is the frozen base, so the run changes its base at the start. The saved adapter is one for
the base as it was: the difference from the start is a LoRA of twice the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dex.methods.lora import Lora, check_targets
from dex.settings import Problem, number

if TYPE_CHECKING:
    from dex.heads import HeadPlan
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject


class Pissa(Lora):
    what: ClassVar[str] = "which trains the principal low-rank part"

    shards: ClassVar[tuple[str, ...]] = ()  # its start is taken off the whole adapter
    result_size: ClassVar[int] = 2  # a LoRA of twice the rank

    name: Literal["pissa"] = "pissa"  # type: ignore[assignment]
    alpha: Annotated[float | None, number(null=True, above=0)] = None  # type: ignore[assignment]  # null: the rank

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        from dex.subject import PrincipalAdapter

        check_targets(base.model, self.targets, self.rank)
        config = self.config(init_lora_weights="pissa")
        config.lora_alpha = self.rank if self.alpha is None else self.alpha
        return PrincipalAdapter(base, config)

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        yield from super().problems(recipe)
        if recipe.model.dtype != "float32":
            yield Problem(
                ("model", "dtype"),
                f"model.dtype is {recipe.model.dtype}, in which what pissa leaves of the weights would be rounded, "
                "so that the run would not begin at the base; use float32 (with run.autocast: true)",
            )
