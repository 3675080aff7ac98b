"""transformers' Trainer with the run's own data order, loss, optimiser and checkpoints, in one or many processes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dex.checkpoints import (
    How,
    damaged,
    drop_leftovers,
    keep_last,
    kept,
    load_random_state,
    newest_checkpoint,
    note_how,
    save_random_state,
    step_of,
)
from dex.console import say
from dex.data import Packed, RunOrder
from dex.errors import DexError, NotFinite
from dex.log_figures import LogFigures
from dex.loss import CrossEntropy, causal_lm_loss, chunked_cross_entropy, liger_cross_entropy
from dex.methods import Method
from dex.output import whole_folder
from dex.processes import (
    TIMEOUT,
    SharedError,
    any_of,
    asked_for,
    first_given,
    has_accelerator,
    is_first,
    on_first,
    rank,
    stop_all,
    world_size,
)
from dex.recipe import Recipe
from dex.subject import State, Subject
from dex.tracking import tracker_folder
from dex.watch import Watch


class DexTrainer(Trainer):
    """The run's loop. It does not know which method it runs: `subject` and the recipe's method do."""

    def __init__(self, subject: Subject, recipe: Recipe, packed: Packed, watch: Watch, run: Path) -> None:
        self.subject, self.recipe, self.watch, self.run_folder = subject, recipe, watch, run
        self.order = RunOrder(packed, recipe.steps, recipe.blocks_per_step, recipe.run.seed)
        self.cross_entropy = cross_entropy_of(recipe)
        self._losses: list[torch.Tensor] = []  # of the micro-batches of this update
        super().__init__(
            model=subject.model,
            args=training_arguments(recipe, run),
            train_dataset=self.order,
            data_collator=_stack,
            callbacks=[*subject.callbacks(), watch],
        )
        self.remove_callback(PrinterCallback)
        self.callback_handler.callbacks.sort(key=_adds_no_figures)
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides by the targets of the whole update
        refuse_processes_apart(self.args)

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"

    def run(self) -> None:
        """Train from the newest whole checkpoint, if there is one, until the end or until the watch stops it.

        Raises DexError, with what is there to go on from, for a damaged checkpoint, a full disk, and for losses and
        gradients that are not finite.
        """
        newest = on_first(self._newest)
        if newest:
            say(f"going on from {newest}")
        with _explained(newest, self.checkpoints), self.watch.bar(step_of(newest) if newest else 0):
            with self.watch.signals():
                self.train(resume_from_checkpoint=str(newest) if newest else None)
            self.watch.share_problems()

    def _newest(self) -> Path | None:
        drop_leftovers(self.checkpoints)
        return newest_checkpoint(self.checkpoints, self.recipe.steps, self.subject.checkpoint_files, self._how())

    def _how(self) -> How:
        kind = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}.get(str(self.accelerator.distributed_type.value), "whole")
        return How(kind, world_size())

    def whole_state(self) -> State:
        """The weights, gathered, where they are sharded over the processes; None where the model has them itself."""
        if self._how().sharding == "whole":
            return None
        state: State = self.accelerator.get_state_dict(self.model_wrapped)
        return state

    # --- one update

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """This micro-batch's part of the update's loss: Σ over its targets / the targets of the update, in all
        processes. Times their number, since gradients are averaged over them."""
        loss = causal_lm_loss(model, num_targets=num_items_in_batch, cross_entropy=self.cross_entropy, **inputs)
        loss = loss * world_size()
        if self.is_deepspeed_enabled and not loss.isfinite():  # its backward pass makes the update too
            raise self._not_finite(loss.detach()[None], [0], math.nan)
        self._losses.append(loss.detach())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The gradient's norm; the run stops here, before the update, where it or a loss is not finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        losses, self._losses = torch.stack(self._losses).float().cpu(), []
        wrong = (~losses.isfinite()).nonzero()[:, 0].tolist()
        if any_of(bool(wrong) or not math.isfinite(float(norm))):
            raise self._not_finite(losses, wrong, float(norm))
        return norm

    def _not_finite(self, losses: torch.Tensor, wrong: list[int], norm: float) -> DexError:
        own = (self._blocks_of(wrong[0]), losses[wrong[0]].item()) if wrong else None
        blocks, loss = first_given(own) or (None, None)
        step = self.state.global_step + 1
        if blocks is not None:
            what, where = f"The loss of step {step} is {loss}", f"in the batch of blocks {_listed(blocks)}"
        else:
            first = self.state.global_step * self.recipe.blocks_per_step
            update = [self.order.block_index(item) for item in range(first, first + self.recipe.blocks_per_step)]
            what, where = f"The gradient of step {step} has the norm {norm}", f"over the blocks {_listed(update)}"
        return stop_all(
            f"{what}, {where} of {self.order.packed.folder}; the run stopped before the update; "
            f"{kept(self.checkpoints)}. Try a lower run.lr, with another output or --force.",
            NotFinite,
        )

    def _blocks_of(self, micro: int) -> list[int]:
        """The blocks of this process's micro-batch in the update being made (accelerate deals them out in turn)."""
        size = self.recipe.run.micro_batch
        first = self.state.global_step * self.recipe.blocks_per_step + (micro * world_size() + rank()) * size
        return [self.order.block_index(item) for item in range(first, first + size)]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = self.recipe.method.optimizer(self.subject.parameter_groups(self.recipe.run))
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # RunOrder is the order

    # --- checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpoints / ".saving")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if is_first():
            self.subject.save_checkpoint(output_dir, state_dict)

    def _save_rng_state(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        if is_first():
            save_random_state(Path(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_random_state(Path(checkpoint))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """A checkpoint-N that is there is whole: it is renamed into place when everything is on the disk."""
        name = f"checkpoint-{self.state.global_step}"
        self._refuse_weights_that_are_not_finite(model)
        problem: str | None = None
        try:
            super()._save_checkpoint(model, trial)
        except (DexError, OSError, SafetensorError) as error:
            problem = getattr(error, "strerror", None) or str(error) or repr(error)
        except RuntimeError as error:
            if not any(words in str(error) for words in NOT_WRITTEN):
                raise
            problem = "the disk is full, or the file is larger than allowed"
        problem = first_given(problem)  # all have written, or know who has not
        on_first(lambda: self._put_in_place(name, problem))

    def _refuse_weights_that_are_not_finite(self, model: torch.nn.Module) -> None:
        trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in trained]
        if any_of(not all(bool(tensor.isfinite().all()) for tensor in own)):
            raise stop_all(
                f"The weights after step {self.state.global_step} are not finite, and are not saved; "
                f"{kept(self.checkpoints)}. Try a lower run.lr, with another output or --force.",
                NotFinite,
            )

    def _put_in_place(self, name: str, problem: str | None) -> None:
        saving = Path(self._get_output_dir(None))
        try:
            if problem is not None:
                raise DexError(problem)
            note_how(saving / name, self._how())
            with whole_folder(self.checkpoints / name, force=True) as partial:
                for file in (saving / name).iterdir():
                    file.rename(partial / file.name)
        except (DexError, OSError) as error:
            raise DexError(
                f"{self.checkpoints / name} could not be written ({str(error).splitlines()[0]}); "
                f"{kept(self.checkpoints)}. Make room and run the same command to go on."
            ) from error
        finally:
            shutil.rmtree(saving, ignore_errors=True)
        keep_last(self.checkpoints, self.recipe.run.keep_last)


def cross_entropy_of(recipe: Recipe) -> CrossEntropy:
    return liger_cross_entropy if recipe.run.loss == "liger" else chunked_cross_entropy


@contextmanager
def _explained(newest: Path | None, checkpoints: Path) -> Iterator[None]:
    """One sentence for a damaged checkpoint and for a full disk."""
    try:
        yield
    except OSError as error:
        raise DexError(
            f"The run stopped: {error.strerror or error} ({error.filename or checkpoints}); {kept(checkpoints)}. "
            "Make room and run the same command to go on."
        ) from error
    except (SafetensorError, EOFError, UnpicklingError) as error:
        if newest is None:
            raise
        raise damaged(newest, error) from error
    except RuntimeError as error:
        if newest is not None and "PytorchStreamReader" in str(error):  # torch.load: the file is cut off
            raise damaged(newest, error) from error
        if world_size() > 1 and any(word in str(error) for word in LOST):
            raise SharedError("Another process of this run has stopped.") from error
        raise


LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL")  # what the others' collectives say then
# How torch.save says, with a RuntimeError, that the disk does not take a file.
NOT_WRITTEN = ("PytorchStreamWriter", "unexpected pos", "inline_container", "Parent directory")


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _listed(blocks: list[int]) -> str:
    return ", ".join(map(str, blocks[:16])) + (f" and {len(blocks) - 16} more" if len(blocks) > 16 else "")


def _adds_no_figures(callback: TrainerCallback) -> bool:
    """The order of callbacks: trackers come after those who add figures to the log."""
    return not isinstance(callback, LogFigures)


def refuse_batches_that_do_not_divide(recipe: Recipe) -> None:
    """Raise DexError if the blocks of an update cannot be dealt evenly to the processes."""
    together = recipe.run.micro_batch * world_size()
    if recipe.blocks_per_step % together:
        raise DexError(
            f"run.micro_batch {recipe.run.micro_batch} in {world_size()} processes does not divide the "
            f"{recipe.blocks_per_step} blocks of one update (run.batch_tokens {recipe.run.batch_tokens:_} / "
            f"data.block {recipe.data.block:_}); change one of them, or the number of processes."
        )


def refuse_sharding_of(method: Method, dtype: str) -> None:
    """Raise DexError if the launcher's sharding would change what this method computes."""
    asked = asked_for()
    if asked is not None and asked not in method.shards:
        raise DexError(
            f"method.name {method.name} cannot be spread by {asked}, which would change what it computes; use "
            "recipes/accelerate/ddp.yaml."
        )
    if asked == "DEEPSPEED" and dtype != "float32":
        raise DexError(
            "DeepSpeed casts everything to one dtype, float32 copies, W_D and λ included, and model.dtype is "
            f"{dtype}; use model.dtype=float32 run.autocast=true, or FSDP2."
        )


def refuse_processes_apart(arguments: TrainingArguments) -> None:
    """Raise DexError where accelerate sees other processes than the launcher started."""
    if arguments.world_size != world_size():
        raise stop_all(
            f"The launcher started {world_size()} processes, but accelerate runs each of them with "
            f"{arguments.world_size}; start dex train with torchrun or accelerate launch."
        )


def training_arguments(recipe: Recipe, run_folder: Path) -> TrainingArguments:
    run = recipe.run
    if run.track:
        tracker_folder(run_folder)
    return TrainingArguments(
        output_dir=str(run_folder / "checkpoints"),
        max_steps=recipe.steps,
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=recipe.accumulation // world_size(),
        learning_rate=run.lr,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(run.decay, run.decay),
        warmup_steps=round(run.warmup * recipe.steps),
        weight_decay=run.weight_decay,
        max_grad_norm=run.clip or 0.0,
        seed=run.seed,
        bf16=run.autocast,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_steps or recipe.steps,
        eval_strategy="no",
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if run.gradient_checkpointing else None,
        use_cpu=not has_accelerator(),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # t is counted in every process
        ddp_timeout=int(TIMEOUT.total_seconds()),
        average_tokens_across_devices=True,
        remove_unused_columns=False,
        report_to=list(run.track),
        run_name=recipe.output,
        disable_tqdm=True,
    )
