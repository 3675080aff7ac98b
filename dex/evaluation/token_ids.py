"""Pieces of a prompt as token ids: each piece as the tokenizer writes it where it stands."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from dex.tokenizer import without_truncation_or_padding


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, without the special tokens that the tokenizer would put around it."""
    with without_truncation_or_padding(tokenizer):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: its BOS, or nothing."""
    with without_truncation_or_padding(tokenizer):
        ids: list[int] = tokenizer("", verbose=False)["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []


def encoded_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """The ids of `text` as they stand after `before`, which differ from its own where a tokenizer marks beginnings.

    Where the tokenizer joins the end of `before` with `text`, they are its own.
    """
    first, both = encoded(tokenizer, before), encoded(tokenizer, before + text)
    return both[len(first) :] if both[: len(first)] == first else encoded(tokenizer, text)
