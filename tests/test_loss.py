"""The loss without logits equals the loss with them, and its memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dex.loss import BUFFER_ELEMENTS, causal_lm_loss, chunked_cross_entropy, head_computes, token_losses

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 13, 8, 50


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels of which some are −100."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :4] = labels[1, 7] = labels[1, -1] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, num_targets: float | None = None) -> Tensor:
    """The oracle: all logits at once, as transformers does it."""
    logits = (hidden[:, :-1] @ weight.t()).float() if hidden.dtype != torch.float64 else hidden[:, :-1] @ weight.t()
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / (num_targets or (labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("chunk_tokens", [1, 5, 19, 1000, None])
@pytest.mark.parametrize("num_targets", [None, 7, torch.tensor(40)])
def test_loss_and_gradients_equal_those_of_the_full_logits(chunk_tokens: int | None, num_targets: Any) -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, labels, num_targets, chunk_tokens)
    expected = plain_loss(hidden, weight, labels, num_targets)
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(grads, torch.autograd.grad(3 * expected, (hidden, weight)))


def test_gradients_pass_gradcheck_in_float64() -> None:
    hidden, weight, labels = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, labels, 5, chunk_tokens=4), (hidden, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_its_rounding(dtype: torch.dtype) -> None:
    hidden, weight, labels = inputs(dtype)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
    expected = plain_loss(hidden, weight, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)  # the same half-precision logits, so not a rounding apart
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [g.dtype for g in grads] == [dtype, dtype]
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (hidden, weight)), rtol=0.02, atol=2e-3)


def test_a_float16_gradient_divided_by_many_targets_does_not_vanish_before_the_loss_is_scaled() -> None:
    hidden, weight, labels = inputs(torch.float16)
    scaled = 2.0**20 * chunked_cross_entropy(hidden, weight, labels, num_targets=2**24)
    (grad,) = torch.autograd.grad(scaled, hidden)
    (expected,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, num_targets=16), hidden)
    torch.testing.assert_close(grad, expected)


def test_autocast_runs_the_products_in_its_dtype_and_the_loss_in_float32() -> None:
    hidden, weight, labels = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=5)
        expected = plain_loss(hidden, weight, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (hidden, weight)), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("num_targets", [None, 0, 3])
def test_without_a_target_the_loss_and_its_gradients_are_zero(num_targets: int | None) -> None:
    hidden, weight, labels = inputs()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), num_targets)
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]


def test_an_improbable_target_keeps_its_exact_loss() -> None:
    """A probability of e⁻²⁰⁰ is 0 in float32; its logarithm is not."""
    hidden = torch.tensor([[[200.0], [0.0]]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [0.5]])
    labels = torch.tensor([[0, 1]])
    loss = chunked_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, torch.tensor(200.0))
    loss.backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0, 0], torch.tensor([1.0]))


def test_a_frozen_head_gets_no_gradient_and_evaluation_keeps_no_graph() -> None:
    hidden, weight, labels = inputs()
    chunked_cross_entropy(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels).requires_grad
    assert not chunked_cross_entropy(hidden.detach(), weight.detach(), labels).requires_grad


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    hidden, weight, labels = inputs()
    broken = hidden.detach().clone()
    broken[1, 2] = torch.nan
    assert chunked_cross_entropy(broken, weight, labels).isnan()


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor made in its block has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_memory_is_bounded_for_a_vocabulary_of_128k_and_4k_tokens() -> None:
    vocabulary, length, width = 128 * 1024, 4096, 4
    hidden = torch.randn(1, length, width, requires_grad=True)
    weight = torch.randn(vocabulary, width)
    labels = torch.randint(0, vocabulary, (1, length))
    labels[:, 600:] = -100  # positions without a target cost nothing, so that this test takes a second
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, weight, labels).backward()
    assert largest.elements <= BUFFER_ELEMENTS < length * vocabulary / 30


def own_loss(model: nn.Module, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    loss: Tensor = model(input_ids=input_ids, labels=labels, use_cache=False, **kwargs).loss
    return loss


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_targets", [None, 100])
def test_the_model_loss_equals_the_models_own(family: str, num_targets: int | None) -> None:
    model = tiny_model(family)
    input_ids = tokens(2, 24)
    labels = input_ids.clone()
    labels[0, :10] = -100
    position_ids = torch.cat([torch.arange(9), torch.arange(15)]).expand(2, -1)

    losses, gradients = [], []
    for loss_of in (own_loss, causal_lm_loss):
        model.zero_grad()
        name = "num_items_in_batch" if loss_of is own_loss else "num_targets"
        loss = loss_of(model, input_ids, labels, position_ids=position_ids, **{name: num_targets})
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_the_loss_runs_through_wrappers() -> None:
    class Wrapper(nn.Module):  # as DistributedDataParallel wraps
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.calls = module, 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.module(*args, **kwargs)

    adapted = get_peft_model(tiny_model(), LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    wrapper = Wrapper(adapted)
    input_ids = tokens()
    expected = own_loss(adapted, input_ids, input_ids)
    torch.testing.assert_close(causal_lm_loss(wrapper, input_ids, input_ids), expected)
    assert wrapper.calls == 1


def test_the_head_multiplies_nothing_and_is_itself_again_afterwards() -> None:
    model = tiny_model()
    input_ids = tokens()
    before = model(input_ids).logits
    seen = []

    def compute(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert weight is model.lm_head.weight
        seen.append(hidden)
        return hidden.sum()

    with head_computes(model, compute):
        out = model(input_ids).logits
    assert torch.equal(out, seen[0].sum())
    assert seen[0].shape == (2, 24, 64)
    assert torch.equal(model.lm_head(seen[0]), before)
    assert torch.equal(model(input_ids).logits, before)
    with pytest.raises(KeyError), head_computes(model, compute):
        raise KeyError
    assert torch.equal(model(input_ids).logits, before)


def test_a_model_whose_head_is_not_a_plain_product_is_refused() -> None:
    biased = tiny_model()
    biased.lm_head = nn.Linear(64, 260)
    adapted = get_peft_model(tiny_model(), LoraConfig(target_modules=["lm_head"]))
    for model, reason in (
        (tiny_model().model, "has no output head"),
        (nn.Linear(2, 2), "is not a language model"),
        (biased, "without bias"),
        (adapted, "plain nn.Linear"),
    ):
        with pytest.raises(ValueError, match=reason):
            causal_lm_loss(model, tokens(), tokens())


@pytest.mark.parametrize("chunk_tokens", [7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_losses_are_the_negative_log_likelihoods(dtype: torch.dtype, chunk_tokens: int | None) -> None:
    model = tiny_model("qwen3", dtype=dtype)
    input_ids = tokens()
    losses = token_losses(model, input_ids, chunk_tokens)
    log_p = model(input_ids).logits.float().log_softmax(-1)[:, :-1]
    assert (losses.shape, losses.dtype, losses.requires_grad) == ((2, 23), torch.float32, False)
    torch.testing.assert_close(losses, -log_p.gather(2, input_ids[:, 1:, None])[..., 0], rtol=1e-5, atol=1e-5)


def test_token_losses_of_a_row_do_not_depend_on_its_neighbours() -> None:
    model = tiny_model()
    input_ids = tokens(7)
    together = token_losses(model, input_ids)
    for size in (1, 2):
        apart = torch.cat([token_losses(model, part) for part in input_ids.split(size)])
        torch.testing.assert_close(apart, together)


def test_token_losses_of_one_token_are_none() -> None:
    assert token_losses(tiny_model(), tokens(2, 1)).shape == (2, 0)


def test_liger_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from dex.errors import DexError
    from dex.loss import refuse_without_liger

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find(name))
    with pytest.raises(DexError, match="pip install liger-kernel"):
        refuse_without_liger()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DexError, match="needs a GPU"):
        refuse_without_liger()
