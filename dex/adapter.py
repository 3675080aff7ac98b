"""Adapter folders: attach, save, load. The base is named in adapter_config.json by id and commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import PretrainedConfig

from dex.cards import write_card
from dex.errors import DexError
from dex.heads import HeadPlan
from dex.lock import Lock, write_lock
from dex.models import (
    ANY,
    LoadedModel,
    ModelSource,
    hub_errors_explained,
    load_model,
    load_outline,
    save_tokenizer,
)
from dex.output import whole_folder
from dex.tuner import DexConfig


def attach(base: LoadedModel, config: PeftConfig, plan: HeadPlan | None = None) -> PeftModel:
    """Put an adapter on a base, Dex on the heads of the plan if there is one, and record the base in it."""
    local = Path(base.source.id)
    config.base_model_name_or_path = str(local.resolve()) if local.exists() else base.source.id
    config.revision = base.source.commit
    if isinstance(config, DexConfig):
        if plan is not None:
            config.use_plan(plan)
        if base.quantised is not None:
            config.base_quantised, config.base_fingerprint = base.quantised, base.fingerprint
    return get_peft_model(base.model, config)


def save_adapter(
    model: PeftModel,
    base: LoadedModel,
    folder: Path,
    plan: HeadPlan | None = None,
    *,
    state: dict[str, Any] | None = None,
    lock: Lock | None = None,
    force: bool = False,
    **options: Any,
) -> None:
    """Write an adapter folder: adapter, tokenizer with chat template, head plan, card. Whole or not at all.

    state: its tensors, if not the model's. lock: the run's, to which the hashes of the written files are added.
    """
    config = model.peft_config["default"]
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # a set's order is another one in every process
    with whole_folder(folder, force, "adapter_config.json") as partial:
        # PEFT's "auto" would ask the Hub whether the vocabulary was resized.
        model.save_pretrained(partial, state_dict=state, save_embedding_layers=False, **options)
        save_tokenizer(base.tokenizer, partial)
        if plan is not None:
            plan.save(partial / "heads.json", force=True)
        if lock is not None:
            write_lock(partial, lock.of(partial))
        write_card(partial, base.source, force=True)  # PEFT has written one of its own


def is_adapter(model: str) -> bool:
    return (Path(model) / "adapter_config.json").is_file()


def read_adapter_config(adapter: str) -> DexConfig | LoraConfig:
    """The configuration of an adapter of Dex, or of its baseline LoRA, a folder or a Hub id.

    Raises DexError for anything else.
    """
    try:
        config = PeftConfig.from_pretrained(adapter)
    except (ValueError, KeyError, TypeError, OSError) as error:
        on_hub = not Path(adapter).exists() and not isinstance(error.__cause__, HFValidationError)
        if on_hub and error.__cause__ is not None:
            with hub_errors_explained(adapter, None):
                raise error.__cause__ from None
        raise DexError(f"{adapter} is not an adapter: no readable adapter_config.json is there.") from error
    if not isinstance(config, DexConfig | LoraConfig):
        raise DexError(f"{adapter} is an adapter of the method {config.peft_type}, not DEX or LORA; use PEFT itself.")
    if not config.base_model_name_or_path:
        raise DexError(f"{adapter} does not say which base it belongs to (base_model_name_or_path is empty).")
    return config


def base_outline(model: str, revision: str | None) -> tuple[PretrainedConfig, ModelSource]:
    """The config of a model in any layout, or of an adapter's base, and where it is; no weights are read."""
    if not is_adapter(model):
        return load_outline(model, revision, ANY)
    adapter = read_adapter_config(model)
    return load_outline(adapter.base_model_name_or_path or "", adapter.revision)


def load_adapter(adapter: str, dtype: str = "auto") -> tuple[PeftModel, LoadedModel]:
    """The base that an adapter names, with the adapter on it, in eval mode; and that base."""
    config = read_adapter_config(adapter)
    quantised = config.base_quantised if isinstance(config, DexConfig) else None
    base = load_model(config.base_model_name_or_path, config.revision, dtype, quantise=quantised)
    return load_onto(base, adapter), base


def load_onto(base: LoadedModel, adapter: str) -> PeftModel:
    """Put a saved adapter on a base. Raises DexError if its file is damaged or does not fit the base."""
    try:
        return PeftModel.from_pretrained(base.model, adapter).eval()
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DexError(f"The adapter {adapter} cannot be put on {base.source.id}: {reason}") from error
