"""What attention does that no map is needed for: where it is linear in the map, and its entropy.

For a query i of one head, over the keys j that it sees; key 0 is the text's first real token:

    entropy_i = z_i − s q_i·(Σ_j p_ij k_j)                  of one softmax p, z its log-sum-exp (dex/stats.py)
    p_i0      = exp(s q_i·k_0 − z_i)                        0 where a sliding window has passed the first token
    map_ij    = p_ij − λ_i p'_ij                            DIFF layouts; so Σ_j map_ij = 1 − λ_i
    span_i    = Σ_{j in span} map_ij                        attention with the span's indicator in V's place

Each is a mean over the text's queries at positions ≥ 32; the spans' masses, over the queries of each passage and then
over passages. A fused call gives z and Σ_j p_ij k_j, and one with ones for values the sum of a row: memory is O(T·D).

    B batch   T tokens   L layers   H heads (of a DIFF layout: its diff heads)   G key/value heads   D head_dim
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dex.analysis.head_sums import HeadSums, leave_out_short_texts, refuse_what_is_not_finite
from dex.analysis.records import Findings, Statistic, numbers
from dex.analysis.subject import Passage, Progress, Subject
from dex.attention_maps import LayerMaps, QueryKey, for_each_layer
from dex.stats import FIRST_POSITION, attend

OF_TEXT = f"the mean over the text's queries at positions ≥ {FIRST_POSITION}"
OF_PASSAGES = "the mean over the queries that are asked about an answer, and over passages"


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut where no query is counted, NotFinite where queries or keys are no numbers."""
    total = len(subject.ids) + len(subject.passages)
    sums = of_text(subject, lambda done: progress(done, total))
    statistics = _of_diff(subject, sums) if subject.signed else [_entropy(sums.mean("entropy"))]
    statistics.append(_first_token(subject, sums.mean("first_token_mass")))
    if subject.passages:
        masses = []
        for done, passage in enumerate(subject.passages, start=len(subject.ids) + 1):
            masses.append(passage_masses(subject, passage))
            progress(done, total)
        statistics += _of_passages(subject, torch.stack(masses).mean(0))
    return Findings(statistics=statistics, remarks=_remarks(statistics))


# ---- the text ------------------------------------------------------------------------------------------------


def of_text(subject: Subject, on_progress: Callable[[int], None]) -> HeadSums:
    """The sums over the text's counted queries, and `queries`: how many they are."""
    sums = HeadSums(len(subject.layers), subject.num_heads)

    def take(maps: LayerMaps, position: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        sums.add(maps.layer_idx, position >= FIRST_POSITION, **_of_queries(maps))

    for_each_layer(subject.model, subject.batches(), take, on_progress)
    leave_out_short_texts(sums)
    return sums


def _of_queries(maps: LayerMaps) -> dict[str, Tensor]:
    """[B, H, T] each."""
    entropy, first_token = entropy_and_first_token(maps.first, maps.mask, maps.scaling)
    queries = torch.ones_like(entropy)
    if maps.second is None:
        return {"queries": queries, "entropy": entropy, "first_token_mass": first_token}
    assert maps.lam is not None
    second_entropy, second_first_token = entropy_and_first_token(maps.second, maps.mask, maps.scaling)
    lam = maps.lam.cpu().double()
    return {
        "queries": queries,
        "entropy_first_map": entropy,
        "entropy_second_map": second_entropy,
        "first_token_mass": first_token - maps.lam * second_first_token,
        "row_sum": maps.attend(torch.ones_like(maps.first.key))[..., 0],  # as wide as K: the fused kernel's condition
        "lam": lam,
        "lam_squared": lam.square(),
    }


def entropy_and_first_token(of_map: QueryKey, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Of one softmax: the entropy in nats, and the share that goes to key 0; [B, H, T] float32 both."""
    query, key = of_map.query.float(), of_map.key.float()
    mean_key, z = attend(query, key, key, mask, scaling)
    first_key = key[:, :, 0].repeat_interleave(query.shape[1] // key.shape[1], 1)  # [B, H, D]
    share = (scaling * torch.einsum("bhtd,bhd->bht", query, first_key) - z).exp()
    if mask is not None:
        share = torch.where(mask[..., 0], share, 0.0)
    return z - scaling * (query * mean_key).sum(-1), share


# ---- the passages ----------------------------------------------------------------------------------------------


def passage_masses(subject: Subject, passage: Passage) -> Tensor:
    """The mass on the answer, and on what is neither it nor the first token: [L, H, 2] float64."""
    start, stop = passage.span
    spans = torch.zeros(len(passage.ids), 2)
    spans[1:, 1] = 1.0
    spans[start:stop] = torch.tensor([1.0, 0.0])
    totals = torch.zeros(len(subject.layers), subject.num_heads, 2, dtype=torch.float64)

    def take(maps: LayerMaps, _: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        key = maps.first.key
        value = spans.to(key.device).expand(1, key.shape[1], -1, -1)  # [1, G, T, 2]
        for part in maps.parts(passage.queries):  # after a span that the user names, all tokens are queries
            totals[maps.layer_idx] += part.attend(value)[0].cpu().double().sum(1)

    for_each_layer(subject.model, [{"input_ids": torch.tensor([passage.ids])}], take)
    return totals / len(passage.queries)


# ---- the findings ----------------------------------------------------------------------------------------------


def _entropy(values: Tensor, which: str = "") -> Statistic:
    return Statistic(
        name=f"entropy_{which}_map" if which else "entropy",
        title=f"Attention entropy of the {which} map" if which else "Attention entropy",
        meaning=f"−Σ p ln p of {'the softmax of the ' + which + ' map by itself' if which else 'each softmax'}: "
        f"{OF_TEXT}.",
        unit="nats",
        over="head",
        values=numbers(values),
        first_token="counted",
        headline=which in ("", "first"),
    )


def _of_diff(subject: Subject, sums: HeadSums) -> list[Statistic]:
    return [
        _entropy(sums.mean("entropy_first_map"), "first"),
        _entropy(sums.mean("entropy_second_map"), "second"),
        *_lam(sums, of_tokens=subject.stock.config.model_type == "diff_v2"),
        Statistic(
            name="row_sum",
            title="Sum of a map's row",
            meaning=f"Σ_j of the first map minus λ times the second, which is 1 − λ: {OF_TEXT}.",
            over="head",
            values=numbers(sums.mean("row_sum")),
            signs="raw",
            first_token="counted",
        ),
    ]


def _lam(sums: HeadSums, of_tokens: bool) -> list[Statistic]:
    """λ: one number a layer, or, where every token and head has its own, their mean and standard deviation."""
    mean, title = sums.mean("lam"), "λ"
    meaning = "What the second map is multiplied by before it is subtracted from the first"
    if not of_tokens:
        return [
            Statistic(
                name="lam",
                title=title,
                meaning=f"{meaning}.",
                over="layer",
                values=numbers(mean[:, 0]),
                headline=True,
            )
        ]
    spread = (sums.mean("lam_squared") - mean.square()).clamp(min=0.0).sqrt()
    return [
        Statistic(
            name="lam",
            title=title,
            meaning=f"{meaning}: {OF_TEXT}.",
            over="head",
            values=numbers(mean),
            headline=True,
        ),
        Statistic(
            name="lam_spread",
            title="Spread of λ",
            meaning=f"The standard deviation of λ over the text's tokens at positions ≥ {FIRST_POSITION}.",
            over="head",
            values=numbers(spread),
        ),
    ]


def _first_token(subject: Subject, values: Tensor) -> Statistic:
    return Statistic(
        name="first_token_mass",
        title="Attention to the first token",
        meaning=f"How much of the map stands on the text's first token: {OF_TEXT}.",
        unit="share",
        over="head",
        values=numbers(values),
        signs="raw" if subject.signed else None,
        first_token="counted",
        diverging=subject.signed,
        headline=True,
    )


def _of_passages(subject: Subject, masses: Tensor) -> list[Statistic]:
    """masses: [L, H, 2]."""
    return [
        Statistic(
            name="answer_mass",
            title="Attention to the answer",
            meaning=f"How much of the map stands on the answer's tokens: {OF_PASSAGES}.",
            unit="share",
            over="head",
            values=numbers(masses[..., 0]),
            signs="raw" if subject.signed else None,
            first_token="counted",  # a span may hold it
            diverging=subject.signed,
            headline=True,
        ),
        Statistic(
            name="other_mass",
            title="Attention to other tokens",
            meaning=f"How much of the map stands on tokens neither of the answer nor the first: {OF_PASSAGES}.",
            unit="share",
            over="head",
            values=numbers(masses[..., 1]),
            signs="raw" if subject.signed else None,
            first_token="left out",
            diverging=subject.signed,
        ),
    ]


def _remarks(statistics: list[Statistic]) -> list[str]:
    values = {one.name: torch.tensor(one.values, dtype=torch.float64) for one in statistics}
    remarks = [_extremes(values["first_token_mass"], "On the first token the maps have a mass of {}")]
    if "answer_mass" in values:
        answer, other = (values[name].mean() for name in ("answer_mass", "other_mass"))
        remarks.append(
            f"From the queries asked about an answer, a mass of {answer:.3g} goes to the answer and {other:.3g} to "
            "tokens that are neither the answer's nor the first, in the mean over heads."
        )
    if "lam" in values:
        lam = values["lam"]
        over = "layers" if lam.dim() == 1 else "heads"
        remarks.append(f"λ is {lam.mean():.3g} in the mean over {over}, from {lam.min():.3g} to {lam.max():.3g}.")
    for name, which in {"entropy": "", "entropy_first_map": " of the first maps"}.items():
        if name in values:
            remarks.append(_extremes(values[name], f"The entropy{which} is {{}} nats"))
    return remarks


def _extremes(values: Tensor, sentence: str) -> str:
    """The mean over heads, and the two heads at the ends; values [L, H]."""
    ends = []
    for word, index in (("most", values.argmax()), ("least", values.argmin())):
        layer, head = divmod(int(index), values.shape[1])
        ends.append(f"{word} in layer {layer}, head {head} ({values[layer, head]:.3g})")
    return f"{sentence.format(f'{values.mean():.3g}')} in the mean over heads: {' and '.join(ends)}."
