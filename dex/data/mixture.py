"""Several sources as one stream of encoded documents, in the proportion of their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dex.data.files import Fault, Place
from dex.data.held_out import HeldOutWriter, is_held_out
from dex.data.sources import Document, Outcome, Skipped, Source, is_local, outcomes
from dex.data.tokens import BATCH, Piece, encode_batch, from_text, join, to_text
from dex.data.too_long import cut_to
from dex.errors import DexError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOGETHER = 2**20  # characters that are read and encoded together, on all cores


class SourceStream:
    """The training documents of one pinned source; its held-out documents go to `held_out` on the first pass.

    Rows are read and encoded in batches. A batch counts when it has been read whole, so what `state` gives is
    exact also after reading has failed.
    """

    def __init__(
        self, source: Source, tokenizer: PreTrainedTokenizerBase, share: float, held_out: HeldOutWriter, block: int
    ) -> None:
        self.source, self.tokenizer, self.share, self.held_out, self.block = source, tokenizer, share, held_out, block
        self.documents = self.tokens = 0
        self.truncated = self.dropped = 0
        self.passes = 1
        self.skipped = Skipped()
        self._place, self._ended = Place(), False
        self._reader: Iterator[Outcome] | None = None
        self._encoded = deque[Iterable[Piece]]()

    def next_document(self) -> Iterable[Piece] | None:
        """The tokens of the next document, in pieces, or None at the source's end."""
        while not self._encoded and not self._ended:
            self._read_batch(for_training=True)
        if not self._encoded:
            return None
        self.documents += 1
        return self._encoded.popleft()

    def start_again(self) -> None:
        self.passes += 1
        self._place, self._ended, self._reader = Place(), False, None

    def finish(self) -> None:
        """Read the rest of a local source, so that its held-out part does not depend on the token budget."""
        while is_local(self.source) and self.passes == 1 and not self._ended:
            self._read_batch(for_training=False)
        self.skipped.check(self.source.source)

    def report(self) -> dict[str, Any]:
        return {
            "source": self.source.source,
            "revision": self.source.revision,
            "weight": self.source.weight,
            "documents": self.documents,
            "tokens": self.tokens,
            "passes": self.passes,
            "too_long": {"truncated": self.truncated, "dropped": self.dropped},
            **self.skipped.summary(),
        }

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as JSON; taken between two documents."""
        encoded = [join(pieces) for pieces in self._encoded]
        self._encoded = deque([piece] for piece in encoded)
        return {
            "counts": [self.documents, self.tokens, self.truncated, self.dropped, self.passes],
            "skipped": self.skipped.summary(),
            "place": self._place,
            "ended": self._ended,
            "encoded": [to_text(piece) for piece in encoded],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.documents, self.tokens, self.truncated, self.dropped, self.passes = map(int, state["counts"])
        self.skipped = Skipped.from_summary(state["skipped"])
        self._place, self._ended, self._reader = Place(*state["place"]), bool(state["ended"]), None
        self._encoded = deque([from_text(*piece)] for piece in state["encoded"])

    def _read_batch(self, for_training: bool) -> None:
        batch, ended = self._next_outcomes()
        wanted = list[tuple[Document, bool]]()
        for outcome in batch:
            self._count(outcome)
            document = outcome.value
            if isinstance(document, Fault):
                continue
            held_out = is_held_out(document.text, self.share)
            if (self.passes == 1 and self.held_out.wants(document)) if held_out else for_training:
                wanted.append((document, held_out))
        encoded = encode_batch([document for document, _ in wanted], self.tokenizer)
        for (document, held_out), pieces in zip(wanted, encoded, strict=True):
            self._take(document, pieces, held_out)
        self._place, self._ended = batch[-1].place if batch else self._place, ended
        if ended and self.passes == 1:
            self.skipped.check_end(self.source.source)

    def _next_outcomes(self) -> tuple[list[Outcome], bool]:
        """The next rows, and whether the source ends with them."""
        if self._reader is None:
            self._reader = outcomes(self.source, self.tokenizer, self._place)
        batch, size = list[Outcome](), 0
        for outcome in self._reader:
            batch.append(outcome)
            size += len(outcome.value.text) if isinstance(outcome.value, Document) else 0
            if len(batch) == BATCH or size >= TOGETHER:
                return batch, False
        return batch, True

    def _count(self, outcome: Outcome) -> None:
        if self.passes == 1:
            self.skipped.note(outcome, self.source.source)

    def _take(self, document: Document, pieces: Iterable[Piece], held_out: bool) -> None:
        kept, cut = cut_to(self.block, self.source.too_long, pieces)
        self.truncated += cut and kept is not None
        self.dropped += kept is None
        # Of a long conversation that is split nothing is known yet: it is encoded when its turn comes.
        if document.spans is not None and isinstance(kept, list) and not join(kept).targets[1:].any():
            reason = "no target in the first block" if cut else "no target"
            if self.passes == 1:
                self.skipped.add_later(Fault(reason), document.origin, self.source.source)
            return
        if kept is None:
            return
        if held_out:
            self.held_out.add(document, join(kept))
        else:
            self._encoded.append(kept)


def mix(streams: list[SourceStream]) -> Iterator[tuple[SourceStream, Iterable[Piece]]]:
    """Yield documents, always from the source whose tokens lag furthest behind its share.

    A source that ends while others go on starts again (counted in `passes`); a single source ends the stream.
    The tokens of a document are counted by whoever reads them, before the next document is asked for.
    """
    weights = sum(stream.source.weight for stream in streams)
    while True:
        total = sum(stream.tokens for stream in streams)
        stream = max(streams, key=lambda each: each.source.weight / weights * total - each.tokens)
        pieces = stream.next_document()
        if pieces is None:
            if len(streams) == 1:
                return
            pieces = _first_of_next_pass(stream)
        yield stream, pieces


def _first_of_next_pass(stream: SourceStream) -> Iterable[Piece]:
    stream.start_again()
    pieces = stream.next_document()
    if pieces is None:
        raise DexError(
            f"{stream.source.source} has no document left to train on: all are held out, or too long. Use more data, "
            "cut it finer (`documents: paragraph`), or hold out less."
        )
    return pieces
