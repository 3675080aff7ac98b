"""How much the loss depends on each head, and how unequally that is spread over the heads.

    importance_h = mean over texts of |∂L/∂ξ_h|           ξ_h: a gate at 1 on head h's output; L: the text's mean loss
    Gini(x)      = Σ_i (2i − n − 1) x_(i) / (n Σ_i x_i)     x_(1) ≤ … ≤ x_(n); 0: all equal, (n − 1)/n: all in one

    L layers   H heads (those whose outputs `o_proj` reads)        importance [L, H]

The gate and its gradient are `dex.heads.importance` (Michel et al. 2019, arXiv:1905.10650).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dex import heads
from dex.analysis.records import Curve, Findings, Statistic, number, numbers
from dex.analysis.subject import Progress, Subject
from dex.errors import NotFinite

TOP = 0.1  # of the heads: those whose share of the whole is told


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Importance of every head, and its inequality. Raises NotFinite where the gradients are no numbers."""
    of = len(subject.ids)
    scores = heads.importance(subject.stock, subject.batches(), lambda done: progress(done, of), subject.num_heads)
    if not scores.isfinite().all():
        raise NotFinite("The gradients of the heads are not numbers; try another dtype, such as float32.")
    everywhere = gini(scores.flatten().tolist())
    return Findings(
        statistics=_statistics(scores, everywhere),
        curves=[_sorted(scores, everywhere, subject.evaluated.label)],
        remarks=_remarks(scores, everywhere),
    )


def gini(values: Sequence[float]) -> float:
    """Gini coefficient of n values ≥ 0: 0 where all are equal, (n − 1)/n where one has everything; NaN for all 0."""
    ascending, n, largest = sorted(values), len(values), max(values)
    if largest == 0:
        return math.nan
    shares = [value / largest for value in ascending]  # so that no sum overflows or vanishes
    weighted = math.fsum((2 * i - n - 1) * share for i, share in enumerate(shares, start=1))
    return max(0.0, weighted / (n * math.fsum(shares)))


def share_of_top(scores: Tensor, top: float) -> tuple[int, float]:
    """How many heads the top part of all is, rounded up, and their share of the total of `scores` [L, H]."""
    count = math.ceil(top * scores.numel())
    return count, float(scores.flatten().topk(count).values.sum() / scores.sum())


def _statistics(scores: Tensor, everywhere: float) -> list[Statistic]:
    unequal = "0 where all are equally important, towards 1 where one head has all"
    return [
        Statistic(
            name="importance",
            title="Importance of heads",
            meaning="How fast a text's loss changes as the head's output is scaled: the mean over texts of the "
            "absolute gradient of a gate at 1 on it.",
            unit="nats",
            over="head",
            values=numbers(scores),
            headline=True,
        ),
        Statistic(
            name="importance_gini",
            title="Inequality of importance within a layer",
            meaning=f"Gini coefficient of the importance of the layer's heads: {unequal}.",
            over="layer",
            values=[number(gini(of_layer)) for of_layer in scores.tolist()],
        ),
        Statistic(
            name="importance_gini_all",
            title="Inequality of importance over all heads",
            meaning=f"Gini coefficient of the importance of all heads of the model: {unequal}.",
            over="model",
            values=number(everywhere),
        ),
    ]


def _sorted(scores: Tensor, everywhere: float, label: str) -> Curve:
    shares = scores.flatten().sort(descending=True).values / scores.sum()
    known = f" The Gini coefficient is {everywhere:.3f}." if math.isfinite(everywhere) else ""
    return Curve(
        name="importance_sorted",
        title="Importance by rank",
        meaning=f"All heads of the model, the most important first, each as its share of the total.{known}",
        x_label="rank of the head",
        y_label="share of the total importance",
        x=[float(rank) for rank in range(1, len(shares) + 1)],
        lines={label: numbers(shares)},
    )


def _remarks(scores: Tensor, everywhere: float) -> list[str]:
    if not math.isfinite(everywhere):
        return ["The loss does not depend on any head: all gradients are 0."]
    count, share = share_of_top(scores, TOP)
    layer_idx, head = divmod(int(scores.argmax()), scores.shape[1])
    return [
        f"The {TOP:.0%} of heads with the greatest importance ({count} of {scores.numel()}) hold {share:.0%} of the "
        f"total; the Gini coefficient over all heads is {everywhere:.3f}.",
        f"The loss depends most on head {head} of layer {layer_idx}, whose importance is {scores.max():.3g}: "
        f"{scores.max() / scores.mean():.1f} times the mean of all heads.",
    ]
