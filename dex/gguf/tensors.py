"""The weights of a model folder as GGUF tensors: names, order of the rows, types.

llama.cpp rotates neighbouring entries of a Llama head where transformers rotates entry i with entry i + D/2, so the
rows of q and k (and their biases) are interleaved; its Qwen code rotates as transformers does.
Matrices get the type that was asked for, norms and biases stay float32. One tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dex.errors import DexError
from dex.gguf.types import F16, F32, Q8_0, TYPES
from dex.models import attention_shape, check_weight_files

FLOAT16_LARGEST = float(np.finfo(np.float16).max)
LARGEST = {F16: FLOAT16_LARGEST, Q8_0: 127 * FLOAT16_LARGEST}  # 8-bit numbers times a float16
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Planned:
    """One tensor: transformers' name of it, GGUF's, its shape and how its numbers are stored."""

    name: str
    stored_name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        return prod(gguf.quant_shape_to_byte_shape(self.shape, self.type))


def plan_tensors(config: PretrainedConfig, dtype: str, model: str) -> list[Planned]:
    """Every weight of the model, from its config alone. Raises DexError if the type does not suit its shapes."""
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    plan = []
    for name, parameter in outline.named_parameters():  # a tied head is the embedding, and comes once
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise DexError(f"{model} has {name}, for which llama.cpp's {config.model_type} has no tensor.")
        kind = TYPES[dtype].matrices if parameter.ndim == 2 else F32
        plan.append(Planned(name, stored, tuple(parameter.shape), kind))
    _refuse_broken_blocks(plan, model)
    return plan


def _refuse_broken_blocks(plan: list[Planned], model: str) -> None:
    """q8_0 has one scale for 32 numbers of a row."""
    block = gguf.GGML_QUANT_SIZES[Q8_0][0]
    for tensor in plan:
        if tensor.type == Q8_0 and tensor.shape[-1] % block:
            raise DexError(
                f"{tensor.name} of {model} has rows of {tensor.shape[-1]} numbers, and q8_0 stores {block} together; "
                "use --type f16."
            )


class Weights:
    """The tensors of a model folder by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        for name in check_weight_files(folder, str(folder)):
            file = self._stack.enter_context(safe_open(folder / name, framework="pt"))
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def interleave_rows(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows (or biases) of heads in transformers' order → in llama.cpp's: i and i + D/2 become neighbours."""
    pairs = tensor.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, D/2, …]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def rounded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """The float32 values that a tensor stored as `kind` gives back."""
    whole = tensor.float()
    if kind == F32:
        return whole
    return torch.from_numpy(gguf.dequantize(encode(whole, kind), kind)).reshape(tensor.shape)


def encode(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """The numbers as they stand in the file: float32, float16, or bytes of blocks (one float16 scale, 32 int8)."""
    encoded: np.ndarray[Any, Any] = gguf.quantize(tensor.float().contiguous().numpy(), kind)
    return encoded


def encoded_tensors(
    weights: Weights, plan: list[Planned], config: PretrainedConfig
) -> Iterator[tuple[Planned, np.ndarray[Any, Any]]]:
    """Each tensor of the plan as it is written."""
    head_dim = attention_shape(config).head_dim
    for tensor in plan:
        values = weights[tensor.name]
        if is_interleaved(tensor.name, config):
            values = interleave_rows(values, head_dim)
        yield tensor, encode(values, tensor.type)


def is_interleaved(name: str, config: PretrainedConfig) -> bool:
    return config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name)


def refuse_values(model: PreTrainedModel, plan: list[Planned]) -> None:
    """Raise DexError, naming the tensor, for numbers that are not finite or beyond what its type can hold."""
    parameters = dict(model.named_parameters())
    for tensor in plan:
        values, kind = parameters[tensor.name].detach(), tensor.type.name.lower()
        if not values.isfinite().all():
            raise DexError(f"{tensor.name} holds numbers that are not finite; the checkpoint is damaged.")
        largest, limit = values.abs().max().item(), LARGEST.get(tensor.type, float("inf"))
        if largest > limit:
            raise DexError(f"{tensor.name} holds {largest:.6g}, and {kind} ends at {limit:.6g}; use --type f32.")
