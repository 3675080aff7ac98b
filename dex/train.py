"""`dex train RECIPE`: transformers' Trainer on accelerate, over packed blocks, with a budget in tokens.

A run is a folder (`dex.run_folder`). The same command goes on where the run was stopped, and does nothing where it is
finished.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed

from dex import __version__
from dex.checkpoints import damaged, kept, newest_checkpoint, sorted_checkpoints, step_of
from dex.console import say
from dex.convert import Choice, choose_heads
from dex.data import Prepared, RunOrder
from dex.errors import DexError
from dex.evaluate.perplexity import held_out_losses, report, summarise
from dex.evaluate.suite import interval
from dex.heads import HeadPlan
from dex.loss import causal_lm_loss
from dex.method.callback import INERT_BELOW, branch_state
from dex.models import ANY, SUPPORTED, LoadedModel, fingerprint, load_model
from dex.output import refuse_output_over, whole_folder, write_json
from dex.recipe import PlannedHeads, Recipe
from dex.run_data import cache_dir, held_out_blocks, prepare_data, sources
from dex.run_folder import ADAPTER, MODEL, open_run, start_run, used_alone
from dex.subject import Subject, subject_of
from dex.watch import Watch


def train(recipe: Recipe, *, force: bool = False) -> dict[str, Any]:
    """Run a recipe, from its start or from its newest checkpoint; returns what result.json holds."""
    run = Path(recipe.output)
    refuse_output_over(run, recipe.model.id)
    with used_alone(run, cache_dir()):
        return _train(recipe, run, force)


def _train(recipe: Recipe, run: Path, force: bool) -> dict[str, Any]:
    finished = open_run(run, recipe, force)
    if finished is not None:
        say(f"{run} is finished already; --force starts it again")
        return finished
    set_seed(recipe.run.seed)
    families = ANY if recipe.method.name == "full" else SUPPORTED
    base = load_model(recipe.model.id, recipe.model.revision, recipe.model.dtype, families=families)
    data = prepare_data(recipe.data, base.tokenizer, recipe.run.tokens)
    _say_passes(recipe, data)
    plan = _head_plan(run, recipe, base, force)
    set_seed(recipe.run.seed)  # W_D does not depend on what was drawn before
    inputs = _inputs(base, data)
    subject = subject_of(recipe, base, plan)
    start_run(run, recipe, inputs, plan, force)
    trainer = DexTrainer(subject, recipe, data, run)
    trainer.run()
    return _finish(run, recipe, trainer, {**base.source.to_dict(), "fingerprint": inputs["model"]["fingerprint"]})


def _inputs(base: LoadedModel, data: Prepared) -> dict[str, Any]:
    """What a run that goes on must find unchanged."""
    return {
        "model": {"commit": base.source.commit, "fingerprint": fingerprint(base.model)},
        "data": {"packed": data.packed.fingerprint, "held_out": data.held_out.fingerprint},
    }


def describe(recipe: Recipe, result: dict[str, Any]) -> str:
    """The lines that are printed."""
    lines = [
        f"{result['method']}: {result['tokens']:,} tokens, held-out loss {interval(result['held_out_loss'])}, "
        f"perplexity {interval(result['held_out_perplexity'], 2)}"
    ]
    if branch := result["branch"]:
        state = "the branch ended inert" if branch["inert"] else "the branch is live"
        lam = branch["lam"]
        lines.append(f"λ {min(lam):.4f} to {max(lam):.4f}, mean branch ratio {branch['mean_ratio']:.1e}: {state}")
    if recipe.method.name == "full":
        lines.append(f"the model is in {recipe.output}/{MODEL}")
    else:
        lines.append(f"fold it: dex fold {recipe.output}/{ADAPTER} -o FOLDER")
    return "\n".join(lines)


def _say_passes(recipe: Recipe, data: Prepared) -> None:
    there = len(data.packed) * data.packed.block
    if recipe.run.tokens > there:
        say(f"the data packs into {there:,} tokens, so the run goes over it {recipe.run.tokens / there:.1f} times")


def _head_plan(run: Path, recipe: Recipe, base: LoadedModel, force: bool) -> HeadPlan | None:
    if recipe.method.schedule == "off":
        return None
    saved = run / "heads.json"
    if saved.exists() and not force:
        return HeadPlan.load(saved)
    heads = recipe.method.heads
    if isinstance(heads, PlannedHeads):
        return HeadPlan.load(Path(heads.plan))
    source = max(sources(recipe.data), key=lambda source: source.weight)
    return choose_heads(base, Choice(source=source, held_out=recipe.data.held_out, **heads.model_dump()))


def _finish(run: Path, recipe: Recipe, trainer: DexTrainer, base: dict[str, Any]) -> dict[str, Any]:
    """Write what was trained and then result.json, whose presence means that the run is finished."""
    subject, blocks = trainer.subject, trainer.watch.blocks
    losses = held_out_losses(subject.model, blocks, recipe.run.micro_batch, "held-out part")
    loss, perplexity = summarise(losses)
    branch = branch_state(subject.model, max((ids for _, ids in blocks), key=len))
    if branch and branch["inert"]:
        say(f"the branch ended inert: mean ‖λ f_D(O)‖/‖O‖ is {branch['mean_ratio']:.1e}, below {INERT_BELOW:g}")
    trainer.watch.write({"step": recipe.steps, "held_out_loss": loss._asdict(), "branch": branch})
    result = {
        "method": recipe.method.name,
        "tokens": recipe.run.tokens,
        "steps": recipe.steps,
        "held_out_loss": loss._asdict(),
        "held_out_perplexity": perplexity._asdict(),
        "branch": branch,
        "tokens_per_second": trainer.watch.tokens_per_second(),
        "trained_parameters": sum(p.numel() for p in subject.model.parameters() if p.requires_grad),
        "model": base,
        "data": trainer.data.report,
        "versions": {"dex": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    output = run / subject.output
    subject.save(output, result)
    write_json(run / "held_out.json", report({str(output): losses}, trainer.data.held_out, blocks))
    write_json(run / "result.json", result)
    return result


# --- the Trainer ------------------------------------------------------------------------------------------


class DexTrainer(Trainer):
    """transformers' Trainer with the run's own data order, loss, learning-rate groups and whole checkpoints."""

    def __init__(self, subject: Subject, recipe: Recipe, data: Prepared, run: Path) -> None:
        self.subject, self.recipe, self.run_folder, self.data = subject, recipe, run, data
        self.watch = Watch(recipe, held_out_blocks(recipe.data, data), run / "log.jsonl")
        super().__init__(
            model=subject.model,
            args=_training_arguments(recipe, run),
            train_dataset=RunOrder(data.packed, recipe.steps, recipe.blocks_per_step, recipe.run.seed),
            data_collator=_stack,
            callbacks=[*subject.callbacks(), self.watch],
        )
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # `compute_loss` divides by the targets of the whole update

    def run(self) -> None:
        """Train from the newest whole checkpoint, if there is one. Ctrl-C saves a checkpoint and stops."""
        checkpoints = self.run_folder / "checkpoints"
        shutil.rmtree(checkpoints / ".saving", ignore_errors=True)  # what a kill left
        newest = newest_checkpoint(checkpoints, self.recipe.steps, self.subject.checkpoint_files)
        if newest:
            say(f"going on from {newest}")
        try:
            with self.watch.bar(step_of(newest) if newest else 0), self.watch.ctrl_c():
                self.train(resume_from_checkpoint=str(newest) if newest else None)
        except (SafetensorError, EOFError, UnpicklingError, RuntimeError) as error:
            # torch.load says that a file is cut off with a RuntimeError of its reader.
            if newest is None or (isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error)):
                raise
            raise damaged(newest, error) from error
        except OSError as error:
            raise DexError(
                f"The run stopped: {error.strerror or error} ({error.filename or self.run_folder}); "
                f"{kept(checkpoints)}. Make room and run the same command to go on."
            ) from error
        if self.watch.interrupted and self.state.global_step < self.recipe.steps:
            raise DexError(
                f"Interrupted after step {self.state.global_step} of {self.recipe.steps}; the checkpoint is in "
                f"{checkpoints}: run the same command to go on."
            )

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        loss = causal_lm_loss(model, num_targets=num_items_in_batch, **inputs)
        if not torch.isfinite(loss):
            raise DexError(
                f"The loss of step {self.state.global_step + 1} is {loss.item()}; the run stopped before the update; "
                f"{kept(self.run_folder / 'checkpoints')}. Try a lower run.lr, with another output or --force."
            )
        return loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.subject.parameter_groups(self.recipe), fused=True)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # RunOrder is the order

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run_folder / "checkpoints" / ".saving")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self.subject.save_checkpoint(output_dir, state_dict)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """A checkpoint-N that is there is whole: it is renamed into place when everything is on the disk."""
        checkpoints = self.run_folder / "checkpoints"
        name = f"checkpoint-{self.state.global_step}"
        try:
            with whole_folder(checkpoints / name, force=True) as partial:
                super()._save_checkpoint(model, trial)
                saved = Path(self._get_output_dir(trial)) / name
                for file in saved.iterdir():
                    file.rename(partial / file.name)
        except (DexError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            raise DexError(
                f"{checkpoints / name} could not be written ({str(error).splitlines()[0]}); {kept(checkpoints)}. "
                "Make room and run the same command to go on."
            ) from error
        finally:
            shutil.rmtree(self._get_output_dir(trial), ignore_errors=True)
        for old in sorted_checkpoints(checkpoints)[: -self.recipe.run.keep_last]:
            shutil.rmtree(old)


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _training_arguments(recipe: Recipe, run_folder: Path) -> TrainingArguments:
    run = recipe.run
    arguments = TrainingArguments(
        output_dir=str(run_folder / "checkpoints"),
        max_steps=recipe.steps,
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=run.lr,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(run.decay, run.decay),
        warmup_steps=round(run.warmup * recipe.steps),
        weight_decay=run.weight_decay,
        max_grad_norm=run.clip or 0.0,
        seed=run.seed,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_steps or recipe.steps,
        eval_strategy="no",
        gradient_checkpointing=run.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if run.gradient_checkpointing else None,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )
    if arguments.world_size > 1 or arguments.n_gpu > 1:
        raise DexError(
            f"dex train runs in one process on one device for now, and here are {arguments.world_size} processes "
            f"with {arguments.n_gpu} GPUs; start it without a launcher and with CUDA_VISIBLE_DEVICES=0."
        )
    return arguments
