"""The held-out part: whole documents, chosen by the hash of their text, that are never trained on."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dex.data.sources import Document
from dex.data.tokens import Ids, Mask, Piece, from_text, to_text

TOKEN_FILE = "held_out.bin"  # uint32, the documents one after another
TARGET_FILE = "held_out_targets.bin"  # bool, for each of these tokens
DOCUMENT_FILE = "held_out.json"


class HeldOutBlock(NamedTuple):
    """A part of one held-out document: its tokens, and which of them are targets (the first never is)."""

    document: int
    input_ids: torch.Tensor  # [n] int64, n ≤ block
    targets: torch.Tensor  # [n] bool


def split_hash(text: str) -> str:
    """The hash that decides the side of a document, as hexadecimal digits; their order is the documents' order."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def is_held_out(text: str, share: float) -> bool:
    """True for `share` of all texts, always the same ones; equal texts fall on the same side."""
    return int(split_hash(text)[:16], 16) / 2**64 < share


class _Kept(NamedTuple):
    hash: str
    origin: str
    ids: Ids
    targets: Mask


class HeldOutWriter:
    """Collects held-out documents: each text once, the first ones by hash, up to `max_tokens` (at least one).

    Which documents are kept does not depend on the order in which they come.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.seen = 0
        self.tokens = 0
        self._kept: list[tuple[int, _Kept]] = []  # heap, the last by hash on top
        self._hashes: set[str] = set()
        self._bound = "g"  # after every hexadecimal digit; documents from this hash on are left out

    def wants(self, document: Document) -> bool:
        """Count a held-out document; True if it would be kept as things stand, so that it has to be encoded."""
        self.seen += 1
        text_hash = split_hash(document.text)
        return text_hash < self._bound and text_hash not in self._hashes

    def add(self, document: Document, piece: Piece) -> None:
        """Take the tokens of a document that was wanted."""
        text_hash = split_hash(document.text)
        if text_hash < self._bound and text_hash not in self._hashes:
            self._keep(_Kept(text_hash, document.origin, piece.ids, piece.targets))

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the kept documents, by hash; returns their counts and the fingerprint of the tokens."""
        kept = self._sorted()
        tokens = b"".join(document.ids.tobytes() for document in kept)
        targets = b"".join(document.targets.tobytes() for document in kept)
        (folder / TOKEN_FILE).write_bytes(tokens)
        (folder / TARGET_FILE).write_bytes(targets)
        documents = [{"origin": document.origin, "tokens": len(document.ids)} for document in kept]
        (folder / DOCUMENT_FILE).write_text(json.dumps(documents, ensure_ascii=False), encoding="utf-8")
        lengths = repr([document["tokens"] for document in documents]).encode()
        fingerprint = hashlib.sha256(lengths + tokens + targets).hexdigest()
        return {"documents": len(kept), "tokens": self.tokens, "seen": self.seen, "fingerprint": fingerprint}

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as JSON."""
        kept = [[each.hash, each.origin, *to_text(Piece(each.ids, each.targets))] for each in self._sorted()]
        return {"seen": self.seen, "bound": self._bound, "kept": kept}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen, self._bound, self.tokens = int(state["seen"]), str(state["bound"]), 0
        self._kept, self._hashes = [], set()
        for text_hash, origin, ids, targets in state["kept"]:
            self._push(_Kept(text_hash, origin, *from_text(ids, targets)))

    def _sorted(self) -> list[_Kept]:
        return sorted((document for _, document in self._kept), key=lambda document: document.hash)

    def _keep(self, document: _Kept) -> None:
        self._push(document)
        while self.tokens > self.max_tokens and len(self._kept) > 1:
            _, last = heapq.heappop(self._kept)
            self.tokens -= len(last.ids)
            self._bound = last.hash
            self._hashes.discard(last.hash)

    def _push(self, document: _Kept) -> None:
        heapq.heappush(self._kept, (-int(document.hash, 16), document))  # hashes differ, so the key decides
        self._hashes.add(document.hash)
        self.tokens += len(document.ids)


class HeldOut:
    """Held-out documents in the order of their hashes; `origins[i]` names document i.

    Any first part of them is a fair sample: the order has nothing to do with the texts' order or content.
    """

    def __init__(self, folder: Path, block: int, documents: int, fingerprint: str) -> None:
        """Raises ValueError if the files do not hold that many documents."""
        self.folder, self.block, self.fingerprint = folder, block, fingerprint
        listed = json.loads((folder / DOCUMENT_FILE).read_text(encoding="utf-8"))
        self.origins: list[str] = [document["origin"] for document in listed]
        self._ends = np.cumsum([0, *(document["tokens"] for document in listed)])
        self._tokens = np.fromfile(folder / TOKEN_FILE, dtype=np.uint32)
        self._targets = np.fromfile(folder / TARGET_FILE, dtype=np.bool_)
        if len(self.origins) != documents or not self.tokens == int(self._ends[-1]) == len(self._targets):
            raise ValueError(f"{TOKEN_FILE}, {TARGET_FILE} and {DOCUMENT_FILE} do not fit together")

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def document(self, index: int) -> torch.Tensor:
        """Token ids of a document, [n] int64, ending in EOS."""
        ids = self._tokens[self._ends[index] : self._ends[index + 1]]
        return torch.from_numpy(ids.astype(np.int64))

    def targets(self, index: int) -> torch.Tensor:
        """Which tokens of a document are targets, [n] bool; of a text all but the first."""
        targets = self._targets[self._ends[index] : self._ends[index + 1]].copy()
        targets[:1] = False
        return torch.from_numpy(targets)

    def blocks(self, max_tokens: int | None = None, per_document: int | None = None) -> list[HeldOutBlock]:
        """The documents, cut into blocks; no block spans two documents.

        The last block of a document is shorter; a block without a target is dropped, such as one of a single token.
        `per_document` takes at most so many tokens from the start of each document, so that a few long ones do not
        outweigh the rest. `max_tokens` takes the first documents that have no more tokens together (at least one).
        """
        lengths = np.minimum(np.diff(self._ends), per_document or self.tokens)
        count = (
            len(self) if max_tokens is None else max(1, int(np.searchsorted(lengths.cumsum(), max_tokens, "right")))
        )
        cut = [
            _block(index, ids, targets)
            for index in range(min(count, len(self)))
            for ids, targets in zip(
                self.document(index)[: lengths[index]].split(self.block),
                self.targets(index)[: lengths[index]].split(self.block),
                strict=True,
            )
        ]
        return [block for block in cut if block.targets.any()]


def _block(document: int, input_ids: torch.Tensor, targets: torch.Tensor) -> HeldOutBlock:
    targets = targets.clone()
    targets[:1] = False  # nothing precedes it in its block
    return HeldOutBlock(document, input_ids, targets)


def training_side(documents: Iterator[Document], share: float) -> Iterator[Document]:
    """Yield the documents that may be trained on."""
    return (document for document in documents if not is_held_out(document.text, share))


def held_out_side(documents: Iterator[Document], share: float) -> Iterator[Document]:
    """Yield the documents that no run trains on which holds out that share of them, or a larger one."""
    return (document for document in documents if is_held_out(document.text, share))
