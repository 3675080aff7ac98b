"""Documents → token ids: one BOS at most, one EOS at the end, no truncation; and which tokens are targets."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dex.data.chat import Span
from dex.data.sources import Document
from dex.errors import DexError
from dex.tokenizer import without_truncation_or_padding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# tokenizers needs about 100 bytes a token while it works: a text of 40 MB at once would take gigabytes
PIECE = 2**18  # characters
TOGETHER = 4  # pieces that are encoded together, in parallel
BATCH = 256  # documents
BEFORE_WORD = re.compile(r"(?<=\S) (?=\S)")
PARALLEL = "TOKENIZERS_PARALLELISM"  # read by the tokenizers at every call

Ids = np.ndarray[Any, np.dtype[np.uint32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Piece(NamedTuple):
    """Consecutive tokens of a document, [n] each: their ids, and whether a token is a target."""

    ids: Ids
    targets: Mask


def to_text(piece: Piece) -> tuple[str, str]:
    """A piece as two strings, for JSON."""
    return base64.b64encode(piece.ids.tobytes()).decode(), base64.b64encode(piece.targets.tobytes()).decode()


def from_text(ids: str, targets: str) -> Piece:
    """What `to_text` made strings of. Raises ValueError where they are not."""
    piece = Piece(
        np.frombuffer(base64.b64decode(ids), dtype=np.uint32),
        np.frombuffer(base64.b64decode(targets), dtype=np.bool_),
    )
    if len(piece.ids) != len(piece.targets):
        raise ValueError("ids and targets do not fit together")
    return piece


def join(pieces: Iterable[Piece]) -> Piece:
    """The pieces of a document as one."""
    ids, targets = zip(*pieces, strict=True)
    return Piece(np.concatenate(ids), np.concatenate(targets))


def encode_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Document, Iterable[Piece]]]:
    """Yield each document with its tokens, in one or more consecutive pieces.

    The ids are the tokenizer's, with EOS at the end. A text of over 2^18 characters is encoded lazily, in
    pieces cut before a word: the same tokens for byte-level tokenizers (Llama 3, Qwen, SmolLM). All tokens of a text
    are targets; of a conversation, those of its assistant turns and the special token that ends each.
    Raises DexError if the tokenizer has no EOS.
    """
    eos_token_id(tokenizer)
    for batch in _batches(documents):
        yield from zip(batch, encode_batch(batch, tokenizer), strict=True)


def encode_batch(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[Iterable[Piece]]:
    """The pieces of each document, as `encode_documents` yields them; together and on all cores."""
    pieces: dict[int, Iterable[Piece]] = {}
    for chat in (False, True):
        short = [
            index
            for index, document in enumerate(documents)
            if len(document.text) <= PIECE and (document.spans is not None) == chat
        ]
        for index, piece in zip(short, _encode([documents[i] for i in short], tokenizer, chat), strict=True):
            pieces[index] = [piece]
    return [
        pieces[index] if index in pieces else _encode_long(document, tokenizer)
        for index, document in enumerate(documents)
    ]


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
    """Groups of at most BATCH documents; one that reaches PIECE characters is full."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) == BATCH or size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(documents: list[Document], tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[Piece]:
    if not documents:
        return []
    texts = [document.text for document in documents]
    if not chat:
        return [_text_piece(_with_eos(_one_bos(ids, tokenizer), tokenizer)) for ids in _ids(texts, tokenizer)]
    special = special_ids(tokenizer)
    return [
        _chat_piece(ids, targets_of(document, offsets, ids, special), tokenizer, first=True, last=True)
        for document, (ids, offsets) in zip(documents, _ids_and_offsets(texts, tokenizer), strict=True)
    ]


def _encode_long(document: Document, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    text, start = document.text, 0
    while start < len(text):
        cuts = [start]
        while len(cuts) <= TOGETHER and cuts[-1] < len(text):
            cuts.append(_cut(text, cuts[-1]))
        yield from _encode_cut(document, cuts, tokenizer)
        start = cuts[-1]


def _encode_cut(document: Document, cuts: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The pieces between the cuts of a text, which may be its first, its last, or neither."""
    bounds = list(pairwise(cuts))
    texts = [document.text[start:end] for start, end in bounds]
    if document.spans is not None:
        special = special_ids(tokenizer)
        for (start, end), (ids, offsets) in zip(bounds, _ids_and_offsets(texts, tokenizer), strict=True):
            targets = targets_of(document, offsets + start, ids, special)
            yield _chat_piece(ids, targets, tokenizer, first=start == 0, last=end == len(document.text))
        return
    start_ids = _ids([""], tokenizer)[0] if cuts[0] == 0 else []
    bos = start_ids[:1] if start_ids[:1] == [tokenizer.bos_token_id] else []
    for (start, end), ids in zip(bounds, _ids(texts, tokenizer, add_special_tokens=False), strict=True):
        if start == 0:
            ids = _one_bos(bos + ids, tokenizer)
        yield _text_piece(_with_eos(ids, tokenizer) if end == len(document.text) else ids)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The tokens that are no text, among them those that end turns; sorted."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return _array(sorted(added | set(tokenizer.all_special_ids)))


def targets_of(document: Document, offsets: np.ndarray, ids: list[int], special: Ids) -> Mask:
    """Which tokens lie in an assistant turn of the document, or are the special token that ends one. [n]

    offsets: [n, 2], where in the document's text each token starts and ends. A token that carries the white space
    before a turn, as SentencePiece's do, starts before it and lies in it.
    """
    targets = np.zeros(len(ids), dtype=bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    is_special = np.isin(np.asarray(ids), special)
    for span in _spans_near(document.spans or (), starts, ends):
        targets |= (starts >= span.start) & (starts < span.end)
        for index in np.flatnonzero((starts < span.start) & (ends > span.start)):
            targets[index] = document.text[starts[index] : span.start].isspace()
        targets[np.flatnonzero(is_special & (starts == span.stop) & (ends > starts))[:1]] = True
    return targets


def _spans_near(spans: tuple[Span, ...], starts: np.ndarray, ends: np.ndarray) -> list[Span]:
    """The spans that tokens at these places can have to do with: a long text is encoded in pieces."""
    if not len(starts):
        return []
    return [span for span in spans if span.start <= ends[-1] and span.stop >= starts[0]]


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends: before the last word that begins in it, if there is one."""
    end = start + PIECE
    if end >= len(text):
        return len(text)
    tail = end - 4096
    cuts = [match.start() for match in BEFORE_WORD.finditer(text, tail, end)]
    return cuts[-1] if cuts else end


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool = True) -> list[list[int]]:
    ids: list[list[int]] = _call(texts, tokenizer, add_special_tokens=add_special_tokens)["input_ids"]
    return ids


def _ids_and_offsets(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], np.ndarray]]:
    """Ids and offsets, [n, 2], of rendered conversations: what is special in them is in their text already."""
    encoding = _call(texts, tokenizer, add_special_tokens=False, return_offsets_mapping=True)
    offsets = [np.asarray(each, dtype=np.int64).reshape(-1, 2) for each in encoding["offset_mapping"]]
    return list(zip(encoding["input_ids"], offsets, strict=True))


def _call(texts: list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    with without_truncation_or_padding(tokenizer), on_all_cores():
        return tokenizer(
            texts,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Within the block tokenizers use all cores (RAYON_NUM_THREADS at most), whatever was set before.

    Outside of it the setting is what it was: dex.cli switches it off, since processes are forked later.
    """
    before = os.environ.get(PARALLEL)
    os.environ[PARALLEL] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLEL]
        else:
            os.environ[PARALLEL] = before


def _text_piece(ids: list[int]) -> Piece:
    return Piece(_array(ids), np.ones(len(ids), dtype=bool))


def _chat_piece(ids: list[int], targets: Mask, tokenizer: PreTrainedTokenizerBase, first: bool, last: bool) -> Piece:
    """With one BOS where the template and the text brought more, and EOS (no target) if it is not there."""
    if first:
        kept = _one_bos(ids, tokenizer)
        ids, targets = kept, targets[len(ids) - len(kept) :]
    if last:
        closed = _with_eos(ids, tokenizer)
        targets = np.concatenate([targets, np.zeros(len(closed) - len(ids), dtype=bool)])
        ids = closed
    return Piece(_array(ids), targets)


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
