"""The branch of a Dex adapter: λ(t), what λ f_D(O) does to the heads' outputs, and how K, V and O changed.

    O'_h  = O_h − λ(t) f_D(O_h) = O_h (I − λ W_D)        for the selected heads h of a layer (dex/layer.py)
    ratio = ‖λ f_D(O)‖/‖O‖                               dex/analysis/branch_outputs.py
    ΔW_O  = by training + by the fold                    dex/analysis/branch_weights.py

A folded folder has no branch any more: what its certificate recorded is reported (dex/analysis/branch_folded.py).

    L layers, H heads: statistics are [L] or [L, H], None for a layer or head without a branch
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from dex.analysis.branch_folded import folded_branch
from dex.analysis.branch_outputs import measure
from dex.analysis.branch_statistics import (
    of_changes,
    of_heads,
    of_lam_and_ratio,
    of_spectra,
    spectrum_curve,
    verdict,
)
from dex.analysis.branch_weights import Spectrum, WeightChange, spectrum, weight_change
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.run_log import branch_curves, log_beside
from dex.analysis.subject import Progress, Subject
from dex.errors import NotFinite
from dex.tuner.model import dex_layers, dex_outputs
from dex.tuner.projection import DexOutput


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Raises LeftOut for a model without a branch, NotFinite for values that are no numbers."""
    if subject.signed:
        raise LeftOut("The model has no Dex branch: it is a DIFF layout, whose λ is in the attention section.")
    outputs = dex_outputs(subject.model)
    if not outputs:
        return folded_branch(subject)
    adapter = next((name for layer in outputs if (name := layer.adapter_in_use()) is not None), None)
    if adapter is None:
        raise LeftOut("The Dex adapter is merged or switched off, so no branch is at work.")
    _refuse_what_is_not_finite(subject, adapter)
    adapted = [layer for layer in outputs if adapter in layer.dex_step]
    changes = _changes(subject, adapter)
    branches = [layer for layer in adapted if layer.has_branch(adapter)]
    if not branches:
        return Findings(statistics=of_changes(changes, has_branch=False), remarks=[_without_branch(changes)])
    return _with_branch(subject, adapter, adapted, branches, changes, progress)


def _with_branch(
    subject: Subject,
    adapter: str,
    adapted: list[DexOutput],
    branches: list[DexOutput],
    changes: dict[str, list[WeightChange]],
    progress: Progress,
) -> Findings:
    sums = measure(subject, branches, adapter, progress)
    spectra = {each.layer_idx: spectrum(each.matrices) for each in sums}
    lam = {layer.layer_idx: float(layer.lam(adapter).detach()) for layer in branches}
    ratio = {each.layer_idx: each.ratio() for each in sums}
    mean_ratio = sum(ratio.values()) / len(adapted)
    log = log_beside(subject.path)
    return Findings(
        statistics=[
            *of_lam_and_ratio(lam, ratio, mean_ratio, len(subject.layers)),
            *of_heads(sums, len(subject.layers), subject.num_heads),
            *of_spectra(spectra, len(subject.layers)),
            *of_changes(changes, has_branch=True),
        ],
        curves=[
            spectrum_curve(spectra),
            *([] if log is None else branch_curves(log, [layer.layer_idx for layer in adapted])),
        ],
        remarks=[
            verdict(mean_ratio, list(lam.values())),
            _of_the_operation(spectra),
            _of_the_weights(changes["o"]),
            *(
                []
                if log is not None
                else [f"No log.jsonl lies beside {subject.path}, so nothing is drawn over steps."]
            ),
        ],
    )


def _refuse_what_is_not_finite(subject: Subject, adapter: str) -> None:
    for layer in dex_layers(subject.model):
        if not all(bool(parameter.isfinite().all()) for parameter in layer.adapter_parameters(adapter)):
            raise NotFinite(
                f"The adapter {subject.path} holds values that are not finite, so it can say nothing; "
                "train it again, or analyse an earlier checkpoint."
            )


def _changes(subject: Subject, adapter: str) -> dict[str, list[WeightChange]]:
    """Of k_proj, v_proj and o_proj, a change for each layer."""
    return {
        name: [weight_change(getattr(layer.self_attn, f"{name}_proj"), adapter) for layer in subject.layers]
        for name in ("k", "v", "o")
    }


def _without_branch(changes: Mapping[str, list[WeightChange]]) -> str:
    k, v, o = (_mean([change.total for change in changes[name]]) for name in ("k", "v", "o"))
    return (
        f"The adapter has no branch, only trained copies: on average over the layers, K is {k:.3g}, V {v:.3g} and O "
        f"{o:.3g} of the norm of the base's weight away from it."
    )


def _of_the_operation(spectra: Mapping[int, Spectrum]) -> str:
    smallest, largest = (min(each.smallest for each in spectra.values()), max(s.largest for s in spectra.values()))
    return f"The singular values of I − λ W_D lie between {smallest:.4g} and {largest:.4g} in all layers."


def _of_the_weights(changes: list[WeightChange]) -> str:
    total, training, fold = (
        _mean([getattr(change, key) for change in changes]) for key in ("total", "by_training", "by_fold")
    )
    return (
        f"On average over the layers, W_O is {total:.3g} of its norm away from the base's: {training:.3g} by "
        f"training, {fold:.3g} by the fold."
    )


def _mean(values: list[float | None]) -> float:
    return fmean(value for value in values if value is not None)
