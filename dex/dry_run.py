"""`dex train --dry-run`: everything that a run can trip over before its first update, in a minute, writing nothing.

The recipe, the run's folder, the base and its tokenizer, a block of every source, the method, one forward pass; and
the plan of the whole run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dex.console import say
from dex.data import Source, calibration
from dex.errors import DexError
from dex.heads import HeadPlan, make_plan
from dex.loss import causal_lm_loss
from dex.methods.dex import PlannedHeads
from dex.models import LoadedModel, device
from dex.output import refuse_output_over
from dex.plan import describe as describe_plan
from dex.plan import plan
from dex.processes import world_size
from dex.recipe import Recipe
from dex.run_folder import open_run
from dex.train import check_settings, load_base
from dex.trainer import refuse_batches_that_do_not_divide


def dry_run(recipe: Recipe, *, force: bool = False) -> dict[str, Any]:
    """Check a recipe as far as its first loss; returns what was seen. Raises DexError where the run would."""
    check_settings(recipe)
    refuse_batches_that_do_not_divide(recipe)
    refuse_output_over(Path(recipe.output), recipe.model.id)
    finished = open_run(Path(recipe.output), recipe, force)
    base = load_base(recipe)
    blocks = {source.source: _block(recipe, Source(**source.model_dump()), base) for source in recipe.data.train}
    subject = recipe.method.subject(recipe, base, _any_plan(recipe, base))
    trained = sum(p.numel() for p in subject.model.parameters() if p.requires_grad)
    name, ids = next(iter(blocks.items()))
    say(f"one forward pass over a block of {name}")
    model = subject.model.to(device()).eval()
    with torch.no_grad():
        loss = causal_lm_loss(model, ids[None].to(device()), ids[None].to(device())).item()
    if not torch.isfinite(torch.tensor(loss)):
        raise DexError(f"The loss of the first block of {name} is {loss}, before any training; is the base whole?")
    return {
        "dry_run": True,
        "finished": finished is not None,
        "sources": list(blocks),
        "loss_of_one_block": loss,
        "trained_parameters": trained,
        "plan": plan(recipe, processes=world_size()).to_dict(),
    }


def _block(recipe: Recipe, source: Source, base: LoadedModel) -> torch.Tensor:
    say(f"tokenising one block of {source.source}")
    return calibration(source, base.tokenizer, 1, recipe.data.block, recipe.data.held_out).input_ids[0]


def _any_plan(recipe: Recipe, base: LoadedModel) -> HeadPlan | None:
    """The plan of a file; in the place of scored heads, random ones: scoring is the run's own work."""
    heads = recipe.method.heads_to_choose()
    if heads is None:
        return None
    if isinstance(heads, PlannedHeads):
        return HeadPlan.load(Path(heads.plan))
    criterion = heads.criterion if heads.criterion in ("all", "none") else "random"
    return make_plan(base.model, base.source.id, base.source.commit, base.fingerprint, criterion, heads.per_layer)


def describe(recipe: Recipe, result: dict[str, Any]) -> str:
    """The lines that are printed."""
    finished = f"\n{recipe.output} holds this run, finished; nothing would be done" if result["finished"] else ""
    return (
        f"{describe_plan(plan(recipe, processes=world_size()))}\n"
        f"{', '.join(result['sources'])}: a block of {recipe.data.block:,} tokens each; the loss of the first is "
        f"{result['loss_of_one_block']:.4f}; {result['trained_parameters']:,} parameters would train{finished}"
    )
