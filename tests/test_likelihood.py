"""Log-likelihoods of continuations: as one plain forward pass a request gives them, however they are batched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_in_two
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model
from tiny import tiny_diff_v1, tiny_diff_v2, tiny_diffllama, tiny_model

import dex
from dex.errors import DexError
from dex.evaluation import likelihood
from dex.evaluation.answers import Answers
from dex.evaluation.likelihood import (
    Likelihood,
    Request,
    as_read,
    batches,
    branch_mask,
    lay_rows,
    likelihoods_of_batch,
    log_likelihoods,
    rows_of,
    takes_branches,
)

SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def attached() -> Any:
    """An adapter whose branch is live: λ is 0.3 in every layer."""
    config = dex.DexConfig(schedule="fixed", lam=0.3, w_d_init="zeros")
    model = get_peft_model(tiny_model("qwen2"), config).eval()
    w_d = [parameter for name, parameter in model.named_parameters() if "dex_w_d" in name]
    assert w_d
    for parameter in w_d:
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model("llama"),
    "qwen2-sliding": lambda: tiny_model("qwen2-sliding"),
    "qwen3": lambda: tiny_model("qwen3"),
    "attached": attached,
    "diff-v1": tiny_diff_v1,
    "diff-v1-sliding": lambda: tiny_diff_v1(**SLIDING),
    "diff-v2": tiny_diff_v2,
    "diff-v2-sliding": lambda: tiny_diff_v2(**SLIDING),
    "diffllama": tiny_diffllama,
}


def plain(model: Any, request: Request) -> Likelihood:
    """The oracle: one forward pass of the whole request, and log-softmax of all its logits."""
    tokens = torch.tensor([*request.context, *request.continuation])
    with torch.no_grad():
        log_p = model(input_ids=tokens[None, :-1]).logits[0].double().log_softmax(-1)
    start = len(request.context) - 1
    own, targets = log_p[start:], torch.tensor(request.continuation)
    return Likelihood(own.gather(1, targets[:, None]).sum().item(), bool((own.argmax(1) == targets).all()))


def some_requests(seed: int = 0) -> list[Request]:
    """Contexts of 1 to 40 tokens with one to five continuations of 1 to 14 tokens; some are equal."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return tuple(torch.randint(0, 256, (length,), generator=draw).tolist())

    contexts = [ids(1, 41) for _ in range(6)] + [(5,), (5,)]
    requests = [Request(context, ids(1, 15)) for i, context in enumerate(contexts) for _ in range(1 + i % 5)]
    requests += [Request(contexts[0], (each,)) for each in (7, 8)]
    return [*requests, requests[0]]


def greedy(model: Any, context: tuple[int, ...], length: int) -> Request:
    tokens = list(context)
    for _ in range(length):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return Request(context, tuple(tokens[len(context) :]))


def assert_equal(found: Sequence[Likelihood], wanted: Sequence[Likelihood]) -> None:
    assert [each.log_likelihood for each in found] == pytest.approx(
        [each.log_likelihood for each in wanted], rel=1e-5, abs=1e-5
    )
    assert [each.is_greedy for each in found] == [each.is_greedy for each in wanted]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_each_is_what_one_plain_forward_pass_gives_at_every_batch_size(name: str, implementation: str) -> None:
    model = MODELS[name]()
    (model.get_base_model() if name == "attached" else model).set_attn_implementation(implementation)
    requests = some_requests()
    requests += [greedy(model, requests[1].context, length) for length in (1, 3)]
    wanted = [plain(model, request) for request in requests]
    assert any(each.is_greedy for each in wanted)
    assert takes_branches(model)
    for batch_size in (1, 2, 7):
        assert_equal(log_likelihoods(model, requests, 512, batch_size, Answers(), "x"), wanted)


def test_attention_that_takes_no_mask_of_ours_gets_one_continuation_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny_model("qwen2"), some_requests()
    wanted = [plain(model, request) for request in requests]
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert not takes_branches(model)
    rows = rows_of(requests, takes_branches(model))
    assert all(row.branches <= 1 for row in rows)
    assert len(rows) > len(rows_of(requests, True))
    monkeypatch.undo()
    for start in range(0, len(requests), 5):
        some = slice(start, start + 5)
        assert_equal(likelihoods_of_batch(model, requests[some], branching=False), wanted[some])


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "dex_observed", "paged|sdpa"])
def test_only_attention_that_is_known_to_take_a_mask_gets_one(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    assert takes_branches(model)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", implementation)
    assert not takes_branches(model)


def test_what_does_not_fit_loses_the_beginning_of_its_context() -> None:
    model = tiny_model("llama")
    (request,) = [Request(tuple(range(30)), (40, 41, 42))]
    (found,) = log_likelihoods(model, [request], 12, 1, Answers(), "x")
    assert_equal([found], [plain(model, Request(tuple(range(20, 30)), (40, 41, 42)))])
    assert len(as_read(request, 3).context) == 1
    assert as_read(request, 400) == request
    with pytest.raises(DexError, match="continuation of 3 tokens does not fit this model, which holds 2"):
        as_read(request, 2)
    with pytest.raises(DexError, match="has no tokens"):
        as_read(Request((1,), ()), 9)


def test_long_rows_do_not_branch_and_a_short_context_bears_few_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    requests = [Request(tuple(range(20)), tuple(range(30, 30 + n))) for n in (6, 7, 8, 9)]
    wanted = [plain(model, request) for request in requests]
    assert len(rows_of(requests, True)) == 1
    monkeypatch.setattr(likelihood, "BRANCHES_BESIDE_SHORT_CONTEXT", 4)
    assert [len(row.members) for row in rows_of(requests, True)] == [3, 1]
    assert_equal(log_likelihoods(model, requests, 512, 2, Answers(), "x"), wanted)
    monkeypatch.setattr(likelihood, "LONGEST_BRANCHED_ROW", 30)
    assert [len(row.members) for row in rows_of(requests, True)] == [1, 1, 1, 1]
    assert_equal(log_likelihoods(model, requests, 512, 2, Answers(), "x"), wanted)


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.builds(Request, tokens, tokens), min_size=1, max_size=12), branching=st.booleans())
def test_a_row_lets_every_token_see_its_own_sequence_and_nothing_else(
    requests: list[Request], branching: bool
) -> None:
    rows = rows_of(requests, branching)
    laid = lay_rows(rows, requests, torch.device("cpu"))
    seen = branch_mask(laid)[:, 0]  # [B, T, T]
    start = 0
    assert sorted(laid.order) == list(range(len(requests)))
    for index in laid.order:
        context, continuation = requests[index]
        for n, target in enumerate(continuation):
            row, place = (int(each[start + n]) for each in laid.predicts)
            assert int(laid.targets[start + n]) == target
            visible = seen[row, place]
            in_order = laid.positions[row][visible].argsort()
            assert tuple(laid.ids[row][visible][in_order].tolist()) == (*context, *continuation[:n])
            assert laid.positions[row][visible][in_order].tolist() == list(range(len(context) + n))
        start += len(continuation)
    assert bool(seen.any(-1).all())  # a softmax over nothing is NaN


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.builds(Request, tokens, tokens), max_size=12),
    batch_size=st.integers(1, 5),
    branching=st.booleans(),
)
def test_batches_hold_every_request_once_and_the_longest_rows_first(
    requests: list[Request], batch_size: int, branching: bool
) -> None:
    found = batches(requests, batch_size, branching)
    assert sorted(index for batch in found for index in batch) == list(range(len(requests)))
    longest = [max(map(len, rows_of([requests[i] for i in batch], branching))) for batch in found]
    assert longest == sorted(longest, reverse=True)
    assert all(len(rows_of([requests[i] for i in batch], branching)) <= batch_size for batch in found)


def test_half_precision_keeps_the_sum_in_float32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    requests = some_requests()
    found = log_likelihoods(model, requests, 512, 3, Answers(), "x")
    wanted = [plain(model, request) for request in requests]
    assert [each.log_likelihood for each in found] == pytest.approx(
        [each.log_likelihood for each in wanted], rel=0.02
    )


def test_what_was_answered_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny_model("llama"), some_requests()
    first = log_likelihoods(model, requests, 512, 2, Answers(tmp_path / "a.jsonl"), "x")
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:-5]))
    computed: list[Request] = []
    real = likelihood.likelihoods_of_batch

    def noted(model: Any, batch: Sequence[Request], branching: bool) -> list[Likelihood]:
        computed.extend(batch)
        return real(model, batch, branching)

    monkeypatch.setattr(likelihood, "likelihoods_of_batch", noted)
    again = log_likelihoods(model, requests, 512, 7, Answers(tmp_path / "a.jsonl"), "x")
    assert_equal(again, first)
    assert len(computed) == 5


def test_two_processes_share_the_requests_and_find_the_same(tmp_path: Path) -> None:
    run_in_two(of_one_rank_of_two, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    alone = log_likelihoods(tiny_model("llama"), some_requests(), 512, 7, Answers(), "x")
    assert first == second
    assert_equal([Likelihood(*each) for each in first], alone)


def of_one_rank_of_two(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = log_likelihoods(tiny_model("llama"), some_requests(), 512, 2, Answers(), "x")
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
