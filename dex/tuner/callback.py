"""A Trainer callback that watches the branch: λ(t) and ‖λ f_D(O)‖/‖O‖ of every layer, in the Trainer's log."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerControl, TrainerState, TrainingArguments

from dex.layer import ANNEALED
from dex.log_figures import LogFigures, whole
from dex.tuner import annealing
from dex.tuner.model import dex_layers, dex_outputs, set_anneal_steps
from dex.tuner.projection import DexOutput

INERT_BELOW = 1e-3  # a mean branch ratio below this is called inert: it does nothing that rounding would not do


class BranchRatios:
    """Measures ‖λ f_D(O)‖/‖O‖ of every adapted layer in the first `passes` forward passes made inside `with`.

    `.mean()` gives one number per adapted layer, averaged over those passes.
    """

    def __init__(self, model: nn.Module, passes: float = math.inf) -> None:
        self.layers, self.passes = dex_outputs(model), passes
        self._measured: list[list[Tensor]] = [[] for _ in self.layers]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> BranchRatios:
        for layer, measured in zip(self.layers, self._measured, strict=True):

            def measure(module: DexOutput, args: tuple[Tensor, ...], into: list[Tensor] = measured) -> None:
                if len(into) < self.passes:
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
        return [whole(o.lam(adapter)).item() if o.has_branch(adapter) else 0.0 for o in dex_outputs(model)]


def branch_state(model: nn.Module, input_ids: Tensor) -> dict[str, Any] | None:
    """λ and ‖λ f_D(O)‖/‖O‖ per adapted layer, the ratio on the tokens input_ids [T]; None without any branch.

    layers: which those are.
    """
    if not any(layer.dex_w_d for layer in dex_outputs(model)):
        return None
    model.eval()
    with BranchRatios(model) as ratios, torch.no_grad():
        model(input_ids=input_ids[None].to(next(model.parameters()).device), use_cache=False)
    mean = statistics.fmean(ratios.mean())
    layers = [layer.layer_idx for layer in dex_outputs(model)]
    return {
        "layers": layers,
        "lam": lams(model),
        "ratio": ratios.mean(),
        "mean_ratio": mean,
        "inert": mean < INERT_BELOW,
    }


class DexCallback(LogFigures):
    """Logs `lam` and `branch_ratio`, one number per adapted layer, whenever a Trainer logs its loss.

    Where the configuration leaves T_a open, sets it to half of the run (ours; the paper does not give it).
    The ratio is measured in the logging step's own first forward pass, so it costs no extra one (and is left out
    where a Trainer logs at other steps than every `logging_steps`).
    Where an optimiser holds flat copies of the parameters (DeepSpeed's), whose steps the hook of
    `dex.tuner.annealing` cannot tell, the callback counts them.
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
        for adapter in _active_adapters(model):
            config = model.peft_config[adapter]
            if config.schedule in ANNEALED and config.anneal_steps is None:
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
            self._ratios = BranchRatios(model, passes=1).__enter__()

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        annealing.count_unseen_step(optimizer, dex_layers(model))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._ratios is not None:
            self._ratios.__exit__()

    def figures(self, model: Any) -> dict[str, Any]:
        figures: dict[str, Any] = {"lam": lams(model, _active_adapters(model)[0])}
        if self._ratios is not None:
            figures["branch_ratio"] = self._ratios.mean()
            self._ratios = None
        return figures


def _active_adapters(model: nn.Module) -> list[str]:
    # `model.active_adapters` is a property of PEFT's models and a method of transformers'.
    return dex_outputs(model)[0].active_adapters
