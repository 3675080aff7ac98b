"""What a run was made with, for whoever has to repeat it: versions, the commit of dex, the machine, the processes."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from dex import __version__
from dex.processes import world_size

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "pytorch-optimizer",
    "bitsandbytes",
    "liger-kernel",
    "deepspeed",
)


def environment() -> dict[str, Any]:
    return {
        "dex": __version__,
        "commit": code_commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "device": _device(),
        "cpu": _cpu(),
        "threads": _threads(),
        "processes": world_size(),
    }


def code_commit() -> str | None:
    """The commit of the checkout that dex runs from, with a + if files differ from it; None outside of one."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "HEAD")
    if commit is None or _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # no checkout, or one of something else that dex is installed in
    return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {_threads()} threads"


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cpu() -> str:
    """The processor and the instructions that torch uses of it: both decide in which order it adds."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
