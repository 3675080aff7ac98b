"""Devices that a run is planned for: memory, and products a second."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from dex.errors import DexError

MIB, GIB, TERA = 2**20, 2**30, 10**12
UTILISATION = 0.4  # share of a GPU's peak that training reaches; an assumption, not measured
CONTEXT = GIB  # of a GPU's memory, for CUDA, its libraries and what the allocator cannot use; an assumption
SIZE, SECONDS = 1_024, 0.3  # of the matrices that the CPU is measured with, and for about how long


@dataclass(frozen=True)
class Device:
    """`memory`: bytes that a run can have. `rates`: operations a second of dense products, by dtype, as published (a
    GPU's float32 without TF32, which is torch's default). `utilisation`: the share of them that is reached."""

    name: str
    memory: int
    rates: dict[str, float]
    utilisation: float

    def seconds(self, flops: dict[str, int]) -> float:
        """Of these operations, by dtype; float16 as bfloat16, and what is wider than float32 as float32."""
        return sum(number / (self.rate(dtype) * self.utilisation) for dtype, number in flops.items())

    def rate(self, dtype: str) -> float:
        return self.rates["bfloat16" if dtype in ("bfloat16", "float16") else "float32"]


def _gpu(name: str, mib: int, bfloat16: float, float32: float) -> Device:
    rates = {"bfloat16": bfloat16 * TERA, "float32": float32 * TERA}
    return Device(name, mib * MIB - CONTEXT, rates, UTILISATION)


# Memory as nvidia-smi shows it; rates from NVIDIA's data sheets, without sparsity (GeForce: float32 accumulation).
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 143_771, 989, 67),
        _gpu("h100", 81_559, 989, 67),
        _gpu("a100-80g", 81_920, 312, 19.5),
        _gpu("a100-40g", 40_960, 312, 19.5),
        _gpu("l40s", 46_068, 362, 91.6),
        _gpu("rtx-4090", 24_564, 165, 82.6),
        _gpu("rtx-3090", 24_576, 71, 35.6),
    )
}
NAMES = (*GPUS, "cpu")


def find_device(name: str, dtypes: set[str]) -> Device:
    """A device by its name; the CPU is measured, for the dtypes that are used. Raises DexError for another name."""
    if name == "cpu":
        return _this_cpu(dtypes)
    if name not in GPUS:
        raise DexError(f"There is no device {name!r} to plan for; choose one of {', '.join(NAMES)}.")
    return GPUS[name]


def _this_cpu(dtypes: set[str]) -> Device:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wide, narrow = "float32", "bfloat16"
    rates = {wide: _measured(torch.float32)}
    rates[narrow] = _measured(torch.bfloat16) if dtypes & {"bfloat16", "float16"} else rates[wide]
    return Device("cpu", memory, rates, 1.0)


def _measured(dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    torch.mm(a, a)  # threads and kernels are set up once
    began, products = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < SECONDS or not products:
        torch.mm(a, a)
        products += 1
    return 2 * SIZE**3 * products / elapsed
