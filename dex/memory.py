"""The memory that this process has had, and what is free."""

from __future__ import annotations

import re
from pathlib import Path


def resident(what: str = "VmHWM") -> int | None:
    """Bytes of this process: VmHWM, the most so far (getrusage would begin with its parent's), or VmRSS, now.

    None where the system does not say (it is Linux' /proc).
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def available() -> int | None:
    """Bytes that are free on the device that models go to: of a GPU, or of this machine.

    None where the system does not say.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
