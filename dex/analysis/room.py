"""Whether a model and what is computed of it fit the memory, from its config alone: before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from dex.adapter import is_adapter
from dex.analysis.redundancy import COVARIANCES
from dex.errors import DexError
from dex.memory import available
from dex.models import ModelSource, quiet
from dex.planning.outline import checkpoint_dtype, count, on_meta
from dex.planning.words import size

BLOCK = 128  # queries whose maps are in memory at once, at most
COPIES = 8  # of such a block: logits, maps, what is made of them
# Tensors as wide as the model, and as its MLP: alive in a forward pass, and kept of each layer for a backward one.
# With these, `scripts/bench_analyze.py --only report` compares the estimate with the peak that it measures.
ALIVE, KEPT = (6, 2), (16, 4)


class Work(NamedTuple):
    """What is to be computed: which sections, on how many tokens of a window, and how many windows at once."""

    sections: Sequence[str]
    length: int
    batch_size: int


def check_room(name: str, config: PretrainedConfig, source: ModelSource, dtype: str, work: Work) -> None:
    """Raise DexError, with what would fit, where the memory that is free does not hold the work.

    config, source: of the model, or of an adapter's base (`dex.adapter.base_outline`).
    """
    free = available()
    if free is None:
        return
    with quiet():
        own = checkpoint_dtype(config, source)
        kept = own if dtype == "auto" else getattr(torch, dtype)
        parameters = count(on_meta(config, kept, source))
    trained = _adapter_bytes(name) if is_adapter(name) else 0
    weights = parameters * kept.itemsize + trained
    needed = weights + working_bytes(config, work)
    if needed > free:
        raise DexError(
            f"{name} needs about {size(needed)}, {size(weights)} of it for its weights and the rest to work on "
            f"{work.batch_size} × {work.length} tokens, and {size(free)} are free; "
            f"{_what_fits(parameters, trained, kept, config, work, free)}."
        )


def working_bytes(config: PretrainedConfig, work: Work) -> int:
    """What is held beside the weights at most. Importance has a backward pass, redundancy a covariance a layer."""
    d, ffn, L, H = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
    )
    tokens = work.batch_size * work.length
    held = [tokens * (ALIVE[0] * d + ALIVE[1] * ffn) + COPIES * tokens * H * min(BLOCK, work.length)]
    if "importance" in work.sections:
        held.append(tokens * (L * (KEPT[0] * d + KEPT[1] * ffn) + 3 * config.vocab_size))
    covariances = min(COVARIANCES, 8 * L * d**2) if "redundancy" in work.sections else 0
    return 4 * max(held) + covariances


def _what_fits(
    parameters: int, trained: int, kept: torch.dtype, config: PretrainedConfig, work: Work, free: int
) -> str:
    """Half of the advice: shorter windows, a narrower dtype, fewer sections, or how large a model could be."""
    for dtype in dict.fromkeys((kept, torch.bfloat16)):
        for other, words in _less(work):
            if parameters * dtype.itemsize + trained + working_bytes(config, other) <= free:
                narrower = "" if dtype == kept else f"--dtype {str(dtype).removeprefix('torch.')} and "
                return f"{narrower}{words} would fit"
    return (
        f"at most about {free // 2 // 10**6:,} million parameters would, in bfloat16; use a machine with more memory"
    )


def _less(work: Work) -> Iterator[tuple[Work, str]]:
    """Less work, and the options that ask for it, the nearest first."""
    without = [name for name in work.sections if name != "importance"]
    for sections, words in ((work.sections, ""), (without, f" --only {','.join(without)}")):
        length = work.length
        while sections and length >= 64:
            yield Work(sections, length, 1), f"--batch-size 1 --length {length}{words}"
            length //= 2


def _adapter_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("adapter_model*"))
