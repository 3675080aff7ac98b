"""From sources to blocks and held-out documents in a cache folder, done once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from dex.data.held_out import HeldOut, HeldOutWriter
from dex.data.mixture import SourceStream, mix
from dex.data.packing import BlockWriter, Packed
from dex.data.sources import Source, identity, pin
from dex.data.tokens import Ids, eos_token_id, tokenizer_identity
from dex.errors import DexError
from dex.output import whole_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
META = "meta.json"  # written last
HELD_OUT_TOKENS = 2**20  # kept for evaluation at most; all held-out documents stay out of training

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prepared:
    """Training blocks, held-out documents, and the account of how they came about (JSON)."""

    packed: Packed
    held_out: HeldOut
    report: dict[str, Any]
    folder: Path
    reused: bool


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    tokens: int,
    held_out: float,
    cache_dir: Path,
    held_out_tokens: int = HELD_OUT_TOKENS,
    on_progress: Progress | None = None,
) -> Prepared:
    """Pack `tokens` training tokens of the sources (fewer, if a single source ends before) into blocks of `block`.

    `held_out` is the share of documents that is kept apart: of all documents of a local source, and of those that
    were streamed from the Hub before the budget was full. The result lies in `cache_dir`, under a key made of
    everything that decides it; a second call reads it back. `on_progress(done_tokens, total_tokens)`.
    Raises DexError for unusable settings or sources, too little data for one block, or an empty side of the split.
    """
    _check_settings(sources, block, tokens, held_out, held_out_tokens)
    eos_token_id(tokenizer)
    sources = [pin(source) for source in sources]
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer_identity(tokenizer),
        "sources": [identity(source) for source in sources],
        "block": block,
        "blocks": -(-tokens // block),
        "held_out": held_out,
        "held_out_tokens": held_out_tokens,
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir / key
    ready = _open(folder, reused=True)
    if ready is not None:
        return ready
    with _locked(cache_dir, key):
        ready = _open(folder, reused=True)  # another process may have prepared it meanwhile
        if ready is None:
            with whole_folder(folder, force=True) as partial:
                pack(sources, tokenizer, inputs, partial, on_progress)
            ready = _open(folder, reused=False)
    if ready is None:
        raise DexError(f"{folder} was changed while it was prepared; run the command again.")
    return ready


def pack(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    inputs: dict[str, Any],
    folder: Path,
    on_progress: Progress | None = None,
) -> None:
    """Read, split, encode and cut pinned sources into `folder`; stops as soon as the blocks are full."""
    held_out = HeldOutWriter(tokenizer, inputs["held_out_tokens"])
    streams = [SourceStream(source, tokenizer, inputs["held_out"], held_out) for source in sources]
    writer = BlockWriter(folder, inputs["block"], inputs["blocks"])
    for stream, pieces in mix(streams):
        _add_document(writer, stream, pieces)
        if on_progress is not None:
            on_progress(min(writer.tokens, writer.wanted * writer.block), writer.wanted * writer.block)
        if writer.full:
            break
    for stream in streams:
        stream.finish()
    packed = {**writer.close(), "tokens_left_over": writer.waiting}
    kept = held_out.write(folder)
    reports = [stream.report() for stream in streams]
    _check_result(packed, kept, reports, inputs["held_out"])
    write_json(folder / META, {"inputs": inputs, "packed": packed, "held_out": kept, "sources": reports})


def _add_document(writer: BlockWriter, stream: SourceStream, pieces: Iterable[Ids]) -> None:
    starts = True
    for ids in pieces:
        writer.add(ids, starts)
        stream.tokens += len(ids)
        starts = False
        if writer.full:
            return


def _open(folder: Path, reused: bool) -> Prepared | None:
    """What lies in a cache folder, or None if it is missing or damaged."""
    try:
        report = json.loads((folder / META).read_text(encoding="utf-8"))
        packed, kept = report["packed"], report["held_out"]
        blocks = Packed(folder, packed["block"], packed["blocks"], packed["fingerprint"])
        held_out = HeldOut(folder, packed["block"], kept["documents"], kept["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Prepared(blocks, held_out, report, folder, reused)


@contextmanager
def _locked(cache_dir: Path, key: str) -> Iterator[None]:
    """One process prepares, others with the same data wait for it; a killed process leaves no lock behind."""
    lock = FileLock(cache_dir / f".{key}.lock")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DexError(f"{cache_dir} could not be written: {error.strerror or error}.") from error
    try:
        yield
    finally:
        lock.release()


def _check_settings(
    sources: Sequence[Source], block: int, tokens: int, held_out: float, held_out_tokens: int
) -> None:
    if not sources:
        raise DexError("There is no data source to train on; name at least one.")
    if block < 2:
        raise DexError(f"block must be at least 2 tokens, not {block}.")
    if tokens < 1:
        raise DexError(f"tokens must be at least 1, not {tokens}.")
    if not 0 <= held_out < 1:
        raise DexError(f"held_out must be a share from 0 to below 1, not {held_out}.")
    if held_out_tokens < 1:
        raise DexError(f"held_out_tokens must be at least 1, not {held_out_tokens}.")


def _check_result(packed: dict[str, Any], kept: dict[str, Any], reports: list[dict[str, Any]], share: float) -> None:
    names = ", ".join(report["source"] for report in reports)
    documents = sum(report["documents"] for report in reports)
    finer = "use more data, or cut it finer (`documents: paragraph` for a .txt file)"
    if share > 0 and kept["documents"] == 0:
        raise DexError(
            f"{names}: none of the {documents} documents read fell into the held-out part of {share:g}; {finer}, or "
            "hold out a larger share (0 for none)."
        )
    if documents == 0:
        raise DexError(
            f"{names}: all {kept['seen']} documents fell into the held-out part of {share:g}, none is left to train "
            f"on; {finer}, or hold out less."
        )
    if packed["blocks"] == 0:
        raise DexError(
            f"{names}: the {documents} training documents have {packed['tokens_left_over']} tokens, too few for one "
            f"block of {packed['block']}; use more data or a smaller block."
        )
