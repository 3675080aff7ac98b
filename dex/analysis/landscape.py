"""How curved the loss is in the attention's weights: the largest eigenvalues of its Hessian, and its negative ones.

    H     = ∂²L/∂w² [n, n]                  L: mean next-token loss of one sequence; w [n]: the attention's weights
    θ, τ  = Ritz values and weights of H    m of each, from products H v (dex/analysis/hessian.py, lanczos.py)
    negative share     = Σ τ_i [θ_i < 0]    estimates the share of H's eigenvalues that are negative
    negative curvature = Σ τ_i |θ_i| [θ_i < 0] / Σ τ_i |θ_i|

One Hessian per sequence rather than one of all, as in the Hessian max-eigenvalue spectra of Park & Kim 2022
(arXiv:2202.06709), which the Dex paper (arXiv:2505.16333) repeats. The quadrature is that of Ghorbani et al. 2019
(arXiv:1901.10159).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor

from dex.analysis.hessian import hessian, weights_in_use
from dex.analysis.lanczos import Lanczos, lanczos
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Curve, Findings, Statistic, Table, number, numbers
from dex.analysis.subject import Progress, Subject
from dex.models import is_quantised
from dex.stats import real_tokens_first

LANDSCAPE_BATCHES, LANDSCAPE_LENGTH = 4, 256  # sequences, and tokens of each at most: enough to see them differ
STARTS = 2  # random starts, whose difference shows what the start alone decides
STEPS = 16  # of Lanczos: the largest eigenvalues stand apart from the rest, and are found within a dozen
NEAR_ZERO = 0.01  # of the largest |θ|: the bulk, for which few Ritz values stand, on either side of 0 as it happens

# With 8.4 million, in a model of 34 million, a product takes 1.8 s of one core, so all 128 take 4 minutes of it, and
# the vectors 0.7 GB. SmolLM2-135M, whose attention has 26.5 million, would take a quarter of an hour and 2.1 GB.
MOST_PARAMETERS = 10_000_000


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut for a quantised model and one with too many weights, NotFinite for a loss that is no number."""
    if is_quantised(subject.stock.config):
        raise LeftOut("The model is quantised, and the kernels of quantised weights have no second derivative.")
    _refuse_too_many(_projection_weights(subject))
    sequences = _sequences(subject)
    if not sequences:
        raise LeftOut("No sequence of the text has two tokens or more, so there is no next-token loss.")
    names = weights_in_use(subject.stock, sequences[0])
    tensors = dict(subject.stock.named_parameters())
    count = sum(tensors[name].numel() for name in names)
    runs: list[Run] = []
    for index, ids in enumerate(sequences):
        with hessian(subject.stock, names, ids) as product:
            for seed in range(subject.settings.seed, subject.settings.seed + STARTS):
                start = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(ids.device)
                runs.append(Run(index, seed, lanczos(product, start, STEPS)))
                progress(len(runs), len(sequences) * STARTS)
    return _findings(runs, count, names)


def bytes_needed(count: int) -> int:
    """Of the float32 vectors of `count` weights: a basis of STEPS, the weights, the gradient and two products."""
    return count * (STEPS + 4) * 4


def _refuse_too_many(count: int) -> None:
    if count > MOST_PARAMETERS:
        raise LeftOut(
            f"The landscape is for small models: the attention of this one has {count:,} weights, more than "
            f"{MOST_PARAMETERS:,}, and {LANDSCAPE_BATCHES * STARTS * STEPS} products with its Hessian would take "
            f"long and need {bytes_needed(count) / 1e9:.2g} GB for their vectors alone."
        )


def _projection_weights(subject: Subject) -> int:
    """Of Q, K, V and O: known before anything is computed, and all but a few of the attention's weights."""
    attentions = (layer.self_attn for layer in subject.layers)
    projections = (getattr(each, f"{name}_proj") for each in attentions for name in "qkvo")
    return sum(projection.in_features * projection.out_features for projection in projections)


def _sequences(subject: Subject) -> list[Tensor]:
    """The ids [1, t] of the first sequences, without their padding."""
    found: list[Tensor] = []
    for batch in subject.batches():
        inputs, position = real_tokens_first(batch, subject.stock.device)
        for ids, places in zip(inputs["input_ids"], position, strict=True):
            real = ids[places >= 0][:LANDSCAPE_LENGTH]
            if len(real) > 1:
                found.append(real[None])
            if len(found) == LANDSCAPE_BATCHES:
                return found
    return found


@dataclass(frozen=True)
class Run:
    """One Lanczos process: of which sequence, from which start."""

    sequence: int
    seed: int
    ritz: Lanczos

    @property
    def largest(self) -> float:
        return float(self.ritz.values[0])

    @property
    def smallest(self) -> float:
        return float(self.ritz.values[-1])

    @property
    def negative_share(self) -> float:
        return float(self.ritz.weights[self.ritz.values < 0].sum())

    @property
    def near_zero_share(self) -> float:
        size = self.ritz.values.abs()
        return float(self.ritz.weights[size < NEAR_ZERO * size.max()].sum())

    @property
    def negative_curvature(self) -> float | None:
        """Σ_{θ<0} τ|θ| / Σ τ|θ|; None for H = 0."""
        curvature = self.ritz.weights * self.ritz.values.abs()
        whole = float(curvature.sum())
        return float(curvature[self.ritz.values < 0].sum()) / whole if whole else None


def _findings(runs: list[Run], count: int, names: list[str]) -> Findings:
    by_sequence: dict[int, list[Run]] = {}
    for run in runs:
        by_sequence.setdefault(run.sequence, []).append(run)
    largest = [fmean(run.largest for run in of_one) for of_one in by_sequence.values()]
    found = {
        "hessian_largest": fmean(largest),
        "hessian_largest_spread": stdev(largest) if len(largest) > 1 else None,
        "hessian_seed_spread": fmean(_range([run.largest for run in of_one]) for of_one in by_sequence.values()),
        "hessian_smallest": fmean(run.smallest for run in runs),
        "hessian_negative_share": fmean(run.negative_share for run in runs),
        "hessian_negative_share_seed_spread": fmean(
            _range([run.negative_share for run in of_one]) for of_one in by_sequence.values()
        ),
        "hessian_near_zero_share": fmean(run.near_zero_share for run in runs),
        "hessian_negative_curvature": _mean_or_none([run.negative_curvature for run in runs]),
    }
    return Findings(
        statistics=_statistics(found, count, names),
        tables=[_table(runs)],
        curves=[_spectrum(runs)],
        remarks=[_of_the_largest(found, len(by_sequence)), _of_the_share(found)],
    )


def _range(values: list[float]) -> float:
    return max(values) - min(values)


def _mean_or_none(values: list[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else None


_TEXTS = {  # {hessian}: of what it is
    "hessian_largest": (
        "Largest Hessian eigenvalue",
        "The largest Ritz value of {hessian}: how sharply the loss bends in the sharpest direction; the mean over "
        "sequences and random starts.",
        "",
    ),
    "hessian_largest_spread": (
        "Largest Hessian eigenvalue: spread over sequences",
        "The standard deviation of the largest Ritz value over the sequences; not defined for one sequence.",
        "",
    ),
    "hessian_seed_spread": (
        "Largest Hessian eigenvalue: spread over starts",
        "The difference of the largest Ritz value between the random starts, in the mean over sequences: what the "
        "Lanczos process has not settled.",
        "",
    ),
    "hessian_smallest": (
        "Smallest Hessian eigenvalue",
        "The smallest Ritz value of {hessian}; the mean over sequences and random starts.",
        "",
    ),
    "hessian_negative_share": (
        "Share of negative Hessian eigenvalues",
        "The weight of the negative Ritz values, which estimates the share of the Hessian's eigenvalues that are "
        "negative (stochastic Lanczos quadrature); eigenvalues near 0 count by the sign of the Ritz value that "
        "stands for them, so read it beside their share.",
        "share",
    ),
    "hessian_near_zero_share": (
        "Share of Hessian eigenvalues near 0",
        f"The weight of the Ritz values whose magnitude is below {NEAR_ZERO:g} of the largest magnitude: their sign "
        "is not settled.",
        "share",
    ),
    "hessian_negative_share_seed_spread": (
        "Share of negative Hessian eigenvalues: spread over starts",
        "The difference of the share between the random starts, in the mean over sequences.",
        "share",
    ),
    "hessian_negative_curvature": (
        "Share of negative curvature",
        "The negative Ritz values' part of the weighted sum of all magnitudes, Σ τ|θ| over θ < 0 divided by that "
        "over all: eigenvalues near 0 hardly count.",
        "share",
    ),
}


def _statistics(found: Mapping[str, float | None], count: int, names: list[str]) -> list[Statistic]:
    kinds = ", ".join(sorted({name.split(".self_attn.")[-1] for name in names}))
    hessian = f"the Hessian of a sequence's mean next-token loss in the {count:,} weights {kinds}"
    return [
        Statistic(
            name=name,
            title=title,
            meaning=meaning.format(hessian=hessian),
            unit=unit,
            over="model",
            values=number(found[name]),
            headline=name == "hessian_largest",
        )
        for name, (title, meaning, unit) in _TEXTS.items()
    ]


def _table(runs: list[Run]) -> Table:
    return Table(
        name="hessian",
        title="Hessian of each sequence",
        meaning=(
            f"The Ritz values after at most {STEPS} Lanczos steps. An eigenvalue of the Hessian lies no farther from "
            "the largest one than its residual."
        ),
        columns=["sequence", "seed", "largest", "second", "smallest", "negative share", "residual of the largest"],
        rows=[
            [
                run.sequence + 1,
                run.seed,
                number(run.largest),
                number(float(run.ritz.values[1])) if len(run.ritz.values) > 1 else None,
                number(run.smallest),
                number(run.negative_share),
                number(float(run.ritz.residuals[0])),
            ]
            for run in runs
        ],
    )


def _spectrum(runs: list[Run]) -> Curve:
    """Every Ritz value with its weight, divided by the starts, so that each sequence's weights sum to 1."""
    points = sorted(
        (float(value), run.sequence, float(weight) / STARTS)
        for run in runs
        for value, weight in zip(run.ritz.values, run.ritz.weights, strict=True)
    )
    return Curve(
        name="hessian_spectrum",
        title="Spectrum of the Hessian",
        meaning=(
            "The Ritz values of each sequence's Hessian and their weights: the share of the eigenvalues that each of "
            "them stands for."
        ),
        x_label="Ritz value",
        y_label="weight",
        x=numbers([value for value, _, _ in points]),
        lines={
            f"sequence {sequence + 1}": [number(weight) if of == sequence else None for _, of, weight in points]
            for sequence in sorted({run.sequence for run in runs})
        },
        points=True,
    )


def _of_the_largest(found: Mapping[str, float | None], sequences: int) -> str:
    spread = found["hessian_largest_spread"]
    over = "" if spread is None else f" (standard deviation {spread:.2g})"
    return (
        f"The largest eigenvalue of the loss's Hessian in the attention's weights is {found['hessian_largest']:.4g} "
        f"in the mean over {sequences} sequence{'s' if sequences > 1 else ''}{over}; {STARTS} random starts differ "
        f"by {found['hessian_seed_spread']:.2g}."
    )


def _of_the_share(found: Mapping[str, float | None]) -> str:
    """What the share means, and how far it can be trusted."""
    curvature = found["hessian_negative_curvature"]
    first = "" if curvature is None else f"Negative eigenvalues make {curvature:.1%} of all curvature of the loss. "
    return (
        f"{first}By number they are about {found['hessian_negative_share']:.1%} of the Hessian's eigenvalues: in so "
        "many independent directions of the weights the loss bends downwards, so that it is not convex there. But "
        f"{found['hessian_near_zero_share']:.1%} of the eigenvalues are near 0, where {STEPS} Lanczos steps do not "
        f"settle the sign: {STARTS} random starts differ by {found['hessian_negative_share_seed_spread']:.1%}."
    )
