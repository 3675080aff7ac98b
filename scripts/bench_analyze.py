"""The benchmark of `dex analyze`: one JSON line per figure, {"figure", "value", "target", "met"}.

    python scripts/bench_analyze.py [--only speed|memory|report] [--length 2048] [--lengths T ...] [--repeats 5]

speed: all statistics that need no maps (the section attention) on --length tokens against a plain forward pass over
them, alternating in one process; the model has SmolLM2-135M's shape and random weights.
memory: what the statistics of the maps (the sections maps and redundancy) add to the peak memory of a process of its
own, on a model of two layers, at each of --lengths; per 1024 tokens, and how that grows from the first to the last.
report: the whole default report of smollm2-135m-instruct as a command, in seconds, and its peak memory against what
is estimated before it begins.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from bench_models import SMOLLM2, Shape, llama
from bench_timing import alternate, figure, memory_by_length, ratio, resident
from dex.analysis import attention, maps, redundancy
from dex.analysis.room import Work, working_bytes
from dex.analysis.sections import SECTIONS
from dex.analysis.subject import Settings, Subject
from dex.evaluation.evaluated import Evaluated
from dex.models import load_config
from dex.quiet import quiet_libraries
from dex.verbs.plan import plan_model

SMALL = Shape(4_096, 64, 192, 2, 2, 1, 32)
MIB = 2**20
REAL = "smollm2-135m-instruct"


def subject(shape: Shape, length: int) -> Subject:
    """Of random ids: neither time nor memory depends on them."""
    model = llama(shape)
    model.config.max_position_embeddings = max(length, model.config.max_position_embeddings)
    ids = torch.randint(0, shape.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    evaluated = Evaluated("random", model, PreTrainedTokenizerFast, {"id": "random"}, 1)
    return Subject(evaluated, "random", Settings(length=length, sequences=1), ids, [])


def quietly(done: int, total: int) -> None:
    """A benchmark shows no progress."""


def speed(length: int, repeats: int) -> Iterator[dict[str, Any]]:
    read = subject(SMOLLM2, length)

    def plain() -> None:
        with torch.no_grad():
            read.model(input_ids=read.ids, use_cache=False, logits_to_keep=1)

    seconds = alternate({"plain": plain, "analysed": lambda: attention.analyze(read, quietly)}, repeats)
    slower = ratio(seconds["analysed"], seconds["plain"])
    yield figure(f"map-free statistics / forward pass, {length} tokens", slower, "<= 2.5", slower <= 2.5)


def block_memory(length: int) -> int:
    """Bytes that the statistics of the maps add to the peak."""
    for each in (64, length):  # the first time loads what torch loads late
        read = subject(SMALL, each)
        before = resident("VmRSS")
        maps.analyze(read, quietly)
        redundancy.analyze(read, quietly)
    return resident() - before


def report() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("dex")), "analyze", REAL, "-o", f"{folder}/report"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)  # its own peak, not that of other children
        assert status == 0, "dex analyze failed"
        seconds = time.perf_counter() - began
        page = (Path(folder) / "report" / "report.html").stat().st_size / MIB
        took = json.loads((Path(folder) / "report" / "report.json").read_text(encoding="utf-8"))
    peak, work = used.ru_maxrss * 1024, Work(list(SECTIONS), Settings().length, 1)
    estimated = plan_model(REAL).weights["float32"] + working_bytes(load_config(REAL), work)
    estimated += resident("VmRSS")  # what a process has that has imported dex and loaded nothing
    yield figure(f"dex analyze {REAL}, seconds", seconds, "<= 300", seconds <= 300)
    for name, value in took["models"][0]["seconds"].items():
        yield figure(f"  of which {name}", value, "", True)
    yield figure("report.html, MiB", page, "<= 5", page <= 5)
    yield figure("peak memory / estimate", peak / estimated, "0.6 to 1.2", 0.6 <= peak / estimated <= 1.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "memory", "report"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_048, 8_192, 32_768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet_libraries()
    if given.child is not None:
        print(block_memory(given.child))
        return
    benchmarks = {
        "speed": lambda: speed(given.length, given.repeats),
        "memory": lambda: memory_by_length(__file__, "statistics of the maps", given.lengths),
        "report": report,
    }
    for name, run in benchmarks.items():
        if given.only in (None, name):
            for each in run():
                print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
