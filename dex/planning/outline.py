"""A run's model and what is trained of it, as shapes on the meta device: the recipe's real method on no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dex.errors import DexError
from dex.heads import HeadPlan, make_plan
from dex.layouts import body
from dex.methods.dex import PlannedHeads
from dex.models import ANY, EMBEDDED, NOT_QUANTISED, SUPPORTED, LoadedModel, ModelSource, load_outline
from dex.recipe import Recipe
from dex.subject import Subject


@dataclass(frozen=True)
class Outline:
    """`base_bytes`: the weights of the base in their checkpoint's dtype. `dtype`: of the base in this run."""

    source: ModelSource
    config: PretrainedConfig
    subject: Subject
    dtype: torch.dtype
    parameters: int
    trainable: int
    base_bytes: int


def outline(recipe: Recipe) -> Outline:
    """The recipe's subject on the meta device. Raises DexError for whatever config, method and plan have wrong."""
    families = ANY if recipe.method.any_layout else SUPPORTED
    config, source = load_outline(recipe.model.id, recipe.model.revision, families)
    own = checkpoint_dtype(config, source)
    dtype = own if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    model = on_meta(config, dtype, source)
    base_bytes = count(model) * own.itemsize
    base = LoadedModel(model, None, source)
    plan = stand_in_plan(recipe, base)
    # A layout draws new tensors with a generator of the CPU, which tensors on meta do not take.
    with torch.device("meta") if recipe.method.result == "adapter" else nullcontext():
        subject = recipe.method.subject(recipe, base, plan)
    return Outline(source, config, subject, dtype, count(subject.model), subject.trained_parameters, base_bytes)


def on_meta(config: PretrainedConfig, dtype: torch.dtype, source: ModelSource) -> PreTrainedModel:
    """The model of a config in this dtype, without memory behind it. Raises DexError where no model can be made."""
    try:
        model = body.on_meta(config, dtype)
    except Exception as error:  # a wrong config can make the modeling code raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DexError(f"The config of {source.id} makes no model: {reason[0].rstrip('.:')}.") from error
    model.name_or_path = source.id
    return model.eval()


def checkpoint_dtype(config: PretrainedConfig, source: ModelSource) -> torch.dtype:
    """What `dtype: auto` stands for: the config's; float32 where it has none, and for GGUF, which is dequantised."""
    given = getattr(config, "dtype", None)
    is_gguf = source.id.lower().endswith(".gguf") or source.id in EMBEDDED
    return given if isinstance(given, torch.dtype) and not is_gguf else torch.float32


def count(model: nn.Module) -> int:
    """Parameters, a tied one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def quantised(model: nn.Module) -> Iterator[nn.Linear]:
    """The projections that model.quantise quantises."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and set(name.split(".")).isdisjoint(NOT_QUANTISED):
            yield module


def stand_in_plan(recipe: Recipe, base: LoadedModel) -> HeadPlan | None:
    """A plan of the right size without scoring: which heads are chosen changes neither parameters nor memory."""
    heads, own = recipe.method.heads_to_choose(), base.fingerprint
    if heads is None:
        return None
    if isinstance(heads, PlannedHeads):
        plan = HeadPlan.load(Path(heads.plan))
        if base.model.device.type != "meta":
            return plan
        # Checked against the model's shape alone: there are no weights that could be the wrong ones.
        return plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": own})})
    criterion = heads.criterion if heads.criterion in ("all", "none") else "random"
    return make_plan(base.model, base.source.id, base.source.commit, own, criterion, heads.per_layer)
