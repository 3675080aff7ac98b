"""A Trainer callback that watches the branch: λ(t) and ‖λ f_D(O)‖/‖O‖ of every layer, in the Trainer's log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dex.method.model import dex_outputs, set_anneal_steps
from dex.method.projection import DexOutput

INERT_BELOW = 1e-3  # a mean branch ratio below this is called inert: it does nothing that rounding would not do


class BranchRatios:
    """Measures ‖λ f_D(O)‖/‖O‖ of every adapted layer in the forward passes made inside `with`.

    `.mean()` gives one number per adapted layer, averaged over those passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = dex_outputs(model)
        self._measured: list[list[Tensor]] = [[] for _ in self.layers]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> BranchRatios:
        for layer, measured in zip(self.layers, self._measured, strict=True):

            def measure(module: DexOutput, args: tuple[Tensor, ...], into: list[Tensor] = measured) -> None:
                with torch.no_grad():
                    into.append(module.branch_ratio(args[0]))

            self._handles.append(layer.register_forward_pre_hook(measure))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mean(self) -> list[float]:
        return [torch.stack(measured).mean().item() if measured else 0.0 for measured in self._measured]


def lams(model: nn.Module, adapter: str = "default") -> list[float]:
    """λ(t) of every adapted layer at this moment; 0 for a layer without a branch."""
    with torch.no_grad():
        return [o.lam(adapter).item() if o.has_branch(adapter) else 0.0 for o in dex_outputs(model)]


class DexCallback(TrainerCallback):
    """Logs `lam` and `branch_ratio`, one number per adapted layer, at every logging step of a Trainer.

    Where the configuration leaves T_a open, sets it to half of the run (ours; the paper does not give it).
    The ratio is measured in the logging step's own forward pass, so it costs no extra one.
    """

    def __init__(self) -> None:
        self._ratios: BranchRatios | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        for adapter in model.active_adapters:
            if model.peft_config[adapter].anneal_steps is None:
                set_anneal_steps(model, adapter, max(1, state.max_steps // 2))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if (state.global_step + 1) % max(1, int(state.logging_steps)) == 0:
            self._ratios = BranchRatios(model).__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ratios is not None:
            self._ratios.__exit__()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or self._ratios is None:
            return
        logs["lam"] = lams(model, model.active_adapters[0])
        logs["branch_ratio"] = self._ratios.mean()
        state.log_history[-1].update(lam=logs["lam"], branch_ratio=logs["branch_ratio"])
        self._ratios = None
