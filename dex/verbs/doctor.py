"""`dex doctor`: the whole pipeline on a tiny random model, offline, so that an installation can be trusted."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from dex.console import say
from dex.data import Source
from dex.errors import DexError
from dex.models import load_model, save_model
from dex.recipe import parse_recipe
from dex.suites import Suite, suite_of
from dex.tuner import DexConfig
from dex.verbs.convert import Choice, convert, write_plan
from dex.verbs.evaluate import evaluate
from dex.verbs.fold import fold
from dex.verbs.train import train


def doctor() -> list[dict[str, Any]]:
    """Run every stage in a scratch folder; returns one entry a stage. Raises DexError at the first that fails."""
    with tempfile.TemporaryDirectory() as scratch, _own_cache(Path(scratch)):
        return _examine(Path(scratch))


def _examine(scratch: Path) -> list[dict[str, Any]]:
    base, adapter, run, folded = (scratch / name for name in ("base", "adapter", "run", "folded"))
    choice = Choice(source=Source("pydoc"), sequences=2, length=64)
    recipe = parse_recipe(_RECIPE, "the doctor's recipe", [f"model.id={base}", f"output={run}"])
    stages: list[tuple[str, Callable[[], Any]]] = [
        ("a tiny random Llama is saved and loaded", lambda: _write_tiny_base(base)),
        ("heads are scored and chosen", lambda: write_plan(str(base), scratch / "heads.json", choice)),
        ("an adapter is attached and written", lambda: convert(str(base), adapter, DexConfig(), choice)),
        ("the attached model equals the base exactly", lambda: _check_equal(base, adapter)),
        ("a recipe is trained", lambda: train(recipe)),
        (
            "base and adapter are evaluated",
            lambda: evaluate([str(base), str(run / "adapter")], scratch / "eval", _perplexity(run / "recipe.yaml")),
        ),
        ("the adapter is folded and certified", lambda: fold(str(run / "adapter"), folded)),
    ]
    return [_timed(name, stage) for name, stage in stages]


def _perplexity(recipe: Path) -> Suite:
    return suite_of("perplexity", [f"recipe={recipe}"])


def _timed(name: str, stage: Callable[[], Any]) -> dict[str, Any]:
    say(f"… {name}")
    began = time.monotonic()
    try:
        stage()
    except DexError as error:
        raise DexError(f"Not so: {name}. {error}") from error
    return {"check": name, "passed": True, "seconds": round(time.monotonic() - began, 1)}


def describe(checks: list[dict[str, Any]]) -> str:
    lines = [f"ok  {check['check']} ({check['seconds']} s)" for check in checks]
    return "\n".join([*lines, f"dex works here: {len(checks)} of {len(checks)} checks passed"])


def _write_tiny_base(folder: Path) -> None:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
    )
    save_model(LlamaForCausalLM(config), _byte_tokenizer(), folder)
    load_model(str(folder))


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def _check_equal(base: Path, adapter: Path) -> None:
    from dex.adapter import load_adapter

    input_ids = torch.arange(64)[None]
    with torch.no_grad():
        expected = load_model(str(base)).model(input_ids).logits
        attached = load_adapter(str(adapter))[0](input_ids).logits
    if not torch.equal(attached, expected):
        raise DexError(f"The logits differ by up to {(attached - expected).abs().max():.3g}.")


@contextmanager
def _own_cache(scratch: Path) -> Iterator[None]:
    """Prepared data of the doctor goes with its scratch folder."""
    before = os.environ.get("DEX_CACHE")
    os.environ["DEX_CACHE"] = str(scratch / "cache")
    try:
        yield
    finally:
        os.environ.pop("DEX_CACHE")
        if before is not None:
            os.environ["DEX_CACHE"] = before


_RECIPE = """
model: {id: base}
method: {heads: {sequences: 2, length: 64}}
data: {train: [{source: pydoc}], block: 128, held_out: 0.1, held_out_tokens: 2_000}
run: {tokens: 4_096, batch_tokens: 512, micro_batch: 2, lr: 1.0e-3, save_every: 2_048}
output: run
"""
