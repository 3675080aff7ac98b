"""The file itself: metadata, tokenizer, then the tensors one by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PretrainedConfig

from dex.console import Bar
from dex.gguf.metadata import rope_factors, write_metadata
from dex.gguf.tensors import ROPE_FREQS, Planned, Weights, encoded_tensors
from dex.gguf.tokenizer import Vocabulary, write_vocabulary
from dex.gguf.types import F32


@dataclass(frozen=True)
class Contents:
    """All that goes into a file beside the numbers. `card`: the head of the folder's README.md."""

    config: PretrainedConfig
    dtype: str
    name: str
    card: dict[str, Any]
    plan: list[Planned]
    vocabulary: Vocabulary

    @property
    def nbytes(self) -> int:
        """Of the tensors, which are nearly all of a file."""
        return sum(tensor.nbytes for tensor in self.plan)


def write_file(file: Path, folder: Path, contents: Contents) -> None:
    """Write it, one tensor in memory at a time. Raises OSError if the disk refuses."""
    config = contents.config
    writer = gguf.GGUFWriter(file, config.model_type)
    write_metadata(writer, config, contents.dtype, contents.name, contents.card)
    write_vocabulary(writer, contents.vocabulary)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FREQS, factors.shape, np.dtype(np.float32), 4 * len(factors), F32)
    for tensor in contents.plan:
        writer.add_tensor_info(
            tensor.stored_name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.type
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            _write_tensor(writer, factors.numpy())
        with Weights(folder) as weights, Bar("writing", contents.nbytes, "bytes") as bar:
            for tensor, encoded in encoded_tensors(weights, contents.plan, config):
                _write_tensor(writer, encoded)
                bar.update(bar.done + tensor.nbytes)
        writer.flush()
    finally:
        writer.close()


def _write_tensor(writer: gguf.GGUFWriter, numbers: np.ndarray[Any, Any]) -> None:
    try:
        writer.write_tensor_data(numbers)
    except OSError as error:
        if error.strerror is None:  # numpy's own, which says how many numbers were written and not why
            raise OSError(error.errno, "the disk takes no more of it") from error
        raise
