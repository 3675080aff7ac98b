"""dex/analysis/outliers.py and its accumulator against sorted explicit values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from eager_maps import real_rows, subject_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from dex.analysis import outliers
from dex.analysis.magnitudes import Magnitudes
from dex.errors import NotFinite

RESOLUTION = 2.0**-10 * (1 + 1e-6)  # of a median, relative; reached at the edge of a bin, but for rounding


def update(magnitudes: Magnitudes, values: np.ndarray, seen: np.ndarray | None = None) -> None:
    mask = np.ones_like(values, dtype=bool) if seen is None else seen
    magnitudes.update(torch.tensor(values), torch.tensor(mask))


# The accumulator


floats = st.one_of(
    st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False),
    st.floats(-50, 50, width=32, allow_subnormal=False),
    st.integers(-3, 3).map(float),
)
chunk = st.lists(st.tuples(floats, st.booleans()), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(st.lists(chunk, min_size=1, max_size=5), st.booleans())
def test_top_and_median_are_those_of_the_sorted_magnitudes(chunks: list[list[Any]], masked: bool) -> None:
    magnitudes, expected = Magnitudes(), []
    for each in chunks:
        values = np.array([value for value, _ in each], dtype=np.float32)
        seen = np.array([kept or not masked for _, kept in each])
        update(magnitudes, values, seen)
        expected += abs(values[seen].astype(np.float64)).tolist()
    assert magnitudes.count == len(expected)
    ordered = sorted(expected, reverse=True)
    for k in range(1, 11):
        found = magnitudes.top(k)
        assert found == ordered[k - 1] if k <= len(ordered) else math.isnan(found)
    if expected:
        assert magnitudes.median() == pytest.approx(float(np.median(expected)), rel=RESOLUTION, abs=1e-37)
    else:
        assert math.isnan(magnitudes.median())


def test_a_mask_is_broadcast_to_the_values() -> None:
    values = torch.randn(3, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    for shape in ((5, 7), (3, 1, 5, 7), (3, 1, 1, 1), (3, 2, 5, 1)):
        seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
        magnitudes, kept = Magnitudes(), values.abs()[seen.expand(values.shape)].numpy()
        magnitudes.update(values, seen)
        assert magnitudes.count == len(kept)
        assert magnitudes.top(10) == np.sort(kept)[-10]
        assert magnitudes.median() == pytest.approx(float(np.median(kept)), rel=RESOLUTION)


def test_one_value_that_towers_over_the_rest_is_their_ratio() -> None:
    magnitudes = Magnitudes()
    update(magnitudes, np.array([1.0, -1.0, 1.0, -800.0, 1.0]))
    assert magnitudes.ratio() == pytest.approx(800.0, rel=RESOLUTION)


def test_what_is_not_seen_may_be_anything_and_what_is_seen_must_be_finite() -> None:
    magnitudes = Magnitudes()
    values = np.array([1.0, np.nan, np.inf, -np.inf], dtype=np.float32)
    update(magnitudes, values, np.array([True, False, False, False]))
    assert (magnitudes.count, magnitudes.top(1)) == (1, 1.0)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(NotFinite, match="not finite"):
            update(magnitudes, np.array([1.0, bad], dtype=np.float32))


def test_the_ratio_to_a_median_of_zero_is_not_defined() -> None:
    magnitudes = Magnitudes()
    update(magnitudes, np.array([0.0, 0.0, -0.0, 5.0]))
    assert magnitudes.median() == 0.0
    assert math.isnan(magnitudes.ratio())


# The section


class Explicit:
    """The oracle: a layer's logits and outputs at real tokens, one row at a time without its padding, in float64."""

    def __init__(self, model: Any, rows: list[list[int]]) -> None:
        stock = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.layers = stock.get_decoder().layers
        self.logits: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self.hidden: list[list[torch.Tensor]] = [[] for _ in self.layers]
        handles = []
        for index, layer in enumerate(self.layers):
            handles += [
                layer.register_forward_hook(lambda _, args, out, at=index: self.hidden[at].append(out.flatten())),
                layer.self_attn.register_forward_pre_hook(self.attention(index), with_kwargs=True),
            ]
        with torch.no_grad():
            for row in rows:
                model(input_ids=torch.tensor([row]), use_cache=False)
        for handle in handles:
            handle.remove()

    def attention(self, index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            x, (cos, sin) = kwargs["hidden_states"][0], kwargs["position_embeddings"]
            D = module.head_dim
            q, k = (self.heads(x, module, name, D) for name in ("q", "k"))  # [heads, T, D]
            q, k = (each * cos + torch.cat([-each[..., D // 2 :], each[..., : D // 2]], -1) * sin for each in (q, k))
            if module.config.model_type == "diff_v1":  # the heads of the two maps alternate
                q, k = (torch.cat([each[0::2], each[1::2]]) for each in (q, k))
            z = (q.double() @ k.repeat_interleave(len(q) // len(k), 0).double().mT) * D**-0.5
            distance = torch.arange(z.shape[-1])[:, None] - torch.arange(z.shape[-1])
            window = getattr(module, "sliding_window", None) or len(distance)
            self.logits[index].append(z[:, (distance >= 0) & (distance < window)].flatten())

        return hook

    @staticmethod
    def heads(x: torch.Tensor, module: Any, name: str, D: int) -> torch.Tensor:
        made = getattr(module, f"{name}_proj")(x).unflatten(-1, (-1, D))
        norm = getattr(module, f"{name}_norm", None)
        return (made if norm is None else norm(made)).transpose(0, 1)


def check(found: Any, parts: list[list[torch.Tensor]], name: str) -> None:
    by_name = {statistic.name: statistic.values for statistic in found.statistics}
    for layer, values in enumerate(parts):
        magnitude = torch.cat(values).abs().double().numpy()
        ordered, median = np.sort(magnitude)[::-1], float(np.median(magnitude))
        assert by_name[f"{name}_top1"][layer] == pytest.approx(ordered[0], rel=2e-5)
        assert by_name[f"{name}_top10"][layer] == pytest.approx(ordered[9], rel=2e-5)
        assert by_name[f"{name}_median"][layer] == pytest.approx(median, rel=1.1 * RESOLUTION)
        assert by_name[f"{name}_outlier_ratio"][layer] == pytest.approx(ordered[0] / median, rel=1.1 * RESOLUTION)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2-sliding", "qwen3", "attached", "diff-v1", "diff-v2", "diff-v2-sliding", "diffllama"]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_statistic_is_that_of_the_explicit_logits_and_outputs(kind: str, side: str) -> None:
    subject = subject_of(kind, lengths=(70, 47, 9), side=side)
    found = outliers.analyze(subject, lambda done, of: None)
    explicit = Explicit(subject.model, real_rows(subject))
    check(found, explicit.logits, "logit")
    check(found, explicit.hidden, "hidden")


def test_a_hidden_state_that_is_blown_up_is_named_with_its_layer() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 1000
    found = outliers.analyze(subject_of(model), lambda done, of: None)
    by_name = {statistic.name: statistic.values for statistic in found.statistics}
    assert by_name["hidden_outlier_ratio"][1] > 50 > by_name["hidden_outlier_ratio"][0]
    assert found.remarks[0].startswith("The hidden state of the largest magnitude")
    assert "is in layer 1, " in found.remarks[0]


def test_the_ratios_are_shown_first() -> None:
    found = outliers.analyze(subject_of("llama", lengths=(9,)), lambda done, of: None)
    assert [one.name for one in found.statistics if one.headline] == ["logit_outlier_ratio", "hidden_outlier_ratio"]


def test_progress_counts_the_sequences() -> None:
    seen: list[tuple[int, int]] = []
    outliers.analyze(subject_of("llama"), lambda done, of: seen.append((done, of)))
    assert seen == [(2, 3), (3, 3)]


def test_logits_that_are_not_numbers_are_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(NotFinite, match="not finite"):
        outliers.analyze(subject_of(model), lambda done, of: None)
