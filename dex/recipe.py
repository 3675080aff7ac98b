"""The recipe of `dex train`: one YAML file with four blocks and an output.

Every key is known and every default is in this file and in dex/methods/. Whatever is wrong is refused when the recipe
is loaded, in one sentence that names the key, its line, what was given and what is expected; where two settings do
not fit, both. Lengths are in tokens, not in steps or epochs.

    recipe = load_recipe("recipes/demo.yaml", ["run.seed=1", "output=runs/x"])
    recipe.run.lr, recipe.steps, recipe.to_yaml()
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from dex.methods import METHODS, AnyMethod, read_method_name
from dex.methods.dex import Dex
from dex.recipe_yaml import yaml_lines
from dex.settings import Block, Problem, YesNo, choice, clash, distinct, expected, number, text, whole
from dex.settings_file import SettingsFile

BILLION = 1_000_000_000
FLASH = ("flash_attention_2", "flash_attention_3")

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
AttentionName = Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]
Quantisation = Literal["4bit", "8bit"]
Decay = Literal["cosine", "linear", "constant"]
Documents = Literal["file", "paragraph", "line"]
Format = Literal["text", "chat"]
TooLong = Literal["split", "truncate", "drop"]
Loss = Literal["chunked", "liger"]
Tracker = Literal["trackio", "tensorboard", "wandb"]


def _at_least_one(sources: list[Source]) -> list[Source]:
    if not sources:
        raise expected("a list of at least one source")
    return sources


# --- The blocks --------------------------------------------------------------------------------------------


class ModelChoice(Block):
    id: Annotated[str, text()]  # a Hub id, a folder or a .gguf file
    revision: Annotated[str | None, text(null=True)] = None
    dtype: Annotated[Dtype, choice(Dtype)] = "float32"  # of what is frozen; what trains is float32
    # Of what is frozen apart from K, V, O and the head, with bitsandbytes; null: not quantised.
    quantise: Annotated[Quantisation | None, choice(Quantisation, null=True)] = None
    # How attention is computed; null: transformers' choice, which is sdpa. With flash a block's mask is never formed.
    attention: Annotated[AttentionName | None, choice(AttentionName, null=True)] = None
    chat_template: Annotated[str | None, text(null=True)] = None  # a .jinja file; null: the tokenizer's own


class Source(Block):
    source: Annotated[str, text()]  # a file, a folder, a Hub id, or `pydoc`
    weight: Annotated[float, number(above=0)] = 1.0
    column: Annotated[str | None, text(null=True)] = None
    split: Annotated[str, text()] = "train"
    name: Annotated[str | None, text(null=True)] = None  # the configuration of a Hub data set
    revision: Annotated[str | None, text(null=True)] = None
    documents: Annotated[Documents, choice(Documents)] = "file"  # how a .txt file is cut
    format: Annotated[Format, choice(Format)] = "text"  # chat: conversations, and the loss on assistant turns alone
    too_long: Annotated[TooLong, choice(TooLong)] = "split"  # what happens to a document longer than a block


class Data(Block):
    train: Annotated[list[Source], AfterValidator(_at_least_one)]
    block: Annotated[int, whole(above=1)] = 1024
    held_out: Annotated[float, number(above=0, below=1)] = 0.1  # share of the documents
    held_out_tokens: Annotated[int | None, whole(above=0, null=True)] = None  # evaluate at most so many
    held_out_per_document: Annotated[int | None, whole(above=1, null=True)] = None  # and at most so many of each


class Run(Block):
    tokens: Annotated[int, whole(above=0)]
    batch_tokens: Annotated[int, whole(above=0)]  # of one update, over all processes
    micro_batch: Annotated[int, whole(above=0)] = 1  # blocks in one forward pass
    lr: Annotated[float, number(above=0)] = 1e-4  # the paper's peak
    decay: Annotated[Decay, choice(Decay)] = "cosine"
    warmup: Annotated[float, number(at_least=0, below=1)] = 0.03  # share of the run; the paper's
    weight_decay: Annotated[float, number(at_least=0)] = 0.0
    clip: Annotated[float | None, number(above=0, null=True)] = 1.0  # gradient norm; null: not clipped
    seed: Annotated[int, whole(at_least=0, below=2**32)] = 0
    save_every: Annotated[int | None, whole(above=0, null=True)] = None  # tokens; null: at the end
    eval_every: Annotated[int | None, whole(above=0, null=True)] = None  # tokens; null: at the end
    log_every: Annotated[int | None, whole(above=0, null=True)] = None  # tokens; null: every update
    keep_last: Annotated[int, whole(above=0)] = 2  # checkpoints
    hours: Annotated[float | None, number(null=True, above=0)] = None  # stops with a checkpoint after so many
    gradient_checkpointing: YesNo = False
    autocast: YesNo = False  # bfloat16 products of what is float32
    loss: Annotated[Loss, choice(Loss)] = "chunked"
    track: Annotated[list[Annotated[Tracker, choice(Tracker)]], distinct("a list of different names,", 0)] = []
    allow_over_1b: YesNo = False


class Recipe(Block):
    model: ModelChoice
    method: Annotated[AnyMethod, BeforeValidator(read_method_name)] = Dex()
    data: Data
    run: Run
    output: Annotated[str, AfterValidator(os.path.expanduser), text()]

    @model_validator(mode="after")
    def _settings_fit(self) -> Recipe:
        if problems := [*_batch_problems(self), *self.method.problems(self), *_model_problems(self)]:
            raise clash(problems)
        return self

    @property
    def steps(self) -> int:
        """Updates of the run."""
        return self.run.tokens // self.run.batch_tokens

    @property
    def blocks_per_step(self) -> int:
        """Blocks of one update, over all processes."""
        return self.run.batch_tokens // self.data.block

    @property
    def accumulation(self) -> int:
        """Forward passes of one update, over all processes."""
        return self.blocks_per_step // self.run.micro_batch

    @property
    def log_steps(self) -> int:
        """Updates from one log line to the next."""
        return (self.run.log_every or self.run.batch_tokens) // self.run.batch_tokens

    @property
    def save_steps(self) -> int | None:
        """Updates from one checkpoint to the next; None: only at the end."""
        return self.run.save_every // self.run.batch_tokens if self.run.save_every else None

    @property
    def eval_steps(self) -> int | None:
        """Updates from one evaluation to the next; None: only at the end."""
        return self.run.eval_every // self.run.batch_tokens if self.run.eval_every else None

    def to_yaml(self) -> str:
        """The recipe with every default written out, which loads again as an equal recipe."""
        return "\n".join(yaml_lines(self.model_dump())) + "\n"


# --- Settings that must fit each other ---------------------------------------------------------------------


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    run, data = recipe.run, recipe.data
    if run.tokens > BILLION and not run.allow_over_1b:
        yield Problem(
            ("run", "tokens"),
            f"run.tokens is {run.tokens:_}, more than one billion, and run.allow_over_1b is false; "
            "lower the first or set the second to true",
        )
    if run.batch_tokens % data.block:
        yield _not_a_multiple("run.batch_tokens", run.batch_tokens, "data.block", data.block)
    elif recipe.blocks_per_step % run.micro_batch:
        yield Problem(
            ("run", "micro_batch"),
            f"run.micro_batch is {run.micro_batch}, which does not divide the {recipe.blocks_per_step} blocks of "
            f"one update (run.batch_tokens {run.batch_tokens:_} / data.block {data.block:_})",
        )
    for key in ("tokens", "save_every", "eval_every", "log_every"):
        value = getattr(run, key)
        if value is not None and value % run.batch_tokens:
            yield _not_a_multiple(f"run.{key}", value, "run.batch_tokens", run.batch_tokens)
    if data.held_out_tokens is not None and data.held_out_tokens < data.block:
        yield Problem(
            ("data", "held_out_tokens"),
            f"data.held_out_tokens is {data.held_out_tokens:_}, less than one block (data.block {data.block:_})",
        )


def _not_a_multiple(key: str, value: int, unit_key: str, unit: int) -> Problem:
    below = value // unit * unit
    fits = f"{below:_} or {below + unit:_}" if below else f"{unit:_}"
    sentence = f"{key} is {value:_}, which is not a multiple of {unit_key}, {unit:_}; {fits} would be"
    return Problem(tuple(key.split(".")), sentence)


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    model, method = recipe.model, recipe.method
    if model.quantise is not None and method.in_place:
        yield Problem(
            ("model", "quantise"),
            f"model.quantise is {model.quantise}, and method.name {method.name} updates the base's own weights; "
            "remove the first",
        )
    if model.quantise is not None and model.dtype == "float32":
        yield Problem(
            ("model", "dtype"),
            f"model.quantise is {model.quantise}, and model.dtype is float32; bitsandbytes computes in bfloat16 or "
            "float16: set one of them",
        )
    if method.in_place and model.dtype != "float32":
        yield Problem(
            ("model", "dtype"),
            f"model.dtype is {model.dtype}, and method.name {method.name} updates the weights in place, which needs "
            "float32 (run.autocast: true makes the products bfloat16)",
        )
    if recipe.run.autocast and model.dtype != "float32":
        yield Problem(
            ("run", "autocast"),
            f"run.autocast has no effect beside model.dtype {model.dtype}, in which the products are already; remove "
            "one of the two",
        )
    if model.attention in FLASH and recipe.run.micro_batch > 1:
        yield Problem(
            ("run", "micro_batch"),
            f"run.micro_batch is {recipe.run.micro_batch}, and model.attention {model.attention} keeps the documents "
            "of a block apart only with one block at a time; use micro_batch: 1",
        )
    if model.attention in FLASH and model.dtype == "float32" and not recipe.run.autocast:
        yield Problem(
            ("model", "attention"),
            f"model.attention {model.attention} computes in bfloat16 or float16, and model.dtype is float32; set "
            "another dtype, or run.autocast: true",
        )
    template = Path(model.chat_template).suffix if model.chat_template else ".jinja"
    if template not in (".jinja", ".j2"):
        yield Problem(("model", "chat_template"), f"model.chat_template is {model.chat_template}, not a .jinja file")


# --- Loading -----------------------------------------------------------------------------------------------

_LISTS: dict[tuple[str, ...], str] = {
    ("data", "train"): "sources",
    ("method", "layers"): "layer indices or null",
    ("method", "train"): "names or null",
    ("method", "targets"): "names or null",
    ("run", "track"): "trackers",
}
RECIPES = SettingsFile(
    Recipe, "recipe", {("method",): METHODS}, _LISTS, "; `dex recipes ls` lists some to start from"
)
_DATA = SettingsFile(Data, "data block")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides, whose values are YAML.

    Raises DexError, in one sentence, for anything that cannot be read or does not fit.
    """
    return RECIPES.load(path, overrides)


def as_recipe(recipe: Recipe | str | Path) -> Recipe:
    """A recipe, or the file that holds one."""
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` for a text at hand; `name` stands for the file in error sentences."""
    return RECIPES.parse(text, name, overrides)


def data_block(**settings: Any) -> Data:
    """A `data` block from settings at hand. Raises DexError as for a recipe."""
    return _DATA.block(**settings)
