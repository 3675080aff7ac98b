"""`dex plan`: what a run will need, before its weights are there: parameters, memory, operations, time, files.

Read from the config alone. The recipe's real method makes the real modules without memory behind them, and one update
of them runs on fake tensors (`dex.planning.step`): sizes are counted, not estimated by formulas. What is assumed is
said with the result (`Plan.notes`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dex.errors import DexError
from dex.models import ANY, AttentionShape, attention_shape, load_outline, quiet
from dex.planning import words
from dex.planning.cache import kv_bytes
from dex.planning.devices import CONTEXT, GPUS, UTILISATION, Device, find_device
from dex.planning.outline import Outline, checkpoint_dtype, count, on_meta, outline
from dex.planning.step import StepFigures, simulate
from dex.recipe import Recipe, as_recipe
from dex.run_data import tokens_to_prepare

Sharding = Literal["none", "fsdp"]
SHARDINGS = ("none", "fsdp")
SHARDED = ("frozen", "trained", "gradients", "optimiser")  # what FSDP divides by the number of processes
CACHED = 5  # bytes of a token in the cache of tokens: its id and its flags (dex/data/packing.py)
WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0, "4bit": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. Each part by itself, at its largest; `at_peak`: what of it is there when most is.

    The parts of `at_peak` sum up to `peak`. communication: DDP's buckets of gradients, or the whole weights of the
    layers that FSDP computes with.
    """

    frozen: int
    trained: int
    gradients: int
    optimiser: int
    activations: int  # kept for the backward pass
    loss: int
    temporaries: int
    communication: int
    peak: int
    at_peak: dict[str, int]


@dataclass(frozen=True)
class Work:
    """`flops`: floating point operations of the whole run in all processes, by the dtype of their operands."""

    tokens: int
    updates: int
    accumulation: int  # micro-batches of one update in each process
    processes: int
    flops: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.flops.values())


@dataclass(frozen=True)
class Fit:
    """A run on a device: `seconds` of all its products; `advice`: one sentence, where the peak does not fit."""

    device: str
    memory: int
    utilisation: float
    seconds: float
    fits: bool
    advice: str | None


@dataclass(frozen=True)
class Files:
    """Bytes on the disk. `folded`: the stock model that `dex fold` writes; None where the run's result is a model."""

    result: int
    checkpoint: int
    checkpoints: int  # all that are kept
    folded: int | None
    tokens: int  # in the cache, at most


@dataclass(frozen=True)
class Plan:
    model: str
    method: str
    result: str  # adapter or model
    parameters: int  # with the adapter's
    trainable: int
    sharding: str
    memory: Memory
    work: Work
    files: Files
    devices: list[Fit]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["work"]["total_flops"] = self.work.total
        return values


@dataclass(frozen=True)
class ModelPlan:
    """Bytes by dtype. `kv_cache`: of 1000 tokens of one sequence. Files are as large as the weights."""

    model: str
    commit: str | None
    parameters: int
    attention: AttentionShape
    vocabulary: int
    dtype: str  # of the checkpoint
    weights: dict[str, int]
    kv_cache: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- A run -------------------------------------------------------------------------------------------------


def plan(
    recipe: Recipe | str | Path, device: str | None = None, processes: int = 1, sharding: Sharding = "none"
) -> Plan:
    """What the recipe's run will need on `device` (None: on each known GPU), in so many processes of one device each.

    Reads the model's config, no weights. Raises DexError for an unknown device, for processes that do not divide an
    update, and for everything that the recipe's model and method refuse by config.
    """
    recipe = as_recipe(recipe)
    accumulation = _accumulation(recipe, processes)
    if sharding not in SHARDINGS:
        raise DexError(f"sharding {sharding!r} is not known; choose one of {', '.join(SHARDINGS)}.")
    if sharding != "none" and processes == 1:
        raise DexError(f"sharding {sharding} is for several processes, and there is one; give --processes.")
    if device is not None and device not in (*GPUS, "cpu"):
        find_device(device, set())
    with quiet():
        seen = outline(recipe)
        result_bytes = _result_bytes(recipe, seen)
        step = simulate(recipe, seen, accumulates=accumulation > 1)
    memory = _memory(step, processes, sharding)
    work = _work(recipe, step, accumulation, processes)
    chosen = list(GPUS.values()) if device is None else [find_device(device, set(work.flops))]
    return Plan(
        model=recipe.model.id,
        method=recipe.method.name,
        result=recipe.method.result,
        parameters=seen.parameters,
        trainable=seen.trainable,
        sharding=sharding,
        memory=memory,
        work=work,
        files=_files(recipe, seen, result_bytes, step),
        devices=[_fit(recipe, memory, work, one, sharding) for one in chosen],
        notes=_notes(recipe, processes, sharding, device),
    )


def _accumulation(recipe: Recipe, processes: int) -> int:
    """Micro-batches of one update in each process."""
    if processes < 1:
        raise DexError(f"{processes} processes were asked for; a run has 1 or more.")
    if recipe.accumulation % processes:
        raise DexError(
            f"run.micro_batch {recipe.run.micro_batch} in {processes} processes does not divide the "
            f"{recipe.blocks_per_step} blocks of one update; change one of them, or the number of processes."
        )
    return recipe.accumulation // processes


def _memory(step: StepFigures, processes: int, sharding: Sharding) -> Memory:
    full, at_peak = Counter[str](step.full), Counter[str](step.at_peak)
    communication = 0
    if sharding == "fsdp":
        for parts in (full, at_peak):
            parts.update({kind: -(parts[kind] - math.ceil(parts[kind] / processes)) for kind in SHARDED})
        # What is outside the layers is whole throughout; of the layers, the one at work and the next.
        communication = step.root + 2 * step.unit if processes > 1 else 0
    elif processes > 1:
        communication = full["gradients"]
    at_peak["communication"] = communication
    return Memory(**full, communication=communication, peak=at_peak.total(), at_peak=dict(at_peak))


def _work(recipe: Recipe, step: StepFigures, accumulation: int, processes: int) -> Work:
    of_update = Counter(step.update)
    of_update.update({dtype: number * accumulation for dtype, number in step.micro.items()})
    flops = {dtype: number * recipe.steps * processes for dtype, number in of_update.items()}
    return Work(recipe.steps * recipe.run.batch_tokens, recipe.steps, accumulation, processes, flops)


def _result_bytes(recipe: Recipe, seen: Outline) -> int:
    """The file of what the run ends with: all weights, or those of the adapter and its counts of steps."""
    model = seen.subject.model
    if recipe.method.result == "model":
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())
    trained = sum(p.numel() * p.dtype.itemsize for p in model.parameters() if p.requires_grad)
    counts = sum(b.numel() * b.dtype.itemsize for name, b in model.named_buffers() if ".dex_step." in name)
    return trained + counts


def _files(recipe: Recipe, seen: Outline, result: int, step: StepFigures) -> Files:
    checkpoint = result + step.full["optimiser"]
    saved = math.ceil(recipe.steps / (recipe.save_steps or recipe.steps))
    return Files(
        result=recipe.method.result_size * result,
        checkpoint=checkpoint,
        checkpoints=checkpoint * min(saved, recipe.run.keep_last),
        folded=seen.base_bytes if recipe.method.result == "adapter" else None,
        tokens=tokens_to_prepare(recipe.data, recipe.run.tokens) * CACHED,
    )


def _fit(recipe: Recipe, memory: Memory, work: Work, device: Device, sharding: str) -> Fit:
    fits = memory.peak <= device.memory
    seconds = device.seconds(work.flops) / (work.processes if device.name != "cpu" else 1)
    advice = None if fits else _advice(recipe, memory, device, work.processes, sharding)
    return Fit(device.name, device.memory, device.utilisation, seconds, fits, advice)


def _advice(recipe: Recipe, memory: Memory, device: Device, processes: int, sharding: str) -> str:
    """What to change, the most effective first: the weights' part if that alone is too much."""
    run, method = recipe.run, recipe.method
    standing = memory.frozen + memory.trained + memory.gradients + memory.optimiser + memory.communication
    moves = []
    if standing < device.memory:
        moves += ["run.gradient_checkpointing: true"] if not run.gradient_checkpointing else []
        moves += ["a smaller run.micro_batch"] if run.micro_batch > 1 else []
        moves += ["run.autocast: true"] if method.in_place and not run.autocast else []
    if recipe.model.dtype == "float32" and not method.in_place:
        moves.append("model.dtype: bfloat16")
    elif standing >= device.memory and not method.in_place and recipe.model.quantise is None:
        moves.append("model.quantise: 4bit")
    if standing >= device.memory and method.in_place:
        moves.append("a method with an adapter (method.name: dex or lora)")
    if sharding == "none":
        moves.append("--sharding fsdp" if processes > 1 else "more processes with --sharding fsdp")
    moves.append("a shorter data.block" if standing < device.memory else "a smaller model")
    need = f"The peak of {words.size(memory.peak)} does not fit into the {words.size(device.memory)} of {device.name}"
    return f"{need}; try {' or '.join(moves[:3])}."


def _notes(recipe: Recipe, processes: int, sharding: str, device: str | None) -> list[str]:
    """What the figures assume and leave out."""
    notes = [
        "memory: one update with torch's CPU attention; blocks hold several documents, so the attention has a mask "
        "of block × block",
        "not in the memory: what kernels use within themselves, the allocator's fragments, held-out evaluation",
        "operations: products of training alone; attention in full, not its causal half; recomputation counted",
    ]
    if device == "cpu":
        notes.append("time: at the rate of a matrix product measured just now; a bound from below")
    else:
        notes.append(
            f"time: at {UTILISATION:g} of the published peak, an assumption; {words.size(CONTEXT)} left to CUDA"
        )
    if recipe.run.loss == "liger":
        notes.append("run.loss liger is counted as chunked")
    if recipe.model.quantise == "8bit":
        notes.append("8bit is counted as dequantised in each pass; bitsandbytes keeps int8 activations as well")
    if recipe.method.plan_note is not None:
        notes.append(recipe.method.plan_note)
    if sharding == "fsdp":
        notes.append("fsdp: weights, gradients and optimiser divided by the processes; two whole layers at a time")
    elif processes > 1:
        notes.append("DDP: a second copy of the gradients in its buckets; the time without communication")
    return notes


# --- A model -----------------------------------------------------------------------------------------------


def plan_model(model: str | Path, revision: str | None = None) -> ModelPlan:
    """Parameters, and bytes of weights and KV cache, of MODEL by its config alone. Raises DexError as load_config."""
    with quiet():
        config, source = load_outline(str(model), revision, ANY)
        dtype = checkpoint_dtype(config, source)
        meta = on_meta(config, dtype, source)
        cache = {name: kv_bytes(on_meta(config, kind, source), 1_000) for name, kind in _CACHE_DTYPES.items()}
    parameters = count(meta)
    return ModelPlan(
        model=source.id,
        commit=source.commit,
        parameters=parameters,
        attention=attention_shape(config),
        vocabulary=config.vocab_size,
        dtype=str(dtype).removeprefix("torch."),
        weights={name: round(parameters * width) for name, width in WIDTHS.items()},
        kv_cache=cache,
    )


_CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# --- In words ----------------------------------------------------------------------------------------------


def describe(plan: Plan | ModelPlan) -> str:
    """The tables that are printed."""
    return _describe_model(plan) if isinstance(plan, ModelPlan) else _describe_run(plan)


def _describe_run(plan: Plan) -> str:
    memory, work, files = plan.memory, plan.work, plan.files
    share = plan.trainable / plan.parameters
    head = (
        f"{plan.model}, {plan.method}: {plan.parameters:,} parameters, {plan.trainable:,} train ({share:.2%})\n"
        f"{work.tokens:,} tokens in {work.updates:,} updates of {work.accumulation:,} micro-batches in "
        f"{work.processes:,} process{'es' if work.processes > 1 else ''}; {work.total:.2e} floating point operations"
    )
    parts = [(name, words.size(getattr(memory, name)), words.size(now)) for name, now in memory.at_peak.items()]
    names = {
        "result": plan.result,
        "checkpoints": "kept checkpoints",
        "folded": "folded model",
        "tokens": "token cache",
    }
    sizes = [(names.get(name, name), words.size(value)) for name, value in asdict(files).items() if value is not None]
    fits = [
        (fit.device, words.size(fit.memory), "yes" if fit.fits else "no", words.duration(fit.seconds))
        for fit in plan.devices
    ]
    advice = [fit.advice for fit in plan.devices if fit.advice] if len(plan.devices) == 1 else []
    return "\n\n".join(
        [
            head,
            words.table(
                ("memory of a process", "largest", "at the peak"), [*parts, ("peak", "", words.size(memory.peak))]
            ),
            words.table(("device", "memory", "fits", "time"), fits) + "".join(f"\n{line}" for line in advice),
            words.table(("file", "size"), sizes),
            "\n".join(plan.notes),
        ]
    )


def _describe_model(plan: ModelPlan) -> str:
    a = plan.attention
    head = (
        f"{plan.model}: {plan.parameters:,} parameters, {plan.dtype}, vocabulary of {plan.vocabulary:,}\n"
        f"{a.num_layers} layers of width {a.hidden_size}; {a.num_heads} heads of {a.head_dim} on {a.num_kv_heads} "
        "key/value heads"
    )
    rows = [
        (name, words.size(value), words.size(plan.kv_cache[name]) if name in plan.kv_cache else "")
        for name, value in plan.weights.items()
    ]
    return f"{head}\n\n{words.table(('dtype', 'weights and file', 'KV cache of 1,000 tokens'), rows)}"
