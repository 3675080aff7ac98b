"""Tokens that several requests begin with, computed once: their keys and values stay in a cache.

    prefix = Prefix(model, haystack)
    prefix.greedy(question, 32, stop)
    prefix.log_likelihoods(question, [answer, other])

The prefix goes through the model in chunks, so its memory is linear in its length: no [T, T] mask, and logits of one
position only. For stock and DIFF models and for attached adapters alike; what they return is a plain forward pass's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dex.attention_maps import unwrapped
from dex.errors import NotFinite

CACHED_TOKENS = 2**14  # of all continuations that are computed together, which each have a copy of the cache
LOGITS = 2**24  # 64 MB of float32 at a time


class Prefix:
    """`ids`, which may be none, in the cache of `model`, which is in eval mode and stays so."""

    def __init__(self, model: Any, ids: Sequence[int], chunk: int = 1024) -> None:
        self.model = model
        self.length = len(ids)
        self._chunk = chunk
        # Without a config every layer keeps all keys, those of a sliding window too (its mask still slides): a cache
        # of the window alone could not be cropped back.
        self._cache = DynamicCache()
        self._cache_name = _name_of_cache(model)
        self._next = self._feed(ids)

    def greedy(self, suffix: Sequence[int], max_new_tokens: int, stop: Collection[int] = ()) -> list[int]:
        """The likeliest token after prefix and suffix, and so on, up to a token of `stop`, which is left out."""
        found: list[int] = []
        with self.extended(suffix) as logits:
            while len(found) < max_new_tokens:
                token = int(logits.argmax())
                if token in stop:
                    break
                found.append(token)
                if len(found) < max_new_tokens:
                    logits = self.after([token])
        return found

    def log_likelihoods(self, suffix: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability of each continuation after prefix and suffix, of which at least one has a token."""
        with self.extended(suffix) as logits:
            first = logits.float().log_softmax(-1)
            found = [float(first[each[0]]) if each else 0.0 for each in continuations]
            longer = [i for i, each in enumerate(continuations) if len(each) > 1]
            for group in self._groups(longer, continuations, self.length + len(suffix)):
                rest = self._log_likelihoods_of_rest([continuations[i] for i in group])
                for i, value in zip(group, rest, strict=True):
                    found[i] += value
        return found

    @contextmanager
    def extended(self, suffix: Sequence[int]) -> Iterator[Tensor]:
        """Within the block the suffix stands in the cache too; yields the logits after it, [V]."""
        try:
            yield self.after(suffix)
        finally:
            self._crop()

    def after(self, ids: Sequence[int]) -> Tensor:
        """Append `ids`, in a block of `extended`; the logits after them, or after the prefix without any, [V]."""
        logits = self._feed(ids) if ids else self._next
        if logits is not None and logits.isnan().any():
            raise NotFinite("The model's logits are not numbers; try another dtype, such as float32.")
        if logits is None:
            raise ValueError("Nothing comes before the first token: give a prefix or a suffix, such as a BOS token.")
        return logits

    def _feed(self, ids: Sequence[int]) -> Tensor | None:
        """Append to the cache; the logits after the last token, [V], or None where there is no token."""
        logits = None
        for start in range(0, len(ids), self._chunk):
            logits = self._forward([ids[start : start + self._chunk]], self._cache, keep=1)[0, -1]
        return logits

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sequence[int]], cache: DynamicCache, keep: int) -> Tensor:
        """The logits of the last `keep` positions, [B, keep, V]."""
        ids = torch.tensor(rows, device=next(self.model.parameters()).device)
        given = {self._cache_name: cache, "use_cache": True, "logits_to_keep": keep}
        logits: Tensor = self.model(input_ids=ids, **given).logits
        return logits

    def _groups(
        self, indices: Sequence[int], continuations: Sequence[Sequence[int]], length: int
    ) -> Iterator[list[int]]:
        """Continuations that are computed together: of similar length, so few that the copies of the cache fit."""
        ordered = sorted(indices, key=lambda i: len(continuations[i]))
        together = max(1, CACHED_TOKENS // length)
        for _, group in groupby(enumerate(ordered), key=lambda each: each[0] // together):
            yield [i for _, i in group]

    def _log_likelihoods_of_rest(self, continuations: Sequence[Sequence[int]]) -> list[float]:
        """Of every token but the first, which the cache does not hold yet.

        Shorter ones are padded on the right, behind what they could see.
        """
        given = max(map(len, continuations)) - 1
        targets = torch.tensor([[*each[1:], *[-1] * (given + 1 - len(each))] for each in continuations])  # [B, given]
        rows = [[*each[:-1], *[0] * (given + 1 - len(each))] for each in continuations]
        cache = _repeated(self._cache, len(rows))
        total = torch.zeros(len(rows), dtype=torch.float64)
        step = max(1, LOGITS // (len(rows) * self.model.config.vocab_size))
        for start in range(0, given, step):
            part = slice(start, start + step)
            logits = self._forward([row[part] for row in rows], cache, keep=min(step, given - start)).float()
            target = targets[:, part].to(logits.device)
            chosen = logits.gather(-1, target.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)  # [B, step]
            total += chosen.masked_fill(target < 0, 0.0).double().sum(-1).cpu()
        values: list[float] = total.tolist()
        return values

    def _crop(self) -> None:
        """Back to the prefix, also after a forward pass that got no further than some layers."""
        for layer in self._cache.layers:
            if (appended := layer.get_seq_length() - self.length) > 0:
                layer.crop(-appended)


def _name_of_cache(model: Any) -> str:
    """What the model's forward calls it: `cache`, or `past_key_values` in earlier releases of transformers."""
    return "cache" if "cache" in inspect.signature(type(unwrapped(model)).forward).parameters else "past_key_values"


def _repeated(cache: DynamicCache, rows: int) -> DynamicCache:
    """The same keys and values for every row, without copying them: appending makes new tensors."""
    repeated = copy.copy(cache)
    repeated.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in repeated.layers:
        layer.keys, layer.values = (each.expand(rows, -1, -1, -1) for each in (layer.keys, layer.values))
    return repeated
