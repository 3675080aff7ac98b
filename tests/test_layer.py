"""The equation, the schedule and the fold, against the paper's formulas written plainly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dex.layer import Schedule, apply_branch, fold_weight, lambda_init


def random_branch(num_heads: int = 5, head_dim: int = 4, width: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "heads": draw(2, 3, num_heads * head_dim),
        "weight": draw(width, num_heads * head_dim),
        "w_d": draw(head_dim, head_dim),
        "lam": draw(1),
        "selected": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
    }


def test_branch_equals_the_papers_equation_head_by_head() -> None:
    b = random_branch()
    new = apply_branch(b["heads"], b["w_d"], b["lam"], b["selected"])
    for h in range(5):
        o_h = b["heads"][..., 4 * h : 4 * h + 4]
        expected = o_h - b["lam"] * (o_h @ b["w_d"]) if b["selected"][h] else o_h
        torch.testing.assert_close(new[..., 4 * h : 4 * h + 4], expected)


def test_fold_gives_the_outputs_and_gradients_of_the_plain_form() -> None:
    b = random_branch()
    names = ("weight", "w_d", "lam", "heads")
    leaves = {name: b[name].clone().requires_grad_() for name in names}
    plain = apply_branch(leaves["heads"], leaves["w_d"], leaves["lam"], b["selected"]) @ leaves["weight"].T
    folded = leaves["heads"] @ fold_weight(leaves["weight"], leaves["w_d"], leaves["lam"], b["selected"]).T
    torch.testing.assert_close(folded, plain)
    upstream = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((plain * upstream).sum(), list(leaves.values()))
    actual = torch.autograd.grad((folded * upstream).sum(), list(leaves.values()))
    for name, a, e in zip(names, actual, expected, strict=True):
        torch.testing.assert_close(a, e, msg=f"gradient of {name}")


def test_fold_leaves_unselected_heads_bit_for_bit() -> None:
    b = random_branch()
    folded = fold_weight(b["weight"], b["w_d"], b["lam"], b["selected"])
    assert torch.equal(folded[:, 4:8], b["weight"][:, 4:8])
    assert not torch.equal(folded[:, 0:4], b["weight"][:, 0:4])


def test_minus_sign_is_a_reparameterisation() -> None:
    b = random_branch()
    minus = apply_branch(b["heads"], b["w_d"], b["lam"], b["selected"])
    plus = apply_branch(b["heads"], -b["w_d"], -b["lam"], b["selected"])
    assert torch.equal(minus, plus)


def test_lambda_init_starts_at_one_fifth_in_the_first_layer() -> None:
    assert lambda_init(0) == pytest.approx(0.2)
    assert lambda_init(7) == pytest.approx(0.8 - 0.6 * math.exp(-2.1))


def equation_4(t: int, t_a: int, lam_init: float, lam_learn: float) -> float:
    alpha = min(1.0, t / t_a)
    return (1 - alpha) * (t / t_a) * lam_init + alpha * lam_learn


@given(t=st.integers(0, 500), t_a=st.integers(1, 200), lam_learn=st.floats(-1, 1), layer=st.integers(0, 40))
def test_paper_and_land_schedules_are_equation_4(t: int, t_a: int, lam_learn: float, layer: int) -> None:
    lam_init = lambda_init(layer)
    expected = equation_4(t, t_a, lam_init, lam_learn)
    for name in ("paper", "land"):
        schedule = Schedule(name, lam_init, t_a)  # type: ignore[arg-type]
        lam = schedule.lam(torch.tensor([t]), torch.tensor([lam_learn]))
        assert lam.dtype == torch.float32
        assert lam.item() == pytest.approx(expected, abs=1e-6)


def test_paper_schedule_peaks_at_a_quarter_of_lambda_init_and_returns_to_zero() -> None:
    schedule = Schedule("paper", 0.4, 10)
    lam_learn = torch.tensor([schedule.lam_learn_start])
    curve = [schedule.lam(torch.tensor([t]), lam_learn).item() for t in range(15)]
    assert curve[0] == 0.0
    assert max(curve) == pytest.approx(0.1)
    assert curve.index(max(curve)) == 5
    assert curve[10:] == [0.0] * 5


def test_land_schedule_rises_from_zero_and_stays_at_lambda_init() -> None:
    schedule = Schedule("land", 0.4, 10)
    lam_learn = torch.tensor([schedule.lam_learn_start])
    curve = [schedule.lam(torch.tensor([t]), lam_learn).item() for t in range(15)]
    assert curve[0] == 0.0
    assert curve == sorted(curve)
    assert curve[10:] == pytest.approx([0.4] * 5)


def test_fixed_schedule_is_constant() -> None:
    schedule = Schedule("fixed", 0.3, None)
    assert [schedule.lam(torch.tensor([t]), None).item() for t in (0, 9)] == pytest.approx([0.3, 0.3])
