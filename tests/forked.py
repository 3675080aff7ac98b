"""Two processes that run a function of a test, as two ranks do."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch


def run_in_two(function: Callable[..., None], *arguments: Any, seconds: float = 150) -> None:
    """Call `function(rank, *arguments)` in two processes; what one raises, this raises.

    Forked from a server that has imported the libraries and done nothing else: a fork of the test's own process can
    wait for ever for a lock that one of its threads held. `seconds` is for a hang, not a benchmark.
    """
    multiprocessing.set_forkserver_preload(["dex.study.imports"])  # the server that `dex study` starts too
    processes = torch.multiprocessing.start_processes(
        function, arguments, nprocs=2, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + seconds
    try:
        while not processes.join(timeout=5):  # one process at a time
            assert time.monotonic() < deadline
    finally:
        for process in processes.processes:
            process.kill()
