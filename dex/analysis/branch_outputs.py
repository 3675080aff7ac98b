"""What the branch of a Dex adapter does to the heads' outputs on real text.

    ratio   = sqrt(Σ ‖λ f_D(O_h)‖² / Σ ‖O_h‖²)        Σ over the real tokens, and for a layer also over its heads S
    cosine  = mean over tokens of cos(O_h, λ f_D(O_h))

+1: the branch only makes the head's output smaller (it is subtracted); 0: it takes another direction away; −1: it
makes the output larger. In one forward pass the ratio of a layer is that of `DexOutput.branch_ratio`.

    S selected heads of a layer, n real tokens of a batch, D head_dim        O [n, S, D]        λ W_D [1 or S, D, D]
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dex.analysis.branch_weights import branch_matrices
from dex.analysis.subject import Progress, Subject
from dex.errors import NotFinite
from dex.stats import evaluating, real_tokens_first
from dex.tuner.projection import DexOutput


@dataclass
class BranchSums:
    """Sums over the real tokens, float64, of each selected head of one layer."""

    layer_idx: int
    heads: list[int]  # S
    matrices: Tensor  # λ W_D, [1 or S, D, D]
    output: Tensor = field(init=False)  # Σ_t ‖O_h‖²
    branch: Tensor = field(init=False)  # Σ_t ‖λ f_D(O_h)‖²
    cosine: Tensor = field(init=False)  # Σ_t cos(O_h, λ f_D(O_h)), over the tokens where neither is 0
    tokens: Tensor = field(init=False)  # how many those are

    def __post_init__(self) -> None:
        for name in ("output", "branch", "cosine", "tokens"):
            setattr(self, name, torch.zeros(len(self.heads), dtype=torch.float64))

    def add(self, heads: Tensor) -> None:
        """heads [n, S, D] float64."""
        branch = torch.einsum("nse,sef->nsf", heads, self.matrices.expand(len(self.heads), -1, -1))
        output_norm, branch_norm = heads.norm(dim=-1), branch.norm(dim=-1)  # [n, S]
        both = output_norm * branch_norm
        cosine = torch.where(both > 0, (heads * branch).sum(-1) / both, 0.0)
        self.output += output_norm.square().sum(0).cpu()
        self.branch += branch_norm.square().sum(0).cpu()
        self.cosine += cosine.sum(0).cpu()
        self.tokens += (both > 0).sum(0).cpu()

    def ratio(self) -> float:
        return _ratio(self.branch.sum(), self.output.sum())

    def ratio_of_head(self) -> list[float]:
        return [_ratio(branch, output) for branch, output in zip(self.branch, self.output, strict=True)]

    def cosine_of_head(self) -> list[float | None]:
        """None where λ f_D(O) is 0 at every token (λ = 0 or W_D = 0): 0 has no direction."""
        return [
            float(cosine / tokens) if tokens > 0 else None
            for cosine, tokens in zip(self.cosine, self.tokens, strict=True)
        ]


def _ratio(branch: Tensor, output: Tensor) -> float:
    return float((branch / output).sqrt()) if output > 0 else 0.0


@torch.no_grad()
def measure(subject: Subject, layers: list[DexOutput], adapter: str, progress: Progress) -> list[BranchSums]:
    """The sums of every one of the `layers`, which have a branch, over the real tokens of the subject's text.

    Raises NotFinite where a head's output is not a number.
    """
    sums = [BranchSums(o.layer_idx, _selected(o, adapter), branch_matrices(o, adapter)) for o in layers]
    is_real = torch.empty(0)

    with evaluating(subject.model), ExitStack() as stack:
        for layer, into in zip(layers, sums, strict=True):

            def take(module: DexOutput, args: tuple[Tensor, ...], into: BranchSums = into) -> None:
                heads = args[0][is_real].unflatten(-1, (module.num_heads, -1))  # [n, H, D]
                into.add(heads[:, into.heads].double())

            stack.callback(layer.register_forward_pre_hook(take).remove)
        done = 0
        for batch in subject.batches():
            inputs, position = real_tokens_first(batch, subject.stock.device)
            is_real = position >= 0
            subject.stock.get_decoder()(**inputs, use_cache=False)  # the logits are not needed
            done += len(position)
            progress(done, len(subject.ids))
    for each in sums:
        if not (each.output.isfinite().all() and each.branch.isfinite().all()):
            raise NotFinite(
                f"The heads' outputs of layer {each.layer_idx} are not finite; try another dtype, such as float32."
            )
    return sums


def _selected(layer: DexOutput, adapter: str) -> list[int]:
    return [head for head, is_selected in enumerate(layer.dex_selected[adapter].tolist()) if is_selected]
