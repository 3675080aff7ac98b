"""One update of a run on fake tensors: the real model, loss and optimiser, with every allocation counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dex.loss import causal_lm_loss, chunked_cross_entropy
from dex.planning.outline import Outline, quantised
from dex.planning.tracker import KINDS, Kind, Tracker
from dex.recipe import Recipe

NF4_BYTES = 0.5 + 4 / 64  # of one value: 4 bits, and a float32 for each 64 (bitsandbytes without double quantisation)


@dataclass(frozen=True)
class StepFigures:
    """Bytes of one process by kind, and floating point operations of one process by dtype.

    `full`: each kind by itself, at its largest (activations: at the end of the forward pass). `at_peak`: what of it
    is there when most is; its sum is the peak. `micro`: operations of one micro-batch; `update`: of the optimiser's
    step. `unit`: the weights of the largest decoder layer, `root`: of all that is outside the layers, in bytes.
    """

    full: dict[Kind, int]
    at_peak: dict[Kind, int]
    micro: dict[str, int]
    update: dict[str, int]
    unit: int
    root: int

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def simulate(recipe: Recipe, outline: Outline, accumulates: bool) -> StepFigures:
    """A later update of the run, whose optimiser has its state; with the gradients of earlier micro-batches or none.

    Blocks hold several documents, as packed text does: the attention gets a mask. The outline's model is used up.
    """
    model = outline.subject.model
    with FakeTensorMode(), Tracker() as tracker:
        if recipe.model.quantise is not None:
            for linear in quantised(model):
                _quantise(linear, recipe.model.quantise, outline.dtype)
        with tracker.making("frozen"):
            give_memory(model)
        unit, root = _units(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        tracker.count_as("trained", trained)
        optimizer = recipe.method.optimizer(outline.subject.parameter_groups(recipe.run))
        _first_step(optimizer, trained, tracker, keep_gradients=accumulates)
        tracker.begin()
        loss = _forward(model, recipe, tracker)
        activations = tracker.live["activations"] + tracker.live["loss"]
        _backward(loss, trained, recipe, tracker)
        micro = _by_name(tracker.flops)
        before = Counter(tracker.flops)
        optimizer.step()
        update = _by_name(tracker.flops - before)
    full = {kind: tracker.most[kind] for kind in KINDS} | {"activations": activations}
    return StepFigures(full, {kind: tracker.peak[kind] for kind in KINDS}, micro, update, unit, root)


def _first_step(
    optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], tracker: Tracker, keep_gradients: bool
) -> None:
    """Make gradients and the optimiser's state, as the first update does."""
    with tracker.making("gradients"):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    tracker.count_as("optimiser", _tensors(optimizer.state))
    if not keep_gradients:
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        if "update_proj_gap" in group:  # the next step is one that makes a new projection, and needs most
            group["step"] = group["update_proj_gap"] - 1


def _forward(model: Any, recipe: Recipe, tracker: Tracker) -> Tensor:
    run = recipe.run
    model.train()
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )

    def cross_entropy(*given: Any) -> Tensor:
        with tracker.making("loss"):
            return chunked_cross_entropy(*given)

    with tracker.making("activations"):
        ids, positions, labels = (torch.empty(run.micro_batch, recipe.data.block, dtype=torch.int64) for _ in "ipl")
        targets = float(run.micro_batch * (recipe.data.block - 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
            return causal_lm_loss(model, ids, labels, targets, cross_entropy, position_ids=positions)


def _backward(loss: Tensor, trained: list[nn.Parameter], recipe: Recipe, tracker: Tracker) -> None:
    """Gradients count as such as soon as they are a parameter's."""

    def note(parameter: Any) -> None:
        tracker.count_as("gradients", [parameter.grad])

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]
    loss.backward()
    for handle in handles:
        handle.remove()
    if recipe.run.clip is not None:
        torch.nn.utils.clip_grad_norm_(trained, recipe.run.clip)


# --- Memory for a model on the meta device -----------------------------------------------------------------


def give_memory(model: nn.Module) -> None:
    """Replace every parameter and buffer by a fake one on the CPU; tied ones stay tied."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too: an id is another tensor's once its own is gone

    def fake(old: Tensor) -> Tensor:
        if id(old) not in done:
            new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            is_parameter = isinstance(old, nn.Parameter)
            done[id(old)] = (old, nn.Parameter(new, old.requires_grad) if is_parameter else new)
        return done[id(old)][1]

    for module in model.modules():
        groups: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in groups:
            tensors.update({name: fake(old) for name, old in tensors.items() if old is not None})


def _quantise(linear: nn.Linear, kind: str, dtype: torch.dtype) -> None:
    """Let a projection hold as many bytes as bitsandbytes does, and dequantise them each time it is used."""
    shape, count = linear.weight.shape, linear.weight.numel()
    size = round(count * NF4_BYTES) if kind == "4bit" else count + 4 * shape[0]
    linear.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = _Dequantised.apply(x.to(dtype), linear.weight, shape)
        return (out if linear.bias is None else out + linear.bias).to(x.dtype)

    linear.forward = forward  # type: ignore[method-assign, assignment]


class _Dequantised(torch.autograd.Function):
    """x [..., in] → [..., out]; the weight [out, in] is whole within a pass alone, in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape, ctx.save = shape, ctx.save_for_backward(packed)
        return F.linear(x, x.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None


def _units(model: Any) -> tuple[int, int]:
    layers = (model.get_base_model() if hasattr(model, "get_base_model") else model).get_decoder().layers
    sizes = [_bytes(layer) for layer in layers]
    return max(sizes), _bytes(model) - sum(sizes)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in module.parameters())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an optimiser's state, also those that an object in it holds (GaLore's projection)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _by_name(flops: Counter[torch.dtype]) -> dict[str, int]:
    return {str(dtype).removeprefix("torch."): number for dtype, number in flops.items() if number}
