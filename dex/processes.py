"""One run in several processes (torchrun, accelerate launch): who speaks, who writes, and how all of them agree.

In one process all of this does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from dex.errors import DexError

T = TypeVar("T")

# The first process may tokenise for hours while the others wait for it; the libraries' ten minutes are for a step.
TIMEOUT = timedelta(hours=12)


class SharedError(DexError):
    """An error that all processes stop with, and that the first one shows."""


def rank() -> int:
    return _torch_distributed().get_rank() if _is_joined() else _of_launcher("RANK", 0)


def world_size() -> int:
    return _torch_distributed().get_world_size() if _is_joined() else _of_launcher("WORLD_SIZE", 1)


def _of_launcher(name: str, alone: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else alone  # `join` refuses what is no number


def _is_joined() -> bool:
    """Have the processes found each other? Before that, the launcher's word counts; torch is not imported for it."""
    return "torch" in sys.modules and _torch_distributed().is_available() and _torch_distributed().is_initialized()


def _torch_distributed() -> Any:
    return sys.modules["torch"].distributed


def is_first() -> bool:
    return rank() == 0


def join() -> None:
    """Let the processes of this run find each other. Raises DexError if a launcher asked for what cannot be had."""
    _check_environment()
    refuse_sharding_that_is_not_to_be_had()
    if world_size() == 1:
        return
    from accelerate import PartialState

    PartialState(cpu=not has_accelerator(), timeout=TIMEOUT)


def _check_environment() -> None:
    """What a launcher sets; without one, nothing of it."""
    for name in ("RANK", "WORLD_SIZE"):
        value = os.environ.get(name, "1")
        if not value.isdecimal() or (name == "WORLD_SIZE" and int(value) < 1):
            raise DexError(
                f"The environment has {name}={value!r}, which no launcher sets; unset it, or use torchrun."
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" not in os.environ:
        raise DexError(
            "The environment has WORLD_SIZE but no MASTER_ADDR; start dex train with torchrun, or unset it."
        )


def has_accelerator() -> bool:
    """accelerate has to be told where there is none: it would leave every process alone, without a word."""
    import torch

    return torch.accelerator.is_available()


def refuse_gpus_left_over() -> None:
    """Raise DexError for several GPUs and one process: the Trainer would run them in threads, another arithmetic."""
    import torch

    if world_size() == 1 and torch.cuda.device_count() > 1:
        gpus = torch.cuda.device_count()
        raise DexError(
            f"Here are {gpus} GPUs and one process; start one process a GPU (torchrun --nproc-per-node {gpus} "
            "-m dex.cli train …), or choose one GPU with CUDA_VISIBLE_DEVICES=0."
        )


def asked_for() -> str | None:
    """The sharding that the launcher asks of accelerate: FSDP, DEEPSPEED or none."""
    names = ("FSDP", "DEEPSPEED")
    return next((name for name in names if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"), None)


def refuse_sharding_that_is_not_to_be_had() -> None:
    """Where it cannot shard, accelerate runs DDP without a word: who asked for sharding would run out of memory."""
    asked = asked_for()
    if asked is None:
        return
    if not has_accelerator() or world_size() == 1:
        raise stop_all(
            f"The launcher asks for {asked}, which needs several processes with a GPU each, and here "
            f"{'is one process' if world_size() == 1 else 'is no GPU'}; start it with recipes/accelerate/ddp.yaml."
        )
    if asked == "FSDP" and os.environ.get("FSDP_VERSION") != "2":
        raise stop_all("FSDP of version 1 flattens the parameters, which Dex needs as they are; set fsdp_version: 2.")
    if asked == "FSDP" and os.environ.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT":
        raise stop_all("A checkpoint has to hold the whole adapter; set fsdp_state_dict_type: FULL_STATE_DICT.")


def on_first(work: Callable[[], T]) -> T:
    """Run on the first process; all of them get what it returns, or stop with the DexError that it raised."""
    if world_size() == 1:
        return work()
    import torch

    answer: list[Any] = [None, None]  # what it returned, or the error's sentence
    failed: Exception | None = None
    if is_first():
        try:
            answer[0] = work()
        except Exception as error:
            failed, answer[1] = error, str(error) or type(error).__name__
    torch.distributed.broadcast_object_list(answer)
    if failed is not None:
        raise failed
    if answer[1] is not None:
        raise SharedError(answer[1])
    value: T = answer[0]
    return value


def agree(work: Callable[[], T]) -> T:
    """Run in every process; if it fails in one of them all stop with that DexError, which is shown once."""
    failed: DexError | None = None
    value: T | None = None
    try:
        value = work()
    except DexError as error:
        failed = error
    problem = first_given(None if failed is None else str(failed))
    if problem is not None:
        raise stop_all(problem) from failed
    return value  # type: ignore[return-value]  # there is one where nothing failed


def first_ahead(work: Callable[[], T]) -> T:
    """Run on the first process, then on the others, who find what it left; each gets a value of its own."""
    ahead = agree(lambda: work() if is_first() else None)
    return agree(lambda: work() if ahead is None else ahead)


def any_of(flag: bool) -> bool:
    """Is it so in any of the processes?"""
    return flag if world_size() == 1 else any(gather(flag))


def first_given(value: T | None) -> T | None:
    """The value of the first process that has one: of a reason to stop, say; None where none has."""
    return next((each for each in gather(value) if each is not None), None)


def gather(value: T) -> list[T]:
    """The value of every process, in the order of their ranks; this one's alone, before they have joined."""
    if world_size() == 1 or not _is_joined():
        return [value]
    import torch

    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def place() -> tuple[int, int]:
    """Which of the processes that work together this one is, and how many they are: one, before they have joined."""
    ranks = gather(rank())
    return ranks.index(rank()), len(ranks)


def stop_all(message: str, kind: type[DexError] = DexError) -> DexError:
    """The error to raise where all processes have come to the same conclusion, so that it is shown once."""
    return kind(message) if is_first() else SharedError(message)
