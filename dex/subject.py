"""What a run trains: an adapter on a frozen base, or a model's own weights (whole, or by a list)."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from dex.adapter import attach, save_adapter
from dex.cards import write_card
from dex.errors import DexError
from dex.heads import HeadPlan
from dex.layouts.callback import V1Callback
from dex.lock import Lock, write_lock
from dex.models import LoadedModel, quiet, save_model
from dex.output import whole_folder
from dex.recipe import Run
from dex.tuner import DexConfig
from dex.tuner.callback import DexCallback

State = dict[str, Tensor] | None  # a gathered state dict, where the model's own tensors are sharded over processes


class Subject(ABC):
    """`model` is what the Trainer gets, `base` what it was made of."""

    model: Any
    base: LoadedModel
    checkpoint_files: Sequence[str]  # without which a checkpoint is not whole

    @property
    def trained_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @abstractmethod
    def parameter_groups(self, run: Run) -> list[dict[str, Any]]: ...

    @abstractmethod
    def save_checkpoint(self, folder: str | None, state: State) -> None: ...

    @abstractmethod
    def save(self, folder: Path, lock: Lock, state: State = None) -> None:
        """Write what was trained, whole or not at all; the lock says what the run knows of it."""

    def callbacks(self) -> list[TrainerCallback]:
        return []


class Adapter(Subject):
    """Any adapter of PEFT on a frozen base."""

    checkpoint_files = ("adapter_config.json", "adapter_model.safetensors")

    def __init__(self, base: LoadedModel, config: PeftConfig, plan: HeadPlan | None = None) -> None:
        self.base, self.plan = base, plan
        self.model = attach(base, config, plan)

    def parameter_groups(self, run: Run) -> list[dict[str, Any]]:
        params = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return [{"params": params, "lr": run.lr, "weight_decay": run.weight_decay}]

    def save_checkpoint(self, folder: str | None, state: State) -> None:
        # PEFT's "auto" would ask the Hub whether the vocabulary was resized.
        self.model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)

    def save(self, folder: Path, lock: Lock, state: State = None) -> None:
        save_adapter(self.model, self.base, folder, self.plan, state=state, lock=lock, force=True)


class DexAdapter(Adapter):
    """Dex, or its control: an adapter without a branch."""

    def __init__(
        self,
        base: LoadedModel,
        config: DexConfig,
        plan: HeadPlan | None = None,
        lr_scale: dict[str, float] | None = None,
    ) -> None:
        super().__init__(base, config, plan)
        self.lr_scale = {"copies": 1.0, "w_d": 1.0, "lam": 1.0, **(lr_scale or {})}

    def parameter_groups(self, run: Run) -> list[dict[str, Any]]:
        """W_D and λ have learning rates of their own; weight decay is for the copies of K, V and O alone."""
        kinds: dict[str, list[nn.Parameter]] = {"copies": [], "w_d": [], "lam": []}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                kind = "w_d" if ".dex_w_d." in name else "lam" if ".dex_lam." in name else "copies"
                kinds[kind].append(parameter)
        return [
            {
                "params": params,
                "lr": run.lr * self.lr_scale[kind],
                "weight_decay": run.weight_decay if kind == "copies" else 0.0,
            }
            for kind, params in kinds.items()
            if params
        ]

    def callbacks(self) -> list[TrainerCallback]:
        return [DexCallback()]


class PrincipalAdapter(Adapter):
    """PiSSA: the base is changed at the start, so the saved adapter is the difference from the start."""

    def __init__(self, base: LoadedModel, config: Any) -> None:
        super().__init__(base, config)
        self._start = tempfile.TemporaryDirectory(prefix="dex-pissa-")
        if base.model.device.type == "meta":
            return
        own = self.model.peft_config["default"]
        own.init_lora_weights, kind = True, own.init_lora_weights  # PEFT wants the start to be a plain LoRA
        try:
            self.model.save_pretrained(self._start.name, save_embedding_layers=False)
        except (OSError, SafetensorError) as error:
            raise DexError(
                f"PiSSA's start could not be written to {self._start.name}: {error}; make room."
            ) from error
        own.init_lora_weights = kind

    def save(self, folder: Path, lock: Lock, state: State = None) -> None:
        options = {"path_initial_model_for_weight_conversion": self._start.name}
        save_adapter(self.model, self.base, folder, None, state=state, lock=lock, force=True, **options)


class WholeModel(Subject):
    """The model's own weights, of any layout. Weight decay is for matrices alone, not for norms, biases and λ."""

    checkpoint_files = ("config.json", "model.safetensors")

    def __init__(
        self, base: LoadedModel, names: list[str] | None, steps: int, norm_anneal: float | None = None
    ) -> None:
        self.base = base
        self.model = base.model
        self.use_cache = base.model.config.use_cache  # the Trainer turns it off in the config
        choose_trainable(self.model, names)
        set_norm_anneal(self.model, norm_anneal, steps)

    def parameter_groups(self, run: Run) -> list[dict[str, Any]]:
        """`kind` tells the layers' matrices, which some optimisers project, from embeddings and from vectors."""
        kinds: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "vectors": []}
        layers = {id(parameter) for parameter in self.model.get_decoder().layers.parameters()}
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                matrix = "matrices" if id(parameter) in layers else "embeddings"
                kinds[matrix if parameter.ndim > 1 else "vectors"].append(parameter)
        return [
            {
                "params": params,
                "lr": run.lr,
                "weight_decay": 0.0 if kind == "vectors" else run.weight_decay,
                "kind": kind,
            }
            for kind, params in kinds.items()
            if params
        ]

    def callbacks(self) -> list[TrainerCallback]:
        return [V1Callback()]

    def save_checkpoint(self, folder: str | None, state: State) -> None:
        with quiet():
            # In one file: a checkpoint is whole if it has it.
            self.model.save_pretrained(folder, state_dict=state, max_shard_size="1TB")

    def save(self, folder: Path, lock: Lock, state: State = None) -> None:
        self.model.config.use_cache = self.use_cache
        with whole_folder(folder, force=True) as partial:
            save_model(self.model, self.base.tokenizer, partial, state)
            write_lock(partial, lock.of(partial))
            write_card(partial, self.base.source)


def laid_out(base: LoadedModel, convert: Callable[[PreTrainedModel], PreTrainedModel]) -> LoadedModel:
    """The base in another layout, with its generation config."""
    model = convert(base.model)
    model.generation_config = base.model.generation_config
    return replace(base, model=model)


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


def set_norm_anneal(model: PreTrainedModel, share: float | None, steps: int) -> None:
    """Say over how many steps the norm of a DIFF V1 anneals. Raises DexError where the recipe asks for it in vain."""
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
