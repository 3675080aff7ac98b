"""The training loss without its logits.

    loss = 1/num_targets · Σ_n −ln softmax(h_n W_Uᵀ)[label_n]

h_n: the hidden state that the head is given, [d]; W_U: the head's weight, [V, d]; n runs over the targets
(positions whose label is not −100). Logits of [B·T, V] would be 2 GB for 4k tokens of a vocabulary of 128k,
twice that with their gradient. Here they exist for one chunk of targets at a time, in one buffer, and the
gradient of the chunk is taken at once, while its probabilities are there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dex.errors import DexError

IGNORE = -100  # transformers' label for "not a target"
BUFFER_ELEMENTS = 2**24  # 64 MB of float32 logits: 341 targets of SmolLM2's vocabulary, 130 of Llama-3's
TINY_PROBABILITY = 1e-30  # near float32's smallest normal number, 1.2e-38, ln p loses its digits


def chunked_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    num_targets: int | float | Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross-entropy of the next token, as transformers computes it, in bounded memory.

    hidden: [B, T, d], what the head is given. head_weight: [V, d]. labels: [B, T], not shifted, −100 where
    there is no target. The SUM over targets is divided by `num_targets` (default: the targets of this call;
    a trainer that accumulates passes those of the whole update). Returns a scalar, float32 (float64 for
    float64 inputs); without any target it is 0 with gradients of 0.
    Under autocast the two matrix products run in autocast's dtype, the loss never does.
    """
    targets = labels[:, 1:].to(hidden.device)
    batch, place = (targets != IGNORE).nonzero(as_tuple=True)
    rows = batch * hidden.shape[1] + place  # position t predicts the label at t + 1
    hidden, head_weight = _in_autocast_dtype(hidden), _in_autocast_dtype(head_weight)
    divisor = float(num_targets) if num_targets is not None else float(len(rows))
    scale = 1.0 / divisor if len(rows) else 0.0
    trained = torch.is_grad_enabled()
    return _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        head_weight,
        rows,
        targets[batch, place],
        scale,
        chunk_tokens or _chunk_length(head_weight),
        (trained and hidden.requires_grad, trained and head_weight.requires_grad),
    )


def liger_cross_entropy(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, num_targets: int | float | Tensor | None = None
) -> Tensor:
    """`chunked_cross_entropy` by the kernel of the package liger-kernel, which needs a GPU."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    targets = labels[:, 1:].reshape(-1).to(hidden.device)
    hidden, head_weight = _in_autocast_dtype(hidden), _in_autocast_dtype(head_weight)
    rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    total: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(head_weight, rows, targets)
    return total / (num_targets if num_targets is not None else (targets != IGNORE).sum())


def refuse_without_liger() -> None:
    """Raise DexError if `liger_cross_entropy` cannot run here."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise DexError(
            "run.loss liger needs the package liger-kernel: `pip install liger-kernel`, or run.loss: chunked."
        )
    if not torch.cuda.is_available():
        raise DexError("run.loss liger needs a GPU, and there is none here; use run.loss: chunked.")


CrossEntropy = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    num_targets: int | float | Tensor | None = None,
    cross_entropy: CrossEntropy = chunked_cross_entropy,
    **inputs: Any,
) -> Tensor:
    """The loss of `model(input_ids, labels=labels)`, without its logits.

    input_ids, labels: [B, T]; `inputs` (position_ids, attention_mask, …) go to the model as they are.
    `model` may be wrapped (PEFT, DDP): its own forward is called. Raises ValueError for a
    head that is not a plain linear one.
    """

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(hidden, weight, labels, num_targets)

    return _computed_by_the_head(model, loss, input_ids, inputs)


@torch.no_grad()
def token_losses(model: nn.Module, input_ids: Tensor, chunk_tokens: int | None = None, **inputs: Any) -> Tensor:
    """−ln p(token t+1 | tokens ≤ t), [B, T−1], float32, for every position, padding included.

    input_ids: [B, T]. The model's mode (train, eval) is left as it is.
    """

    def losses(hidden: Tensor, weight: Tensor) -> Tensor:
        return _token_losses(hidden, weight, input_ids, chunk_tokens)

    return _computed_by_the_head(model, losses, input_ids, inputs)


def _computed_by_the_head(
    model: nn.Module, compute: Callable[[Tensor, Tensor], Tensor], input_ids: Tensor, inputs: dict[str, Any]
) -> Tensor:
    check_head(model)
    with head_computes(model, compute):
        out: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return out


def _token_losses(hidden: Tensor, weight: Tensor, input_ids: Tensor, chunk_tokens: int | None) -> Tensor:
    weight, hidden = _in_autocast_dtype(weight), _in_autocast_dtype(hidden)[:, :-1]
    rows = hidden.reshape(-1, hidden.shape[-1])
    targets = input_ids[:, 1:].reshape(-1).to(rows.device)
    length = chunk_tokens or _chunk_length(weight)
    buffers = _Buffers(min(length, len(rows)), weight)
    losses = torch.zeros(len(rows), dtype=_loss_dtype(weight), device=rows.device)
    for h, target, loss in zip(rows.split(length), targets.split(length), losses.split(length), strict=True):
        loss.copy_(_probabilities_and_losses(h, weight, target, buffers)[1])
    return losses.view(hidden.shape[:2])


@contextmanager
def head_computes(model: nn.Module, compute: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Within the block, `model`'s forward gives compute(hidden, W_U) as its logits; hidden: [B, T, d], W_U: [V, d].

    Inside the head's own forward, not after the model's: there a sharded W_U is whole (FSDP2, ZeRO-3), and what the
    model returns is what the backward pass begins at, which wrappers (DDP, FSDP2) rely on.
    """
    kept: list[Tensor] = []

    def keep_and_empty(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        kept.append(args[0])
        return (args[0][:, :0],)

    def replace(head: Any, args: tuple[Tensor, ...], empty: Tensor) -> Tensor:
        return compute(kept.pop(), head.weight)

    head = output_head(model)
    before = head.register_forward_pre_hook(keep_and_empty)
    after = head.register_forward_hook(replace, prepend=True)  # before a hook that gives the weight back
    try:
        yield
    finally:
        before.remove()
        after.remove()


def output_head(model: nn.Module) -> nn.Module:
    """The module that turns hidden states into logits, also of a wrapped model."""
    while not hasattr(model, "get_output_embeddings"):
        if not isinstance(getattr(model, "module", None), nn.Module):
            raise ValueError(f"{type(model).__name__} is not a language model with a head.")
        model = model.module  # type: ignore[assignment]
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head.")
    return head


def check_head(model: nn.Module) -> None:
    """Raise ValueError for a head that is more than a product with its weight.

    That is: a bias (no Llama or Qwen has one), an adapter of its own, quantised values.
    """
    head = output_head(model)
    if not isinstance(head, nn.Linear) or head.bias is not None or not head.weight.is_floating_point():
        raise ValueError("The chunked loss needs a head that is a plain nn.Linear without bias.")


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradients are ready when the forward ends; the backward only multiplies by its own input."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, d]
        weight: Tensor,  # [V, d]
        rows: Tensor,  # [M], the rows of `hidden` that have a target
        targets: Tensor,  # [M]
        scale: float,
        chunk_tokens: int,
        trained: tuple[bool, bool],  # is hidden, is weight
    ) -> Tensor:
        train_hidden, train_weight = trained
        precision = _loss_dtype(weight)
        total = torch.zeros((), dtype=precision, device=hidden.device)
        hidden_grad = torch.zeros_like(hidden) if train_hidden else None
        # A sum over chunks: bfloat16 would lose the later ones.
        weight_grad = torch.zeros_like(weight, dtype=precision) if train_weight else None
        buffers = _Buffers(min(chunk_tokens, len(rows)), weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, target in zip(rows.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
                if not len(chunk):
                    continue
                h = hidden[chunk]  # [n, d]
                p, losses = _probabilities_and_losses(h, weight, target, buffers)
                total += losses.sum()
                if not any(trained):
                    continue
                p[torch.arange(len(p), device=p.device), target] -= 1.0  # now ∂loss/∂logits, [n, V]
                g = buffers.in_weight_dtype(p)
                if hidden_grad is not None:
                    hidden_grad[chunk] = torch.mm(g, weight)
                if weight_grad is not None:
                    weight_grad += torch.mm(g.t(), h)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.scale, ctx.weight_dtype = scale, weight.dtype
        return total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        factor = grad_loss * ctx.scale  # applied here, in float32: a float16 gradient would underflow before
        if hidden_grad is not None:
            hidden_grad = (hidden_grad * factor).to(hidden_grad.dtype)
        if weight_grad is not None:
            weight_grad = (weight_grad * factor).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


class _Buffers:
    """The [chunk, V] memory that every chunk uses again.

    Logits have the weight's dtype, probabilities are float32; for a float32 weight the two are one.
    """

    def __init__(self, chunk_tokens: int, weight: Tensor) -> None:
        shape = (chunk_tokens, weight.shape[0])
        self.logits = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        precision = _loss_dtype(weight)
        self.probabilities = self.logits.to(precision)

    def in_weight_dtype(self, values: Tensor) -> Tensor:
        """`values` [n, V] for the matrix products, cast into the logits' buffer, which is free by then."""
        return values if values.dtype == self.logits.dtype else self.logits[: len(values)].copy_(values)


def _probabilities_and_losses(h: Tensor, weight: Tensor, targets: Tensor, buffers: _Buffers) -> tuple[Tensor, Tensor]:
    """softmax(h Wᵀ), [n, V] (in the buffer), and −ln of the targets' entries, [n].

    Softmax in place is the only pass over the buffer besides the matrix products: 0.19 s, where log-sum-exp
    and exp took 0.80 s and the products 4.6 s (2048 targets, V=49152, two cores).
    """
    logits = torch.mm(h, weight.t(), out=buffers.logits[: len(h)])
    p = buffers.probabilities[: len(h)]
    if p.dtype != logits.dtype:
        p.copy_(logits)
    torch.softmax(p, dim=-1, out=p)
    target_p = p.gather(1, targets[:, None])[:, 0]
    losses = -target_p.log()
    lost = (target_p < TINY_PROBABILITY).nonzero()[:, 0]  # a target some 69 below the largest logit
    for row in lost.tolist():
        losses[row] = _loss_of_row(h[row], weight, targets[row])
    return p, losses


def _loss_of_row(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = torch.mv(weight, h).to(_loss_dtype(weight))  # [V]
    return logits.logsumexp(0) - logits[target]


def _loss_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _in_autocast_dtype(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _chunk_length(weight: Tensor) -> int:
    return max(1, BUFFER_ELEMENTS // weight.shape[0])
