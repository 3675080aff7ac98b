"""A written GGUF file, read back by transformers and compared with the folder that it was made from.

Every tensor must be the folder's, as its type rounds it, and so must what the model says at every place of some
texts; how many of these are what the folder's own greedy decoding says is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from dex.errors import DexError
from dex.gguf.metadata import rope_factors
from dex.gguf.tensors import ROPE_FREQS, Planned, Weights, rounded
from dex.models import LoadedModel, load_model, quiet

PROMPTS = (
    "The capital of France is",
    "def mean(numbers):\n    return",
    "Water boils at",
    "Once upon a time there was a",
    "Zwölf Boxkämpfer jagen Viktor über den großen",
)
NEW_TOKENS = 16
# Numbers of the config that the file must give back; transformers reads them under these names.
_READ_BACK = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Expected:
    """Prompts, the greedy tokens of the folder's model after each, and how far the rounded weights agree.

    `likeliest`: at every place of those tokens, what the model would say with its weights as the file rounds them.
    """

    prompts: list[list[int]]
    greedy: list[list[int]]
    likeliest: list[list[int]]


def expect(loaded: LoadedModel, plan: list[Planned]) -> Expected:
    """What the file must say; rounds the loaded model's weights."""
    prompts = [loaded.tokenizer(prompt).input_ids for prompt in PROMPTS]
    greedy = [greedy_tokens(loaded.model, prompt, NEW_TOKENS) for prompt in prompts]
    parameters = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for tensor in plan:
            parameters[tensor.name].copy_(rounded(parameters[tensor.name], tensor.type))
    return Expected(prompts, greedy, _likeliest(loaded.model, prompts, greedy))


def greedy_tokens(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """The likeliest token again and again; ends of text and generation configs do not count."""
    ids = torch.tensor([prompt])
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    said: list[int] = ids[0, len(prompt) :].tolist()
    return said


def _likeliest(model: PreTrainedModel, prompts: list[list[int]], said: list[list[int]]) -> list[list[int]]:
    """The likeliest token at each place of what was said; where it is what was said, so are the greedy tokens."""
    found = []
    for prompt, answer in zip(prompts, said, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        found.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    return found


def check_file(
    file: Path, folder: Path, config: PretrainedConfig, plan: list[Planned], expected: Expected
) -> dict[str, Any]:
    """Read `file` back and compare; returns what was compared. Raises DexError for what is not as written."""
    hidden = _hidden_from_transformers(config)
    model = _read_with_config(file, config) if hidden else load_model(str(file), dtype="float32").model
    if not hidden:
        _compare_config(model.config, config)
    with Weights(folder) as weights:
        _compare_tensors(model, weights, plan)
    _compare_rope(file, config)
    likeliest = _likeliest(model, expected.prompts, expected.greedy)
    if likeliest != expected.likeliest:
        raise DexError(f"{file.name} gives the folder's tensors back and says other tokens; nothing was kept.")
    same = sum(a == b for a, b in zip(likeliest, expected.greedy, strict=True))
    return {
        "read_back_by": "transformers"
        + (f", with the folder's config, since it does not read {hidden}" if hidden else ""),
        "tensors_equal": len(plan),
        "prompts": len(PROMPTS),
        "new_tokens": NEW_TOKENS,
        "prompts_with_the_folders_tokens": same,
    }


def _hidden_from_transformers(config: PretrainedConfig) -> str | None:
    """What the file says of the model and transformers does not read from GGUF."""
    if rope_factors(config) is not None:
        return "RoPE scaling"
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        return "a Llama's biases"
    return None


def _read_with_config(file: Path, config: PretrainedConfig) -> PreTrainedModel:
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32, local_files_only=True
        )
    return model.eval()


def _compare_config(read: PretrainedConfig, config: PretrainedConfig) -> None:
    for name in _READ_BACK:
        if getattr(read, name, None) != getattr(config, name, None):
            raise DexError(f"The file gives {name} back as {getattr(read, name, None)}; nothing was kept.")
    for name, a, b in (
        ("rms_norm_eps", read.rms_norm_eps, config.rms_norm_eps),
        ("rope_theta", read.rope_parameters["rope_theta"], config.rope_parameters["rope_theta"]),
    ):
        if np.float32(a) != np.float32(b):
            raise DexError(f"The file gives {name} back as {a}; nothing was kept.")


def _compare_tensors(model: PreTrainedModel, weights: Weights, plan: list[Planned]) -> None:
    read = dict(model.named_parameters())
    if read.keys() != {tensor.name for tensor in plan}:
        raise DexError("The file gives other tensors back than the folder has; nothing was kept.")
    for tensor in plan:
        if not torch.equal(read[tensor.name], rounded(weights[tensor.name], tensor.type)):
            raise DexError(f"The file gives {tensor.name} back with other numbers; nothing was kept.")


def _compare_rope(file: Path, config: PretrainedConfig) -> None:
    factors = rope_factors(config)
    if factors is None:
        return
    stored = [tensor.data for tensor in gguf.GGUFReader(file).tensors if tensor.name == ROPE_FREQS]
    if len(stored) != 1 or not np.array_equal(stored[0], factors.numpy()):
        raise DexError(f"The file gives {ROPE_FREQS} back with other numbers; nothing was kept.")
