"""dex/stats.py against the plain definition: eager attention maps and −Σ p ln p."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dex import stats
from dex.errors import DexError

LENGTH = 48
REAL = torch.tensor([LENGTH, 41])  # real tokens of the two rows of a padded batch


def padded(side: str, length: int = LENGTH) -> dict[str, Tensor]:
    index = torch.arange(length)
    real = {
        "none": torch.ones(2, length, dtype=torch.bool),
        "right": index < REAL[:, None],
        "left": index >= length - REAL[:, None],
    }[side]
    return {"input_ids": tokens(2, length).masked_fill(~real, 258), "attention_mask": real.long()}


def entropy_from_maps(model: Any, batch: dict[str, Tensor], first_position: int) -> Tensor:
    """The oracle, [L, H]."""
    model.set_attn_implementation("eager")
    real = batch["attention_mask"].bool()
    counted = real & (real.cumsum(1) - 1 >= first_position)
    with torch.no_grad():
        maps = torch.stack(model(**batch, output_attentions=True).attentions).double()  # [L, B, H, T, T]
    entropies = -torch.special.xlogy(maps, maps).sum(-1)
    return (entropies * counted[:, None]).sum((1, 3)) / counted.sum()


@pytest.fixture(params=["fused", "blocks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the statistic; blocks of 7 queries, so that the last one is not full."""
    if request.param == "blocks":
        blocks = stats.attend_in_blocks
        monkeypatch.setattr(stats, "fused_kernel_takes", lambda *_: False)
        monkeypatch.setattr(stats, "attend_in_blocks", lambda *args: blocks(*args, block=7))
    return request.param


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_entropy_equals_that_of_the_maps(family: str, side: str, path: str) -> None:
    model = tiny_model(family)
    batch = padded(side)
    scores = stats.attention_entropy(model, [batch])
    oracle = entropy_from_maps(model, batch, first_position=32)
    assert oracle.std() > 0.05  # heads differ: the comparison means something
    torch.testing.assert_close(scores, oracle, atol=1e-5, rtol=0)


@pytest.mark.parametrize("first_position", [0, 1, 40])
def test_positions_are_counted_from_the_first_real_token(first_position: int) -> None:
    model = tiny_model("llama")
    left = stats.attention_entropy(model, [padded("left")], first_position)
    right = {**padded("right"), "input_ids": padded("left")["input_ids"].clone()}
    right["input_ids"][1] = right["input_ids"][1].roll(REAL[1].item() - LENGTH)
    torch.testing.assert_close(left, stats.attention_entropy(model, [right], first_position), atol=1e-6, rtol=0)
    torch.testing.assert_close(left, entropy_from_maps(model, padded("left"), first_position), atol=1e-5, rtol=0)


def test_batching_does_not_change_the_mean() -> None:
    model, ids = tiny_model("qwen3"), tokens(4, 40)
    together = stats.attention_entropy(model, [{"input_ids": ids}])
    apart = stats.attention_entropy(model, [{"input_ids": row[None]} for row in ids])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=0)


def test_packed_documents_are_scored_as_if_alone(path: str) -> None:
    model = tiny_model("qwen2")
    first, second = tokens(1, 40, seed=1), tokens(1, 37, seed=2)
    positions = torch.cat([torch.arange(40), torch.arange(37)])[None]
    packed = stats.attention_entropy(model, [{"input_ids": torch.cat([first, second], 1), "position_ids": positions}])
    alone = stats.attention_entropy(model, [{"input_ids": first}, {"input_ids": second}])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


def test_uniform_attention_over_n_tokens_has_entropy_ln_n(path: str) -> None:
    query, key = torch.zeros(1, 4, 50, 16), torch.randn(1, 2, 50, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.arange(1, 51).log().expand(1, 4, 50)
    torch.testing.assert_close(stats.entropy(query, key, None, 0.25), expected, atol=1e-6, rtol=0)


def test_attention_to_one_token_has_entropy_0(path: str) -> None:
    query, key = torch.ones(1, 1, 20, 8), torch.zeros(1, 1, 20, 8)
    key[:, :, 0] = 10.0  # 80 above every other logit
    torch.testing.assert_close(stats.entropy(query, key, None, 1.0), torch.zeros(1, 1, 20), atol=1e-4, rtol=0)


@pytest.mark.parametrize("columns", [1, 16, 40])
def test_a_linear_statistic_is_attention_with_its_indicator_for_values(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 30, 16, generator=generator), torch.randn(2, 2, 30, 16, generator=generator)
    value = torch.rand(2, 2, 30, columns, generator=generator)
    attended, z = stats.attend(query, key, value, None, 0.3)
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    logits = (0.3 * query @ keys.mT).masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(attended, logits.softmax(-1) @ values, atol=1e-5, rtol=0)
    torch.testing.assert_close(z, logits.logsumexp(-1), atol=1e-5, rtol=0)


def test_a_bfloat16_model_is_scored_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 64, 16, generator=generator).bfloat16()
    key = torch.randn(1, 2, 64, 16, generator=generator).bfloat16()
    scores = stats.entropy(query, key, None, 1.0)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, stats.entropy(query.float(), key.float(), None, 1.0), atol=0, rtol=0)
    assert stats.attention_entropy(tiny_model("llama", dtype=torch.bfloat16), [padded("left")]).isfinite().all()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same_while_observed(family: str, side: str) -> None:
    model = tiny_model(family)
    batch = padded(side)
    layers: list[int] = []
    with torch.no_grad():
        expected = model(**batch).logits
        with stats.observed_attention(model, lambda layer_idx, *_: layers.append(layer_idx)):
            observed = model(**batch).logits
    assert torch.equal(observed, expected)
    assert layers == [0, 1, 2]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [300, 600])
@pytest.mark.parametrize("fused", [True, False])
def test_no_attention_map_is_ever_allocated(
    family: str, length: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr(stats, "fused_kernel_takes", lambda *_: False)
    model = tiny_model(family)
    batch = padded("left", length)
    with LargestTensor() as largest:
        stats.attention_entropy(model, [batch])
    assert largest.sides < length
    model.set_attn_implementation("eager")
    with torch.no_grad(), LargestTensor() as largest:
        model(**batch)
    assert largest.sides == length  # the measure does see a map


class LargestTensor(TorchDispatchMode):
    """The largest n for which a tensor with two sides of n or more was made."""

    sides = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 1:
                self.sides = max(self.sides, sorted(leaf.shape)[-2])
        return result


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    stats.attention_entropy(model, [padded("left")])
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is True
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_by_an_error() -> None:
    model = tiny_model("llama").train()
    with pytest.raises(IndexError):
        stats.attention_entropy(model, [{"input_ids": torch.full((1, 40), 10_000)}])
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        model(tokens())  # attention works, and no observer is left behind


def test_progress_is_told_in_sequences() -> None:
    done: list[int] = []
    stats.attention_entropy(tiny_model("llama"), [padded("left"), padded("none")], on_progress=done.append)
    assert done == [2, 4]


def test_sequences_too_short_to_count_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(DexError, match="None of the 2 calibration sequences is longer than 32 tokens"):
        stats.attention_entropy(model, [{"input_ids": tokens(2, 32)}])
    assert stats.attention_entropy(model, [{"input_ids": tokens(2, 33)}]).max() < math.log(33)


def test_a_gap_in_the_padding_mask_is_refused() -> None:
    batch = padded("none")
    batch["attention_mask"][0, 5] = 0
    with pytest.raises(DexError, match="gap between real tokens"):
        stats.attention_entropy(tiny_model("llama"), [batch])
