"""Documents → token ids: one BOS at most, one EOS at the end, no truncation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dex.data.sources import Document
from dex.errors import DexError
from dex.tokenizer import without_truncation_or_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# tokenizers needs about 100 bytes a token while it works: a text of 40 MB at once would take gigabytes
PIECE = 2**18  # characters
BATCH = 256  # documents
BEFORE_WORD = re.compile(r"(?<=\S) (?=\S)")

Ids = np.ndarray[Any, np.dtype[np.uint32]]


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, Iterable[Ids]]]:
    """Yield each document with its token ids, in one or more consecutive pieces (uint32, [n] each).

    The ids are the tokenizer's, with EOS at the end. A text of over 2^18 characters is encoded lazily, in
    pieces cut before a word: the same tokens for byte-level tokenizers (Llama 3, Qwen, SmolLM).
    Raises DexError if the tokenizer has no EOS.
    """
    eos_token_id(tokenizer)
    for batch in _batches(documents):
        if len(batch[0].text) > PIECE:
            yield batch[0], _encode_long(batch[0].text, tokenizer)
            continue
        encoded = _ids([document.text for document in batch], tokenizer)
        for document, ids in zip(batch, encoded, strict=True):
            yield document, [_array(_with_eos(_one_bos(ids, tokenizer), tokenizer))]


def eos_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends every document; DexError if there is none."""
    if tokenizer.eos_token_id is None:
        raise DexError(
            "The tokenizer has no EOS token, so packed documents could not be kept apart; set its eos_token."
        )
    return int(tokenizer.eos_token_id)


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides the ids; truncation and padding settings do not count."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        state = json.loads(backend.to_str())
        state.pop("truncation")
        state.pop("padding")
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, getattr(tokenizer, "split_special_tokens", False)]
    return hashlib.sha256(json.dumps([state, special], sort_keys=True).encode()).hexdigest()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups of at most BATCH documents and PIECE characters; a longer document stands alone."""
    batch, size = list[Document](), 0
    for document in documents:
        length = len(document.text)
        if batch and (len(batch) == BATCH or size + length > PIECE):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += length
    if batch:
        yield batch


def _encode_long(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Ids]:
    start_ids = _ids([""], tokenizer)[0]
    bos = start_ids[:1] if start_ids[:1] == [tokenizer.bos_token_id] else []
    start = 0
    while start < len(text):
        end = _cut(text, start)
        ids = _ids([text[start:end]], tokenizer, add_special_tokens=False)[0]
        if start == 0:
            ids = _one_bos(bos + ids, tokenizer)
        if end == len(text):
            ids = _with_eos(ids, tokenizer)
        yield _array(ids)
        start = end


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends: before the last word that begins in it, if there is one."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    tail = end - 4096
    cuts = [match.start() for match in BEFORE_WORD.finditer(text, tail, end)]
    return cuts[-1] if cuts else end


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> list[list[int]]:
    with without_truncation_or_padding(tokenizer):
        encoding = tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
    return encoding["input_ids"]


def _one_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids with a single BOS where there were several: a text may begin with the BOS string itself."""
    bos, extra = tokenizer.bos_token_id, 0
    while bos is not None and ids[extra : extra + 2] == [bos, bos]:
        extra += 1
    return ids[extra:]


def _with_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos = eos_token_id(tokenizer)
    return ids if ids[-1:] == [eos] else [*ids, eos]


def _array(ids: list[int]) -> Ids:
    return np.asarray(ids, dtype=np.uint32)
