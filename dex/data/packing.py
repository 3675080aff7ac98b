"""The stream of tokens, cut into blocks of equal length, on disk; and the order in which a run visits them.

A document that does not fit into what is left of a block goes on in the next. Documents (and the halves of a cut
one) do not see each other: `position_ids` restart at 0 at each, no attention mask is given, and transformers then
masks everything before a restart. This holds with `use_cache=False` only; with a cache, transformers attends across.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dex.data.tokens import Ids

INPUT_IDS = "input_ids.bin"  # uint32 [N, block]
DOC_START = "doc_start.bin"  # bool [N, block]: the token is the first of its document
IGNORED = -100  # the label that transformers leaves out of the loss
FLUSH = 2**16  # tokens gathered before they are written


class BlockWriter:
    """Cuts a stream of documents into blocks and appends them to files in `folder`, until `blocks` are full."""

    def __init__(self, folder: Path, block: int, blocks: int) -> None:
        self.block = block
        self.wanted = blocks
        self.written = 0
        self.waiting = 0  # tokens that are not in a block yet
        self._ids: list[Ids] = []
        self._starts: list[np.ndarray] = []
        self._digest = hashlib.sha256(f"block {block}".encode())
        self._files = folder / INPUT_IDS, folder / DOC_START

    @property
    def full(self) -> bool:
        return self.tokens >= self.wanted * self.block

    @property
    def tokens(self) -> int:
        return self.written * self.block + self.waiting

    def add(self, ids: Ids, starts_document: bool) -> None:
        """Append ids [n]; the first of them may be the first of a document."""
        starts = np.zeros(len(ids), dtype=bool)
        starts[:1] = starts_document
        self._ids.append(ids)
        self._starts.append(starts)
        self.waiting += len(ids)
        if self.waiting >= max(FLUSH, self.block):
            self._flush()

    def close(self) -> dict[str, Any]:
        """Write the last whole blocks; what is left over is dropped. Returns the block count and the fingerprint."""
        self._flush()
        return {"block": self.block, "blocks": self.written, "fingerprint": self._digest.hexdigest()}

    def _flush(self) -> None:
        if not self._ids:
            return
        ids, starts = np.concatenate(self._ids), np.concatenate(self._starts)
        blocks = min(len(ids) // self.block, self.wanted - self.written)
        size = blocks * self.block
        for file, values in zip(self._files, (ids[:size], starts[:size]), strict=True):
            with file.open("ab") as out:
                out.write(values.tobytes())
        self._digest.update(ids[:size].tobytes() + starts[:size].tobytes())
        self.written += blocks
        self._ids, self._starts, self.waiting = [ids[size:]], [starts[size:]], len(ids) - size


class Packed(Dataset[dict[str, torch.Tensor]]):
    """Training blocks, memory-mapped. `fingerprint` is the hash of their content.

    Item i: `input_ids`, `position_ids` and `labels`, [block] int64 each. Labels are not shifted (the model shifts);
    the first token of a document and of a block has no context and is -100, so labels != -100 are the targets.
    """

    def __init__(self, folder: Path, block: int, blocks: int, fingerprint: str) -> None:
        """Raises ValueError if the files have not the size of `blocks` blocks."""
        self.folder, self.block, self.blocks, self.fingerprint = folder, block, blocks, fingerprint
        self.input_ids = _mapped(folder / INPUT_IDS, np.uint32, (blocks, block))
        self.doc_start = _mapped(folder / DOC_START, np.bool_, (blocks, block))

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        input_ids = self.input_ids[index].astype(np.int64)
        starts = np.array(self.doc_start[index])
        starts[0] = True
        labels = np.where(starts, IGNORED, input_ids)
        item = {"input_ids": input_ids, "position_ids": _positions(starts), "labels": labels}
        return {name: torch.from_numpy(values) for name, values in item.items()}

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled memory map would carry the whole file to each worker
        return Packed, (self.folder, self.block, self.blocks, self.fingerprint)


def _positions(starts: np.ndarray) -> np.ndarray:
    """Distance of each token from the last start before it, [block]; the first token is a start."""
    index = np.arange(len(starts), dtype=np.int64)
    return index - np.maximum.accumulate(np.where(starts, index, 0))


def _mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    size = path.stat().st_size if path.exists() else -1
    if size != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has not the size of {shape}")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


class RunOrder(Dataset[dict[str, torch.Tensor]]):
    """The blocks in the order of a run: item i is the i-th block that the run visits, epoch after epoch.

    A pure function of (seed, i): a resumed run and any number of processes see the same order.
    """

    def __init__(self, packed: Packed, batches: int, batch_blocks: int, seed: int) -> None:
        self.packed, self.batches, self.batch_blocks, self.seed = packed, batches, batch_blocks, seed

    def __len__(self) -> int:
        return self.batches * self.batch_blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.packed[self.block_index(index)]

    def block_index(self, index: int) -> int:
        """Which block of `packed` item `index` is."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        epoch, place = divmod(index, len(self.packed))
        return int(_permutation(self.seed, epoch, len(self.packed))[place])


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, blocks: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(blocks)
