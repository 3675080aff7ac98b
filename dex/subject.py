"""What a run trains: an adapter on a frozen base, or the model's own weights (whole, or by the recipe's list)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from dex.adapter import attach, save_adapter
from dex.card import write_trained_card
from dex.errors import DexError
from dex.heads import HeadPlan
from dex.layouts.callback import V1Callback
from dex.method import DexConfig
from dex.method.callback import DexCallback
from dex.models import LoadedModel, quiet, save_model
from dex.output import whole_folder
from dex.recipe import Recipe
from dex.run_folder import ADAPTER, MODEL


class Subject(ABC):
    """`model` is what the Trainer gets; `output` the folder inside the run that holds the result."""

    output: str
    checkpoint_files: Sequence[str]  # without which a checkpoint is not whole
    model: Any

    @abstractmethod
    def parameter_groups(self, recipe: Recipe) -> list[dict[str, Any]]: ...

    @abstractmethod
    def callbacks(self) -> list[TrainerCallback]: ...

    @abstractmethod
    def save_checkpoint(self, folder: str | None, state_dict: dict[str, Any] | None) -> None: ...

    @abstractmethod
    def save(self, folder: Path, result: dict[str, Any]) -> None:
        """Write the result, whole or not at all; `result` is what the run knows of it, for the card."""


def subject_of(recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> Subject:
    return WholeModel(recipe, base) if recipe.method.name == "full" else Adapter(recipe, base, plan)


class Adapter(Subject):
    """Dex, or its control `attention`: an adapter without a branch."""

    output = ADAPTER
    checkpoint_files = ("adapter_config.json", "adapter_model.safetensors")

    def __init__(self, recipe: Recipe, base: LoadedModel, plan: HeadPlan | None) -> None:
        self.base, self.plan = base, plan
        self.model = attach(base, adapter_config(recipe), plan)

    def parameter_groups(self, recipe: Recipe) -> list[dict[str, Any]]:
        """W_D and λ have learning rates of their own; weight decay is for the copies of K, V and O alone."""
        run, scale = recipe.run, recipe.method.lr_scale
        kinds: dict[str, list[nn.Parameter]] = {"copies": [], "w_d": [], "lam": []}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                kind = "w_d" if ".dex_w_d." in name else "lam" if ".dex_lam." in name else "copies"
                kinds[kind].append(parameter)
        rates = {"copies": run.lr, "w_d": run.lr * scale.w_d, "lam": run.lr * scale.lam}
        return [
            {"params": params, "lr": rates[kind], "weight_decay": run.weight_decay if kind == "copies" else 0.0}
            for kind, params in kinds.items()
            if params
        ]

    def callbacks(self) -> list[TrainerCallback]:
        return [DexCallback()]

    def save_checkpoint(self, folder: str | None, state_dict: dict[str, Any] | None) -> None:
        # PEFT's "auto" would ask the Hub whether the vocabulary was resized.
        self.model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)

    def save(self, folder: Path, result: dict[str, Any]) -> None:
        save_adapter(self.model, self.base, folder, self.plan, result["branch"], force=True)


def adapter_config(recipe: Recipe) -> DexConfig:
    """The recipe's adapter; the control `attention` is one without a branch."""
    method = recipe.method
    return DexConfig(
        task_type="CAUSAL_LM",
        schedule=method.schedule,
        anneal_steps=recipe.anneal_steps if method.schedule in ("paper", "land") else None,
        lam=method.lam,
        w_d_init=method.w_d_init,
        train_kvo=method.train_kvo,
        layers_to_transform=method.layers,
    )


class WholeModel(Subject):
    """The model's own weights, of any layout. Weight decay is for matrices alone, not for norms, biases and λ."""

    output = MODEL
    checkpoint_files = ("config.json", "model.safetensors")

    def __init__(self, recipe: Recipe, base: LoadedModel) -> None:
        self.base = base
        self.model = base.model
        self.use_cache = base.model.config.use_cache  # the Trainer turns it off in the config
        choose_trainable(self.model, recipe.method.train)
        set_norm_anneal(self.model, recipe)

    def parameter_groups(self, recipe: Recipe) -> list[dict[str, Any]]:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices, others = ([p for p in trained if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        return [
            {"params": params, "lr": recipe.run.lr, "weight_decay": decay}
            for params, decay in ((matrices, recipe.run.weight_decay), (others, 0.0))
            if params
        ]

    def callbacks(self) -> list[TrainerCallback]:
        return [V1Callback()]

    def save_checkpoint(self, folder: str | None, state_dict: dict[str, Any] | None) -> None:
        with quiet():
            # In one file: a checkpoint is whole if it has it.
            self.model.save_pretrained(folder, state_dict=state_dict, max_shard_size="1TB")

    def save(self, folder: Path, result: dict[str, Any]) -> None:
        self.model.config.use_cache = self.use_cache
        with whole_folder(folder, force=True) as partial:
            save_model(self.model, self.base.tokenizer, partial)
            write_trained_card(partial, self.base.source, self.model.config, result)


def choose_trainable(model: PreTrainedModel, names: list[str] | None) -> None:
    """Train the parameters that have one of the names as a part of their own, `q_proj` say; all of them for None.

    Raises DexError for a name that no parameter has.
    """
    parts = {name: name.split(".") for name, _ in model.named_parameters()}
    known = sorted({part for split in parts.values() for part in split if not part.isdigit()})
    for wanted in names or ():
        if wanted not in known:
            raise DexError(
                f"method.train has {wanted!r}, which no weight of this model is called; {', '.join(known)} are."
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or not set(names).isdisjoint(parts[name]))


def set_norm_anneal(model: PreTrainedModel, recipe: Recipe) -> None:
    """Say over how many steps the norm of a DIFF V1 anneals. Raises DexError where the recipe asks for it in vain."""
    share, steps = recipe.method.norm_anneal, recipe.steps
    if getattr(model.config, "head_norm", None) == "anneal":
        if not any(p.requires_grad for p in model.get_decoder().layers[0].get_submodule("self_attn").parameters()):
            raise DexError("method.train has no weight of the attention, so the norm would never anneal; add one.")
        if model.config.head_norm_steps is None:
            model.config.head_norm_steps = max(1, round((0.5 if share is None else share) * steps))
        elif share is not None:
            raise DexError(
                f"method.norm_anneal is {share:g}, and the model says itself that its norm anneals over "
                f"{model.config.head_norm_steps} steps; remove one of the two."
            )
    elif share is not None:
        raise DexError(
            "method.norm_anneal has no effect: the model is no DIFF V1 with head_norm 'anneal'; remove it."
        )
