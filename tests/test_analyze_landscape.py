"""The Lanczos process against numpy; the Hessian's products against the whole one and differences of gradients."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from eager_maps import subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix import model_of
from tiny import tiny_model, tokens
from torch.func import functional_call

from dex.analysis import landscape
from dex.analysis.hessian import hessian, weights_in_use
from dex.analysis.lanczos import Lanczos, lanczos
from dex.analysis.landscape import analyze, bytes_needed
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.errors import NotFinite

KINDS = ["llama", "qwen2", "qwen3", "attached", "diff-v1", "diff-v2", "diffllama"]


def start_of(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def symmetric(eigenvalues: list[float], seed: int) -> torch.Tensor:
    n = len(eigenvalues)
    axes, _ = torch.linalg.qr(start_of(n * n, seed).view(n, n))
    return axes @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ axes.T


def analysed(subject: Any) -> Findings:
    return analyze(subject, lambda done, total: None)


def values(found: Findings, name: str) -> Any:
    return next(statistic.values for statistic in found.statistics if statistic.name == name)


# ---- Lanczos -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_as_many_steps_as_dimensions_give_every_eigenvalue(n: int, seed: int) -> None:
    A = start_of(n * n, seed).view(n, n)
    A = A + A.T
    found = lanczos(lambda v: A @ v, start_of(n, seed + 1), n)
    np.testing.assert_allclose(found.values.numpy()[::-1], np.linalg.eigvalsh(A.numpy()), atol=1e-8)
    assert float(found.weights.sum()) == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 30), steps=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_fewer_steps_give_values_with_an_eigenvalue_within_their_residual(n: int, steps: int, seed: int) -> None:
    A = start_of(n * n, seed).view(n, n)
    A = A + A.T
    found = lanczos(lambda v: A @ v, start_of(n, seed + 1), steps)
    eigenvalues = torch.linalg.eigvalsh(A)
    nearest = (found.values[:, None] - eigenvalues).abs().min(1).values
    assert (nearest <= found.residuals + 1e-9).all()
    assert eigenvalues[0] - 1e-9 <= found.values[-1]
    assert found.values[0] <= eigenvalues[-1] + 1e-9


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 20), steps=st.integers(1, 6), power=st.integers(0, 11), seed=st.integers(0, 10**6))
def test_the_quadrature_is_exact_up_to_degree_twice_the_steps_less_one(
    n: int, steps: int, power: int, seed: int
) -> None:
    A = symmetric(torch.linspace(-1, 1.2, n).tolist(), seed)
    start = start_of(n, seed + 1)
    found = lanczos(lambda v: A @ v, start, steps)
    power = min(power, 2 * steps - 1)
    q = start / start.norm()
    exact = float(q @ torch.linalg.matrix_power(A, power) @ q)
    assert float((found.weights * found.values**power).sum()) == pytest.approx(exact, abs=1e-9)


def test_over_many_starts_the_negative_weight_is_the_share_of_negative_eigenvalues() -> None:
    eigenvalues = torch.tensor([-3.0, -1.0, -0.5, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 4.0], dtype=torch.float64)
    shares = []
    for seed in range(150):
        found = lanczos(lambda v: eigenvalues * v, start_of(10, seed), 10)
        shares.append(float(found.weights[found.values < 0].sum()))
    assert np.mean(shares) == pytest.approx(0.3, abs=4 * np.std(shares) / 150**0.5)
    assert np.std(shares) < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_stops_at_an_invariant_subspace_whose_values_are_exact(dtype: torch.dtype) -> None:
    A = symmetric([3.0] * 8 + [-1.0] * 8 + [0.5] * 4, 0).to(dtype)  # three eigenvalues: three steps say all
    products = []

    def matvec(v: torch.Tensor) -> torch.Tensor:
        products.append(A @ v)
        return products[-1]

    found = lanczos(matvec, start_of(20, 1, dtype), 15)
    assert len(products) == len(found.values) == 3
    np.testing.assert_allclose(found.values.numpy(), [3.0, 0.5, -1.0], atol=1e-5)
    assert found.residuals.max() < 1e-4


def test_a_matrix_of_zeros_has_the_eigenvalue_0() -> None:
    found = lanczos(torch.zeros_like, start_of(5), 4)
    assert (found.values.tolist(), found.residuals.tolist()) == ([0.0], [0.0])


def test_no_eigenvalue_comes_back_a_second_time() -> None:
    eigenvalues = torch.cat([torch.tensor([1000.0]), torch.linspace(0, 1, 199)])  # found early, and at once again
    found = lanczos(lambda v: eigenvalues * v, start_of(200, 0, torch.float32), 40)
    assert int((found.values > 500).sum()) == 1
    assert float(found.values[0]) == pytest.approx(1000, rel=1e-5)


def test_a_product_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NotFinite):
        lanczos(lambda v: v * float("inf"), start_of(4), 3)


# ---- the Hessian -------------------------------------------------------------------------------------------


def smallest_model() -> Any:
    """128 attention weights: Q, K, V and O of 2 heads of 2, the width 8."""
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 2}
    special: dict[str, Any] = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return tiny_model("llama", num_attention_heads=2, num_key_value_heads=2, **shape, **special)


def full_hessian(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """By torch, of eager attention in float64."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    weights = {f"model.layers.0.self_attn.{name}_proj.weight": (32, shape) for name, shape in _shapes().items()}
    own = dict(model.named_parameters())

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([count for count, _ in weights.values()])
        given = {name: part.view(weights[name][1]) for name, part in zip(weights, parts, strict=True)}
        return functional_call(model, given, (), {"input_ids": ids, "labels": ids, "use_cache": False}).loss

    flat = torch.cat([own[name].detach().flatten() for name in weights])
    return torch.autograd.functional.hessian(loss, flat)


def _shapes() -> dict[str, tuple[int, int]]:
    return {"q": (4, 8), "k": (4, 8), "v": (4, 8), "o": (8, 4)}


def test_the_products_are_the_full_hessian_and_lanczos_finds_all_its_eigenvalues() -> None:
    model, ids = smallest_model(), tokens(1, 10) % 11
    names = weights_in_use(model, ids)
    expected = full_hessian(model, ids)
    with hessian(model, names, ids) as product:
        found = torch.stack([product(row) for row in torch.eye(128)])
        ritz = lanczos(product, start_of(128, 0, torch.float32), 128)
    scale = float(expected.abs().max())
    assert scale > 0.01
    torch.testing.assert_close(found.double(), expected, atol=1e-4 * scale, rtol=0)
    eigenvalues = torch.linalg.eigvalsh(expected).flip(0)
    size = float(eigenvalues.abs().max())
    for place in (0, -1):
        assert float(ritz.values[place]) == pytest.approx(float(eigenvalues[place]), abs=1e-4 * size)
    for eigenvalue in eigenvalues[
        eigenvalues.abs() > 1e-2 * size
    ]:  # each of the distinct ones, in float32's rounding
        assert float((ritz.values - eigenvalue).abs().min()) < 1e-4 * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_difference_of_two_gradients(kind: str) -> None:
    """Of every layout, with GQA and biases: eager attention, plain backward passes, float64 but for an adapter."""
    model, ids, step = model_of(kind), tokens(1, 12), 1e-3
    stock = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = weights_in_use(stock, ids)
    own = dict(stock.named_parameters())
    direction = start_of(sum(own[name].numel() for name in names), 3, torch.float32)
    direction /= direction.norm()
    with hessian(stock, names, ids) as product:
        found = product(direction)

    moved = copy.deepcopy(stock) if kind == "attached" else copy.deepcopy(stock).double()
    moved.set_attn_implementation("eager")
    weights = [dict(moved.named_parameters())[name].requires_grad_() for name in names]
    parts = direction.double().split([each.numel() for each in weights])

    def gradient(by: float) -> torch.Tensor:
        with torch.no_grad():
            for weight, part in zip(weights, parts, strict=True):
                weight.add_(by * part.view_as(weight))
        found = torch.autograd.grad(moved(input_ids=ids, labels=ids, use_cache=False).loss, weights)
        return torch.cat([each.flatten() for each in found])

    ahead, behind = gradient(step), gradient(-2 * step)
    expected = (ahead - behind) / (2 * step)
    rounding = 2e-2 if kind == "attached" else 5e-3  # in float32 the gradients' rounding, over the step, adds to it
    assert float((found - expected).norm() / expected.norm()) < rounding
    assert float(expected.norm()) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_attention_that_are_in_use_without_norms(kind: str) -> None:
    model = model_of(kind)
    stock = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = {
        name.split("self_attn.")[1]
        for name in weights_in_use(stock, tokens(1, 6))
        if name.startswith("model.layers.0")
    }
    expected = {f"{name}_proj.weight" for name in "qkvo"}
    if kind == "qwen2":
        expected |= {f"{name}_proj.bias" for name in "qkv"}
    if kind == "attached":  # Q is the base's, a fixed λ is no parameter, and the base's K, V and O stand by
        copies = {f"{name}_proj.dex_weight.default" for name in "kvo"}
        expected = {"q_proj.weight", *copies, "o_proj.dex_w_d.default"}
    if kind == "diff-v2":
        expected |= {"lambda_proj.weight"}
    if kind in ("diff-v1", "diffllama"):
        expected |= {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}
    assert found == expected


# ---- the section -------------------------------------------------------------------------------------------


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landscape, "STEPS", 4)


def test_the_findings_are_made_of_the_runs_of_every_sequence_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landscape, "hessian", lambda *_: _Nothing())
    ritz = {
        (0, 5): [4.0, 1.0, -2.0],
        (0, 6): [4.5, 1.0, 0.001],
        (1, 5): [8.0, -0.001, -1.0],
        (1, 6): [9.0, 0.5, -3.0],
    }
    runs = iter(ritz.values())
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    residuals = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    monkeypatch.setattr(
        landscape,
        "lanczos",
        lambda *_: Lanczos(torch.tensor(next(runs), dtype=torch.float64), weights, residuals),
    )
    calls: list[tuple[int, int]] = []
    found = analyze(subject_of("llama", lengths=(9, 9), seed=5), lambda *done: calls.append(done))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert values(found, "hessian_largest") == (4.25 + 8.5) / 2
    assert values(found, "hessian_largest_spread") == pytest.approx(np.std([4.25, 8.5], ddof=1), rel=1e-5)
    assert values(found, "hessian_seed_spread") == (0.5 + 1.0) / 2
    assert values(found, "hessian_smallest") == pytest.approx((-2.0 + 0.001 - 1.0 - 3.0) / 4)
    assert values(found, "hessian_negative_share") == pytest.approx((0.3 + 0.0 + 0.5 + 0.3) / 4)
    assert values(found, "hessian_negative_share_seed_spread") == pytest.approx((0.3 + 0.2) / 2)
    assert values(found, "hessian_near_zero_share") == pytest.approx((0.0 + 0.3 + 0.2 + 0.0) / 4)
    curvatures = [0.6 / 2.8, 0.0, 0.3002 / 4.3002, 0.9 / 5.5]
    assert values(found, "hessian_negative_curvature") == pytest.approx(np.mean(curvatures), rel=1e-5)
    assert found.tables[0].rows[1] == [1, 6, 4.5, 1.0, 0.001, 0.0, 0.1]
    assert [row[:2] for row in found.tables[0].rows] == [[1, 5], [1, 6], [2, 5], [2, 6]]
    (curve,) = found.curves
    for line in curve.lines.values():
        assert len(line) == len(curve.x) == 12
        assert sum(filter(None, line)) == pytest.approx(1.0)


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.usefixtures("few_steps")
def test_padding_does_not_count_and_one_sequence_has_no_spread() -> None:
    model = smallest_model()
    subject = subject_of(model, lengths=(8, 1))  # a row of one token has no loss
    ids = subject.ids % 11
    mask = subject.attention_mask
    left = analysed(SimpleNamespace(**_of(subject, model, ids, mask)))
    plain = analysed(SimpleNamespace(**_of(subject, model, ids[:1], None)))
    assert left == plain
    assert values(left, "hessian_largest_spread") is None
    assert values(left, "hessian_largest") > 0


def _of(subject: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
    batch = {"input_ids": ids, **({} if mask is None else {"attention_mask": mask})}
    parts = {"stock": model, "layers": model.model.layers, "settings": subject.settings}
    return {**parts, "batches": lambda: iter([batch])}


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("kind", ["attached", "diff-v1"])
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model = model_of(kind)
    model.train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    kept = {name: (p.detach().clone(), p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()}
    analysed(subject_of(model, lengths=(6,)))
    for name, parameter in model.named_parameters():
        value, required, place = kept[name]
        assert torch.equal(parameter, value)
        assert parameter.grad is None
        assert (parameter.requires_grad, parameter.data_ptr()) == (required, place)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("few_steps")
def test_a_bfloat16_model_is_analysed_in_float32_and_stays_bfloat16() -> None:
    rounded = smallest_model().to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    batch = {"input_ids": tokens(1, 8) % 11}
    settings = SimpleNamespace(seed=0)
    found = [
        analysed(
            SimpleNamespace(stock=model, layers=model.model.layers, settings=settings, batches=lambda: iter([batch]))
        )
        for model in (rounded, exact)
    ]
    assert found[0] == found[1]
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}


def test_a_large_model_is_left_out_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("llama", lengths=(9,))
    monkeypatch.setattr(type(subject.model), "forward", None)
    monkeypatch.setattr(landscape, "MOST_PARAMETERS", 36_863)
    with pytest.raises(LeftOut, match="has 36,864 weights, more than 36,863"):
        analysed(subject)
    assert bytes_needed(10**9) == 80 * 10**9


def test_a_text_without_a_next_token_is_left_out() -> None:
    with pytest.raises(LeftOut, match="two tokens"):
        analysed(subject_of("llama", lengths=(1,)))


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(NotFinite, match="loss"):
        analysed(subject_of(model, lengths=(6,)))
