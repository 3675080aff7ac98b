"""The held-out part: whole documents, chosen by the hash of their text, that are never trained on."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dex.data.sources import Document
from dex.data.tokens import Ids, encode_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_FILE = "held_out.bin"  # uint32, the documents one after another
DOCUMENT_FILE = "held_out.json"
WAITING = 64  # documents gathered before they are encoded


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


class HeldOutWriter:
    """Collects held-out documents: each text once, the first ones by hash, up to `max_tokens` (at least one).

    Which documents are kept does not depend on the order in which they come.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.seen = 0
        self.tokens = 0
        self._kept: list[tuple[int, _Kept]] = []  # heap, the last by hash on top
        self._hashes: set[str] = set()
        self._bound = "g"  # after every hexadecimal digit; documents from this hash on are left out
        self._waiting: list[Document] = []

    def add(self, document: Document) -> None:
        self.seen += 1
        text_hash = split_hash(document.text)
        if text_hash < self._bound and text_hash not in self._hashes:
            self._hashes.add(text_hash)
            self._waiting.append(document)
        if len(self._waiting) >= WAITING:
            self._encode()

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the kept documents, by hash; returns their counts and the fingerprint of the tokens."""
        self._encode()
        kept = sorted(document for _, document in self._kept)
        tokens = b"".join(document.ids.tobytes() for document in kept)
        (folder / TOKEN_FILE).write_bytes(tokens)
        documents = [{"origin": document.origin, "tokens": len(document.ids)} for document in kept]
        (folder / DOCUMENT_FILE).write_text(json.dumps(documents, ensure_ascii=False), encoding="utf-8")
        lengths = repr([document["tokens"] for document in documents]).encode()
        fingerprint = hashlib.sha256(lengths + tokens).hexdigest()
        return {"documents": len(kept), "tokens": self.tokens, "seen": self.seen, "fingerprint": fingerprint}

    def _encode(self) -> None:
        for document, pieces in encode_documents(self._waiting, self.tokenizer):
            self._keep(_Kept(split_hash(document.text), document.origin, np.concatenate(list(pieces))))
        self._waiting = []

    def _keep(self, document: _Kept) -> None:
        if document.hash >= self._bound:
            return
        heapq.heappush(self._kept, (-int(document.hash, 16), document))
        self.tokens += len(document.ids)
        while self.tokens > self.max_tokens and len(self._kept) > 1:
            _, last = heapq.heappop(self._kept)
            self.tokens -= len(last.ids)
            self._bound = last.hash
            self._hashes.discard(last.hash)


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
        if len(self.origins) != documents or self.tokens != int(self._ends[-1]):
            raise ValueError(f"{TOKEN_FILE} and {DOCUMENT_FILE} do not fit together")

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def document(self, index: int) -> torch.Tensor:
        """Token ids of a document, [n] int64, ending in EOS."""
        ids = self._tokens[self._ends[index] : self._ends[index + 1]]
        return torch.from_numpy(ids.astype(np.int64))

    def blocks(
        self, max_tokens: int | None = None, per_document: int | None = None
    ) -> list[tuple[int, torch.Tensor]]:
        """(document index, input_ids [≤ block] int64) of each block; no block spans two documents.

        The last block of a document is shorter, and dropped if it has a single token (nothing to predict).
        `per_document` takes at most so many tokens from the start of each document, so that a few long ones do not
        outweigh the rest. `max_tokens` takes the first documents that have no more tokens together (at least one).
        """
        lengths = np.minimum(np.diff(self._ends), per_document or self.tokens)
        count = (
            len(self) if max_tokens is None else max(1, int(np.searchsorted(lengths.cumsum(), max_tokens, "right")))
        )
        return [
            (index, block)
            for index in range(min(count, len(self)))
            for block in self.document(index)[: lengths[index]].split(self.block)
            if len(block) > 1
        ]


def training_side(documents: Iterator[Document], share: float, writer: HeldOutWriter | None) -> Iterator[Document]:
    """Yield the documents that may be trained on; the others go to `writer` (if any)."""
    for document in documents:
        if not is_held_out(document.text, share):
            yield document
        elif writer is not None:
            writer.add(document)
