"""Several sources as one stream of encoded documents, in the proportion of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dex.data.held_out import HeldOutWriter, training_side
from dex.data.sources import Skipped, Source, is_local, read_documents
from dex.data.tokens import Ids, encode_documents
from dex.errors import DexError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SourceStream:
    """The training documents of one pinned source; its held-out documents go to `held_out` on the first pass."""

    def __init__(
        self, source: Source, tokenizer: PreTrainedTokenizerBase, share: float, held_out: HeldOutWriter
    ) -> None:
        self.source, self.tokenizer, self.share = source, tokenizer, share
        self.documents = self.tokens = 0
        self.passes = 1
        self.skipped = Skipped()
        self._texts = training_side(read_documents(source, self.skipped), share, held_out)
        self._encoded = encode_documents(self._texts, tokenizer)

    def next_document(self) -> Iterable[Ids] | None:
        """The ids of the next document, in pieces, or None at the source's end."""
        _, pieces = next(self._encoded, (None, None))
        self.documents += pieces is not None
        return pieces

    def start_again(self) -> None:
        self.passes += 1
        texts = training_side(read_documents(self.source), self.share, None)
        self._encoded = encode_documents(texts, self.tokenizer)

    def finish(self) -> None:
        """Read the rest of a local source, so that its held-out part does not depend on the token budget."""
        if is_local(self.source):
            for _ in self._texts:
                pass
        self.skipped.check(self.source.source)

    def report(self) -> dict[str, Any]:
        return {
            "source": self.source.source,
            "revision": self.source.revision,
            "weight": self.source.weight,
            "documents": self.documents,
            "tokens": self.tokens,
            "passes": self.passes,
            **self.skipped.summary(),
        }


def mix(streams: list[SourceStream]) -> Iterator[tuple[SourceStream, Iterable[Ids]]]:
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


def _first_of_next_pass(stream: SourceStream) -> Iterable[Ids]:
    stream.start_again()
    pieces = stream.next_document()
    if pieces is None:
        raise DexError(
            f"{stream.source.source} has no document left to train on: all are held out. Use more data, cut it finer "
            "(`documents: paragraph`), or hold out less."
        )
    return pieces
