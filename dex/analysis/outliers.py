"""How large the largest attention logits and hidden states are, beside the usual ones.

    z_ij = s q_i·k_j      for every real query i and every key j that it sees, of all heads; of DIFF layouts both maps
    x_td                  the output of the layer at every real token: the residual stream after its MLP

    top-1, top-10         the largest and the 10th largest magnitude, exact
    median                the median magnitude, within 2^-10 of itself
    outlier ratio         top-1 / median

Padding never counts; the first tokens do, since the largest values are often theirs.

Source: "Differential Transformer", arXiv:2410.05258, its table of activation outliers.

    B batch   T queries   S keys   H heads   L layers   d model width
    logits [B, H, T, S], a block of queries at a time   hidden states [B, T, d]   every statistic [L]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from dex.analysis.magnitudes import Magnitudes
from dex.analysis.records import Findings, Statistic, numbers
from dex.analysis.subject import Progress, Subject
from dex.attention_maps import LayerMaps, for_each_layer
from dex.stats import logits_in_blocks


class Outliers(NamedTuple):
    """Of every layer."""

    logits: list[Magnitudes]
    hidden: list[Magnitudes]


def analyze(subject: Subject, progress: Progress) -> Findings:
    found = magnitudes_of(subject, progress)
    statistics = [
        *_statistics("logit", "attention logit", "of s·q·k over all keys that real queries see", found.logits),
        *_statistics("hidden", "hidden state", "of the layer's output at real tokens", found.hidden),
    ]
    remarks = [_remark("hidden state", found.hidden), _remark("attention logit", found.logits)]
    return Findings(statistics=statistics, remarks=remarks)


def magnitudes_of(subject: Subject, progress: Progress = lambda done, of: None) -> Outliers:
    """The magnitudes of every layer's logits and outputs, over the subject's text."""
    found = Outliers([Magnitudes() for _ in subject.layers], [Magnitudes() for _ in subject.layers])
    real = torch.empty(0)  # [B, T] bool, of the batch at work

    def take(maps: LayerMaps, position: torch.Tensor) -> None:
        nonlocal real
        real = position >= 0
        _add_logits(maps, real, found.logits[maps.layer_idx])

    def take_output(layer_idx: int) -> Callable[[Any, Any, Any], None]:
        def hook(_: Any, args: Any, output: torch.Tensor) -> None:  # after the layer's attention, so after `take`
            found.hidden[layer_idx].update(output, real[..., None])

        return hook

    with ExitStack() as stack:
        for layer_idx, layer in enumerate(subject.layers):
            stack.callback(layer.register_forward_hook(take_output(layer_idx)).remove)
        for_each_layer(subject.model, subject.batches(), take, lambda done: progress(done, len(subject.ids)))
    return found


def _add_logits(maps: LayerMaps, real: torch.Tensor, magnitudes: Magnitudes) -> None:
    for of_map in (maps.first, maps.second):
        if of_map is None:
            continue
        query, key = (each.float() for each in of_map)
        for rows, logits, seen in logits_in_blocks(query, key, maps.mask, maps.scaling):
            magnitudes.update(logits, seen & real[:, None, rows, None])


def _statistics(name: str, title: str, of_what: str, layers: list[Magnitudes]) -> list[Statistic]:
    def statistic(which: str, words: str, meaning: str, values: list[float], unit: str = "") -> Statistic:
        return Statistic(
            name=f"{name}_{which}",
            title=words,
            meaning=meaning,
            unit=unit,
            over="layer",
            values=numbers(values),
            headline=which == "outlier_ratio",
        )

    return [
        statistic("top1", f"Largest {title}", f"The largest magnitude {of_what}.", [each.top(1) for each in layers]),
        statistic(
            "top10",
            f"10th largest {title}",
            f"The 10th largest magnitude {of_what}.",
            [each.top(10) for each in layers],
        ),
        statistic(
            "median",
            f"Median {title}",
            f"The median magnitude {of_what}, within 2^-10 of itself.",
            [each.median() for each in layers],
        ),
        statistic(
            "outlier_ratio",
            f"Largest {title} over the median",
            f"The largest magnitude {of_what}, as a multiple of the median magnitude.",
            [each.ratio() for each in layers],
            "×",
        ),
    ]


def _remark(what: str, layers: list[Magnitudes]) -> str:
    layer = max(range(len(layers)), key=lambda index: layers[index].top(1))
    largest, ratio = layers[layer].top(1), layers[layer].ratio()
    times = "" if math.isnan(ratio) else f", {ratio:,.0f} times the median magnitude of that layer"
    return f"The {what} of the largest magnitude, {largest:,.4g}, is in layer {layer}{times}."
