"""The stream of tokens, cut into blocks of equal length, on disk; and the order in which a run visits them.

A document that does not fit into what is left of a block goes on in the next. Documents (and the halves of a cut
one) do not see each other: `position_ids` restart at 0 at each, no attention mask is given, and transformers then
masks everything before a restart. This holds with `use_cache=False` only; with a cache, transformers attends across.

A block without any target is left out: its loss would be a mean over nothing.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dex.data.tokens import Ids, Piece

INPUT_IDS = "input_ids.bin"  # uint32 [N, block]
FLAGS = "flags.bin"  # uint8 [N, block]
STARTS = 1  # flag: the token is the first of its document
NO_TARGET = 2  # flag: the token is no target, whatever precedes it
IGNORED = -100  # the label that transformers leaves out of the loss
FLUSH = 2**16  # tokens gathered before they are written
READ = 2**24  # bytes read at a time

Flags = np.ndarray[Any, np.dtype[np.uint8]]


class BlockWriter:
    """Cuts a stream of documents into blocks and appends them to files in `folder`, until `blocks` are full."""

    def __init__(self, folder: Path, block: int, blocks: int) -> None:
        self.block = block
        self.wanted = blocks
        self.written = 0
        self.left_out = 0  # blocks without a target
        self.waiting = 0  # tokens that are not in a block yet
        self._ids: list[Ids] = []
        self._flags: list[Flags] = []
        self._files = folder / INPUT_IDS, folder / FLAGS

    @property
    def full(self) -> bool:
        if self.tokens >= self.wanted * self.block:
            self.flush()  # only then is it known which blocks have a target
        return self.tokens >= self.wanted * self.block

    @property
    def tokens(self) -> int:
        return self.written * self.block + self.waiting

    def add(self, piece: Piece, starts_document: bool) -> None:
        """Append tokens [n]; the first of them may be the first of a document."""
        flags = np.where(piece.targets, 0, NO_TARGET).astype(np.uint8)
        flags[:1] |= STARTS if starts_document else 0
        self._append(piece.ids, flags)
        if self.waiting >= max(FLUSH, self.block):
            self.flush()

    def close(self) -> dict[str, Any]:
        """Write the last whole blocks; what is left over is dropped. Returns counts and the files' fingerprint."""
        self.flush()
        for file in self._files:
            file.touch()
        return {
            "block": self.block,
            "blocks": self.written,
            "blocks_without_targets": self.left_out,
            "fingerprint": fingerprint(self.block, self._files),
        }

    def flush(self) -> None:
        """Write the whole blocks that are there."""
        if not self._ids:
            return
        ids, flags = np.concatenate(self._ids), np.concatenate(self._flags)
        blocks = len(ids) // self.block
        cut_flags = flags[: blocks * self.block].reshape(blocks, self.block)
        kept = np.flatnonzero((cut_flags[:, 1:] == 0).any(axis=1))
        room = self.wanted - self.written
        if len(kept) >= room:  # blocks after the last one wanted are left over, not left out
            kept = kept[:room]
            blocks = int(kept[-1]) + 1 if room else 0
        cut_ids = ids[: blocks * self.block].reshape(blocks, self.block)
        for file, raw in zip(self._files, (cut_ids[kept].tobytes(), cut_flags[kept].tobytes()), strict=True):
            with file.open("ab") as out:
                out.write(raw)
        self.written += len(kept)
        self.left_out += blocks - len(kept)
        self._ids, self._flags, self.waiting = [], [], 0
        self._append(ids[blocks * self.block :], flags[blocks * self.block :])

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as JSON; the files are on the disk as far as it counts them."""
        self.flush()
        for file in self._files:
            file.touch()
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        ids, flags = np.concatenate([*self._ids, _NO_IDS]), np.concatenate([*self._flags, _NO_FLAGS])
        waiting = {
            "ids": base64.b64encode(ids.tobytes()).decode(),
            "flags": base64.b64encode(flags.tobytes()).decode(),
        }
        return {"written": self.written, "left_out": self.left_out, **waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state: what the files hold beyond it is cut off. Raises ValueError if they hold less."""
        self.written, self.left_out = int(state["written"]), int(state["left_out"])
        for file, width in zip(self._files, (4, 1), strict=True):
            size = self.written * self.block * width
            if file.stat().st_size < size:
                raise ValueError(f"{file.name} is shorter than its state says")
            os.truncate(file, size)
        self._ids, self._flags, self.waiting = [], [], 0
        ids = np.frombuffer(base64.b64decode(state["ids"]), dtype=np.uint32)
        self._append(ids, np.frombuffer(base64.b64decode(state["flags"]), dtype=np.uint8))

    def _append(self, ids: Ids, flags: Flags) -> None:
        self._ids.append(ids)
        self._flags.append(flags)
        self.waiting += len(ids)


_NO_IDS, _NO_FLAGS = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.uint8)


def fingerprint(block: int, files: Iterable[Path]) -> str:
    """The hash of packed blocks, from their files."""
    digest = hashlib.sha256(f"block {block}".encode())
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(READ):
                digest.update(part)
    return digest.hexdigest()


class Packed(Dataset[dict[str, torch.Tensor]]):
    """Training blocks, memory-mapped. `fingerprint` is the hash of their content.

    Item i: `input_ids`, `position_ids` and `labels`, [block] int64 each. Labels are not shifted (the model shifts);
    the first token of a document and of a block has no context and is -100, and so is what a conversation does not
    train: labels != -100 are the targets. Every block has one.
    """

    def __init__(self, folder: Path, block: int, blocks: int, fingerprint: str) -> None:
        """Raises ValueError if the files have not the size of `blocks` blocks."""
        self.folder, self.block, self.blocks, self.fingerprint = folder, block, blocks, fingerprint
        self.input_ids = _mapped(folder / INPUT_IDS, np.uint32, (blocks, block))
        self.flags = _mapped(folder / FLAGS, np.uint8, (blocks, block))

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        input_ids = self.input_ids[index].astype(np.int64)
        flags = np.array(self.flags[index])
        flags[0] |= STARTS
        starts = (flags & STARTS) > 0
        labels = np.where(flags > 0, IGNORED, input_ids)
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
