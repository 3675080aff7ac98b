"""SentencePiece tokenizers of the Llama 2 kind, which transformers keeps as BPE merges and llama.cpp as scores.

llama.cpp joins the pair whose token has the highest score, `tokenizers` the pair whose merge comes first. The two
agree if every way to split a token in two is a merge, and the merges of one token stand together: then the order of
the tokens is the order of the scores.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gguf

from dex.errors import DexError

SPACE = "▁"
_OWN_SPACES = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
_SPACES_NOTE = (
    "llama.cpp puts a space before a text that begins with one, and after a control token, where this tokenizer "
    "puts none: such texts become other tokens"
)


def space_rule(parts: dict[str, Any], model: str) -> tuple[bool, tuple[str, ...]]:
    """Whether a text gets a space before it, and a note where llama.cpp's rule differs from the tokenizer's."""
    normalizer, before = parts["normalizer"], parts["pre_tokenizer"]
    if normalizer == _OWN_SPACES and before is None:
        return True, ()
    if normalizer is None and before is not None and before["type"] == "Metaspace" and not before["split"]:
        if before["prepend_scheme"] == "never":
            return False, ()
        return True, (_SPACES_NOTE,)
    raise DexError(
        f"The tokenizer of {model} treats spaces in a way that llama.cpp's SentencePiece code does not; serve the "
        "folder with transformers or vLLM."
    )


def token_scores(bpe: dict[str, Any], tokens: list[str], types: list[int], model: str) -> list[float]:
    """A score for every token, higher for what is joined earlier. Raises DexError if scores cannot say the merges."""
    ranks: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(bpe["merges"]):
        ranks.setdefault(left + right, []).append(rank)
    merges = {(left, right) for left, right in bpe["merges"]}
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL}
    for token in normal:
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in normal and pair[1] in normal and pair not in merges:
                raise DexError(
                    f"The tokenizer of {model} never joins {pair[0]!r} and {pair[1]!r}, and llama.cpp would; serve "
                    "the folder with transformers or vLLM."
                )
    ordered = sorted(ranks, key=lambda token: ranks[token][0])
    for earlier, later in pairwise(ordered):
        if ranks[earlier][-1] > ranks[later][0]:
            raise DexError(
                f"The merges of {model} that make {earlier!r} and {later!r} are mixed, which scores cannot say; "
                "serve the folder with transformers or vLLM."
            )
    place = {token: -float(index) for index, token in enumerate(ordered)}
    return [place.get(token, -float(len(ordered))) if token in normal else 0.0 for token in tokens]
