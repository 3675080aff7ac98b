"""A Trainer callback that adds figures of the model to the Trainer's log, wherever that has a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP2 has sharded over the processes, put together again."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class LogFigures(TrainerCallback, ABC):
    """A subclass says which figures."""

    @abstractmethod
    def figures(self, model: Any) -> dict[str, Any]: ...

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        figures = self.figures(model)
        # Trackers draw numbers, not lists: beside one number a layer, their mean.
        figures |= {f"{name}_mean": fmean(values) for name, values in figures.items() if isinstance(values, list)}
        logs.update(figures)
        state.log_history[-1].update(figures)
