"""Two processes that run a function of a test, as two ranks do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def run_in_two(function: Callable[..., None], *arguments: Any, seconds: float = 60) -> None:
    """Call `function(rank, *arguments)` in two processes; what one raises, this raises.

    Forked, not spawned: the libraries need not be imported again. `seconds` is for a hang, not a benchmark.
    """
    processes = torch.multiprocessing.start_processes(function, arguments, nprocs=2, join=False, start_method="fork")
    deadline = time.monotonic() + seconds
    while not processes.join(timeout=5):  # one process at a time
        assert time.monotonic() < deadline
