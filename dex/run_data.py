"""The data of a run: from a recipe's `data` block to packed training blocks and held-out documents."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dex.console import Bar
from dex.data import HeldOutBlock, Prepared, Source, prepare
from dex.recipe import Data

# A run whose budget is smaller than its one source draws its blocks from all over it (the order is RunOrder's), not
# from its start. 4M tokens are tokenised in seconds; beyond that only what the budget needs is read. A mixture
# gets what its budget needs: it repeats short sources to keep its weights, and a pool would do so for nothing.
POOL_TOKENS = 2**22


def cache_dir() -> Path:
    """Where prepared data lies: $DEX_CACHE, or `dex` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DEX_CACHE") or Path(home) / "dex")


def held_out_blocks(data: Data, prepared: Prepared) -> list[HeldOutBlock]:
    """The blocks that a recipe evaluates on."""
    return prepared.held_out.blocks(data.held_out_tokens, data.held_out_per_document)


def sources(data: Data) -> list[Source]:
    return [Source(**source.model_dump()) for source in data.train]


def tokens_to_prepare(data: Data, tokens: int) -> int:
    """How many tokens are prepared for a run of `tokens`, where the data has them."""
    return max(tokens, POOL_TOKENS) if len(data.train) == 1 else tokens


def heaviest_source(data: Data) -> Source:
    """The source with the largest weight, the first of such: what heads are scored and scales fitted on."""
    return max(sources(data), key=lambda source: source.weight)


def prepare_data(data: Data, tokenizer: PreTrainedTokenizerBase, tokens: int = 1) -> Prepared:
    """Read, split and pack what `tokens` of training need; a second call finds it in the cache, or goes on.

    The held-out part of local data does not depend on `tokens`.
    """
    pool = tokens_to_prepare(data, tokens)
    with Bar("preparing data", pool, "tokens") as bar:

        def show(done: int, _total: int) -> None:
            if bar.done == 0:
                bar.start = done  # what an earlier call had done says nothing about this one's speed
            bar.update(done)

        return prepare(
            sources(data),
            tokenizer,
            data.block,
            pool,
            data.held_out,
            cache_dir(),
            on_progress=show,
        )
