"""How the benchmark times: runs that alternate in one process, medians of pairwise ratios, one dict per figure."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dex import memory

Step = Callable[[], Any]


def alternate(steps: dict[str, Step], repeats: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each step, run in turn `repeats` times, after one turn that does not count (with `warm_up`)."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1 if warm_up else 0, repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(a: list[float], b: list[float]) -> float:
    """The median of the pairwise ratios."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def figure(name: str, value: float, target: str, met: bool) -> dict[str, Any]:
    return {"figure": name, "value": round(value, 4), "target": target, "met": met}


def resident(what: str = "VmHWM") -> int:
    """Bytes of this process: VmHWM, the most so far, or VmRSS, now."""
    found = memory.resident(what)
    assert found is not None, "the benchmark needs Linux' /proc"
    return found


def memory_by_length(script: str, what: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The bytes that `script --child LENGTH`, a process of its own, says it adds at each length, and growth."""
    added = {length: _in_child(script, length) for length in lengths}
    for length, size in added.items():
        yield figure(f"{what}, {length} tokens, MiB per 1024 tokens", size / 2**20 / (length / 1024), "", True)
    first, last = lengths[0], lengths[-1]
    growth = (added[last] / last) / (added[first] / first)
    yield figure(f"{what}, memory per token, {last} against {first} tokens", growth, "<= 1.2", growth <= 1.2)


def _in_child(script: str, length: int) -> int:
    command = [sys.executable, script, "--child", str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
