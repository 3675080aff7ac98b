"""One run in several processes (torchrun, accelerate launch): who speaks, who writes, and how all of them agree.

In one process all of this does nothing.
"""

from __future__ import annotations

import os
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
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    return rank() == 0


def join() -> None:
    """Let the processes of this run find each other. Raises DexError if a launcher asked for what cannot be had."""
    refuse_sharding_that_is_not_to_be_had()
    if world_size() == 1:
        return
    from accelerate import PartialState

    PartialState(cpu=not has_accelerator(), timeout=TIMEOUT)


def has_accelerator() -> bool:
    """accelerate has to be told where there is none: it would leave every process alone, without a word."""
    import torch

    return torch.accelerator.is_available()


def refuse_sharding_that_is_not_to_be_had() -> None:
    """Where it cannot shard, accelerate runs DDP without a word: who asked for sharding would run out of memory."""
    asked = [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
    if not asked:
        return
    if not has_accelerator() or world_size() == 1:
        raise stop_all(
            f"The launcher asks for {asked[0]}, which needs several processes with a GPU each, and here "
            f"{'is one process' if world_size() == 1 else 'is no GPU'}; start it with recipes/accelerate/ddp.yaml."
        )
    if asked == ["FSDP"] and os.environ.get("FSDP_VERSION") != "2":
        raise stop_all("FSDP of version 1 flattens the parameters, which Dex needs as they are; set fsdp_version: 2.")
    if asked == ["FSDP"] and os.environ.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT":
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


def any_of(flag: bool) -> bool:
    """Is it so in any of the processes?"""
    return flag if world_size() == 1 else any(gather(flag))


def gather(value: T) -> list[T]:
    """The value of every process, in the order of their ranks."""
    if world_size() == 1:
        return [value]
    import torch

    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def stop_all(message: str) -> DexError:
    """The error to raise where all processes have come to the same conclusion, so that it is shown once."""
    return DexError(message) if is_first() else SharedError(message)
