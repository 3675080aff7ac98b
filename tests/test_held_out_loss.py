"""Held-out losses: of the right tokens, whatever the batch size and the number of processes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_in_two
from tiny import tiny_model, write_tiny

from dex.data import HeldOutBlock
from dex.evaluation.held_out import TASK, BlockLoss, held_out_losses, records_of, summarise
from dex.evaluation.records import Result, Task
from dex.models import load_model
from dex.recipe import Data, Source
from dex.run_data import prepare_data

DATA = Data(train=[Source(source="pydoc")], block=64, held_out=0.1, held_out_tokens=4_000)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def blocks(*lengths: int) -> list[HeldOutBlock]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 256, (n,), generator=generator) for n in lengths]
    return [HeldOutBlock(i // 2, each, torch.arange(len(each)) > 0) for i, each in enumerate(ids)]


def test_a_blocks_loss_is_the_models_own_mean_loss() -> None:
    model = tiny_model("qwen3")
    for (document, ids, _), loss in zip(blocks(9, 5, 9), held_out_losses(model, blocks(9, 5, 9)), strict=True):
        expected = model(input_ids=ids[None], labels=ids[None]).loss.item()
        assert (loss.document, loss.tokens) == (document, len(ids) - 1)
        assert loss.loss == pytest.approx(expected, rel=1e-5)


def test_losses_do_not_depend_on_the_batch_size() -> None:
    model = tiny_model("llama")
    reference = [block.loss for block in held_out_losses(model, blocks(*[16] * 9, 7, 3), 1)]
    for batch_size in (2, 7):
        again = [block.loss for block in held_out_losses(model, blocks(*[16] * 9, 7, 3), batch_size)]
        np.testing.assert_allclose(again, reference, rtol=1e-5)


def test_the_mean_weighs_every_token_alike() -> None:
    losses = held_out_losses(tiny_model("llama"), blocks(9, 5, 12, 2))
    loss, perplexity = summarise(losses)
    expected = sum(block.loss * block.tokens for block in losses) / sum(block.tokens for block in losses)
    assert loss.mean == pytest.approx(expected)
    assert perplexity.mean == pytest.approx(math.exp(expected))


def test_a_run_s_own_interval_is_that_of_its_records() -> None:
    losses = [BlockLoss(document, 10 + document, 2.0 + document % 5) for document in range(12)]
    records = records_of(losses, blocks(*[4] * 12))
    result = Result("perplexity", "run", {}, {}, {TASK: Task("loss", higher_is_better=False)}, records)
    assert summarise(losses)[0] == result.score(TASK)


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    tokenizer = load_model(str(write_tiny(tmp_path / "base"))).tokenizer
    prepared = prepare_data(DATA, tokenizer, 100_000)
    trained = "".join(map(chr, np.asarray(prepared.packed.input_ids).ravel().tolist()))
    for document in range(len(prepared.held_out)):
        text = "".join(map(chr, prepared.held_out.document(document).tolist()))
        assert text[:64] not in trained


def test_the_held_out_part_does_not_depend_on_the_training_budget(tmp_path: Path) -> None:
    tokenizer = load_model(str(write_tiny(tmp_path / "base"))).tokenizer
    small, large = (prepare_data(DATA, tokenizer, tokens).held_out.fingerprint for tokens in (1_000, 5_000_000))
    assert small == large


# Several processes


class Counted(torch.nn.Module):
    """A model that counts its forward passes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.calls = model, 0

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.module(*args, **options)


def of_one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results = {}
    for name, lengths in SHARED.items():
        model = Counted(tiny_model("llama"))
        losses = held_out_losses(model, blocks(*lengths), 2)
        results[name] = {"calls": model.calls, "losses": [dataclasses.asdict(loss) for loss in losses]}
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


SHARED = {"uneven": [16] * 5 + [9, 7, 3], "even": [16] * 4, "fewer than processes": [12], "none": []}


def test_processes_share_the_work_and_all_get_the_same_losses(tmp_path: Path) -> None:
    """Each makes the same number of forward passes: those of a sharded model wait for each other."""
    run_in_two(of_one_rank, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for name, lengths in SHARED.items():
        alone = Counted(tiny_model("llama"))
        losses = held_out_losses(alone, blocks(*lengths), 2)
        assert first[name]["losses"] == [dataclasses.asdict(loss) for loss in losses]
        assert first[name]["calls"] == -(-alone.calls // 2)


def test_a_process_that_has_joined_no_other_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = held_out_losses(tiny_model("llama"), blocks(9, 5, 9), 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert held_out_losses(tiny_model("llama"), blocks(9, 5, 9), 1) == reference


def test_only_targets_count(tmp_path: Path) -> None:
    model = tiny_model("llama")
    (whole,) = blocks(20)
    targets = torch.zeros(20, dtype=torch.bool)
    targets[[3, 4, 11]] = True
    (loss,) = held_out_losses(model, [whole._replace(targets=targets)])
    labels = torch.where(targets, whole.input_ids, -100)
    expected = model(input_ids=whole.input_ids[None], labels=labels[None]).loss.item()
    assert (loss.tokens, loss.loss) == (3, pytest.approx(expected, rel=1e-5))
