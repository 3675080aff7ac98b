"""What becomes of a document that is longer than a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dex.data.tokens import Piece, join

Policy = Literal["split", "truncate", "drop"]


def cut_to(block: int, policy: Policy, pieces: Iterable[Piece]) -> tuple[Iterable[Piece] | None, bool]:
    """(what is kept of a document's pieces, or None; whether it is longer than `block` tokens and not split).

    Of a document that is split, no piece is asked for here: a long one is encoded when its turn comes.
    """
    if policy == "split":
        return pieces, False
    kept, count = list[Piece](), 0
    for piece in pieces:
        kept.append(piece)
        count += len(piece.ids)
        if count > block:
            ids, targets = join(kept)
            return (None if policy == "drop" else [Piece(ids[:block], targets[:block])]), True
    return kept, False
