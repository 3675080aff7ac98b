"""How much of each head's attention goes to the answer, and how much to noise; without attention maps.

The mass on a span of keys is attention with the span's indicator in V's place (`dex.stats`). Only the queries that
predict the answer's tokens are needed, t of them, so with the haystack in a cache this takes O(t·T) memory:

    query [1, H, t, D]   key [1, G, T, D]   indicator [T, C] in V's place   →   mass [H, t, C]

A DIFF head's mass is signed: that of its first map minus λ times that of its second, as its output is. Over all
spans it sums to 1 − λ where a stock head's sums to 1, and it is negative where the second map outweighs the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dex.evaluate.haystack import Haystack
from dex.evaluate.prefix import Prefix, unwrapped
from dex.stats import attend_in_blocks, observed_attention

# The needle that is asked, the other needles, the very first token, what stands around the haystack (the template,
# the question, the answer so far), and the filler.
SPANS = ("answer", "other_needles", "first_token", "question", "noise")
SIGNED = ("diff_v1", "diff_v2", "diffllama")


def is_signed(model: Any) -> bool:
    return unwrapped(model).config.model_type in SIGNED


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
    stock = unwrapped(model)
    calls: dict[int, list[Tensor]] = {}
    masses: list[Tensor] = []

    def observe(layer_idx: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        value = spans.to(key.device).expand(1, key.shape[1], -1, -1)  # [1, G, T, C]
        mass, _ = attend_in_blocks(query.float(), key.float(), value, mask, scaling)
        calls.setdefault(layer_idx, []).append(mass[0])

    def combine(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        masses.append(_of_heads(attention, calls.pop(attention.layer_idx), hidden).cpu())

    with ExitStack() as stack:
        stack.enter_context(observed_attention(stock, observe))
        for layer in stock.get_decoder().layers:
            handle = layer.self_attn.register_forward_hook(combine, with_kwargs=True)
            stack.callback(handle.remove)
        yield masses


def _of_heads(attention: Any, calls: list[Tensor], hidden: Tensor) -> Tensor:
    """The heads' masses [H, t, C] from those of the kernel's calls, which DIFF layouts make one or several of.

    hidden: [1, t, d], of which DIFF V2 makes its λ.
    """
    kind = attention.config.model_type
    if kind == "diff_v2":  # a call for each map
        first, second = calls
        return first - attention.lam(hidden)[0].T[..., None] * second
    if kind == "diff_v1":  # one call for both maps, or each map with each half of V
        first, second = calls[0].chunk(2) if len(calls) == 1 else (calls[0], calls[2])
        return first + attention.config.lambda_sign * attention.lam() * second
    if kind == "diffllama":  # both maps with each half of V
        first, second = calls[0].chunk(2)
        return first - _diffllama_lam(attention) * second
    (mass,) = calls
    return mass


def _diffllama_lam(attention: Any) -> Tensor:
    first = (attention.lambda_q1.float() * attention.lambda_k1.float()).sum().exp()
    second = (attention.lambda_q2.float() * attention.lambda_k2.float()).sum().exp()
    lam: Tensor = first - second + attention.lambda_init
    return lam
