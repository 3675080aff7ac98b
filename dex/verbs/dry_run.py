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
from dex.loss import causal_lm_loss
from dex.models import LoadedModel, device
from dex.planning.outline import stand_in_plan
from dex.processes import refuse_sharding_that_is_not_to_be_had, world_size
from dex.recipe import Recipe, as_recipe
from dex.run_data import sources
from dex.run_folder import open_run
from dex.trainer import cross_entropy_of
from dex.verbs.plan import Plan, plan
from dex.verbs.plan import describe as describe_plan
from dex.verbs.train import check_settings, load_base


def dry_run(recipe: Recipe | str | Path, *, force: bool = False) -> tuple[dict[str, Any], Plan]:
    """Check a recipe as far as its first loss; returns what was seen, and the plan. Raises DexError as a run."""
    recipe = as_recipe(recipe)
    refuse_sharding_that_is_not_to_be_had()
    check_settings(recipe)
    finished = open_run(Path(recipe.output), recipe, force)
    base = load_base(recipe)
    blocks = {source.source: _block(recipe, source, base) for source in sources(recipe.data)}
    subject = recipe.method.subject(recipe, base, stand_in_plan(recipe, base))
    name, ids = next(iter(blocks.items()))
    say(f"one forward pass over a block of {name}")
    model, ids = subject.model.to(device()).eval(), ids[None].to(device())
    with torch.no_grad(), torch.autocast(device().type, torch.bfloat16, enabled=recipe.run.autocast):
        loss = causal_lm_loss(model, ids, ids, cross_entropy=cross_entropy_of(recipe)).item()
    if not torch.isfinite(torch.tensor(loss)):
        raise DexError(f"The loss of the first block of {name} is {loss}, before any training; is the base whole?")
    made = plan(recipe, processes=world_size())
    seen = {
        "dry_run": True,
        "finished": finished is not None,
        "sources": list(blocks),
        "loss_of_one_block": loss,
        "trained_parameters": subject.trained_parameters,
        "plan": made.to_dict(),
    }
    return seen, made


def _block(recipe: Recipe, source: Source, base: LoadedModel) -> torch.Tensor:
    """Token ids [block]. The loss counts all of them, also of a conversation, where the run counts the answers."""
    say(f"tokenising one block of {source.source}")
    return calibration(source, base.tokenizer, 1, recipe.data.block, recipe.data.held_out).input_ids[0]


def describe(recipe: Recipe, result: dict[str, Any], made: Plan) -> str:
    """The lines that are printed."""
    finished = f"\n{recipe.output} holds this run, finished; nothing would be done" if result["finished"] else ""
    return (
        f"{describe_plan(made)}\n"
        f"{', '.join(result['sources'])}: a block of {recipe.data.block:,} tokens each; the loss of the first is "
        f"{result['loss_of_one_block']:.4f}; {result['trained_parameters']:,} parameters would train{finished}"
    )
