"""How much of each head's attention goes to the answer, and how much to noise; without attention maps.

The mass on a span of keys is attention with the span's indicator in V's place (`dex.stats`). Only the queries that
predict the answer's tokens are needed, t of them, so with the haystack in a cache this takes O(t·T) memory:

    query [1, H, t, D]   key [1, G, T, D]   indicator [T, C] in V's place   →   mass [H, t, C]

A DIFF head's mass is signed: that of its first map minus λ times that of its second, as its output is. Over all
spans it sums to 1 − λ where a stock head's sums to 1, and it is negative where the second map outweighs the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dex.attention_maps import LayerMaps, observed_maps
from dex.evaluation.haystack import Haystack
from dex.evaluation.prefix import Prefix

# The needle that is asked, the other needles, the very first token, what stands around the haystack (the template,
# the question, the answer so far), and the filler.
SPANS = ("answer", "other_needles", "first_token", "question", "noise")


def spans_of(haystack: Haystack, which: int, length: int) -> Tensor:
    """The span that each of `length` tokens belongs to where needle `which` is asked, one-hot, [length, C]."""
    span = torch.full((length,), SPANS.index("noise"))
    for index, needle in enumerate(haystack.needles):
        span[slice(*needle.span)] = SPANS.index("answer" if index == which else "other_needles")
    span[: haystack.opening] = span[len(haystack.ids) :] = SPANS.index("question")
    span[0] = SPANS.index("first_token")
    return nn.functional.one_hot(span, len(SPANS)).float()


def answer_masses(prefix: Prefix, haystack: Haystack, which: int, answer: Sequence[int]) -> Tensor:
    """The mean mass on every span, [L, H, C], of the queries that predict the tokens of the right answer.

    prefix: the haystack's ids. The answer's own tokens are given to the model one after the other, whatever it would
    have said, so that models are compared on the same queries.
    """
    *question, last = haystack.questions[which]
    queries = [last, *answer[:-1]]
    spans = spans_of(haystack, which, prefix.length + len(question) + len(queries))
    with prefix.extended(question), observed_masses(prefix.model, spans) as masses:
        prefix.after(queries)
    return torch.stack([of_layer.mean(1) for of_layer in masses])


@contextmanager
def observed_masses(model: Any, spans: Tensor) -> Iterator[list[Tensor]]:
    """A list that holds, after one forward pass in the block, each layer's masses on `spans` [T, C]: [H, t, C]."""
    masses: list[Tensor] = []

    def observe(maps: LayerMaps) -> None:
        key = maps.first.key
        value = spans.to(key.device).expand(1, key.shape[1], -1, -1)  # [1, G, T, C]
        masses.append(maps.attend(value)[0].cpu())

    with observed_maps(model, observe):
        yield masses
