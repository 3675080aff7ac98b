"""What a model is, in words: the first thing that a report says of it."""

from __future__ import annotations

from pathlib import Path

from dex.adapter import is_adapter, read_adapter_config
from dex.analysis.subject import Subject
from dex.lock import CERTIFICATE
from dex.tuner import DexConfig

_LAYOUTS = {"diff_v1": "a DIFF Transformer V1", "diff_v2": "a DIFF Transformer V2", "diffllama": "a DiffLlama"}
_FAMILIES = {"llama": "a stock Llama", "qwen2": "a stock Qwen2", "qwen3": "a stock Qwen3"}


def kind_of(subject: Subject) -> str:
    """Such as "a Dex adapter" or "a stock Llama"."""
    if is_adapter(subject.path):
        return "a Dex adapter" if isinstance(read_adapter_config(subject.path), DexConfig) else "a LoRA adapter"
    model_type = subject.stock.config.model_type
    stock = _FAMILIES.get(model_type, model_type)
    if (Path(subject.path) / CERTIFICATE).is_file():
        return f"{stock}, folded from a Dex adapter"
    return _LAYOUTS.get(model_type, stock)


def introduction(subject: Subject, kind: str) -> str:
    """One sentence: which model, how large, and what its heads are."""
    config, label = subject.stock.config, subject.evaluated.label
    base = subject.evaluated.identity.get("base")
    parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    heads = f"{subject.num_heads} {'differential heads' if subject.signed else 'heads'}"
    of = f" on {base}" if base else ""
    dtype = subject.evaluated.identity["dtype"]
    layers = config.num_hidden_layers
    return f"{label} is {kind}{of}: {layers} layers of {heads}, {parameters:,} parameters, analysed in {dtype}."
