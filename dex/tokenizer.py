"""What must not leak into a tokenizer, or out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def without_truncation_or_padding(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Switch off what a call with truncation= or padding= left set, and give it back afterwards.

    tokenizer.json would keep it, and any other call would clear it for good.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
