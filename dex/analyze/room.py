"""Whether a model and what is computed of it fit the memory, from its config alone: before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from dex.adapter import is_adapter, read_adapter_config
from dex.analyze.subject import Settings
from dex.errors import DexError
from dex.memory import available
from dex.models import ANY, load_outline, quiet
from dex.planning.outline import checkpoint_dtype, count, on_meta
from dex.planning.words import size

BLOCK = 128  # queries whose maps are in memory at once
COPIES = 8  # of such a block: logits, maps, what is made of them


def check_room(name: str, revision: str | None, dtype: str, settings: Settings, batch_size: int) -> None:
    """Raise DexError, with what would fit, where the memory that is free does not hold the work."""
    free = available()
    if free is None:
        return
    if is_adapter(name):
        adapter = read_adapter_config(name)
        name, revision, trained = adapter.base_model_name_or_path or "", adapter.revision, _adapter_bytes(name)
    else:
        trained = 0
    with quiet():
        config, source = load_outline(name, revision, ANY)
        own = checkpoint_dtype(config, source)
        kept = own if dtype == "auto" else getattr(torch, dtype)
        parameters = count(on_meta(config, kept, source))
    weights = parameters * kept.itemsize + trained
    needed = weights + working_bytes(config, settings.length, batch_size)
    if needed <= free:
        return
    raise DexError(
        f"{name} needs about {size(needed)}, {size(weights)} of it for its weights and the rest to work with "
        f"{settings.length} tokens, and {size(free)} are free; "
        f"{_what_fits(parameters, trained, kept, config, free)}."
    )


def working_bytes(config: PretrainedConfig, length: int, batch_size: int) -> int:
    """What is held beside the weights at most: the activations of a backward pass, or a block of maps, or logits.

    Of every layer a backward pass keeps about 16 tensors as wide as the model and 4 as wide as its MLP (measured by
    scripts/bench_analyze.py --only memory).
    """
    d, ffn, L, H = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
    )
    tokens = batch_size * length
    activations = tokens * L * (16 * d + 4 * ffn) * 4 + tokens * config.vocab_size * 3 * 4
    return activations + COPIES * batch_size * H * min(BLOCK, length) * length * 4


def _what_fits(parameters: int, trained: int, kept: torch.dtype, config: PretrainedConfig, free: int) -> str:
    """Half of the advice: a shorter text, a narrower dtype, or how large a model could be."""
    for dtype in dict.fromkeys((kept, torch.bfloat16)):
        narrower = "" if dtype == kept else f"--dtype {str(dtype).removeprefix('torch.')} and "
        weights = parameters * dtype.itemsize + trained
        for length in (16_384, 8_192, 4_096, 2_048, 1_024, 512, 256, 128):
            if weights + working_bytes(config, length, 1) <= free:
                return f"{narrower}--batch-size 1 --length {length} would fit"
    return (
        f"at most about {free // 2 // 10**6:,} million parameters would, in bfloat16; use a machine with more memory"
    )


def _adapter_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("adapter_model*"))
