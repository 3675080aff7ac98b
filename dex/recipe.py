"""The recipe of `dex train`: one YAML file with four blocks and an output.

Every key is known and every default is in this file and in dex/methods/. Whatever is wrong is refused when the recipe
is loaded, in one sentence that names the key, its line, what was given and what is expected; where two settings do
not fit, both. Lengths are in tokens, not in steps or epochs.

    recipe = load_recipe("recipes/demo.yaml", ["run.seed=1", "output=runs/x"])
    recipe.run.lr, recipe.steps, recipe.to_yaml()
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError, model_validator

from dex.errors import DexError
from dex.methods import METHODS, AnyMethod, read_method_name
from dex.methods.dex import Dex
from dex.recipe_yaml import yaml_lines
from dex.settings import Block, KeyPath, Problem, YesNo, choice, clash, distinct, expected, number, shown, text, whole

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


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides, whose values are YAML.

    Raises DexError, in one sentence, for anything that cannot be read or does not fit.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DexError(f"{path} does not exist; `dex recipes ls` lists some to start from.") from None
    except IsADirectoryError:
        raise DexError(f"{path} is a folder; a recipe is one YAML file.") from None
    except UnicodeDecodeError as error:
        raise DexError(f"{path} is not a recipe: byte {error.start} is not UTF-8 text.") from None
    except OSError as error:
        raise DexError(f"{path} could not be read: {error.strerror or error}.") from error
    return parse_recipe(text, str(path), overrides)


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` for a text at hand; `name` stands for the file in error sentences."""
    document = _Document(name, *_read_yaml(text, name))
    for override in overrides:
        document.override(override)
    try:
        return Recipe.model_validate(document.values)
    except ValidationError as error:
        raise DexError(document.explain(error)) from None


def data_block(**settings: Any) -> Data:
    """A `data` block from settings of the command line. Raises DexError as for a recipe."""
    try:
        return Data(**settings)
    except ValidationError as error:
        raise DexError(f"{next(_problems(error)).sentence}.") from None


def _read_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The values, and the place of each key ("line 7")."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        values = _with_text_keys(YAML(typ="safe", pure=True).load(text))
        places: dict[KeyPath, str] = {}
        _note_lines(YAML(typ="safe", pure=True).compose(text), (), places, set())
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(error.problem or error.context).splitlines()[0]
        raise DexError(f"{name}{where}: this is not valid YAML: {problem}.") from None
    except (YAMLError, ValueError) as error:
        raise DexError(f"{name}: this is not valid YAML: {str(error).splitlines()[0]}.") from None
    except RecursionError:
        raise DexError(f"{name}: this is not a recipe: it is nested too deeply, or within itself.") from None
    if values is None:
        raise DexError(f"{name} is empty; a recipe has the blocks {_named_keys(())}.")
    if not isinstance(values, dict):
        raise DexError(f"{name} is not a recipe: it holds {shown(values)}, not the blocks {_named_keys(())}.")
    return values, places


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _note_lines(node: Any, path: KeyPath, places: dict[KeyPath, str], seen: set[int]) -> None:
    if node is None or id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))
    for index, item in enumerate(node.value):
        key, child = item if isinstance(item, tuple) else (None, item)
        here = (*path, index if key is None else str(key.value))
        places[here] = f"line {(key or child).start_mark.line + 1}"
        _note_lines(child, here, places, seen)


class _Document:
    """The values of one recipe before validation, and where each was given."""

    def __init__(self, name: str, values: dict[str, Any], places: dict[KeyPath, str]) -> None:
        self.name, self.values, self.places = name, values, places

    def override(self, override: str) -> None:
        """Set one `key.path=value`; blocks that are missing on the way are made."""
        dotted, equals, given = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise DexError(f"{override!r} is not an override; write key.path=value, such as run.seed=1.")
        here: Any = self.values
        path: KeyPath = ()
        for key in keys[:-1]:
            index = self._place_in(here, key, path, override)
            if isinstance(here, dict) and here.get(key) is None:
                here[key] = {}
                self.places[(*path, index)] = "on the command line"
            here, path = here[index], (*path, index)
        index = self._place_in(here, keys[-1], path, override)
        here[index] = _override_value(given, override)
        self._place_on_command_line((*path, index))

    def _place_in(self, here: Any, key: str, path: KeyPath, override: str) -> str | int:
        if isinstance(here, dict):
            return key
        block = _dotted(path)
        if not isinstance(here, list):
            raise DexError(f"{override!r} on the command line: {block} is {shown(here)} and has no keys.")
        if not key.isdecimal() or int(key) >= len(here):
            raise DexError(
                f"{override!r} on the command line: {block} is a list of {len(here)}, whose entries are "
                f"{block}.0 to {block}.{len(here) - 1}, so there is no {block}.{key}."
            )
        return int(key)

    def _place_on_command_line(self, path: KeyPath) -> None:
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]
        self.places[path] = "on the command line"

    def explain(self, error: ValidationError) -> str:
        """The first problem in one sentence, and how many more there are."""
        problems = sorted(_problems(error), key=self._order)
        first, more = problems[0], len(problems) - 1
        place = self._place_of(first.path)
        where = self.name if place is None else f"{self.name}, {place}"
        rest = f" ({more} more problem{'s' if more > 1 else ''} after this one)" if more else ""
        return f"{where}: {first.sentence}{rest}."

    def _place_of(self, path: KeyPath) -> str | None:
        """Where `path` was given, or else the block that it is or should be in."""
        return next((self.places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.places), None)

    def _order(self, problem: Problem) -> tuple[bool, int]:
        """By line; what is missing last, as an unknown key is often the missing one, misspelt."""
        place = self._place_of(problem.path) or ""
        line = re.search(r"\d+", place)
        return problem.path not in self.places, int(line[0]) if line else 0


def _override_value(given: str, override: str) -> Any:
    """The value as YAML has it, but numbers and dates as typed: a revision may be 0123456 or 12e4."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = _with_text_keys(YAML(typ="safe", pure=True).load(given))
    except (YAMLError, ValueError):
        raise DexError(f"{override!r} on the command line: what follows the = is not valid YAML.") from None
    return value if value is None or isinstance(value, bool | str | list | dict) else given.strip()


# --- Saying what is wrong ----------------------------------------------------------------------------------


def _problems(error: ValidationError) -> Iterator[Problem]:
    for found in error.errors(include_url=False):
        path: KeyPath = tuple(key for key in found["loc"] if not str(key).startswith("<"))
        if found["type"] == "clash":
            yield from found["ctx"]["problems"]
        elif found["type"] == "extra_forbidden":
            tags = [str(key)[1:-1] for key in found["loc"] if str(key).startswith("<")]
            yield Problem(path, _unknown_key(path, tags[0] if path[0] == "method" else None))
        elif found["type"] == "missing":
            yield Problem(path, f"{_dotted(path)} is missing")
        else:
            expected = found["msg"] if found["type"] == "expected" else _expected_block(path)
            yield Problem(path, f"{_dotted(path)}: {shown(found['input'])} was given, {expected}")


def _unknown_key(path: KeyPath, method: str | None) -> str:
    block, key = _without_indices(path[:-1]), str(path[-1])
    known = _KEYS.get(block, [])
    if method is not None and block == ("method",):
        if key in known:
            return f"{_dotted(path)} has no effect with method.name {method}, {METHODS[method].what}; remove it"
        known = list(METHODS[method].model_fields)
    if key in known:  # of the other kind of heads
        return f"{_dotted(path)} has no effect beside method.heads.plan; give one of the two"
    elsewhere = [".".join((*place, key)) for place, keys in _KEYS.items() if key in keys]
    if near := difflib.get_close_matches(key, known, n=1):
        hint = f"did you mean {_dotted((*path[:-1], near[0]))}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        hint = f"{_dotted(path[:-1]) or 'a recipe'} has {_listed(known)}"
    return f"{_dotted(path)} is not a key of a recipe; {hint}"


def _expected_block(path: KeyPath) -> str:
    if path == ("data", "train"):
        return "a list of sources is expected"
    if path == ("method", "layers"):
        return "a list of layer indices or null is expected"
    if path in (("method", "train"), ("method", "targets")):
        return "a list of names or null is expected"
    if path == ("run", "track"):
        return "a list of trackers is expected"
    return f"a block with {_named_keys(_without_indices(path))} is expected"


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _without_indices(path: KeyPath) -> tuple[str, ...]:
    return tuple(key for key in path if isinstance(key, str))


def _named_keys(block: tuple[str, ...]) -> str:
    return _listed(_KEYS[block])


def _listed(keys: list[str]) -> str:
    *first, last = keys
    return f"{', '.join(first)} and {last}" if first else last


def _keys_by_block(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """The keys of every block, by its path without list indices."""
    keys: dict[tuple[str, ...], list[str]] = {path: list(model.model_fields)}
    for name, field in model.model_fields.items():
        for block in _blocks_in(field.annotation):
            for place, names in _keys_by_block(block, (*path, name)).items():
                keys[place] = list(dict.fromkeys(keys.get(place, []) + names))
    return keys


def _blocks_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in _blocks_in(argument)]


_KEYS = _keys_by_block(Recipe)
