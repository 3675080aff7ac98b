"""How curved the loss is in the attention's weights: the largest eigenvalues of its Hessian, and its negative ones.

    H     = ∂²L/∂w²                                L: mean next-token loss of one sequence; w: the attention's weights
    H v   = ∂(∂L/∂w · v)/∂w                        two backward passes, H itself [n, n] is never formed
    θ, τ  = Ritz values and weights of H           dex/analyze/lanczos.py
    negative share = Σ τ_i [θ_i < 0]               estimates the share of H's eigenvalues that are negative

One Hessian per sequence rather than of all of them, as in the Hessian max-eigenvalue spectra of Park & Kim 2022
(arXiv:2202.06709, section 2), which the Dex paper (arXiv:2505.16333) repeats.

    n parameters, B sequences, S random starts, m steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from dex.analyze.lanczos import Lanczos, lanczos
from dex.analyze.left_out import LeftOut
from dex.analyze.records import Curve, Findings, Number, Statistic, Table, number, numbers
from dex.analyze.subject import Progress, Subject
from dex.errors import NotFinite
from dex.heads import sequence_losses
from dex.models import is_quantised
from dex.stats import evaluating, real_tokens_first

LANDSCAPE_BATCHES, LANDSCAPE_LENGTH = 4, 256  # sequences, and tokens of each: eight times a training step's cost each
STARTS = 2  # random starts, whose difference shows what the start alone decides
STEPS = 16  # of Lanczos: the largest eigenvalues stand apart from the rest, and are found within a dozen
MOST_PARAMETERS = 10_000_000


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut for a quantised model and one with too many weights, NotFinite for a loss that is no number."""
    if is_quantised(subject.stock.config):
        raise LeftOut("The model is quantised, and the kernels of quantised weights have no second derivative.")
    sequences = _sequences(subject)
    if not sequences:
        raise LeftOut("No sequence of the text has two tokens or more, so there is no next-token loss.")
    names = weights_in_use(subject.stock, sequences[0])
    tensors = dict(subject.stock.named_parameters())
    count = sum(tensors[name].numel() for name in names)
    if count > MOST_PARAMETERS:
        raise LeftOut(
            f"The landscape is for small models: the attention of this one has {count:,} weights, more than "
            f"{MOST_PARAMETERS:,}, and the Lanczos process would need {bytes_needed(count) / 1e9:.1f} GB beside the "
            f"model and {LANDSCAPE_BATCHES * STARTS * STEPS} products with the Hessian."
        )
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


# ---- the Hessian -------------------------------------------------------------------------------------------


def weights_in_use(model: Any, ids: Tensor) -> list[str]:
    """The names of the attention's weights that the loss depends on: all but the norms', as Dex trains no norm.

    Of a Dex adapter these are its copies of K, V and O, W_D, a learned λ, and the base's Q.
    """
    names = [name for name, parameter in model.named_parameters() if _is_of_attention(name, parameter)]
    with _twice_differentiable(model):
        leaves, loss = _loss(model, names, ids)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]


def _is_of_attention(name: str, parameter: Tensor) -> bool:
    parts = name.split(".")
    is_norm = any(part.endswith("norm") or part == "subln" for part in parts)
    return "self_attn" in parts and not is_norm and parameter.is_floating_point()


@contextmanager
def hessian(model: Any, names: list[str], ids: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """v [n] → H v [n], float32, for the loss of ids [1, T] and the weights `names`, in their order.

    The graph of the gradient is kept for all products. The model's own weights, gradients and flags stay untouched.
    """
    with _twice_differentiable(model):
        leaves, loss = _loss(model, names, ids)
        weights = list(leaves.values())
        gradients = torch.autograd.grad(loss, weights, create_graph=True)

        def product(vector: Tensor) -> Tensor:
            parts = [
                part.view_as(w) for part, w in zip(vector.split([w.numel() for w in weights]), weights, strict=True)
            ]
            found = torch.autograd.grad(gradients, weights, parts, retain_graph=True, materialize_grads=True)
            return torch.cat([each.flatten() for each in found])

        yield product


def _loss(model: Any, names: list[str], ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Float32 stand-ins for the weights `names`, and the mean next-token loss of ids [1, T] with them."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    exact = {name: tensor.detach().float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    leaves = {name: exact[name].requires_grad_() for name in names}
    logits = functional_call(model, exact, (), {"input_ids": ids, "use_cache": False}).logits
    position = torch.arange(ids.shape[1], device=ids.device)[None]
    loss = sequence_losses(logits, ids, position).sum()
    if not loss.isfinite():
        raise NotFinite("The loss of the text is not finite; try another dtype, such as float32.")
    return leaves, loss


@contextmanager
def _twice_differentiable(model: Any) -> Iterator[None]:
    """Evaluation mode with gradients, and attention that has a second derivative: fused kernels have none."""
    previous = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
        with evaluating(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        model.set_attn_implementation(previous)


# ---- the findings ------------------------------------------------------------------------------------------


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


def _statistics(found: Mapping[str, float | None], count: int, names: list[str]) -> list[Statistic]:
    kinds = sorted({name.split(".self_attn.")[-1] for name in names})
    of = f"the Hessian of a sequence's mean next-token loss in the {count:,} weights {', '.join(kinds)}"
    texts = {
        "hessian_largest": (
            "Largest Hessian eigenvalue",
            f"The largest Ritz value of {of}: how sharply the loss bends in the sharpest direction; the mean over "
            "sequences and random starts.",
        ),
        "hessian_largest_spread": (
            "Largest Hessian eigenvalue: spread over sequences",
            "The standard deviation of the largest Ritz value over the sequences; not defined for one sequence.",
        ),
        "hessian_seed_spread": (
            "Largest Hessian eigenvalue: spread over starts",
            "The difference of the largest Ritz value between the random starts, in the mean over sequences: what the "
            "Lanczos process has not settled.",
        ),
        "hessian_smallest": (
            "Smallest Hessian eigenvalue",
            f"The smallest Ritz value of {of}; the mean over sequences and random starts.",
        ),
        "hessian_negative_share": (
            "Share of negative Hessian eigenvalues",
            "The weight of the negative Ritz values, which estimates the share of the Hessian's eigenvalues that are "
            "negative (stochastic Lanczos quadrature); eigenvalues near 0 count by the sign of the Ritz value that "
            "stands for them.",
        ),
        "hessian_negative_share_seed_spread": (
            "Share of negative Hessian eigenvalues: spread over starts",
            "The difference of the share between the random starts, in the mean over sequences.",
        ),
        "hessian_negative_curvature": (
            "Share of negative curvature",
            "The negative Ritz values' part of the weighted sum of all magnitudes, Σ τ|θ| over θ < 0 divided by that "
            "over all: eigenvalues near 0 hardly count.",
        ),
    }
    return [
        Statistic(
            name=name,
            title=title,
            meaning=meaning,
            unit="share" if "negative" in name else "",
            over="model",
            values=_or_none(found[name]),
            headline=name == "hessian_largest",
        )
        for name, (title, meaning) in texts.items()
    ]


def _or_none(value: float | None) -> Number:
    return None if value is None else number(value)


def _table(runs: list[Run]) -> Table:
    return Table(
        name="hessian",
        title="Hessian of each sequence",
        meaning=(
            f"The Ritz values after at most {STEPS} Lanczos steps. An eigenvalue of the Hessian lies within the residual "
            "of the largest one."
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
            "The Ritz values of each sequence's Hessian and their weights: the share of the eigenvalues that each of them "
            "stands for."
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
    over = "" if spread is None else f" ± {spread:.3g} (standard deviation)"
    return (
        f"The largest eigenvalue of the loss's Hessian in the attention's weights is {found['hessian_largest']:.4g}{over} "
        f"over {sequences} sequence{'s' if sequences > 1 else ''}; two random starts differ by "
        f"{found['hessian_seed_spread']:.2g} on average."
    )


def _of_the_share(found: Mapping[str, float | None]) -> str:
    curvature = found["hessian_negative_curvature"]
    part = "" if curvature is None else f", and they make {curvature:.1%} of all curvature"
    return (
        f"About {found['hessian_negative_share']:.1%} of the Hessian's eigenvalues are negative{part}: directions of the "
        "weights in which the loss bends downwards, so that it is not convex there. The share is an estimate from "
        f"{STEPS} Lanczos steps, in which eigenvalues near 0 fall on either side."
    )
