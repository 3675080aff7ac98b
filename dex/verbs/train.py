"""`dex train RECIPE`: transformers' Trainer on accelerate, over packed blocks, with a budget in tokens.

A run is a folder (`dex.run_folder`). The same command goes on where the run was stopped, and does nothing where it is
finished. Under torchrun or accelerate launch the same recipe runs in many processes, with the same updates.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from transformers import set_seed

from dex.console import say
from dex.data import Prepared
from dex.environment import environment
from dex.errors import DexError
from dex.evaluation.held_out import held_out_losses, held_out_result, summarise
from dex.evaluation.paired import Interval
from dex.evaluation.records import Record
from dex.evaluation.tables import interval
from dex.heads import HeadPlan
from dex.lock import LOCK, BlockScore, Cursor, Environment, Lock, LockedData, LockedResult, refuse_other_inputs
from dex.loss import refuse_without_liger
from dex.methods.dex import PlannedHeads
from dex.models import ANY, SUPPORTED, LoadedModel, load_model, use_chat_template
from dex.output import refuse_output_over, write_json, write_whole
from dex.pins import pinned, pins_of
from dex.processes import (
    agree,
    any_of,
    first_ahead,
    gather,
    join,
    on_first,
    refuse_gpus_left_over,
    stop_all,
    world_size,
)
from dex.recipe import Recipe, as_recipe
from dex.run_data import cache_dir, heaviest_source, held_out_blocks, prepare_data
from dex.run_folder import (
    HELD_OUT,
    INPUTS,
    RECIPE,
    check_inputs,
    differences,
    earlier_environments,
    note_environment,
    open_run,
    start_run,
    trained_folder,
    used_alone,
)
from dex.subject import Subject
from dex.tracking import check_trackers
from dex.trainer import DexTrainer, refuse_batches_that_do_not_divide, refuse_sharding_of
from dex.tuner.callback import INERT_BELOW, branch_state
from dex.verbs.convert import Choice, choose_heads
from dex.watch import Watch


def train(recipe: Recipe | str | Path, *, force: bool = False, like: Lock | None = None) -> dict[str, Any]:
    """Run a recipe (or its file), from its start or from its newest checkpoint; returns what result.json holds.

    like: the lock of a run that this one repeats: another base or other tokens than its are refused before the work,
    and a head plan that it read from a file is read from the lock.

    Where the run stops before its budget (SIGTERM, its limit of hours), returns {"finished": False, ...} with the
    command to go on. Raises DexError, in one sentence, for everything that stops it otherwise.
    """
    recipe = as_recipe(recipe)
    began, run = time.monotonic(), Path(recipe.output)
    join()
    agree(lambda: check_settings(recipe))
    with ExitStack() as stack:
        on_first(lambda: _enter(stack, used_alone(run, cache_dir())))
        return _train(recipe, run, force, like, began)


def _enter(stack: ExitStack, context: AbstractContextManager[None]) -> None:
    stack.enter_context(context)


def check_settings(recipe: Recipe) -> None:
    """Raise DexError for what the recipe asks of this machine and cannot have, before any work is done."""
    refuse_output_over(Path(recipe.output), recipe.model.id)
    refuse_gpus_left_over()
    refuse_batches_that_do_not_divide(recipe)
    refuse_sharding_of(recipe.method, recipe.model.dtype)
    recipe.method.check_packages()
    check_trackers(recipe.run.track)
    if recipe.run.loss == "liger":
        refuse_without_liger()


def _train(recipe: Recipe, run: Path, force: bool, like: Lock | None, began: float) -> dict[str, Any]:
    finished = on_first(lambda: open_run(run, recipe, force))
    if finished is not None:
        say(f"{run} is finished already; --force starts it again")
        return finished
    set_seed(recipe.run.seed)
    given = recipe
    recipe = pinned(given, on_first(lambda: pins_of(given, None if force else run / INPUTS)))
    base = agree(lambda: load_base(recipe))
    data = first_ahead(lambda: prepare(recipe, base))
    _say_passes(recipe, data)
    inputs = _inputs(recipe, base, data)
    if like is not None:
        agree(lambda: refuse_other_inputs(like, inputs, data.report))
    plan = on_first(lambda: _head_plan(run, recipe, base, force, like))
    set_seed(recipe.run.seed)  # W_D does not depend on what was drawn before
    inputs["heads"] = hashlib.sha256(json.dumps(plan.heads).encode()).hexdigest()[:16] if plan else None
    _refuse_different(inputs)
    on_first(lambda: check_inputs(run, inputs, force))
    subject = agree(lambda: recipe.method.subject(recipe, base, plan))
    on_first(lambda: start_run(run, given, inputs, plan, force))
    _refuse_folder_of_one_machine(run)
    on_first(lambda: note_environment(run, environment()))
    watch = Watch(recipe, held_out_blocks(recipe.data, data), run / "log.jsonl", began)
    trainer = DexTrainer(subject, recipe, data.packed, watch, run)
    trainer.run()
    if watch.stopped:
        return _stopped(recipe, trainer)
    return _finish(recipe, trainer, data, inputs, plan)


def prepare(recipe: Recipe, base: LoadedModel) -> Prepared:
    return prepare_data(recipe.data, base.tokenizer, recipe.run.tokens)


def load_base(recipe: Recipe) -> LoadedModel:
    """The model that the recipe begins with, and its tokenizer."""
    model, families = recipe.model, ANY if recipe.method.any_layout else SUPPORTED
    base = load_model(model.id, model.revision, model.dtype, model.attention, families, model.quantise)
    if model.chat_template is not None:
        use_chat_template(base.tokenizer, Path(model.chat_template))
    return base


def _inputs(recipe: Recipe, base: LoadedModel, data: Prepared) -> dict[str, Any]:
    """What a run that goes on must find unchanged, as its heads."""
    return {
        "model": base.identity(),
        "data": {
            "revisions": [source.revision for source in recipe.data.train],
            "packed": data.packed.fingerprint,
            "held_out": data.held_out.fingerprint,
        },
    }


def _refuse_different(inputs: dict[str, Any]) -> None:
    """Machines with caches of their own may have other versions of libraries, and other tokens."""
    others = [found for each in gather(inputs) for found in differences(inputs, each)]
    if any_of(bool(others)):
        what = others[0][0] if others else "their inputs"
        raise stop_all(
            f"The processes do not train on the same {what}; give every machine the same versions of the libraries "
            "and the same files."
        )


def _refuse_folder_of_one_machine(run: Path) -> None:
    if not all(gather((run / "inputs.json").exists())):
        raise stop_all(f"{run} is not on a disk that all machines of this run see; choose an output that is.")


def describe(recipe: Recipe, result: dict[str, Any]) -> str:
    """The lines that are printed."""
    if not result.get("finished", True):
        return f"{result['stopped']} after step {result['step']} of {result['steps']}; go on with: {result['go_on']}"
    loss, perplexity = (Interval(**result[f"held_out_{name}"]) for name in ("loss", "perplexity"))
    lines = [
        f"{result['method']}: {result['tokens']:,} tokens, held-out loss {interval(loss)}, "
        f"perplexity {interval(perplexity, 2)}"
    ]
    if branch := result["branch"]:
        state = "the branch ended inert" if branch["inert"] else "the branch is live"
        lam = branch["lam"]
        lines.append(f"λ {min(lam):.4f} to {max(lam):.4f}, mean branch ratio {branch['mean_ratio']:.1e}: {state}")
    trained = trained_folder(recipe)
    fold = f"fold it: dex fold {trained} -o FOLDER"
    lines.append(f"the model is in {trained}" if recipe.method.result == "model" else fold)
    return "\n".join(lines)


def _say_passes(recipe: Recipe, data: Prepared) -> None:
    there = len(data.packed) * data.packed.block
    if recipe.run.tokens > there:
        say(f"the data packs into {there:,} tokens, so the run goes over it {recipe.run.tokens / there:.1f} times")


def _head_plan(
    run: Path, recipe: Recipe, base: LoadedModel, force: bool, like: Lock | None = None
) -> HeadPlan | None:
    heads = recipe.method.heads_to_choose()
    if heads is None:
        return None
    saved = run / "heads.json"
    if saved.exists() and not force:
        try:
            return HeadPlan.load(saved)
        except DexError as error:
            raise DexError(f"{str(error).rstrip('.')}; put the run's own copy back, or pass --force.") from error
    if isinstance(heads, PlannedHeads):
        return HeadPlan.load(Path(heads.plan)) if like is None else HeadPlan.model_validate(like.heads)
    choice = Choice(source=heaviest_source(recipe.data), held_out=recipe.data.held_out, **heads.model_dump())
    return choose_heads(base, choice)


def _stopped(recipe: Recipe, trainer: DexTrainer) -> dict[str, Any]:
    step, reason = trainer.state.global_step, trainer.watch.stopped
    command = f"dex train {Path(recipe.output) / 'recipe.yaml'}"
    if world_size() > 1:
        command += ", under the same launcher"
    if reason == "interrupted":
        raise stop_all(
            f"Interrupted after step {step} of {recipe.steps}; the checkpoint is in {trainer.checkpoints}: run the "
            f"same command to go on, or {command}."
        )
    return {"finished": False, "stopped": reason, "step": step, "steps": recipe.steps, "go_on": command}


def _finish(
    recipe: Recipe, trainer: DexTrainer, data: Prepared, inputs: dict[str, Any], plan: HeadPlan | None
) -> dict[str, Any]:
    """Write what was trained and then result.json, whose presence means that the run is finished."""
    subject, blocks = trainer.subject, trainer.watch.blocks
    model = trainer.model
    losses = held_out_losses(model, blocks, recipe.run.micro_batch, "held-out part")
    loss, perplexity = summarise(losses)
    branch = branch_state(model, max((block.input_ids for block in blocks), key=len))
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
        "trained_parameters": subject.trained_parameters,
        "model": inputs["model"],
        "data": data.report,
        "environment": environment(),
    }
    state, output = trainer.whole_state(), trained_folder(recipe)

    def write() -> None:
        run, model = output.parent, {"id": str(output), "base": recipe.model.id}
        settings = {"recipe": str(run / RECIPE)}
        evaluated = held_out_result(run.name, model, losses, blocks, data.held_out, settings, result["environment"])
        _save_result(subject, output, _lock(recipe, inputs, plan, result, evaluated.records), state)
        write_whole(run / LOCK, (output / LOCK).read_text(encoding="utf-8"))
        evaluated.write(run / HELD_OUT)
        write_json(output.parent / "result.json", result)

    on_first(write)
    return result


def _lock(
    recipe: Recipe, inputs: dict[str, Any], plan: HeadPlan | None, result: dict[str, Any], records: list[Record]
) -> Lock:
    """All that the run can be made again from, and what it came to; `records` are of the held-out blocks."""
    run, blocks = Path(recipe.output), recipe.steps * recipe.blocks_per_step
    cursor = Cursor(tokens=recipe.run.tokens, steps=recipe.steps, blocks=blocks, seed=recipe.run.seed)
    losses = [BlockScore(id=r.id, group=r.group, weight=r.weight, score=r.score) for r in records]
    figures = {name: result[name] for name in LockedResult.model_fields if name != "losses"}
    return Lock(
        recipe={**recipe.model_dump(), "output": run.resolve().name},
        model=inputs["model"],
        data=LockedData(**inputs["data"], report=result["data"], cursor=cursor),
        heads=plan.model_dump() if plan else None,
        environment=result["environment"],
        earlier=[Environment(**each) for each in earlier_environments(run, result["environment"])],  # type: ignore[typeddict-item]
        result=LockedResult(**figures, losses=losses),
        files={},  # there are none yet
    )


def _save_result(subject: Subject, output: Path, lock: Lock, state: Any) -> None:
    try:
        subject.save(output, lock, state)
    except RuntimeError as error:  # PEFT's and torch's own word for a full disk
        raise DexError(f"{output} could not be written: {str(error).splitlines()[0]}.") from error
