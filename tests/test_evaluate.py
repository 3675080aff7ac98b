"""`dex eval --suite perplexity`: losses on the same held-out blocks, and paired differences."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_model, write_tiny

from dex.errors import DexError
from dex.evaluate.perplexity import held_out_losses, summarise
from dex.evaluate.suite import describe, evaluate
from dex.models import load_model
from dex.recipe import Data, Source
from dex.run_data import prepare_data

DATA = Data(train=[Source(source="pydoc")], block=64, held_out=0.1, held_out_tokens=4_000)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def blocks(*lengths: int) -> list[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(i // 2, torch.randint(0, 256, (n,), generator=generator)) for i, n in enumerate(lengths)]


def test_a_blocks_loss_is_the_models_own_mean_loss() -> None:
    model = tiny_model("qwen3")
    for (document, ids), loss in zip(blocks(9, 5, 9), held_out_losses(model, blocks(9, 5, 9)), strict=True):
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


def test_models_are_compared_on_the_same_blocks_and_a_model_with_itself_differs_by_zero(tmp_path: Path) -> None:
    a, b, same = (str(write_tiny(tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 2), ("c", 1)))
    result = evaluate([a, b, same], tmp_path / "out", DATA)
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text()) == result
    assert result["models"][a]["difference"] is None
    assert result["models"][same]["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    difference = result["models"][b]["difference"]
    assert difference["low"] < difference["mean"] < difference["high"]
    losses = {name: figures["loss"]["mean"] for name, figures in result["models"].items()}
    assert difference["mean"] == pytest.approx(losses[b] - losses[a])
    assert result["held_out"]["documents"] > 1
    assert "difference from" in describe(result)


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


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a = str(write_tiny(tmp_path / "a"))
    with pytest.raises(DexError, match="named twice"):
        evaluate([a, a], tmp_path / "out", DATA)
    with pytest.raises(DexError, match="not one of the models"):
        evaluate([a], tmp_path / "out", DATA, against="b")
    assert not (tmp_path / "out").exists()
