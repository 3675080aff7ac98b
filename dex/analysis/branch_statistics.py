"""The statistics of the section `branch`, from what was measured or recorded: their names, titles and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from dex.analysis.branch_outputs import BranchSums
from dex.analysis.branch_weights import Spectrum, WeightChange
from dex.analysis.records import Curve, Number, Statistic, number, numbers
from dex.analysis.thinned import MOST_LINES, thinned
from dex.tuner.callback import INERT_BELOW


def verdict(mean_ratio: float, lam: list[float]) -> str:
    """The first remark: whether the branch does anything."""
    inert = mean_ratio < INERT_BELOW
    return (
        f"The branch is {'inert' if inert else 'alive'}: ‖λ f_D(O)‖/‖O‖ is {mean_ratio:.3g} on average over the "
        f"adapted layers, {'below' if inert else 'not below'} {INERT_BELOW:g}, and λ is "
        f"{min(lam):+.4f} to {max(lam):+.4f}."
    )


def _over_layers(values: Mapping[int, float | None], num_layers: int) -> list[Number]:
    """[L], None for a layer that has no value."""
    return [number(values.get(layer_idx)) for layer_idx in range(num_layers)]


def of_lam_and_ratio(
    lam: Mapping[int, float | None],
    ratio: Mapping[int, float | None],
    mean_ratio: float,
    num_layers: int,
    where: str = "",
) -> list[Statistic]:
    """where: said of values that were not measured here."""
    return [
        _of_mean_ratio(mean_ratio, where),
        Statistic(
            name="dex_lam",
            title="λ(t) of the branch",
            meaning=f"What the branch is multiplied with before it is subtracted, at the steps done so far{where}.",
            over="layer",
            values=_over_layers(lam, num_layers),
            diverging=True,
            headline=True,
        ),
        Statistic(
            name="branch_ratio",
            title="Branch ratio",
            meaning=f"‖λ f_D(O)‖/‖O‖ over the layer's selected heads and the tokens of the text{where}.",
            over="layer",
            values=_over_layers(ratio, num_layers),
            headline=True,
        ),
    ]


def _of_mean_ratio(mean_ratio: float, where: str) -> Statistic:
    return Statistic(
        name="branch_mean_ratio",
        title="Mean branch ratio",
        meaning=(
            f"The mean of ‖λ f_D(O)‖/‖O‖ over the adapted layers (0 for one in which no head is selected){where}; "
            f"below {INERT_BELOW:g} the branch is called inert."
        ),
        over="model",
        values=number(mean_ratio),
    )


def of_heads(sums: list[BranchSums], num_layers: int, num_heads: int) -> list[Statistic]:
    ratio: list[list[Number]] = [[None] * num_heads for _ in range(num_layers)]
    cosine: list[list[Number]] = [[None] * num_heads for _ in range(num_layers)]
    cosine_of_layer: dict[int, float] = {}
    for each in sums:
        for head, its_ratio, its_cosine in zip(each.heads, each.ratio_of_head(), each.cosine_of_head(), strict=True):
            ratio[each.layer_idx][head] = number(its_ratio)
            cosine[each.layer_idx][head] = number(its_cosine)
        defined = [value for value in each.cosine_of_head() if value is not None]
        if defined:
            cosine_of_layer[each.layer_idx] = fmean(defined)
    undefined = "not defined where λ or W_D is 0"
    return [
        Statistic(
            name="branch_ratio_of_head",
            title="Branch ratio of each head",
            meaning="‖λ f_D(O_h)‖/‖O_h‖ over the tokens of the text; none for a head that is not selected.",
            over="head",
            values=ratio,
        ),
        Statistic(
            name="branch_cosine",
            title="Direction of the branch",
            meaning=(
                "The mean over tokens of cos(O_h, λ f_D(O_h)): 1 where the branch only shrinks the head's output, 0 "
                f"where it takes away another direction, −1 where it enlarges the output; {undefined}."
            ),
            over="head",
            values=cosine,
            diverging=True,
        ),
        Statistic(
            name="branch_cosine_of_layer",
            title="Direction of the branch, by layer",
            meaning=f"The mean of cos(O_h, λ f_D(O_h)) over tokens and selected heads; {undefined}.",
            over="layer",
            values=_over_layers(cosine_of_layer, num_layers),
            diverging=True,
        ),
    ]


_SPECTRUM = {
    "spectrum_largest": (
        "Largest gain of I − λ W_D",
        "The largest singular value of I − λ W_D: the most that a head's output is stretched; 1 without a branch.",
        "largest",
    ),
    "spectrum_smallest": (
        "Smallest gain of I − λ W_D",
        "The smallest singular value of I − λ W_D: what is left of the direction that the branch takes away most.",
        "smallest",
    ),
    "spectrum_largest_eigenvalue": (
        "Largest eigenvalue of I − λ W_D",
        "The largest magnitude of an eigenvalue of I − λ W_D; 1 without a branch.",
        "largest_eigenvalue",
    ),
    "spectrum_smallest_eigenvalue": (
        "Smallest eigenvalue of I − λ W_D",
        "The smallest magnitude of an eigenvalue of I − λ W_D; 1 without a branch.",
        "smallest_eigenvalue",
    ),
    "spectrum_distance": (
        "Distance of I − λ W_D from I",
        "‖λ W_D‖_F/√D, the root mean square over directions of what the branch takes away; where each head has its "
        "own W_D, the root mean square over the heads too.",
        "distance",
    ),
}


def of_spectra(spectra: Mapping[int, Spectrum], num_layers: int) -> list[Statistic]:
    return [
        Statistic(
            name=name,
            title=title,
            meaning=meaning,
            over="layer",
            values=_over_layers({layer_idx: getattr(each, key) for layer_idx, each in spectra.items()}, num_layers),
        )
        for name, (title, meaning, key) in _SPECTRUM.items()
    ]


def spectrum_curve(spectra: Mapping[int, Spectrum]) -> Curve:
    layers = sorted(spectra)
    shown = [layers[index] for index in thinned(len(layers), MOST_LINES)]
    width = len(spectra[layers[0]].singular_values)
    return Curve(
        name="spectrum",
        title="Gains of I − λ W_D",
        meaning=(
            "The singular values of I − λ W_D in descending order: all 1 without a branch. Where each head has its "
            "own W_D, the mean over the selected heads."
        ),
        x_label="rank",
        y_label="singular value",
        x=[float(rank) for rank in range(1, width + 1)],
        lines={f"layer {layer_idx}": numbers(spectra[layer_idx].singular_values) for layer_idx in shown},
    )


_O_PARTS = {
    "w_o_change_by_training": (
        "Change of W_O by training",
        "‖T‖/‖W_base‖, T the trained copy of W_O minus the base's.",
        "by_training",
    ),
    "w_o_change_by_fold": (
        "Change of W_O by the fold",
        "‖F‖/‖W_base‖, F what the fold of the branch adds to the trained copy of W_O.",
        "by_fold",
    ),
    "w_o_fold_share": (
        "The fold's share of the change of W_O",
        "‖F‖²/(‖F‖² + ‖T‖²) of the part by the fold, F, and the part by training, T; not defined where both are 0.",
        "fold_share",
    ),
    "w_o_cosine": (
        "Fold against training in W_O",
        "cos(F, T) of the part by the fold and the part by training: below 0 they undo each other; not defined where "
        "one of them is 0.",
        "cosine",
    ),
}


def of_changes(changes: Mapping[str, list[WeightChange]], has_branch: bool) -> list[Statistic]:
    folded = " after the fold" if has_branch else ""
    found = [
        Statistic(
            name=f"w_{name}_change",
            title=f"Change of W_{name.upper()}",
            meaning=f"‖W − W_base‖/‖W_base‖ of {name}_proj{folded if name == 'o' else ''}; 0 where it did not train.",
            unit="of ‖W_base‖",
            over="layer",
            values=[number(change.total) for change in of_layers],
        )
        for name, of_layers in changes.items()
    ]
    if not has_branch:
        return found
    parts = [
        Statistic(
            name=name,
            title=title,
            meaning=meaning,
            unit={"by_training": "of ‖W_base‖", "by_fold": "of ‖W_base‖", "fold_share": "share"}.get(key, ""),
            over="layer",
            values=[number(getattr(change, key)) for change in changes["o"]],
            diverging=key == "cosine",
        )
        for name, (title, meaning, key) in _O_PARTS.items()
    ]
    return [*found, *parts]
