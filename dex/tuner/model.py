"""The tuner that PEFT instantiates: which projections are wrapped, what is saved and what is loaded."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import (
    BaseTuner,
    _filter_state_dict_by_key_prefixes,
    _get_tuner_state_dict_key_prefixes,
)
from torch import Tensor, nn

from dex.errors import DexError
from dex.models import attention_shape, check_supported, fingerprint, is_quantised, refuse_quantised
from dex.tuner.config import TARGETS, DexConfig
from dex.tuner.projection import DexLayer, DexOutput


class DexModel(BaseTuner):
    """Dex as PEFT sees it, as `LoraModel` is LoRA."""

    prefix = "dex_"
    tuner_layer_cls = DexLayer

    def _prepare_model(self, peft_config: DexConfig, model: nn.Module) -> None:
        check_supported(model.config)
        _check_whole_targets(peft_config, model)
        shape = attention_shape(model.config)
        _check_layers(peft_config.layers_to_transform, shape.num_layers)
        weights = _identity(peft_config, model)
        if peft_config._plan is not None:
            peft_config._plan.check(shape.num_layers, shape.num_heads, weights)
        elif peft_config.heads != "all":
            _check_heads(peft_config.heads, shape.num_layers, shape.num_heads)
        _check_branch(peft_config, shape.num_layers, shape.num_heads)
        _check_base(peft_config, weights)

    def _create_and_replace(
        self,
        peft_config: DexConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        layer = target if isinstance(target, DexLayer) else _wrap(target, target_name, parent)
        if peft_config.train_kvo:
            layer.add_copy(adapter_name)
        if isinstance(layer, DexOutput):
            heads = peft_config.layer_heads(layer.layer_idx, layer.num_heads)
            if heads:
                schedule = peft_config.layer_schedule(layer.layer_idx)
                layer.add_branch(adapter_name, heads, schedule, peft_config.w_d_init, peft_config.w_d_per)
        layer.count_steps(adapter_name)
        if layer is not target:
            self._replace_module(parent, target_name, layer, target)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: DexConfig,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """What is saved: the adapter; before its first step, without the copies, which still are the base's."""
        saved = super()._get_adapter_state_dict(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict, **kwargs
        )
        if any(isinstance(module, DexLayer) and module.merged for module in model.modules()):
            return saved  # a merged base equals the copies because it was made from them
        return {
            key: value
            for key, value in saved.items()
            if not (_is_base_weight(key, value, state_dict) and _is_untrained(key, saved, adapter_name))
        }

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: DexConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What is loaded: the saved adapter, with the base's own weights for the copies that were not saved."""
        loaded = super()._remap_adapter_state_dict_for_load(
            model=model, config=config, adapter_name=adapter_name, state_dict=state_dict
        )
        own = model.state_dict()
        prefixes = _get_tuner_state_dict_key_prefixes(model, adapter_name=adapter_name)
        expected = set(_filter_state_dict_by_key_prefixes(own, prefixes))
        unexpected = sorted(key for key in loaded if key not in expected)
        missing = sorted(
            key for key in expected if key not in loaded and not _is_untrained(key, loaded, adapter_name)
        )
        if missing or unexpected:
            raise DexError(
                f"The adapter does not fit its configuration: missing tensors {missing or 'none'}, "
                f"unexpected tensors {unexpected or 'none'}."
            )
        for key in expected - set(loaded):
            loaded[key] = own[_base_key(key)].to(torch.float32, copy=True)
        return loaded


def _wrap(target: Any, target_name: str, parent: Any) -> DexLayer:
    if target_name != "o_proj":
        return DexLayer(target)
    return DexOutput(target, layer_idx=parent.layer_idx, head_dim=parent.head_dim)


def _base_key(key: str) -> str:
    """'….k_proj.dex_weight.default' → '….k_proj.base_layer.weight'; of any other key, a key that is not there."""
    layer, _, name = key.rpartition(".dex_")
    return f"{layer}.base_layer.{name.partition('.')[0]}"


def _is_untrained(key: str, adapter: dict[str, Tensor], adapter_name: str) -> bool:
    """Whether `key` is a copy of a base weight in a layer that has done no optimiser step yet."""
    step = adapter.get(f"{key.rpartition('.dex_')[0]}.dex_step.{adapter_name}")
    return (".dex_weight." in key or ".dex_bias." in key) and step is not None and not step.any()


def _is_base_weight(key: str, value: Tensor, state_dict: dict[str, Tensor]) -> bool:
    base = state_dict.get(_base_key(key))
    return base is not None and torch.equal(value, base.to(value.dtype))


def _check_layers(layers: list[int] | int | None, num_layers: int) -> None:
    outside = [layer for layer in layers or [] if not 0 <= layer < num_layers] if isinstance(layers, list) else []
    if outside:
        raise DexError(
            f"layers_to_transform names layer {outside[0]}, but the model has layers 0 to {num_layers - 1}."
        )


def _check_heads(heads: Any, num_layers: int, num_heads: int) -> None:
    if len(heads) != num_layers:
        raise DexError(
            f"heads has {len(heads)} lists, but the model has {num_layers} layers; give one list per layer."
        )
    for layer_idx, chosen in enumerate(heads):
        if len(set(chosen)) != len(chosen) or any(not 0 <= head < num_heads for head in chosen):
            raise DexError(
                f"heads lists {chosen} for layer {layer_idx}, not a choice among the heads 0 to {num_heads - 1}."
            )


def _check_branch(config: DexConfig, num_layers: int, num_heads: int) -> None:
    """Refuse an adapter that would have no branch at all although its schedule asks for one."""
    layers = config.layers_to_transform if isinstance(config.layers_to_transform, list) else range(num_layers)
    if config.schedule != "off" and not any(config.layer_heads(layer, num_heads) for layer in layers):
        raise DexError(
            f"No adapted layer has a selected head, so schedule={config.schedule!r} has nothing to act on; "
            "choose heads, or use schedule='off'."
        )


def _check_whole_targets(config: DexConfig, model: nn.Module) -> None:
    """Refuse a quantised base, unless dex itself quantised it and left K, V and O whole."""
    if is_quantised(model.config) and config.base_quantised is None:
        refuse_quantised(model.config)
    for name, module in model.named_modules():
        if name.endswith(TARGETS) and not isinstance(module, DexLayer) and type(module) is not nn.Linear:
            raise DexError(f"{name} is a {type(module).__name__}, and Dex needs plain linear layers for K, V and O.")


def _identity(config: DexConfig, model: nn.Module) -> str:
    """The fingerprint of the base; of a quantised one, that of its whole weights, which dex noted as it quantised."""
    if is_quantised(model.config) and config.base_fingerprint is not None:
        return config.base_fingerprint
    return fingerprint(model)


def _check_base(config: DexConfig, weights: str) -> None:
    """Tie the adapter to the weights it is first attached to; a copy of K, V and O means nothing on others."""
    if config.base_fingerprint is None:
        config.base_fingerprint = weights
    elif config.base_fingerprint != weights:
        raise DexError(
            f"The adapter belongs to a base whose weights have the fingerprint {config.base_fingerprint} "
            f"({config.base_model_name_or_path}), but this model's have {weights}; load the adapter's own base."
        )


def dex_outputs(model: nn.Module) -> list[DexOutput]:
    """The wrapped o_proj of each adapted layer, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, DexOutput)]


def dex_layers(model: nn.Module) -> list[DexLayer]:
    """Every wrapped projection."""
    return [module for module in model.modules() if isinstance(module, DexLayer)]


def set_anneal_steps(model: nn.Module, adapter: str, steps: int) -> None:
    """Set T_a of an attached adapter, in optimiser steps, where the configuration left it open."""
    config: DexConfig = model.peft_config[adapter]  # type: ignore[index, assignment]
    config.anneal_steps = steps
    config._check()
    for layer in dex_outputs(model):
        if layer.has_branch(adapter):
            layer.schedules[adapter] = config.layer_schedule(layer.layer_idx)
