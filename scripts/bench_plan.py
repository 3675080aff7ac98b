"""How well `dex plan` predicts the peak memory of a training step: one JSON line per figure, predicted / measured.

    python scripts/bench_plan.py [--only NAME]

Measured: a child process builds the model with random weights and its method, and does two updates with the real loss
and AdamW on the CPU; its peak of resident memory (VmHWM) minus what was resident after the imports (VmRSS), some of
which only an update makes: so a tiny model has made one before. Its C allocator gives blocks of 1 MiB and more back
when they are freed (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_). Left as it is, glibc keeps some of what is
freed: 16 % of the peak for wide-1x2048/dex, which `dex plan` does not know.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench_timing import figure, resident

# What glibc reads at its start.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
LOW, HIGH = 0.85, 1.15
DOCUMENTS = 4  # of a block


class Case(NamedTuple):
    """The shape of a Llama (vocabulary, width, inner width, layers, heads, key/value heads), its batch, its run."""

    shape: tuple[int, int, int, int, int, int]
    micro_batch: int
    block: int
    run: dict[str, Any] = {}  # noqa: RUF012


SMOLLM2 = (49_152, 576, 1_536, 30, 9, 3)
WIDE = (32_000, 1_024, 2_816, 4, 16, 4)
LONG = (4_096, 512, 1_408, 4, 8, 4)
TINY = (1_024, 64, 128, 2, 4, 2)  # of the update before
CASES = {
    "smollm2-8x256": Case(SMOLLM2, 8, 256),
    "wide-1x2048": Case(WIDE, 1, 2_048),
    "wide-1x2048-checkpointing": Case(WIDE, 1, 2_048, {"gradient_checkpointing": True}),
    "long-1x4096": Case(LONG, 1, 4_096),
    "wide-2x1024-autocast": Case(WIDE, 2, 1_024, {"autocast": True}),
}
METHODS = ("dex", "full", "lora")


def recipe_of(case: Case, method: str, folder: Path) -> Any:
    from dex.recipe import Recipe

    tokens = case.micro_batch * case.block
    return Recipe.model_validate(
        {
            "model": {"id": str(folder)},
            "method": {"name": method},
            "data": {"train": [{"source": "pydoc"}], "block": case.block},
            "run": {"tokens": 100 * tokens, "batch_tokens": tokens, "micro_batch": case.micro_batch, **case.run},
            "output": "unused",
        }
    )


def write_config(case: Case, folder: Path) -> None:
    from transformers import LlamaConfig

    vocab, width, inner, layers, heads, kv_heads = case.shape
    LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


# --- The child ---------------------------------------------------------------------------------------------


def measure(case: Case, method: str, folder: Path) -> int:
    """Bytes that two updates need at their peak, above what the imports need."""
    small = case._replace(shape=TINY, micro_batch=1, block=64)
    with tempfile.TemporaryDirectory() as scratch:
        write_config(small, Path(scratch))
        _updates(small, method, Path(scratch), 1)
    gc.collect()
    before = resident("VmRSS")
    _updates(case, method, folder, 2)
    return resident("VmHWM") - before


def _updates(case: Case, method: str, folder: Path, number: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dex.heads import make_plan
    from dex.models import LoadedModel, ModelSource, fingerprint

    recipe = recipe_of(case, method, folder)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    base = LoadedModel(model, None, ModelSource(str(folder)))
    plan = make_plan(model, str(folder), None, fingerprint(model), "random")
    subject = recipe.method.subject(recipe, base, plan if recipe.method.heads_to_choose() else None)
    optimizer = recipe.method.optimizer(subject.parameter_groups(recipe.run))
    if recipe.run.gradient_checkpointing:
        subject.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    subject.model.train()
    for _ in range(number):
        _update(subject.model, optimizer, recipe, case)


def _update(model: Any, optimizer: Any, recipe: Any, case: Case) -> None:
    import torch

    from dex.loss import causal_lm_loss

    ids = torch.randint(0, case.shape[0], (case.micro_batch, case.block))
    positions = torch.arange(case.block // DOCUMENTS).repeat(DOCUMENTS).expand_as(ids).contiguous()
    labels = ids.masked_fill(positions == 0, -100)
    targets = float((labels[:, 1:] != -100).sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.run.autocast):
        loss = causal_lm_loss(model, ids, labels, targets, position_ids=positions)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.run.clip)
    optimizer.step()
    optimizer.zero_grad()


# --- The comparison ----------------------------------------------------------------------------------------


def compare(name: str, method: str) -> dict[str, Any]:
    from dex.verbs.plan import plan

    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config(case, folder)
        predicted = plan(recipe_of(case, method, folder)).memory.peak
        child = [sys.executable, __file__, "--child", name, method, scratch]
        environment = {**os.environ, **ALLOCATOR}
        done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=1_800, check=True)
    measured = int(done.stdout.split()[-1])
    value = predicted / measured
    line = figure(f"plan_peak_memory/{name}/{method}", value, f"{LOW} to {HIGH}", LOW <= value <= HIGH)
    return {**line, "predicted_mib": round(predicted / 2**20), "measured_mib": round(measured / 2**20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Only the figures whose name has this in it.")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "METHOD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, method, folder = arguments.child
        print(measure(CASES[name], method, Path(folder)))
        return
    for name in CASES:
        for method in METHODS:
            if arguments.only in f"{name}/{method}":
                print(json.dumps(compare(name, method)), flush=True)


if __name__ == "__main__":
    main()
