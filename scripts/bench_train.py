"""The benchmark of `dex train`: one JSON line per figure, then the baselines as a table.

    python scripts/bench_train.py [--only overhead|baselines] [--steps 10]

overhead: a step of `dex train` (data, loss, clipping, AdamW, log, branch ratio, bar) against a bare loop of the same
forward, backward and AdamW, without clipping, on the same blocks; the two alternate step by step in one process.
baselines: every method of dex.methods, its step against that of K, V and O alone (alternating in one process), and
the peak memory of a process of its own, imports included. Models have SmolLM2-135M's shape and random weights.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from bench_models import SMOLLM2, llama
from bench_timing import Step, alternate, figure, ratio, resident
from dex.data import Packed
from dex.heads import make_plan
from dex.loss import causal_lm_loss
from dex.methods import METHODS
from dex.models import LoadedModel, ModelSource, load_tokenizer
from dex.quiet import quiet_libraries
from dex.recipe import Recipe, parse_recipe
from dex.subject import Subject
from dex.trainer import DexTrainer
from dex.watch import Watch

BLOCK = 256


def recipe_of(method: str, folder: Path, blocks: int, steps: int) -> Recipe:
    text = f"""
model: {{id: none}}
method: {{name: {method}}}
data: {{train: [{{source: pydoc}}], block: {BLOCK}}}
run: {{tokens: {steps * blocks * BLOCK}, batch_tokens: {blocks * BLOCK}, micro_batch: {blocks}}}
output: {folder}
"""
    return parse_recipe(text, "the benchmark's recipe")


def subject_of(recipe: Recipe) -> Subject:
    """What the recipe trains, on a model of SmolLM2's shape."""
    # DIFF V1 fits its norm on text.
    tokenizer = load_tokenizer(ModelSource("smollm2-135m-instruct")) if recipe.method.name == "diff-v1" else None
    base = LoadedModel(llama(SMOLLM2), tokenizer, ModelSource("none"))
    heads = recipe.method.heads_to_choose()
    plan = make_plan(base.model, "none", None, base.fingerprint, "random") if heads else None
    subject = recipe.method.subject(recipe, base, plan)
    subject.model.train()
    return subject


def random_blocks(folder: Path, blocks: int) -> Packed:
    rng = np.random.default_rng(0)
    rng.integers(0, SMOLLM2.vocab, (blocks, BLOCK), dtype=np.uint32).tofile(folder / "input_ids.bin")
    np.zeros((blocks, BLOCK), dtype=np.uint8).tofile(folder / "flags.bin")
    return Packed(folder, BLOCK, blocks, "random")


def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    causal_lm_loss(model, **batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- overhead ----------------------------------------------------------------------------------------------


class Between(TrainerCallback):
    """After every step of the Trainer, one of the bare loop; keeps the seconds of both."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ours: list[float] = []
        self.bare: list[float] = []
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = time.perf_counter()
        self.step()
        self.ours.append(ended - self._began)
        self._began = time.perf_counter()
        self.bare.append(self._began - ended)


def overhead(steps: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, blocks = Path(scratch), 4
        recipe = recipe_of("dex", folder, blocks, steps + 2)
        packed = random_blocks(folder, blocks * (steps + 2))
        subject, bare = subject_of(recipe), subject_of(recipe)
        optimizer = recipe.method.optimizer(bare.parameter_groups(recipe.run))
        rows = [packed[index] for index in range(blocks)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        between = Between(lambda: bare_step(bare.model, optimizer, batch))
        watch = Watch(recipe, [], folder / "log.jsonl", time.monotonic())
        trainer = DexTrainer(subject, recipe, packed, watch, folder)
        trainer.add_callback(between)
        trainer.train()
    value = ratio(between.ours[2:], between.bare[2:])
    print(
        json.dumps(figure("dex train / bare loop, step (4×256)", value, "≤ 1.03", value <= 1.03), ensure_ascii=False),
        flush=True,
    )


# --- baselines ---------------------------------------------------------------------------------------------


def step_of(method: str, blocks: int) -> Step:
    with tempfile.TemporaryDirectory() as scratch:
        recipe = recipe_of(method, Path(scratch), blocks, 100)
        subject = subject_of(recipe)
    optimizer = recipe.method.optimizer(subject.parameter_groups(recipe.run))
    ids = torch.randint(0, SMOLLM2.vocab, (blocks, BLOCK), generator=torch.Generator().manual_seed(1))
    return lambda: bare_step(subject.model, optimizer, {"input_ids": ids, "labels": ids})


def trained_parameters(method: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        model = subject_of(recipe_of(method, Path(scratch), 1, 100)).model
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def peak_memory(method: str) -> int:
    """The most memory of a process that makes two steps, in bytes."""
    step = step_of(method, 2)
    step()
    step()
    return resident()


def baselines(steps: int) -> None:
    rows = []
    for method in METHODS:
        command = [sys.executable, __file__, "--child", method]
        peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        seconds = alternate({"own": step_of(method, 2), "attention": step_of("attention", 2)}, steps)
        value = ratio(seconds["own"], seconds["attention"])
        per_second = 2 * BLOCK / statistics.median(seconds["own"])
        rows.append((method, trained_parameters(method), value, per_second, peak / 2**20))
        print(
            json.dumps(figure(f"step, {method} / attention (2×256)", value, "compared", True), ensure_ascii=False),
            flush=True,
        )
        print(
            json.dumps(figure(f"peak memory, {method}, MiB", peak / 2**20, "compared", True), ensure_ascii=False),
            flush=True,
        )
    print("\n| method | trained parameters | step / attention | tokens/s | peak MiB |\n|---|---|---|---|---|")
    for name, trained, value, per_second, peak_mib in rows:
        print(f"| {name} | {trained:,} | {value:.2f} | {per_second:.0f} | {peak_mib:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "baselines"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_libraries()
    disable_progress_bar()
    if options.child:
        print(peak_memory(options.child))
        return
    if options.only in (None, "overhead"):
        overhead(options.steps)
    if options.only in (None, "baselines"):
        baselines(options.steps)


if __name__ == "__main__":
    main()
