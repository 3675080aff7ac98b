"""The wrapped projections: what PEFT puts in the place of k_proj, v_proj and o_proj.

K and V get a trained copy (`DexLayer`); O gets a trained copy and the branch of `dex.layer` (`DexOutput`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.nn import functional as F

from dex.errors import DexError
from dex.layer import Schedule, WDInit, fold_weight
from dex.tuner import annealing


class DexLayer(nn.Module, BaseTunerLayer):
    """A frozen projection with, per adapter, a float32 copy that trains in its place. K and V are just this.

    The copies are float32 whatever the base's dtype, since bfloat16 swallows updates of 1e-4 relative size.
    """

    adapter_layer_names: tuple[str, ...] = ("dex_weight", "dex_bias")
    other_param_names: tuple[str, ...] = ("dex_step",)

    base_layer: nn.Linear
    if TYPE_CHECKING:  # properties of BaseTunerLayer
        active_adapters: list[str]

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features = base_layer.in_features
        self.out_features = base_layer.out_features
        self.dex_weight = nn.ParameterDict()
        self.dex_bias = nn.ParameterDict()
        self.dex_step = BufferDict(persistent=True)
        self.merged_adapters: list[str] = []
        self._unmerged: tuple[Tensor, Tensor | None] | None = None
        annealing.follow(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        annealing.follow(self)  # a deepcopy trains on its own

    def add_copy(self, adapter: str) -> None:
        """Give `adapter` a trainable float32 copy of the projection's weight and bias."""
        base = self.base_layer
        self.dex_weight[adapter] = nn.Parameter(base.weight.detach().to(torch.float32, copy=True))
        if base.bias is not None:
            self.dex_bias[adapter] = nn.Parameter(base.bias.detach().to(torch.float32, copy=True))

    def count_steps(self, adapter: str) -> None:
        """Start the count t of optimiser steps done; it is a buffer, so it is saved with the adapter."""
        self.dex_step[adapter] = torch.zeros(1, dtype=torch.int64, device=self.base_layer.weight.device)

    def adapter_parameters(self, adapter: str) -> list[nn.Parameter]:
        groups = (getattr(self, name) for name in self.adapter_layer_names)
        return [group[adapter] for group in groups if adapter in group]

    def trains(self, adapter: str) -> bool:
        return any(parameter.requires_grad for parameter in self.adapter_parameters(adapter))

    def projection(self, adapter: str) -> tuple[Tensor, Tensor | None]:
        """The weight [out, in] and bias [out] that stand in for the base's: float32, differentiable."""
        base = self.base_layer
        weight = self.dex_weight.get(adapter, base.weight).float()
        bias = self.dex_bias.get(adapter, base.bias)
        return weight, bias

    def projection_to_merge(self, adapter: str) -> tuple[Tensor, Tensor | None]:
        """`projection` for good: computed in float64, to be cast once."""
        return self.projection(adapter)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [B, T, in] → [B, T, out]."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        adapter = self.adapter_in_use()
        if adapter is None:
            return self.base_layer(x, *args, **kwargs)
        weight, bias = self.projection(adapter)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def adapter_in_use(self) -> str | None:
        """The active adapter that this layer has, or None where the base's own projection is used."""
        if self.disable_adapters or self.merged:
            return None
        return self._the_only([name for name in self.active_adapters if name in self.dex_step])

    @staticmethod
    def _the_only(adapters: Sequence[str]) -> str | None:
        if len(adapters) > 1:
            raise DexError(
                f"The Dex adapters {', '.join(adapters)} are active at once, but each replaces the same projections; "
                "activate one with set_adapter()."
            )
        return adapters[0] if adapters else None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put the adapter's projection in the base's place, cast once to the base's dtype."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.dex_step]
        adapter = self._the_only([*self.merged_adapters, *names])
        if adapter is None or not names:
            return
        base = self.base_layer
        with torch.no_grad():
            weight, bias = self.projection_to_merge(adapter)
        if safe_merge and not torch.isfinite(weight).all():
            raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
        self._unmerged = (base.weight.data, None if base.bias is None else base.bias.data)
        base.weight.data = weight.to(base.weight.dtype)
        if bias is not None:
            base.bias.data = bias.to(base.bias.dtype)
        self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Put the base's own projection back, bit for bit: `merge` kept it."""
        if self._unmerged is None:
            return
        base = self.base_layer
        weight, bias = self._unmerged
        base.weight.data = weight.to(base.weight.device)
        if bias is not None:
            base.bias.data = bias.to(base.bias.device)
        self._unmerged = None
        self.merged_adapters.clear()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT's own also casts to the base's dtype, which would round the float32 copies of a bfloat16 base.
        device = device or self.base_layer.weight.device
        for name in (*self.adapter_layer_names, *self.other_param_names):
            group = getattr(self, name)
            if adapter_name in group and group[adapter_name].device.type != "meta":
                group[adapter_name] = group[adapter_name].to(device)


class DexOutput(DexLayer):
    """o_proj with the branch: W_D, λ and the selected heads, folded into W_O in every forward pass."""

    adapter_layer_names = (*DexLayer.adapter_layer_names, "dex_w_d", "dex_lam")
    other_param_names = (*DexLayer.other_param_names, "dex_selected", "dex_heads")
    lam_scale = 1.0  # what λ is multiplied by, here alone; of `dex.tuner.scaling`, and never saved

    def __init__(self, base_layer: nn.Linear, layer_idx: int, head_dim: int) -> None:
        super().__init__(base_layer)
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_heads = base_layer.in_features // head_dim
        self.dex_w_d = nn.ParameterDict()
        self.dex_lam = nn.ParameterDict()  # λ_learn [1]: FSDP2's fully_shard refuses scalars
        self.dex_selected = BufferDict(persistent=False)  # [H]; from the config, so it is not saved again
        self.dex_heads = BufferDict(persistent=False)  # the indices of the selected heads, where each has its own W_D
        self.schedules: dict[str, Schedule] = {}

    def add_branch(
        self,
        adapter: str,
        heads: Sequence[int],
        schedule: Schedule,
        w_d_init: WDInit,
        w_d_per: Literal["layer", "head"] = "layer",
    ) -> None:
        """Give `adapter` a branch on the heads S of this layer: W_D [D, D], or [S, D, D] with one for each head."""
        device = self.base_layer.weight.device
        w_d = torch.zeros(len(heads), self.head_dim, self.head_dim, device=device)
        if w_d_per == "layer":
            w_d = w_d[0]
        else:
            self.dex_heads[adapter] = torch.tensor(list(heads), device=device)
        if w_d_init == "kaiming":
            for matrix in w_d.unbind() if w_d.ndim == 3 else [w_d]:
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))  # nn.Linear's default; the paper gives none
        self.dex_w_d[adapter] = nn.Parameter(w_d.clone())
        if schedule.learns:
            self.dex_lam[adapter] = nn.Parameter(torch.full((1,), schedule.lam_learn_start, device=device))
        selected = torch.zeros(self.num_heads, device=device)
        selected[list(heads)] = 1.0
        self.dex_selected[adapter] = selected
        self.schedules[adapter] = schedule

    def w_d(self, adapter: str) -> Tensor:
        """W_D as `dex.layer` takes it: [D, D], or [H, D, D] with zeros for the heads that are not selected."""
        w_d = self.dex_w_d[adapter]
        if adapter not in self.dex_heads:
            return w_d
        return w_d.new_zeros(self.num_heads, *w_d.shape[1:]).index_copy(0, self.dex_heads[adapter], w_d)

    def has_branch(self, adapter: str) -> bool:
        return adapter in self.dex_w_d

    def lam(self, adapter: str) -> Tensor:
        """λ(t) [1] at the count of optimiser steps that the adapter has done, times `lam_scale`.

        Differentiable in λ_learn.
        """
        schedule = self.schedules[adapter]
        lam_learn = self.dex_lam[adapter] if schedule.learns else None
        if lam_learn is not None and schedule.anneal_steps is None and self.training and torch.is_grad_enabled():
            raise DexError(
                f"The schedule {schedule.name!r} needs the annealing length T_a before training: set "
                "DexConfig(anneal_steps=N), or add dex.DexCallback() to the Trainer, which sets half of the run."
            )
        return self.lam_scale * schedule.lam(self.dex_step[adapter], lam_learn)

    def projection(self, adapter: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().projection(adapter)
        if not self.has_branch(adapter):
            return weight, bias
        # Under autocast the fold would be rounded to bfloat16 before it is applied.
        with torch.autocast(weight.device.type, enabled=False):
            weight = fold_weight(weight, self.w_d(adapter), self.lam(adapter), self.dex_selected[adapter])
        return weight, bias

    def projection_to_merge(self, adapter: str) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().projection(adapter)
        if self.has_branch(adapter):
            w_d, lam, selected = self.w_d(adapter), self.lam(adapter), self.dex_selected[adapter]
            weight = fold_weight(weight.double(), w_d.double(), lam.double(), selected.double())
        return weight, bias

    def branch_ratio(self, heads: Tensor) -> Tensor:
        """‖λ f_D(O)‖ / ‖O‖ over the selected heads of heads [B, T, H·D]; 0 without a branch. A scalar."""
        adapter = self.adapter_in_use()
        if adapter is None or not self.has_branch(adapter):
            return heads.new_zeros(())
        chosen = self.dex_selected[adapter].bool()
        selected = heads.detach().float().unflatten(-1, (self.num_heads, -1))[..., chosen, :]
        w_d = self.dex_w_d[adapter].detach()
        f_d = selected @ w_d if w_d.ndim == 2 else torch.einsum("...he,hef->...hf", selected, w_d)
        return (self.lam(adapter).detach() * f_d).norm() / selected.norm()
