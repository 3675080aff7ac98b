"""What every method has to say for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dex.settings import Block, Problem

if TYPE_CHECKING:
    import torch

    from dex.heads import HeadPlan
    from dex.methods.dex import PlannedHeads, ScoredHeads
    from dex.models import LoadedModel
    from dex.recipe import Recipe
    from dex.subject import Subject


class Method(Block):
    """A way to train: its settings are the keys of `method` in a recipe.

    A subclass gives `name` as a Literal with a default, and `subject`. The rest has defaults.
    """

    if TYPE_CHECKING:
        name: str

    what: ClassVar[str]  # "which trains K, V and O alone", for sentences
    result: ClassVar[Literal["adapter", "model"]] = "adapter"  # what the run's folder ends up with
    any_layout: ClassVar[bool] = False  # does it take DIFF models too
    in_place: ClassVar[bool] = False  # does it update the base's own weights
    shards: ClassVar[tuple[str, ...]] = ("FSDP", "DEEPSPEED")  # what may spread it over processes, beside DDP
    result_size: ClassVar[int] = 1  # of what is saved at the end, in sizes of what trains
    plan_note: ClassVar[str | None] = None  # what `dex plan` leaves out

    def subject(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
        """What is trained: an adapter on the base, or the base's own weights."""
        raise NotImplementedError

    def problems(self, recipe: Recipe) -> Iterator[Problem]:
        """The settings that do not fit each other or the rest of the recipe."""
        yield from ()

    def check_packages(self) -> None:
        """Raise DexError for a package that the method needs and that is not installed, before any work is done."""

    def heads_to_choose(self) -> ScoredHeads | PlannedHeads | None:
        """The heads that the run has to choose, or read from a plan, before it begins; None: there are none."""
        return None

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser of the subject's parameter groups; AdamW, as in the paper (its betas are torch's: ours)."""
        import torch

        return torch.optim.AdamW(groups, fused=True)
