"""`dex heads` and `dex convert`: score and choose heads, attach, write the adapter folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import set_seed

from dex.adapter import attach, save_adapter
from dex.console import Bar, say
from dex.data import Source, calibration
from dex.heads import DataIdentity, HeadPlan, PerLayer, find_criterion, make_plan
from dex.models import LoadedModel, device, load_model
from dex.output import refuse_to_overwrite, refuse_to_overwrite_file
from dex.tuner import DexConfig


@dataclass(frozen=True)
class Choice:
    """How heads are chosen: `per_layer` of each layer by a criterion, scored on `sequences` × `length` tokens."""

    criterion: str = "entropy"
    per_layer: PerLayer = "half"
    source: Source = field(default_factory=lambda: Source("pydoc"))
    sequences: int = 64
    length: int = 512
    seed: int = 0
    held_out: float = 0.0  # share of the documents that scoring must not see


def choose_heads(base: LoadedModel, choice: Choice) -> HeadPlan:
    """Score the heads of a base on calibration text, and choose."""
    identity = (base.model, base.source.id, base.source.commit, base.fingerprint)
    if find_criterion(choice.criterion).score is None:
        return make_plan(*identity, choice.criterion, choice.per_layer, seed=choice.seed)
    ids, text = calibration(choice.source, base.tokenizer, choice.sequences, choice.length, choice.held_out)
    name = choice.source.source
    if len(ids) < choice.sequences:
        say(f"{name} holds {len(ids)} windows of {choice.length} tokens, not the {choice.sequences} asked for")
    base.model.to(device())
    data = DataIdentity(source=name, fingerprint=text, sequences=len(ids), length=choice.length)
    batches = ({"input_ids": row[None]} for row in ids)
    with Bar(f"scoring heads by {choice.criterion}", len(ids), "sequences") as bar:
        return make_plan(*identity, choice.criterion, choice.per_layer, batches, data, choice.seed, bar.update)


def write_plan(
    model: str | Path,
    output: str | Path,
    choice: Choice | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    force: bool = False,
) -> HeadPlan:
    """`dex heads`: the plan of a model, written to a file."""
    output = Path(output)
    refuse_to_overwrite_file(output, force)
    plan = choose_heads(load_model(str(model), revision, dtype), choice or Choice())
    plan.save(output, force)
    return plan


def convert(
    model: str | Path,
    output: str | Path,
    config: DexConfig | None = None,
    heads: HeadPlan | Choice | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    force: bool = False,
) -> HeadPlan | None:
    """`dex convert`: write the untrained adapter folder of a model, with its head plan.

    heads: a plan, how to make one, or None (all heads; none with schedule "off"). The base is not copied: the folder
    holds W_D, λ and the configuration. Raises DexError for a base or a plan that does not fit.
    """
    output = Path(output)
    refuse_to_overwrite(output, force, "adapter_config.json")
    base = load_model(str(model), revision, dtype)
    plan = choose_heads(base, heads) if isinstance(heads, Choice) else heads
    set_seed(seed)  # W_D does not depend on what was drawn before
    save_adapter(attach(base, config or DexConfig(task_type="CAUSAL_LM"), plan), base, output, plan, force=force)
    return plan
