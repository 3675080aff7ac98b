"""What watches a run: its log.jsonl, its progress bar, its held-out losses on the way, and what stops it early.

Ctrl-C, SIGTERM (pre-emption) and the run's limit of hours all end it with a checkpoint of the last update that is
done. With several processes the first one speaks and writes, and all of them stop after the same step.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dex.console import Bar, say
from dex.data import HeldOutBlock
from dex.evaluation.held_out import held_out_losses, summarise
from dex.output import write_whole
from dex.processes import first_given, is_first, stop_all
from dex.recipe import Recipe

Reason = Literal["interrupted", "terminated", "out of time"]


class Watch(TrainerCallback):
    """The Trainer callback of `dex train`. `stopped` is why the run ended before its budget, if it did."""

    def __init__(self, recipe: Recipe, blocks: list[HeldOutBlock], log: Path, began: float) -> None:
        """`began`: time.monotonic() at the command's start, from which the limit of hours counts."""
        self.recipe, self.blocks, self.log, self.began = recipe, blocks, log, began
        self.stopped: Reason | None = None
        self._signalled: Reason | None = None
        self._problem: str | None = None
        self._bar = Bar("training", recipe.run.tokens, "tokens")
        self._training_seconds = 0.0
        self._trained_tokens = 0
        self._step_began = 0.0

    def bar(self, done: int) -> Bar:
        """The progress bar of a run that has done so many steps."""
        if is_first():
            self._drop_log_after(done)
        self._bar = Bar("training", self.recipe.run.tokens, "tokens", start=done * self.recipe.run.batch_tokens)
        return self._bar

    def tokens_per_second(self) -> float | None:
        """Of the training steps alone, evaluation and saving left out; None if this process made none."""
        return self._trained_tokens / self._training_seconds if self._training_seconds else None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run, with a checkpoint; a second Ctrl-C stops at once.

        A second SIGTERM does nothing: schedulers and launchers send one each.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        reasons: dict[int, Reason] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

        def stop_soon(number: int, frame: FrameType | None) -> None:
            if self._signalled is None:
                say("stopping and saving a checkpoint; Ctrl-C again stops at once")
            self._signalled = self._signalled or reasons[number]
            signal.signal(signal.SIGINT, before[signal.SIGINT])

        before = {number: signal.signal(number, stop_soon) for number in reasons}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """How often a run saves and logs may change when it goes on, and `state` is the checkpoint's."""
        state.compute_steps(args, state.max_steps)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._step_began = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        run = self.recipe.run
        tokens = state.global_step * run.batch_tokens
        self._training_seconds += time.monotonic() - self._step_began
        self._trained_tokens += run.batch_tokens
        self._bar.update(tokens, self._figures(state))
        if self.recipe.eval_steps and state.global_step % self.recipe.eval_steps == 0 and tokens < run.tokens:
            loss, _perplexity = summarise(held_out_losses(model, self.blocks, run.micro_batch, "held-out part"))
            self.write({"step": state.global_step, "tokens": tokens, "held_out_loss": loss._asdict()})
        self.share_problems()
        if tokens < run.tokens:
            self._stop_together(control, self._reason_to_stop())

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """An update of 8M tokens takes minutes, and a scheduler waits for seconds: what is done of it is dropped."""
        self._stop_together(control, self._signalled)

    def _stop_together(self, control: TrainerControl, own_reason: Reason | None) -> None:
        """Nothing has moved since the last update, so the checkpoint is one of that."""
        reason: Reason | None = first_given(own_reason)
        if reason:
            self.stopped = reason
            control.should_save = control.should_training_stop = True

    def share_problems(self) -> None:
        """Raise, in all processes, what kept the first one from writing its log."""
        problem = first_given(self._problem)
        if problem:
            raise stop_all(f"{problem}; the checkpoints are whole. Make room and run the same command to go on.")

    def _reason_to_stop(self) -> Reason | None:
        hours = self.recipe.run.hours
        if self._signalled is None and hours is not None and time.monotonic() - self.began >= 3600 * hours:
            return "out of time"
        return self._signalled

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs and "loss" in logs:
            tokens = state.global_step * self.recipe.run.batch_tokens
            figures = {name: value for name, value in logs.items() if name != "epoch"}
            rate = self.tokens_per_second()
            self.write({"step": state.global_step, "tokens": tokens, **figures, "tokens_per_second": rate})

    def _figures(self, state: TrainerState) -> str:
        last = next((entry for entry in reversed(state.log_history) if "loss" in entry), None)
        if last is None:
            return ""
        lam = [value for value in last.get("lam", []) if value]
        spread = f", λ {min(lam):.4f} to {max(lam):.4f}" if lam else ""
        return f"loss {last['loss']:.3f}{spread}"

    def write(self, entry: dict[str, Any]) -> None:
        if not is_first():
            return
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as error:
            self._problem = f"{self.log} could not be written: {error.strerror or error}"

    def _drop_log_after(self, step: int) -> None:
        """A run that goes on from step N writes the steps after N again."""
        if not self.log.exists():
            return
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        write_whole(self.log, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    """The step of a log line; infinite for one that is damaged, as the line that a kill cut."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
