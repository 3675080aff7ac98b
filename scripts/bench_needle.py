"""The benchmark of `dex eval --suite needle`: one JSON line per figure, {"figure", "value", "target", "met"}.

    python scripts/bench_needle.py [--only shared|memory] [--length 4096] [--repeats 3] [--lengths T ...]

shared: 8 needles that are asked of one haystack of --length tokens against 8 whole prompts, alternating in one
process; the model has SmolLM2-135M's shape and random weights.
memory: what a needle's answer and its attention masses add to the peak memory of a process of its own, on a model of
two layers, at each of --lengths; per 1024 tokens, and how that grows from the first length to the last.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch

from bench_models import SMOLLM2, Shape, llama
from bench_timing import alternate, figure, memory_by_length, ratio, resident
from dex.evaluation.attention_mass import answer_masses
from dex.evaluation.haystack import Haystack, Needle
from dex.evaluation.prefix import Prefix
from dex.quiet import quiet_libraries

QUERIES, NEW_TOKENS, VALUE_TOKENS = 8, 16, 4
SMALL = Shape(4_096, 64, 192, 2, 2, 1, 32)


def haystack(length: int, vocab: int) -> Haystack:
    """Of random ids: neither time nor memory depends on them."""
    question = 16
    ids: list[int] = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    needles = [Needle(str(i), str(i), None, (32 * i + 1, 32 * i + 24)) for i in range(QUERIES)]
    return Haystack(ids[:-question], 1, needles, [ids[-question:]] * QUERIES)


def shared(length: int, repeats: int) -> Iterator[dict[str, Any]]:
    model, hay = llama(SMOLLM2), haystack(length, SMOLLM2.vocab)

    def one_haystack() -> None:
        prefix = Prefix(model, hay.ids)
        for question in hay.questions:
            prefix.greedy(question, NEW_TOKENS)

    def whole_prompts() -> None:
        for question in hay.questions:
            Prefix(model, [*hay.ids, *question]).greedy([], NEW_TOKENS)

    seconds = alternate({"whole": whole_prompts, "shared": one_haystack}, repeats, warm_up=False)
    faster = ratio(seconds["whole"], seconds["shared"])
    yield figure(
        f"needle shared prefill, {QUERIES} queries of {length} tokens, times faster", faster, ">= 3", faster >= 3
    )


def analysis_memory(length: int) -> int:
    """Bytes that one answer and its masses add to the peak."""
    model = llama(SMALL)
    for each in (64, length):  # the first time loads what torch loads late
        before = resident("VmRSS")
        hay = haystack(each, SMALL.vocab)
        prefix = Prefix(model, hay.ids)
        prefix.greedy(hay.questions[0], NEW_TOKENS)
        answer_masses(prefix, hay, 0, hay.ids[:VALUE_TOKENS])
    return resident() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("shared", "memory"))
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8_192, 16_384, 32_768, 65_536])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet_libraries()
    if given.child is not None:
        print(analysis_memory(given.child))
        return
    benchmarks = {
        "shared": lambda: shared(given.length, given.repeats),
        "memory": lambda: memory_by_length(__file__, "needle analysis", given.lengths),
    }
    for name, run in benchmarks.items():
        if given.only in (None, name):
            for each in run():
                print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
