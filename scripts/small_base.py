"""Pretrain the small base of the studies here: a tokenizer and a Llama of 3 million parameters, on Python's source.

    python scripts/small_base.py                     # runs/small-base/run/model; about 40 minutes on two slow cores
    python scripts/small_base.py run.tokens=65_536   # overrides of recipes/studies/small-base.yaml

It goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from dex.console import say
from dex.data.embedded import texts
from dex.errors import DexError
from dex.output import whole_folder
from dex.quiet import quiet_libraries
from dex.recipe import load_recipe
from dex.verbs.init import init
from dex.verbs.train import describe, train

RECIPE = Path("recipes/studies/small-base.yaml")
VOCABULARY = 4_096
END = "<|endoftext|>"
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=2_048,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)


def main(overrides: list[str]) -> None:
    recipe = load_recipe(RECIPE, overrides)
    fresh = Path(recipe.model.id)
    like = fresh.parent / "like"
    if not like.exists():
        say("training the tokenizer")
        with whole_folder(like) as partial:
            CONFIG.save_pretrained(partial)
            make_tokenizer().save_pretrained(partial)
    if not fresh.exists():
        init("base", str(like / "config.json"), fresh)
    print(describe(recipe, train(recipe)))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the standard library's source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(library(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def library() -> Iterator[str]:
    for _, text in texts("stdlib"):
        yield text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    options = parser.parse_args()
    quiet_libraries()
    try:
        main(options.overrides)
    except DexError as error:
        sys.exit(f"small_base: {error}")
