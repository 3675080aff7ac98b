"""The Hessian of a sequence's next-token loss in the attention's weights, as a product with a vector.

    g   = ∂L/∂w            L: mean next-token loss; w [n]: the attention's weights in float32, one after another
    H v = ∂(g · v)/∂w      a second backward pass, through the first; H itself, [n, n], is never formed

The graph of g is made once, so a product costs one backward pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from dex.errors import NotFinite
from dex.heads import sequence_losses
from dex.stats import evaluating


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

    The model's own weights, gradients and flags stay untouched.
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
