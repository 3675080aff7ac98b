"""How alike the heads of a layer are: in where they look, and in what they add.

    distance_gh = 1 − ⟨map_g, map_h⟩ / (‖map_g‖ ‖map_h‖)           a map: all its entries, as one vector
    CKA_gh      = ‖C_gh‖²_F / (‖C_gg‖_F ‖C_hh‖_F)                 C_gh = Σ_n (o_gn − ō_g)(o_hn − ō_h)ᵀ

The distance is the measure of redundancy of the Dex paper (arXiv:2505.16333); CKA is the linear one of Kornblith et
al. 2019 (arXiv:1905.00414), of the head outputs o that `o_proj` reads. Both are means over all pairs g < h of a
layer. Only Gram matrices and covariances are kept, and they are exact: no map, no list of outputs, no mini-batches.

    B batch   T tokens   N tokens of all texts   H heads   S keys   D width of a head's output
    maps [B, H, t, S], t queries at a time   Gram matrix of a layer's maps [H, H]   covariance C [H·D, H·D]
"""

from __future__ import annotations

import torch
from torch import Tensor

from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings, Signs, Statistic, numbers
from dex.analysis.subject import Progress, Subject
from dex.attention_maps import LayerMaps, for_each_layer
from dex.errors import NotFinite
from dex.heads import observed_head_outputs
from dex.stats import FIRST_POSITION, evaluating, real_tokens_first

COVARIANCES = 2 << 30  # bytes of the covariances that are kept at once; 15 layers of a model with H·D = 4096
AT_ONCE = 1024  # vectors in one float32 product


def analyze(subject: Subject, progress: Progress) -> Findings:
    """Mean cosine distance of the maps and mean CKA of the outputs, of every layer and of every head.

    Every group of layers whose covariances fit `COVARIANCES` takes a forward pass over the text, and the maps one.
    Memory: `COVARIANCES`, or (H·D)² float64 where that is more, and twice (H·D)² float64 while a batch is added.
    Raises LeftOut for layers of one head and for texts without a counted query; NotFinite for outputs that are no
    numbers.
    """
    if subject.num_heads == 1:
        raise LeftOut("Each layer has one head, so there is no pair of heads to compare.")
    groups = layer_groups(subject)
    passes = 1 + len(groups)

    def after(passes_done: int) -> Progress:
        """Progress within one pass, of all passes."""
        return lambda done, of: progress(passes_done * of + done, passes * of)

    distance = 1.0 - cosine(map_gram(subject, after(0)))
    cka = torch.cat([output_cka(subject, group, after(1 + which)) for which, group in enumerate(groups)])
    if not _some_pair(distance) and not _some_pair(cka):
        raise LeftOut(f"No text is longer than {FIRST_POSITION} tokens, and queries before that are not counted.")
    return Findings(statistics=_statistics(subject, distance, cka), remarks=_remarks(distance, cka))


# ---- maps --------------------------------------------------------------------------------------------------


def map_gram(subject: Subject, progress: Progress) -> Tensor:
    """⟨map_g, map_h⟩ of all heads of every layer, [L, H, H] float64, over all counted queries and keys."""
    gram = torch.zeros(len(subject.layers), subject.num_heads, subject.num_heads, dtype=torch.float64)

    def take(maps: LayerMaps, position: Tensor) -> None:
        counted = position >= FIRST_POSITION  # [B, T]
        for block in maps.blocks():
            of_query = block.map[..., subject.settings.first_key :].transpose(1, 2)  # [B, t, H, S]
            # A query's products are float32 sums of S terms; those of all queries are added in float64.
            products = (of_query @ of_query.mT)[counted[:, block.rows]]  # [n, H, H]
            gram[maps.layer_idx] += products.double().sum(0).cpu()

    of = len(subject.ids)
    for_each_layer(subject.model, subject.batches(), take, lambda done: progress(done, of))
    if not gram.isfinite().all():
        raise NotFinite("The attention maps are not numbers; try another dtype, such as float32.")
    return gram


def cosine(gram: Tensor) -> Tensor:
    """⟨x_g, x_h⟩ [..., H, H] divided by ‖x_g‖ ‖x_h‖; NaN for an x of zeros. Clamped, as rounding errs, to [−1, 1]."""
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    norm = norm.masked_fill(norm == 0, torch.nan)
    return (gram / (norm[..., :, None] * norm[..., None, :])).clamp(-1.0, 1.0)


# ---- outputs -----------------------------------------------------------------------------------------------


def layer_groups(subject: Subject) -> list[range]:
    """The layers, as many at a time as have covariances of at most `COVARIANCES` bytes together; one at least."""
    width = max(layer.self_attn.o_proj.in_features for layer in subject.layers)
    size = max(1, COVARIANCES // (8 * width**2))
    return [range(len(subject.layers))[start : start + size] for start in range(0, len(subject.layers), size)]


def output_cka(subject: Subject, layers: range, progress: Progress) -> Tensor:
    """CKA of all heads of these layers, [len(layers), H, H] float64."""
    moments = {layer_idx: Moments() for layer_idx in layers}
    counted = torch.empty(0)  # [B, T] bool, of the batch at work

    def take(layer_idx: int, output: Tensor) -> None:
        if layer_idx in moments:
            moments[layer_idx].add(output[counted])

    done = 0
    with torch.no_grad(), evaluating(subject.model), observed_head_outputs(subject.stock, take):
        for batch in subject.batches():
            inputs, position = real_tokens_first(batch, subject.stock.device)
            counted = position >= FIRST_POSITION
            subject.stock.get_decoder()(**inputs, use_cache=False)  # the logits are not needed
            done += len(position)
            progress(done, len(subject.ids))
    return torch.stack([moments[layer_idx].cka(subject.num_heads) for layer_idx in layers])


class Moments:
    """Count, mean [C] and summed covariance [C, C] of vectors that come a batch at a time, in float64.

    Chan, Golub and LeVeque's update: a batch is centred on its own mean, so a mean that is large beside the spread,
    as a head that looks at the first token has, costs no digits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros((), dtype=torch.float64)
        self.covariance = torch.zeros((), dtype=torch.float64)
        self.eps = 0.0  # relative rounding of the vectors

    def add(self, vectors: Tensor) -> None:
        """vectors: [n, C] of any dtype."""
        n = len(vectors)
        if n == 0:
            return
        mean = vectors.double().mean(0)
        # float32 products, added in float64: of 65,536 vectors within 1e-7 of float64's, and 7e-7 if all at once.
        parts = [(part.double() - mean).float() for part in vectors.split(AT_ONCE)]
        covariance, mean = sum((part.mT @ part).double().cpu() for part in parts), mean.cpu()
        shift, total = mean - self.mean, self.count + n
        covariance += torch.outer(shift, shift) * (self.count * n / total)
        self.covariance = covariance.add_(self.covariance)
        self.mean = self.mean + shift * (n / total)
        self.count = total
        self.eps = torch.finfo(vectors.dtype).eps

    def cka(self, num_heads: int) -> Tensor:
        """CKA of all pairs of heads, [H, H]; NaN for a head whose output is constant up to rounding.

        Raises NotFinite for vectors that are no numbers.
        """
        if self.count == 0:
            return torch.full((num_heads, num_heads), torch.nan, dtype=torch.float64)
        if not self.covariance.isfinite().all():
            raise NotFinite("The outputs of the heads are not numbers; try another dtype, such as float32.")
        blocks = self.covariance.unflatten(0, (num_heads, -1)).unflatten(2, (num_heads, -1))  # [H, D, H, D]
        squares = blocks.square().sum((1, 3))  # ‖C_gh‖²_F, whose cosine CKA is
        spread = self.covariance.diagonal().unflatten(0, (num_heads, -1)).sum(1)
        size = self.count * self.mean.square().unflatten(0, (num_heads, -1)).sum(1) + spread
        # Rounding alone spreads a constant by 1.2 eps of its size in float32, whatever the length of the text.
        constant = spread <= (2 * self.eps) ** 2 * size
        return cosine(squares).masked_fill(constant[:, None] | constant, torch.nan)


# ---- what is reported --------------------------------------------------------------------------------------


def over_pairs(values: Tensor) -> Tensor:
    """Mean over the pairs g < h, [L], of a symmetric [L, H, H]; pairs that are NaN are left out."""
    H = values.shape[-1]
    above = torch.ones(H, H, dtype=torch.bool).triu(1)
    return values[:, above].nanmean(-1)


def over_others(values: Tensor) -> Tensor:
    """Mean over the other heads, [L, H], of a symmetric [L, H, H]; pairs that are NaN are left out."""
    itself = torch.eye(values.shape[-1], dtype=torch.bool)
    return values.masked_fill(itself, torch.nan).nanmean(-1)


def _some_pair(values: Tensor) -> bool:
    return bool(over_pairs(values).isfinite().any())


def _statistics(subject: Subject, distance: Tensor, cka: Tensor) -> list[Statistic]:
    first_token = subject.settings.first_token
    signs: Signs | None = "raw" if subject.signed else None
    entries = "signed entries as they are" if subject.signed else "entries"
    apart = f"1 minus the cosine of two heads' attention maps, each taken as one vector of all its {entries}"
    alike = "Linear CKA of two heads' outputs (0: unrelated, 1: equal up to rotation and scale)"
    pairs, others = "mean over all pairs of heads of the layer", "mean over the other heads of its layer"
    return [
        Statistic(
            name="map_cosine_distance",
            title="Cosine distance of the heads' maps",
            meaning=f"{apart}; {pairs}. The smaller, the more redundant the heads.",
            over="layer",
            values=numbers(over_pairs(distance)),
            signs=signs,
            first_token=first_token,
            headline=True,
        ),
        Statistic(
            name="map_cosine_distance_of_head",
            title="Cosine distance of a head's map from the others",
            meaning=f"{apart}; {others}.",
            over="head",
            values=numbers(over_others(distance)),
            signs=signs,
            first_token=first_token,
        ),
        Statistic(
            name="cka",
            title="CKA of the heads' outputs",
            meaning=f"{alike}; {pairs}. The larger, the more redundant the heads.",
            over="layer",
            values=numbers(over_pairs(cka)),
            headline=True,
        ),
        Statistic(
            name="cka_of_head",
            title="CKA of a head's output with the others",
            meaning=f"{alike}; {others}. No value where a head's output is the same for every token.",
            over="head",
            values=numbers(over_others(cka)),
        ),
    ]


def _remarks(distance: Tensor, cka: Tensor) -> list[str]:
    measures = [("The cosine distance between two heads' maps", distance), ("The CKA of two heads' outputs", cka)]
    return [_remark(words, over_pairs(values)) for words, values in measures if _some_pair(values)]


def _remark(words: str, of_layer: Tensor) -> str:
    low, high = of_layer.nan_to_num(torch.inf).argmin(), of_layer.nan_to_num(-torch.inf).argmax()
    return (
        f"{words} is {of_layer.nanmean():.3f} on average, from {of_layer[low]:.3f} in layer {low} to "
        f"{of_layer[high]:.3f} in layer {high}."
    )
