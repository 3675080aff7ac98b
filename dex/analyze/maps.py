"""What the maps themselves are needed for: how sparse and how negative they are, and how alike a DIFF head's two are.

    a_ij = p_ij − λ_i p'_ij                      DIFF layouts; a stock head's map is p_ij ≥ 0 alone
    ã_ij = a_ij | |a_ij| | max(a_ij, 0) | |a_ij| / Σ_j |a_ij|      `treated`: raw, absolute, clipped, renormalised

    sparsity = share of seen entries with |ã_ij| < threshold       signed entropy = −Σ_j ã_ij ln ã_ij
    cosine   = Σ p p' / √(Σ p² Σ p'²)                              Pearson: the same about the means

Entries are those of the text's queries at positions ≥ 32 (of passages: the queries asked) with the keys that they
see; a first token that is not counted, key 0, is taken away before anything else. Maps are float32, made a block of
queries at a time: O(block × S) memory. A row is reduced in float32, and rows are added in float64.

    B batch   t queries of a block   S keys   L layers   H heads (of a DIFF layout: its diff heads)
    map [B, H, t, S]   what a row is reduced to [B, H, t]   sums [L, H]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dex.analyze.attention import (
    OF_PASSAGES,
    OF_TEXT,
    HeadSums,
    leave_out_short_texts,
    refuse_what_is_not_finite,
)
from dex.analyze.records import Findings, FirstToken, Signs, Statistic, numbers
from dex.analyze.subject import FIRST_POSITION, Passage, Progress, Settings, Subject
from dex.attention_maps import LayerMaps, MapBlock, for_each_layer

ENTRIES = (
    2**19
)  # of a block of maps: 2 MB, since passes over what falls out of the cache cost up to four times as much
LEAST, MOST = 16, 128  # queries of a block: with fewer, reading the keys costs more than the products
SPREAD = 1e-6  # of the mean square: a variance below it is rounding, and a correlation has no value

RESTRICTIONS = {"": "", "_answer": " on the answer", "_other": " off the answer"}  # of the keys


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut where no query is counted, NotFinite where queries or keys are no numbers."""
    total = len(subject.ids) + len(subject.passages)
    sums = HeadSums(len(subject.layers), subject.num_heads)

    def take(maps: LayerMaps, position: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        counted = position >= FIRST_POSITION
        for block in maps.blocks(rows_of_block(maps)):
            seen = of_keys(block, _first_key(subject.settings), block.rows.stop)  # no query sees a key behind it
            sums.add(maps.layer_idx, counted[:, block.rows], **_of_queries(seen, subject.settings))

    for_each_layer(subject.model, subject.batches(), take, lambda done: progress(done, total))
    leave_out_short_texts(sums)
    if not subject.signed:
        progress(total, total)
        return _findings(subject, sums, None)
    masses = []
    for done, passage in enumerate(subject.passages, start=len(subject.ids) + 1):
        masses.append(_of_passage(subject, passage, sums))
        progress(done, total)
    return _findings(subject, sums, torch.stack(masses).nanmean(0) if masses else None)


# ---- entries ---------------------------------------------------------------------------------------------------


def treated(attention: Tensor, signs: Signs) -> Tensor:
    """The map [..., S] without its negative entries, except for "raw", which leaves them.

    Of a row of zeros "renormalised" cannot make a distribution: it stays a row of zeros, and is not defined.
    """
    if signs == "raw":
        return attention
    if signs == "clipped":
        return attention.clamp(min=0.0)
    magnitude = attention.abs()
    if signs == "absolute":
        return magnitude
    total = magnitude.sum(-1, keepdim=True)
    return magnitude.div_(total.masked_fill_(total == 0.0, 1.0))


def of_keys(block: MapBlock, start: int, stop: int | None) -> MapBlock:
    """A view of the keys from `start` to `stop`."""
    first, second, seen = (
        None if each is None else each[..., start:stop] for each in (block.first, block.second, block.seen)
    )
    assert first is not None
    assert seen is not None
    return block._replace(first=first, second=second, seen=seen)


def rows_of_block(maps: LayerMaps) -> int:
    B, H = maps.first.query.shape[:2]
    return min(MOST, max(LEAST, ENTRIES // (B * H * maps.first.key.shape[2])))


def _first_key(settings: Settings) -> int:
    return 0 if settings.count_first_token else 1


# ---- rows ------------------------------------------------------------------------------------------------------


def _of_queries(block: MapBlock, settings: Settings) -> dict[str, Tensor]:
    """What every row of the maps is reduced to, [B, H, t] each; `entries`: those seen."""
    attention = block.map
    entries = block.seen.sum(-1).expand(attention.shape[:3])
    of_row = {"queries": torch.ones_like(attention[..., 0]), "entries": entries}
    if block.second is not None:
        of_row["negative"] = _number_below(attention, 0.0)
        of_row["negative_mass"] = attention.clamp(max=0.0).sum(-1).neg_()
        of_row |= _moments(block.first, block.second, entries, "")
    ours = _treatment(block, settings)
    attention = treated(attention, ours)
    defined = _defined(attention, ours)
    magnitude = attention.abs() if ours == "raw" and block.second is not None else attention
    # What is not seen is 0, and so below every threshold.
    below = _number_below(magnitude, settings.threshold) - (attention.shape[-1] - entries)
    of_row |= {"defined": defined, "defined_entries": defined * entries, "below": defined * below}
    if block.second is not None:
        if ours != "raw":
            of_row["signed_entropy"] = entropy(attention)
        if settings.count_first_token:
            of_row["signed_first_token_mass"] = attention[..., 0]
    return of_row


def entropy(weights: Tensor) -> Tensor:
    """−Σ_j w ln w of weights ≥ 0, [..., S] → [...]; 0 ln 0 = 0. Torch's xlogy takes twice as long."""
    smallest = torch.finfo(weights.dtype).tiny
    return weights.clamp(min=smallest).log_().mul_(weights).sum(-1).neg_()


def _number_below(values: Tensor, threshold: float) -> Tensor:
    """[..., S] → [...]; exact for S up to 2²⁴. Sums of bool take three times as long."""
    return torch.lt(values, threshold, out=torch.empty_like(values)).sum(-1)


def _treatment(block: MapBlock, settings: Settings) -> Signs:
    """A stock head's whole row is a distribution, which no treatment changes."""
    a_distribution = block.second is None and settings.count_first_token
    return "raw" if a_distribution else settings.signs


def _defined(attention: Tensor, signs: Signs) -> Tensor:
    """1 where a row has a value; 0 where it cannot be renormalised."""
    if signs != "renormalised":
        return torch.ones_like(attention[..., 0])
    return (attention.amax(-1) > 0.0).to(attention.dtype)


# ---- two maps --------------------------------------------------------------------------------------------------


def _moments(x: Tensor, y: Tensor, entries: Tensor, restriction: str) -> dict[str, Tensor]:
    """The sums over a row of both maps, 0 where a key is not seen, that correlation and cosine are made of."""
    return {
        f"n{restriction}": entries,
        f"x{restriction}": x.sum(-1),
        f"y{restriction}": y.sum(-1),
        f"xx{restriction}": torch.linalg.vector_norm(x, dim=-1).square(),
        f"yy{restriction}": torch.linalg.vector_norm(y, dim=-1).square(),
        f"xy{restriction}": (x * y).sum(-1),
    }


def correlation(sums: HeadSums, restriction: str = "") -> Tensor:
    """Pearson's, [L, H]; NaN where a map is the same at all entries, up to rounding."""
    n, x, y, xx, yy, xy = (sums[f"{name}{restriction}"] for name in ("n", "x", "y", "xx", "yy", "xy"))
    variances = xx - x * x / n, yy - y * y / n
    constant = (variances[0] <= SPREAD * xx) | (variances[1] <= SPREAD * yy)
    found = (xy - x * y / n) / (variances[0] * variances[1]).sqrt()
    return found.clamp(-1.0, 1.0).masked_fill(constant, torch.nan)


def cosine(sums: HeadSums, restriction: str = "") -> Tensor:
    """[L, H]; NaN where a map is 0 at all entries."""
    xx, yy, xy = (sums[f"{name}{restriction}"] for name in ("xx", "yy", "xy"))
    return (xy / (xx.sqrt() * yy.sqrt())).clamp(-1.0, 1.0)


# ---- the passages ----------------------------------------------------------------------------------------------


def _of_passage(subject: Subject, passage: Passage, sums: HeadSums) -> Tensor:
    """The mean mass of the treated maps on the answer, [L, H]; `sums` get the moments on the answer and off it."""
    settings, own = subject.settings, HeadSums(*sums.shape)
    first_key = _first_key(settings)
    span = slice(max(0, passage.span[0] - first_key), passage.span[1] - first_key)
    inputs = {"input_ids": torch.tensor([passage.ids])}

    def take(maps: LayerMaps, _: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        rows = rows_of_block(maps)
        for start in range(0, len(passage.queries), rows):
            some = passage.queries[start : start + rows]
            asked = maps.at(some)
            counted = torch.ones(1, len(some), dtype=torch.bool)
            for block in asked.blocks(rows):
                block = of_keys(block, first_key, None)
                own.add(maps.layer_idx, counted, **_on_answer(block, span, settings))
                sums.add(maps.layer_idx, counted, **_answer_moments(block, span))

    for_each_layer(subject.model, [inputs], take)
    return own.mean("mass", over="defined")


def _on_answer(block: MapBlock, span: slice, settings: Settings) -> dict[str, Tensor]:
    attention = treated(block.map, settings.signs)
    return {"defined": _defined(attention, settings.signs), "mass": attention[..., span].sum(-1)}


def _answer_moments(block: MapBlock, span: slice) -> dict[str, Tensor]:
    """Of the keys in the span, and of the others."""
    assert block.second is not None
    shape = block.first.shape[:3]
    on = block.seen[..., span].sum(-1).expand(shape)
    off = block.seen.sum(-1).expand(shape) - on
    # Weights on an answer can be so small that their squares vanish in float32.
    moments = _moments(block.first[..., span].double(), block.second[..., span].double(), on, "_answer")
    others = []
    for of_map in (block.first, block.second):
        of_map = of_map.clone()
        of_map[..., span] = 0.0
        others.append(of_map)
    return moments | _moments(others[0], others[1], off, "_other")


# ---- the findings ----------------------------------------------------------------------------------------------

OF_MAP: dict[Signs, str] = {
    "raw": "the map",
    "absolute": "the map of absolute values",
    "clipped": "the map with negative entries at 0",
    "renormalised": "the map of absolute values (each row divided by its sum)",
}


def _findings(subject: Subject, sums: HeadSums, answer_mass: Tensor | None) -> Findings:
    statistics = [_sparsity(subject, sums)]
    if subject.signed:
        statistics += _signed(subject, sums, answer_mass)
    return Findings(statistics=statistics, remarks=_remarks(subject, sums))


def _sparsity(subject: Subject, sums: HeadSums) -> Statistic:
    settings = subject.settings
    chosen = subject.signed or not settings.count_first_token
    return _of_heads(
        settings,
        sums.mean("below", over="defined_entries"),
        name="sparsity",
        title="Sparsity of attention",
        meaning=f"The share of entries of {OF_MAP[settings.signs if chosen else 'raw']} whose magnitude is below "
        f"{settings.threshold:g}: the text's queries at positions ≥ {FIRST_POSITION}, and the keys that they see.",
        unit="share",
        signs=settings.signs if chosen else None,
        headline=True,
    )


def _signed(subject: Subject, sums: HeadSums, answer_mass: Tensor | None) -> list[Statistic]:
    """What DIFF layouts alone have."""
    settings = subject.settings
    diverging = settings.signs == "raw"
    of_map = OF_MAP[settings.signs]
    statistics = [
        _of_heads(
            settings,
            sums.mean("negative", over="entries"),
            name="negative_share",
            title="Negative entries",
            meaning="The share of seen entries of the map that are below 0, of the text's queries at positions "
            f"≥ {FIRST_POSITION}.",
            unit="share",
            signs="raw",
        ),
        _of_heads(
            settings,
            sums.mean("negative_mass"),
            name="negative_mass",
            title="Negative mass",
            meaning=f"The sum of the magnitudes of a row's negative entries: {OF_TEXT}.",
            signs="raw",
            headline=True,
        ),
    ]
    if settings.signs != "raw":
        statistics.append(
            _of_heads(
                settings,
                sums.mean("signed_entropy", over="defined"),
                name="signed_entropy",
                title="Entropy of the signed map",
                meaning=f"−Σ a ln a of {of_map}: {OF_TEXT}.",
                unit="nats",
                signs=settings.signs,
            )
        )
    if settings.count_first_token:
        statistics.append(
            _of_heads(
                settings,
                sums.mean("signed_first_token_mass", over="defined"),
                name="signed_first_token_mass",
                title="Signed map on the first token",
                meaning=f"How much of {of_map} stands on the text's first token: {OF_TEXT}.",
                unit="share",
                signs=settings.signs,
                diverging=diverging,
            )
        )
    if answer_mass is not None:
        statistics.append(
            _of_heads(
                settings,
                answer_mass,
                name="signed_answer_mass",
                title="Signed map on the answer",
                meaning=f"How much of {of_map} stands on the answer's tokens: {OF_PASSAGES}.",
                unit="share",
                signs=settings.signs,
                diverging=diverging,
            )
        )
    for restriction in RESTRICTIONS if answer_mass is not None else [""]:
        statistics += _alike(settings, sums, restriction)
    return statistics


def _alike(settings: Settings, sums: HeadSums, restriction: str) -> list[Statistic]:
    where = RESTRICTIONS[restriction]
    queries = (
        "the queries that are asked about an answer"
        if restriction
        else f"the text's queries at positions ≥ {FIRST_POSITION}"
    )
    keys = {"": "the keys that they see", "_answer": "the answer's tokens", "_other": "the other keys that they see"}
    entries = f"over all entries of {queries} with {keys[restriction]}"
    return [
        _of_heads(
            settings,
            correlation(sums, restriction),
            name=f"map_correlation{restriction}",
            title=f"Correlation of the two maps{where}",
            meaning=f"Pearson's correlation of the head's first and second softmax {entries}; no value where one of "
            "them is the same everywhere.",
            diverging=True,
            headline=not restriction,
        ),
        _of_heads(
            settings,
            cosine(sums, restriction),
            name=f"map_cosine{restriction}",
            title=f"Cosine of the two maps{where}",
            meaning=f"The cosine of the head's first and second softmax {entries}; 1: they are proportional.",
        ),
    ]


def _of_heads(settings: Settings, values: Tensor, **fields: Any) -> Statistic:
    first_token: FirstToken = "counted" if settings.count_first_token else "left out"
    return Statistic(over="head", values=numbers(values), first_token=first_token, **fields)


def _remarks(subject: Subject, sums: HeadSums) -> list[str]:
    settings = subject.settings
    remarks = []
    if subject.signed:
        share, mass = sums["negative"].sum() / sums["entries"].sum(), sums.mean("negative_mass").mean()
        remarks.append(
            f"Of the maps' entries {share:.1%} are negative, with a mass of {mass:.3g} a row in the mean over heads."
        )
        alike = correlation(sums)
        if alike.isfinite().any():
            remarks.append(
                f"The two maps of a head have a correlation of {alike.nanmean():.3g} in the mean over heads, from "
                f"{alike.nan_to_num(torch.inf).min():.3g} to {alike.nan_to_num(-torch.inf).max():.3g}."
            )
        if settings.signs == "raw":
            remarks.append("The entropy of the signed maps is left out: raw maps have negative entries.")
    if sums["defined"].any():
        sparse = sums["below"].sum() / sums["defined_entries"].sum()
        of_map = OF_MAP[settings.signs if subject.signed else "raw"]
        remarks.append(f"Of the entries of {of_map}, {sparse:.1%} are below {settings.threshold:g} in magnitude.")
    undefined = sums["queries"].sum() - sums["defined"].sum()
    if undefined > 0:
        remarks.append(
            f"{undefined:.0f} of {sums['queries'].sum():.0f} rows of the maps are 0 everywhere and cannot be "
            "renormalised; they are left out."
        )
    return remarks
