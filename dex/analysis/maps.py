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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dex.analysis.attention import OF_PASSAGES, OF_TEXT
from dex.analysis.head_sums import HeadSums, leave_out_short_texts, refuse_what_is_not_finite
from dex.analysis.records import Findings, Signs, Statistic, numbers
from dex.analysis.subject import Passage, Progress, Settings, Subject
from dex.attention_maps import LayerMaps, MapBlock, for_each_layer
from dex.stats import FIRST_POSITION

SPREAD = 1e-6  # of the mean square: a variance below it is rounding, and a correlation has no value

QUERIES_OF_TEXT = f"the text's queries at positions ≥ {FIRST_POSITION}"
RESTRICTIONS = {"": "", "_answer": " on the answer", "_other": " off the answer"}  # of the keys


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut where no query is counted, NotFinite where queries or keys are no numbers."""
    total = len(subject.ids) + len(subject.passages)
    sums = HeadSums(len(subject.layers), subject.num_heads)

    def take(maps: LayerMaps, position: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        counted = position >= FIRST_POSITION
        for block in maps.blocks():
            seen = of_keys(block, subject.settings.first_key, block.rows.stop)  # no query sees a key behind it
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


# ---- rows ------------------------------------------------------------------------------------------------------


def _of_queries(block: MapBlock, settings: Settings) -> dict[str, Tensor]:
    """What every row of the maps is reduced to, [B, H, t] each; `entries`: those seen."""
    attention = block.map
    entries = block.seen.sum(-1).expand(attention.shape[:3])
    of_row = {"queries": torch.ones_like(attention[..., 0]), "entries": entries}
    if block.second is not None:
        of_row["negative_share"] = _number_below(attention, 0.0)
        of_row["negative_mass"] = attention.clamp(max=0.0).sum(-1).neg_()
        of_row |= _moments(block.first, block.second, entries, "")
    ours = _treatment(block.second is not None, settings) or "raw"
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


def _treatment(signed: bool, settings: Settings) -> Signs | None:
    """None for a stock head's whole row: it is a distribution, which no treatment changes."""
    return settings.signs if signed or not settings.count_first_token else None


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
    first_key = settings.first_key
    span = slice(max(0, passage.span[0] - first_key), passage.span[1] - first_key)
    inputs = {"input_ids": torch.tensor([passage.ids])}

    def take(maps: LayerMaps, _: Tensor) -> None:
        refuse_what_is_not_finite(subject, maps)
        for part in maps.parts(passage.queries):
            for block in part.blocks():
                block = of_keys(block, first_key, None)
                counted = torch.ones(1, block.first.shape[2], dtype=torch.bool)
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
    signs = _treatment(subject.signed, settings)
    return _of_heads(
        settings,
        sums.mean("below", over="defined_entries"),
        name="sparsity",
        title="Sparsity of attention",
        meaning=f"The share of entries of {OF_MAP[signs or 'raw']} whose magnitude is below "
        f"{settings.threshold:g}: {QUERIES_OF_TEXT}, and the keys that they see.",
        unit="share",
        signs=signs,
        headline=True,
    )


class _Signed(NamedTuple):
    """A statistic that DIFF layouts alone have; its name is its sum's."""

    title: str
    meaning: str  # {of_map}: the map with its signs treated as asked
    unit: str = ""
    over: str = "queries"
    raw: bool = False  # of the map itself
    diverging: bool = False  # where the map is raw


_SIGNED = {
    "negative_share": _Signed(
        "Negative entries",
        f"The share of seen entries of the map that are below 0, of {QUERIES_OF_TEXT}.",
        "share",
        over="entries",
        raw=True,
    ),
    "negative_mass": _Signed(
        "Negative mass", f"The sum of the magnitudes of a row's negative entries: {OF_TEXT}.", raw=True
    ),
    "signed_entropy": _Signed(
        "Entropy of the signed map", f"−Σ a ln a of {{of_map}}: {OF_TEXT}.", "nats", over="defined"
    ),
    "signed_first_token_mass": _Signed(
        "Signed map on the first token",
        f"How much of {{of_map}} stands on the text's first token: {OF_TEXT}.",
        "share",
        over="defined",
        diverging=True,
    ),
    "signed_answer_mass": _Signed(
        "Signed map on the answer",
        f"How much of {{of_map}} stands on the answer's tokens: {OF_PASSAGES}.",
        "share",
        diverging=True,
    ),
}


def _signed(subject: Subject, sums: HeadSums, answer_mass: Tensor | None) -> list[Statistic]:
    """What DIFF layouts alone have, of the sums that there are."""
    settings = subject.settings
    values = {name: sums.mean(name, each.over) for name, each in _SIGNED.items() if name in sums}
    if answer_mass is not None:
        values["signed_answer_mass"] = answer_mass
    statistics = [
        _of_heads(
            settings,
            values[name],
            name=name,
            title=each.title,
            meaning=each.meaning.format(of_map=OF_MAP[settings.signs]),
            unit=each.unit,
            signs="raw" if each.raw else settings.signs,
            diverging=each.diverging and settings.signs == "raw",
            headline=name == "negative_mass",
        )
        for name, each in _SIGNED.items()
        if name in values
    ]
    for restriction in RESTRICTIONS if answer_mass is not None else [""]:
        statistics += _alike(settings, sums, restriction)
    return statistics


def _alike(settings: Settings, sums: HeadSums, restriction: str) -> list[Statistic]:
    where = RESTRICTIONS[restriction]
    queries = "the queries that are asked about an answer" if restriction else QUERIES_OF_TEXT
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
    return Statistic(over="head", values=numbers(values), first_token=settings.first_token, **fields)


def _remarks(subject: Subject, sums: HeadSums) -> list[str]:
    settings = subject.settings
    remarks = []
    if subject.signed:
        share, mass = sums["negative_share"].sum() / sums["entries"].sum(), sums.mean("negative_mass").mean()
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
        of_map = OF_MAP[_treatment(subject.signed, settings) or "raw"]
        remarks.append(f"Of the entries of {of_map}, {sparse:.1%} are below {settings.threshold:g} in magnitude.")
    undefined = sums["queries"].sum() - sums["defined"].sum()
    if undefined > 0:
        remarks.append(
            f"{undefined:.0f} of {sums['queries'].sum():.0f} rows of the maps are 0 everywhere and cannot be "
            "renormalised; they are left out."
        )
    return remarks
