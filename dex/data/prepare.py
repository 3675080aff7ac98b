"""From sources to blocks and held-out documents in a cache folder, done once.

What a preparation has done lies in a hidden folder beside its result, with a state from which the same call goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from dex.console import say
from dex.data.chat import chat_template
from dex.data.files import BrokenOff
from dex.data.held_out import HeldOut, HeldOutWriter
from dex.data.mixture import SourceStream, mix
from dex.data.packing import BlockWriter, Packed
from dex.data.sources import Source, identity, pin
from dex.data.state import has_state, load_state, remove_state, save_state
from dex.data.tokens import Piece, eos_token_id, tokenizer_identity
from dex.errors import DexError
from dex.output import put_in_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 2
META = "meta.json"  # written last
HELD_OUT_TOKENS = 2**20  # kept for evaluation at most; all held-out documents stay out of training

SAVE_EVERY = 2**24  # tokens between two saved states: some minutes' work at most

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
    save_every: int = SAVE_EVERY,
) -> Prepared:
    """Pack `tokens` training tokens of the sources (fewer, if a single source ends before) into blocks of `block`.

    `held_out` is the share of documents that is kept apart: of all documents of a local source, and of those that
    were streamed from the Hub before the budget was full. The result lies in `cache_dir`, under a key made of
    everything that decides it; a second call reads it back. `on_progress(done_tokens, total_tokens)`.
    A call that was stopped, or that a broken connection ended, goes on from its last state, saved every `save_every`
    tokens; the result is the same, byte for byte.
    Raises DexError for unusable settings or sources, too little data for one block, or an empty side of the split.
    """
    _check_settings(sources, block, tokens, held_out, held_out_tokens)
    eos_token_id(tokenizer)
    sources = [pin(source) for source in sources]
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer_identity(tokenizer),
        "chat_template": _chat_template(sources, tokenizer),
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
            with resumable_folder(folder) as partial:
                pack(sources, tokenizer, inputs, partial, on_progress, save_every)
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
    save_every: int = SAVE_EVERY,
) -> None:
    """Read, split, encode and cut pinned sources into `folder`; stops as soon as the blocks are full.

    Goes on from the state in the folder, if there is one.
    """
    work = Work(sources, tokenizer, inputs, folder)
    work.go_on()
    try:
        _fill(work, on_progress, save_every)
        work.save()
        for stream in work.streams:
            stream.finish()
    except BrokenOff as error:
        work.save()
        raise BrokenOff(f"{str(error).rstrip('.')}; what was prepared is kept: the same command goes on.") from error
    packed = {**work.blocks.close(), "tokens_left_over": work.blocks.waiting}
    kept = work.held_out.write(folder)
    reports = [stream.report() for stream in work.streams]
    _check_result(packed, kept, reports, inputs["held_out"])
    report = {"inputs": inputs, "packed": packed, "held_out": kept, "sources": reports}
    (folder / META).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fill(work: Work, on_progress: Progress | None, save_every: int) -> None:
    """Add documents until the blocks are full or the sources end."""
    blocks, total = work.blocks, work.blocks.wanted * work.blocks.block
    done, saved = blocks.tokens, work.tokens
    if blocks.full:
        return
    for stream, pieces in mix(work.streams):
        _add_document(blocks, stream, pieces)
        done = max(done, blocks.tokens)  # blocks without a target are counted until they are left out
        if on_progress is not None:
            on_progress(min(done, total), total)
        if blocks.full:
            return
        if work.tokens - saved >= save_every:
            work.save()
            saved = work.tokens


def _add_document(blocks: BlockWriter, stream: SourceStream, pieces: Iterable[Piece]) -> None:
    starts = True
    for piece in pieces:
        blocks.add(piece, starts)
        stream.tokens += len(piece.ids)
        starts = False
        if blocks.full:
            return


class Work:
    """A preparation under way: its streams, the blocks and held-out documents so far, and their saved state."""

    def __init__(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, inputs: dict[str, Any], folder: Path
    ) -> None:
        self.sources, self.tokenizer, self.inputs, self.folder = sources, tokenizer, inputs, folder
        self._start()

    def _start(self) -> None:
        share, block = self.inputs["held_out"], self.inputs["block"]
        self.held_out = HeldOutWriter(self.inputs["held_out_tokens"])
        self.streams = [SourceStream(each, self.tokenizer, share, self.held_out, block) for each in self.sources]
        self.blocks = BlockWriter(self.folder, block, self.inputs["blocks"])

    @property
    def tokens(self) -> int:
        """Tokens read for training so far."""
        return sum(stream.tokens for stream in self.streams)

    def save(self) -> None:
        state = {
            "inputs": self.inputs,
            "blocks": self.blocks.state(),
            "held_out": self.held_out.state(),
            "streams": [stream.state() for stream in self.streams],
        }
        save_state(self.folder, state)

    def go_on(self) -> None:
        """Take up the state in the folder; without one, or with one that cannot be used, start from nothing."""
        if has_state(self.folder):
            try:
                self._restore(load_state(self.folder))
                say(f"going on with preparing data after {self.tokens:,} tokens")
                return
            except (ValueError, KeyError, TypeError, OSError) as error:
                say(f"the state of an earlier preparation cannot be used: {error}; starting again")
        for file in self.folder.iterdir():
            file.unlink()
        self._start()

    def _restore(self, state: dict[str, Any]) -> None:
        if state["inputs"] != self.inputs:
            raise ValueError("it has other settings")
        self.held_out.restore(state["held_out"])
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.restore(saved)
        self.blocks.restore(state["blocks"])


def _chat_template(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template, if any source is rendered with it."""
    chats = [source for source in sources if source.format == "chat"]
    return chat_template(tokenizer, chats[0].source) if chats else None


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
def resumable_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `path`, with what an earlier call left in it; on success it is renamed to `path`.

    Whatever ended the work, the folder stays if a state was saved in it, and otherwise goes.
    """
    partial = path.parent / f".{path.name}.partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        yield partial
        put_in_place(partial, path)
        remove_state(path)
    except OSError as error:
        kept = "; what was prepared is kept: make room, and the same command goes on" if has_state(partial) else ""
        raise DexError(f"{path} could not be written: {error.strerror or error}{kept}.") from error
    finally:
        if not has_state(partial):
            shutil.rmtree(partial, ignore_errors=True)


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
    dropped = sum(report["too_long"]["dropped"] for report in reports)
    if documents == 0 and dropped:
        raise DexError(
            f"{names}: {dropped} documents are longer than a block of {packed['block']} and left out (too_long: "
            "drop), and none is left to train on; use longer blocks, or split or truncate them."
        )
    if share > 0 and kept["documents"] == 0:
        raise DexError(
            f"{names}: none of the {documents} documents read fell into the held-out part of {share:g}; {finer}, or "
            "hold out a larger share."
        )
    if documents == 0:
        raise DexError(
            f"{names}: all {kept['seen']} documents fell into the held-out part of {share:g}, none is left to train "
            f"on; {finer}, or hold out less."
        )
    if packed["blocks"] == 0 and packed["blocks_without_targets"]:
        raise DexError(
            f"{names}: none of the {packed['blocks_without_targets']} blocks of {packed['block']} tokens has a "
            "target; use more data, or longer blocks."
        )
    if packed["blocks"] == 0:
        raise DexError(
            f"{names}: the {documents} training documents have {packed['tokens_left_over']} tokens, too few for one "
            f"block of {packed['block']}; use more data or a smaller block."
        )
