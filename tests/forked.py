"""Processes of a test that begin with everything imported: two ranks of a function, and `dex` itself.

They are forked from a server that has imported the libraries and done nothing else: a fork of the test's own process
can wait for ever for a lock that one of its threads held. Importing takes seconds of a processor, once instead of
once a process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

PRELOADED = ["dex.studies.imports", "dex.cli", "dex.verbs.study", "transformers.models.llama.modeling_llama"]


def run_in_two(function: Callable[..., None], *arguments: Any, seconds: float = 150) -> None:
    """Call `function(rank, *arguments)` in two processes, as two ranks do; what one raises, this raises.

    `seconds` is for a hang, not a benchmark.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
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


def start(function: Callable[..., Any], *arguments: Any, **options: Any) -> BaseProcess:
    """Call a function in a process of its own, in the environment and the folder of this one."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(
        target=_there, args=(dict(os.environ), os.getcwd(), function, arguments, options)
    )
    process.start()
    atexit.register(process.kill)  # before multiprocessing would wait for it
    return process


def _there(
    environment: dict[str, str], folder: str, function: Callable[..., Any], arguments: Any, options: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.freeze()  # a collection would look at, and so copy, all that the server has imported
    function(*arguments, **options)


class Dex:
    """A `dex` command in a process of its own, as subprocess.Popen has it; what it says goes to files.

    Signals, exit codes, standard streams and limits are those of any process. What is not as on a command line is the
    start: the libraries are there already, with the environment that they were imported in (HF_HOME and the like are
    those of the test session).
    """

    def __init__(self, *arguments: object, largest_file: int | None = None, **environment: str) -> None:
        self._said = Path(tempfile.mkdtemp(prefix="dex-tests-said-"))
        weakref.finalize(self, shutil.rmtree, self._said, ignore_errors=True)
        said = (str(self._said), environment, largest_file)
        self._process = start(_dex, [*map(str, arguments)], *said)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """What it has printed up to now."""
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    def _read(self, name: str) -> str:
        file = self._said / name
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("dex", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr


def run_dex(*arguments: object, seconds: float = 240, **options: Any) -> Dex:
    """A `dex` command that has ended; `seconds` is for a hang."""
    done = Dex(*arguments, **options)
    try:
        done.wait(seconds)
    finally:
        done.send_signal(signal.SIGKILL)
    return done


def _dex(arguments: list[str], said: str, environment: dict[str, str], largest_file: int | None) -> None:
    """Of the forked process: become `dex ARGUMENTS`."""
    os.environ.update(environment)
    _speak_into(Path(said))
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    _fork_runs_from_the_server_of_the_test(said)
    sys.argv = ["dex", *arguments]
    from dex.cli import main

    main()


def _speak_into(folder: Path) -> None:
    """Give this process standard streams of its own, buffered as those of a process whose output is kept."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")


def _fork_runs_from_the_server_of_the_test(said: str) -> None:
    """`dex study` forks its runs from such a server too; one of its own would import everything again."""
    from multiprocessing.forkserver import _forkserver

    from dex.studies import work

    _forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    work._child = functools.partial(_run_of_study, said, dict(os.environ))


def _run_of_study(said: str, environment: dict[str, str], *arguments: Any) -> None:
    """Of a run's process: what it would have from a server that its `dex study` started."""
    os.environ.clear()
    os.environ.update(environment)
    _speak_into(Path(said))
    from dex.studies.work import _child

    _child(*arguments)
