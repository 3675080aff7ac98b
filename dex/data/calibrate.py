"""A few windows of real text of one length, for scoring heads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dex.data.held_out import training_side
from dex.data.sources import Document, Skipped, Source, read_documents
from dex.data.tokens import Ids, Piece, encode_documents
from dex.errors import DexError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEARCH = 16  # times the tokens wanted, read at most in the search for documents that are long enough


class Calibration(NamedTuple):
    input_ids: torch.Tensor  # [N, length] int64
    fingerprint: str


def calibration(
    source: Source, tokenizer: PreTrainedTokenizerBase, sequences: int, length: int, held_out: float = 0.0
) -> Calibration:
    """The first windows of exactly `length` tokens, at most `sequences`: N says how many there are.

    Each window lies within one document if there are enough long ones; otherwise windows are cut from the documents
    put one after another. Documents of the `held_out` share are left out.
    Raises DexError if the data has not `length` tokens.
    """
    if sequences < 1 or length < 1:
        raise DexError(f"sequences and length must be at least 1, not {sequences} and {length}.")
    if not 0 <= held_out < 1:
        raise DexError(f"The held-out share is {held_out}; it must be at least 0 and below 1.")
    skipped = Skipped()
    documents = training_side(read_documents(source, skipped, tokenizer), held_out)
    found, seen = windows_of(documents, tokenizer, sequences, length)
    skipped.check(source.source)
    if found is None:
        raise DexError(f"{source.source} has {seen} tokens, too few for one window of {length}; use more data.")
    return found


def windows_of(
    documents: Iterator[Document], tokenizer: PreTrainedTokenizerBase, sequences: int, length: int
) -> tuple[Calibration | None, int]:
    """Windows as `calibration` has them, None for none, and how many tokens were read for them."""
    wanted, seen = sequences * length, 0
    pure, stream = list[Ids](), list[Ids]()
    for _, pieces in encode_documents(documents, tokenizer):
        ids = _first(pieces, wanted)
        pure += _windows(ids, length)
        if seen < wanted:
            stream.append(ids)
        seen += len(ids)
        if len(pure) >= sequences or seen >= SEARCH * wanted:
            break
    packed = _windows(np.concatenate(stream), length) if stream else []
    windows = pure if len(pure) >= min(sequences, len(packed)) else packed
    return (_calibration(np.stack(windows[:sequences])) if windows else None), seen


def _first(pieces: Iterable[Piece], wanted: int) -> Ids:
    """The first `wanted` tokens of a document; later pieces of a long one are not encoded at all."""
    taken, count = list[Ids](), 0
    for ids, _ in pieces:
        taken.append(ids)
        count += len(ids)
        if count >= wanted:
            break
    return np.concatenate(taken)[:wanted]


def _windows(ids: Ids, length: int) -> list[Ids]:
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def _calibration(windows: Ids) -> Calibration:
    fingerprint = hashlib.sha256(repr(windows.shape).encode() + windows.tobytes()).hexdigest()
    return Calibration(torch.from_numpy(windows.astype(np.int64)), fingerprint)
