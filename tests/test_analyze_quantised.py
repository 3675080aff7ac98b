"""Attention logits of few bits: the kernel against explicit float64 logits, and what the section says they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from eager_maps import KINDS, padded, real_rows, subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix import model_of, plain_greedy
from test_stats import LargestTensor
from tiny import tiny_model, tokens
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from dex.analysis import quantised as section
from dex.analysis.left_out import LeftOut
from dex.analysis.quantised import Setting
from dex.errors import DexError, NotFinite
from dex.evaluation.needle import Grid
from dex.evaluation.paired import Interval
from dex.evaluation.prefix import Prefix
from dex.quantised_attention import Scope, attend_quantised, quantised_logits
from dex.stats import attend

FITTING = Grid(lengths=[420], depths=[25, 75], needles=4, queries=2, samples=1, seed=0)  # in tokens of one byte


def explicit(
    query: Any, key: Any, value: Any, mask: Any, scaling: float, bits: int | None, per: Scope
) -> torch.Tensor:
    """The oracle, [B, H, T, C] float64: all logits at once, one sequence at a time, heads and steps by loops."""
    B, H, T, _ = query.shape
    S, together = key.shape[2], H // key.shape[1]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool).tril(S - T).expand(B, 1, T, S)
    out = torch.zeros(B, H, T, value.shape[-1], dtype=torch.float64)
    for b in range(B):
        seen = mask[b, 0]
        z = torch.stack([scaling * query[b, h].double() @ key[b, h // together].double().mT for h in range(H)])
        for h in range(H):
            if bits is not None:
                largest = (z if per == "tensor" else z[h : h + 1]).masked_select(seen).abs().max()
                step = largest / (2 ** (bits - 1) - 1)
                of_head = (z[h] / step).round() * step
            else:
                of_head = z[h]
            out[b, h] = of_head.masked_fill(~seen, -torch.inf).softmax(-1) @ value[b, h // together].double()
    return out


def assert_quantises_as(found: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor) -> None:
    """A model's logits are the oracle's: off by far less than quantisation changes.

    Not equal: of its tens of thousands of attention logits one or two lie so near the middle of two levels that
    float32 rounds them to the other one, which the layers behind and later tokens notice.
    """
    effect = (plain.double() - oracle).abs().mean()
    assert effect > 0.1
    assert (found.double() - oracle).abs().mean() < 0.2 * effect


def drawn(seed: int, B: int = 2, H: int = 4, G: int = 2, T: int = 37, S: int = 37) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, 16), (B, G, S, 16), (B, G, S, 24))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


# The kernel


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(4, 2), (4, 1), (3, 3)]),
    st.sampled_from([(37, 37), (1, 20), (9, 30)]),
    st.sampled_from(["none", "window"]),
    st.sampled_from([3, 4, 8]),
    st.sampled_from(["tensor", "head"]),
    st.integers(0, 50),
)
def test_it_is_attention_with_explicitly_rounded_logits(
    heads: tuple[int, int], shape: tuple[int, int], kind: str, bits: int, per: Scope, seed: int
) -> None:
    (H, G), (T, S) = heads, shape
    query, key, value = drawn(seed, H=H, G=G, T=T, S=S)
    mask = None
    if kind == "window":
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        mask = ((distance >= 0) & (distance < 8)).expand(2, 1, T, S)
    found = attend_quantised(query, key, value, mask, 0.4, bits, per, block=7)
    oracle = explicit(query, key, value, mask, 0.4, bits, per)
    # Rounding may cross one middle of two levels: its row of one head is off then, and no other.
    wrong = ((found - oracle).abs().amax(-1) > 1e-4).sum()
    assert wrong <= 1
    assert (found - explicit(query, key, value, mask, 0.4, None, per)).abs().max() > 1e-4


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_24_bits_are_plain_attention(per: Scope) -> None:
    query, key, value = drawn(0)
    torch.testing.assert_close(
        attend_quantised(query, key, value, None, 0.4, 24, per),
        attend(query, key, value, None, 0.4)[0],
        atol=1e-5,
        rtol=0,
    )


def test_a_sequence_does_not_depend_on_the_others_in_its_batch() -> None:
    query, key, value = drawn(1)
    query[1] *= 50.0  # its step would swallow the logits of the first
    for per in ("tensor", "head"):
        together = attend_quantised(query, key, value, None, 0.4, 4, per)
        alone = attend_quantised(query[:1], key[:1], value[:1], None, 0.4, 4, per)
        torch.testing.assert_close(together[:1], alone, atol=1e-6, rtol=0)


def test_one_head_of_large_logits_makes_the_others_uniform_per_tensor_and_leaves_them_per_head() -> None:
    query, key, value = drawn(2)
    query[:, 0] *= 1000.0
    found = attend_quantised(query, key, value, None, 0.4, 4, "tensor")
    of_seen = value.repeat_interleave(2, 1).cumsum(2) / torch.arange(1, 38)[:, None]  # the mean of the values seen
    torch.testing.assert_close(found[:, 1:], of_seen[:, 1:], atol=1e-5, rtol=0)
    without = attend_quantised(query[:, 2:], key[:, 1:], value[:, 1:], None, 0.4, 4, "head")
    per_head = attend_quantised(query, key, value, None, 0.4, 4, "head")
    torch.testing.assert_close(per_head[:, 2:], without, atol=1e-6, rtol=0)


def test_what_no_query_sees_does_not_set_the_step() -> None:
    query, key, value = drawn(3)
    mask = torch.ones(37, 37, dtype=torch.bool).tril().expand(2, 1, 37, 37).clone()
    mask[..., 0] = False  # padding, of which the first query is too: it sees no key
    expected = attend_quantised(query, key, value, mask, 0.4, 4, "tensor")
    key[:, :, 0] = 1e4
    found = attend_quantised(query, key, value, mask, 0.4, 4, "tensor")
    torch.testing.assert_close(found[:, :, 1:], expected[:, :, 1:], atol=1e-6, rtol=0)
    assert found.isfinite().all()


def test_logits_of_zero_are_no_division_by_zero() -> None:
    query, key, value = drawn(4)
    found = attend_quantised(torch.zeros_like(query), key, value, None, 0.4, 4, "tensor")
    torch.testing.assert_close(found, attend(torch.zeros_like(query), key, value, None, 0.4)[0], atol=1e-5, rtol=0)


def test_memory_is_that_of_a_block_of_queries() -> None:
    query, key, value = drawn(5, B=1, H=2, T=700, S=700)
    with LargestTensor() as largest:
        attend_quantised(query, key, value, None, 0.4, 4, "head")
    assert largest.sides <= 64


# In a model


@contextmanager
def explicit_in(model: Any, bits: int, per: Scope) -> Iterator[None]:
    """The oracle as the model's attention, registered by hand."""

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any) -> Any:
        out = explicit(query, key, value, attention_mask, scaling, bits, per)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("explicit_oracle", forward)
    AttentionMaskInterface.register("explicit_oracle", sdpa_mask)
    model.set_attn_implementation("explicit_oracle")
    yield
    model.set_attn_implementation("sdpa")


def logits_of(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(use_cache=False, **inputs).logits
    return found


def stock_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding", "attached", "diff-v1", "diff-v2", "diffllama"])
def test_a_model_computes_with_the_explicitly_rounded_logits(kind: str, per: Scope) -> None:
    model, ids = model_of(kind), tokens(2, 30)
    plain = logits_of(model, input_ids=ids)
    with explicit_in(stock_of(model), 4, per):
        oracle = logits_of(model, input_ids=ids)
    with quantised_logits(stock_of(model), 4, per):
        found = logits_of(model, input_ids=ids)
    assert_quantises_as(found, oracle.double(), plain)
    torch.testing.assert_close(logits_of(model, input_ids=ids), plain, atol=0, rtol=0)  # and is as it was


@pytest.mark.parametrize("bits", [None, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_24_bits_or_without_rounding_is_the_model_itself_with_padding_too(
    kind: str, bits: int | None
) -> None:
    model = model_of(kind)
    ids, mask = padded((30, 21))
    plain = logits_of(model, input_ids=ids, attention_mask=mask)
    with quantised_logits(stock_of(model), bits, "head"):
        found = logits_of(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], plain[mask.bool()], atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding", "diff-v1", "diff-v2", "diffllama"])
def test_with_a_cache_a_query_sees_what_came_before(kind: str) -> None:
    model, ids = model_of(kind), tokens(1, 29, seed=3)[0].tolist()
    expected = plain_greedy(model, ids, 6, stop=-1)
    for bits in (None, 24):
        with quantised_logits(model, bits, "tensor"):
            assert Prefix(model, ids[:21], chunk=8).greedy(ids[21:], 6) == expected
    with explicit_in(model, 4, "tensor"), Prefix(model, ids[:21], chunk=8).extended(ids[21:-1]) as logits:
        oracle = logits.double()
    with quantised_logits(model, 4, "tensor"), Prefix(model, ids[:21], chunk=8).extended(ids[21:-1]) as logits:
        assert_quantises_as(logits, oracle, logits_of(model, input_ids=torch.tensor([ids[:-1]]))[0, -1])


def test_outputs_keep_the_dtype_of_the_model() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    with quantised_logits(model, 8, "head"):
        assert logits_of(model, input_ids=tokens()).dtype == torch.bfloat16


def test_the_models_own_attention_is_back_also_after_an_exception() -> None:
    model = tiny_model("llama")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.raises(KeyError), quantised_logits(model, 4, "head"):
            raise KeyError
        assert model.config._attn_implementation == implementation


def test_settings_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="at least 2"), quantised_logits(model, 1, "head"):
        pass
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda *_: None)
    with pytest.raises(DexError, match="cannot be quantised"), quantised_logits(model, 4, "head"):
        pass


# The section


@pytest.fixture
def no_needles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "_needles", lambda subject: ([], "This test asks for none."))


def analyze(subject: Any) -> Any:
    return section.analyze(subject, lambda done, of: None)


def by_setting(found: Any) -> dict[tuple[Any, str], list[Any]]:
    (table,) = found.tables
    assert table.columns == ["bits", "scope", "loss", "change", "interval", "needles retrieved"]
    return {(row[0], row[1]): row[2:] for row in table.rows}


def loss_of(model: Any, rows: list[list[int]]) -> float:
    """The mean over all targets of rows without padding."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row])
        logits = logits_of(model, input_ids=ids)[0].double()
        total += float(cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
        count += len(row) - 1
    return total / count


@pytest.mark.usefixtures("no_needles")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "attached", "diff-v2"])
def test_losses_are_those_of_the_rows_alone_and_changes_are_from_full_precision(kind: str, side: str) -> None:
    subject = subject_of(kind, lengths=(60, 33, 47), side=side)
    rows, found = real_rows(subject), by_setting(analyze(subject))
    full = loss_of(subject.model, rows)
    assert found["all, float32", ""] == [pytest.approx(full, abs=1e-4), None, None, None]
    for per in ("tensor", "head"):
        with explicit_in(subject.stock, 4, per):
            expected = loss_of(subject.model, rows)
        loss, change, interval, _ = found[4, f"per {per}"]
        assert loss == pytest.approx(expected, abs=0.01 + 0.1 * abs(expected - full))
        assert change == pytest.approx(loss - full, abs=1e-4)
        assert interval is None  # of three sequences
    assert list(found) == [
        ("all, float32", ""),
        *((b, f"per {per}") for b in (8, 6, 4) for per in ("tensor", "head")),
    ]


@pytest.mark.usefixtures("no_needles")
def test_statistics_are_the_changes_of_the_table() -> None:
    found = analyze(subject_of("llama"))
    values = {each.name: each.values for each in found.statistics}
    assert values == {
        f"quantised_loss_change_{bits}_{scope.replace(' ', '_')}": row[1]
        for (bits, scope), row in by_setting(found).items()
        if scope
    }
    assert abs(values["quantised_loss_change_8_per_head"]) < abs(values["quantised_loss_change_4_per_tensor"])
    assert "takes 5 sequences" in found.tables[0].meaning


@pytest.mark.usefixtures("no_needles")
def test_the_curve_has_the_changes_by_bits() -> None:
    found = analyze(subject_of("llama"))
    (curve,) = found.curves
    rows = by_setting(found)
    assert curve.x == [4.0, 6.0, 8.0]
    assert curve.lines == {
        scope: [rows[bits, scope][1] for bits in (4, 6, 8)] for scope in ("per tensor", "per head")
    }


@pytest.mark.usefixtures("no_needles")
def test_a_change_of_a_bfloat16_model_is_due_to_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "BITS", (24,))
    subject = subject_of(tiny_model("llama", dtype=torch.bfloat16))
    found = by_setting(analyze(subject))
    of_its_own_attention = loss_of(subject.model, real_rows(subject)) - found["all, float32", ""][0]
    assert abs(of_its_own_attention) > 1e-3
    for per in ("per tensor", "per head"):
        assert abs(found[24, per][1]) < 0.1 * abs(of_its_own_attention)


@pytest.mark.usefixtures("no_needles")
def test_five_sequences_give_an_interval_that_holds_the_change() -> None:
    found = analyze(subject_of("llama", lengths=(30,) * 5))
    _, change, interval, _ = by_setting(found)[4, "per tensor"]
    low, high = (float(each) for each in interval.split(" to "))
    assert low < change < high
    assert "95 % bootstrap over sequences" in found.tables[0].meaning


def test_a_change_is_weighted_by_targets() -> None:
    assert section.change([3.0, 1.0], [1.0, 1.0], [1, 3]) == Interval(0.5, None, None)


def test_the_budget_of_tokens_is_spread_over_all_sequences() -> None:
    subject = subject_of("llama", lengths=(60, 7, 1, 60))
    expected = [row for row in real_rows(subject) if len(row) > 1]  # one token predicts nothing
    assert [row.tolist() for row in section.rows_of(subject)] == expected
    assert [row.tolist() for row in section.rows_of(subject, 80)] == [row[:20] for row in expected]
    assert [row.tolist() for row in section.rows_of(subject, 4)] == [row[:2] for row in expected]


def test_a_text_without_targets_is_left_out() -> None:
    with pytest.raises(LeftOut, match="no sequence of two tokens"):
        analyze(subject_of("llama", lengths=(1, 1)))


@pytest.mark.usefixtures("no_needles")
def test_weights_that_are_not_numbers_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(NotFinite):
        analyze(subject_of(model))


# Its needles


def test_the_share_retrieved_is_that_of_right_answers_under_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[int]]] = []

    def answer(items: Any, evaluated: Any, asking: Any) -> list[dict[str, str]]:
        asked.append((evaluated.model.config._attn_implementation, [item.which for item in items]))
        return [{"text": f" {items[0].haystack.needles[0].value}\n"} for _ in items]  # right for one of the two

    monkeypatch.setattr(section, "GRID", FITTING)
    monkeypatch.setattr(section, "answer_haystack", answer)
    found = by_setting(analyze(subject_of("llama", lengths=(20, 20))))
    assert [row[-1] for row in found.values()] == [0.5] * 7
    assert asked == [("dex_quantised", [0, 1])] * 14


def test_needles_are_asked_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "GRID", FITTING)
    monkeypatch.setattr(section, "BITS", (4,))
    found = analyze(subject_of("llama", lengths=(20, 20)))
    assert [row[-1] for row in by_setting(found).values()] == [0.0] * 3  # random weights know no number
    assert "4 questions about numbers hidden in 420 tokens of pydoc" in found.tables[0].meaning
    assert "a check" in found.tables[0].meaning


def test_needles_are_drawn_by_the_seed_of_the_settings_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "GRID", FITTING)

    def haystacks(**settings: Any) -> list[list[int]]:
        items, why_not = section._needles(subject_of("llama", lengths=(20, 20), **settings))
        assert why_not is None
        return [item.haystack.ids for item in items]

    first = haystacks(seed=0)
    assert haystacks(seed=0) == first
    assert haystacks(seed=1) != first
    assert haystacks(seed=0, data="stdlib") != first


def test_a_context_or_tokenizer_without_room_leaves_the_needles_out_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(section, "GRID", replace(FITTING, needles=8))
    small = subject_of(tiny_model("llama", max_position_embeddings=128), lengths=(20, 20))
    wordy = subject_of("llama", lengths=(20, 20))  # a token a byte
    for subject, reason in (
        (small, "do not fit the context"),
        (wordy, "needles=8 do not fit a length of 420 tokens"),
    ):
        found = analyze(subject)
        assert {row[-1] for row in by_setting(found).values()} == {None}
        said = found.tables[0].meaning.partition("No needles were asked: ")[2]
        assert reason in said


# What is said of it


def test_the_remark_names_the_fewest_bits_that_keep_the_loss() -> None:
    means = {(8, "tensor"): 0.02, (6, "tensor"): 0.3, (4, "tensor"): 2.0}
    means |= {(8, "head"): -0.001, (6, "head"): 0.004, (4, "head"): 0.5}
    (found,) = {section._remark({Setting(*key): Interval(mean, None, None) for key, mean in means.items()})}
    assert found == (
        "Of 8, 6 and 4 bits for attention logits, the fewest that add at most 0.01 nats to the loss are "
        "none per tensor (8 bits change it by +0.0200) and 6 per head (+0.0040)."
    )
