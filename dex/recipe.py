"""The recipe of `dex train`: one YAML file with four blocks and an output.

Every key is known and every default is in this file. Whatever is wrong is refused when the recipe is loaded, in
one sentence that names the key, its line, what was given and what is expected; where two settings do not fit,
both. Lengths are in tokens, not in steps or epochs.

    recipe = load_recipe("recipes/demo.yaml", ["run.seed=1", "output=runs/x"])
    recipe.run.lr, recipe.steps, recipe.to_yaml()
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dex.errors import DexError

BILLION = 1_000_000_000

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
MethodName = Literal["dex", "attention", "full"]
Criterion = Literal["entropy", "importance", "random", "all", "none"]
Schedule = Literal["paper", "land", "fixed", "off"]
WdInit = Literal["kaiming", "zeros"]
Decay = Literal["cosine", "linear", "constant"]
Documents = Literal["file", "paragraph", "line"]

KeyPath = tuple[str | int, ...]


# --- Reading one value: each reader returns the value in its type or says what is expected -----------------


class _Range(NamedTuple):
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        return not (
            (self.above is not None and value <= self.above)
            or (self.at_least is not None and value < self.at_least)
            or (self.below is not None and value >= self.below)
            or (self.at_most is not None and value > self.at_most)
        )

    def __str__(self) -> str:
        bounds = {
            "above": self.above,
            "of at least": self.at_least,
            "below": self.below,
            "of at most": self.at_most,
        }
        named = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        return f" {' and '.join(named)}" if named else ""


def _expected(what: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{what} is expected", {"what": what})


def _whole(null: bool = False, word: str | None = None, **bounds: float) -> BeforeValidator:
    """Read a whole number; also null, or one word, where the setting has one."""
    limits = _Range(**bounds)
    what = f"a whole number{limits}{f' or {word}' if word else ''}{' or null' if null else ''}"

    def read(value: Any) -> int | str | None:
        if (value is None and null) or (word is not None and value == word):
            return word if value is not None else None
        number = _as_float(value)
        if number is None or not number.is_integer() or not limits.holds(number):
            raise _expected(what)
        return int(value) if isinstance(value, int) else _as_int(str(value), number)

    return BeforeValidator(read)


def _number(null: bool = False, **bounds: float) -> BeforeValidator:
    """Read a finite number. Text counts if it is one: parsers of YAML 1.1 take 1e-4 for a string."""
    limits = _Range(**bounds)

    def read(value: Any) -> float | None:
        if value is None and null:
            return None
        number = _as_float(value)
        if number is None or not limits.holds(number):
            raise _expected(f"a number{limits}{' or null' if null else ''}")
        return number

    return BeforeValidator(read)


def _as_float(value: Any) -> float | None:
    """The finite number that `value` is or spells; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_int(text: str, number: float) -> int:
    try:
        return int(text)  # exact beyond 2**53, where the float is not
    except ValueError:
        return int(number)


def _text(null: bool = False) -> BeforeValidator:
    """Read a name, path or id: printable, on one line, not empty."""

    def read(value: Any) -> str | None:
        if value is None and null:
            return None
        if not isinstance(value, str):
            hint = "" if value is None or isinstance(value, dict | list) else " (put it in quotes)"
            raise _expected(f"text{' or null' if null else ''}{hint}")
        if not value.strip() or not value.isprintable():
            raise _expected("printable text on one line")
        return value

    return BeforeValidator(read)


def _choice(literal: Any) -> BeforeValidator:
    """Read one of the words of a Literal."""
    words = list(get_args(literal))

    def read(value: Any) -> str:
        if value in words:
            return str(value)
        near = difflib.get_close_matches(str(value), words, n=1)
        raise _expected(f"one of {', '.join(words)}" + (f" (did you mean {near[0]}?)" if near else ""))

    return BeforeValidator(read)


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _expected("true or false")
    return value


YesNo = Annotated[bool, BeforeValidator(_yes_or_no)]


def _layer_list(layers: list[int] | None) -> list[int] | None:
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        raise _expected("a list of different layer indices, or null for all layers,")
    return layers


def _name_list(names: list[str] | None) -> list[str] | None:
    if names is not None and (not names or len(set(names)) < len(names)):
        raise _expected("a list of different names, or null for all weights,")
    return names


def _at_least_one(sources: list[Source]) -> list[Source]:
    if not sources:
        raise _expected("a list of at least one source")
    return sources


# --- The blocks --------------------------------------------------------------------------------------------


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelChoice(_Block):
    id: Annotated[str, _text()]  # a Hub id, a folder or a .gguf file
    revision: Annotated[str | None, _text(null=True)] = None
    dtype: Annotated[Dtype, _choice(Dtype)] = "float32"  # of what is frozen; what trains is float32


class ScoredHeads(_Block):
    criterion: Annotated[Criterion, _choice(Criterion)] = "entropy"
    per_layer: Annotated[int | Literal["half"], _whole(above=0, word="half")] = "half"
    # The paper does not give its calibration set; 64 sequences of the training data are ours.
    sequences: Annotated[int, _whole(above=0)] = 64
    length: Annotated[int, _whole(above=1)] = 512
    seed: Annotated[int, _whole(at_least=0, below=2**32)] = 0


class PlannedHeads(_Block):
    plan: Annotated[str, _text()]  # a file that `dex heads` wrote


def _kind_of_heads(value: Any) -> str | None:
    if isinstance(value, PlannedHeads) or (isinstance(value, Mapping) and "plan" in value):
        return "<plan>"
    return "<scored>" if isinstance(value, ScoredHeads | Mapping) else None


Heads = Annotated[
    Annotated[ScoredHeads, Tag("<scored>")] | Annotated[PlannedHeads, Tag("<plan>")],
    Discriminator(_kind_of_heads),
]


class LrScale(_Block):
    """Multipliers of the learning rate for Dex's own parameters."""

    w_d: Annotated[float, _number(above=0)] = 1.0
    lam: Annotated[float, _number(at_least=0)] = 1.0


class Method(_Block):
    """`dex`; its control `attention`: K, V and O alone; or `full`: a model of any layout, whole or in part."""

    name: Annotated[MethodName, _choice(MethodName)] = "dex"
    heads: Heads = ScoredHeads()
    schedule: Annotated[Schedule, _choice(Schedule)] = "paper"
    # T_a as a share of the run. The paper does not give it; half of the run is ours.
    anneal: Annotated[float, _number(above=0, at_most=1)] = 0.5
    lam: Annotated[float | None, _number(null=True)] = None  # for `fixed`; null: λ_init of each layer
    w_d_init: Annotated[WdInit, _choice(WdInit)] = "kaiming"
    lr_scale: LrScale = LrScale()
    train_kvo: YesNo = True  # false: W_D and λ alone
    layers: Annotated[
        list[Annotated[int, _whole(at_least=0)]] | None,
        AfterValidator(_layer_list),
    ] = None

    # Of `full`: which weights train, by a part of their names such as q_proj or lambda_q1; null: all.
    train: Annotated[list[Annotated[str, _text()]] | None, AfterValidator(_name_list)] = None
    # Of `full`, for a DIFF V1 whose norm anneals: over which share of the run. null: half, if it is such a model.
    norm_anneal: Annotated[float | None, _number(null=True, above=0, at_most=1)] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_idle_keys(cls, values: Any) -> Any:
        name = values.get("name", "dex") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name not in get_args(MethodName):
            return values  # refused by the types
        keys = _keys_of(name)
        if idle := [key for key in values if key in cls.model_fields and key not in keys]:
            raise _clash(
                _Problem(
                    ("method", key), f"method.{key} has no effect with method.name {name}, {_WHAT[name]}; remove it"
                )
                for key in idle
            )
        return values if name not in _BRANCHLESS else {**values, "schedule": "off", "heads": {"criterion": "none"}}

    @model_serializer(mode="wrap")
    def _without_idle_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        keys = _keys_of(self.name)
        return {key: value for key, value in values.items() if key in keys}


_BRANCHLESS = {"attention": {"name", "layers"}, "full": {"name", "train", "norm_anneal"}}
_WHAT = {
    "dex": "which trains K, V, O and its branch",
    "attention": "which trains K, V and O alone",
    "full": "which trains the model's own weights",
}


def _keys_of(name: str) -> set[str]:
    """The keys that have an effect with this method."""
    return _BRANCHLESS.get(name) or set(Method.model_fields) - (_BRANCHLESS["full"] - {"name"})


class Source(_Block):
    source: Annotated[str, _text()]  # a file, a folder, a Hub id, or `pydoc`
    weight: Annotated[float, _number(above=0)] = 1.0
    column: Annotated[str | None, _text(null=True)] = None
    split: Annotated[str, _text()] = "train"
    name: Annotated[str | None, _text(null=True)] = None  # the configuration of a Hub data set
    revision: Annotated[str | None, _text(null=True)] = None
    documents: Annotated[Documents, _choice(Documents)] = "file"  # how a .txt file is cut


class Data(_Block):
    train: Annotated[list[Source], AfterValidator(_at_least_one)]
    block: Annotated[int, _whole(above=1)] = 1024
    held_out: Annotated[float, _number(above=0, below=1)] = 0.1  # share of the documents
    held_out_tokens: Annotated[int | None, _whole(above=0, null=True)] = None  # evaluate at most so many
    held_out_per_document: Annotated[int | None, _whole(above=1, null=True)] = None  # and at most so many of each


class Run(_Block):
    tokens: Annotated[int, _whole(above=0)]
    batch_tokens: Annotated[int, _whole(above=0)]  # of one update, over all processes
    micro_batch: Annotated[int, _whole(above=0)] = 1  # blocks in one forward pass
    lr: Annotated[float, _number(above=0)] = 1e-4  # the paper's peak
    decay: Annotated[Decay, _choice(Decay)] = "cosine"
    warmup: Annotated[float, _number(at_least=0, below=1)] = 0.03  # share of the run; the paper's
    weight_decay: Annotated[float, _number(at_least=0)] = 0.0
    clip: Annotated[float | None, _number(above=0, null=True)] = 1.0  # gradient norm; null: not clipped
    seed: Annotated[int, _whole(at_least=0, below=2**32)] = 0
    save_every: Annotated[int | None, _whole(above=0, null=True)] = None  # tokens; null: at the end
    eval_every: Annotated[int | None, _whole(above=0, null=True)] = None  # tokens; null: at the end
    log_every: Annotated[int | None, _whole(above=0, null=True)] = None  # tokens; null: every update
    keep_last: Annotated[int, _whole(above=0)] = 2  # checkpoints
    gradient_checkpointing: YesNo = False
    allow_over_1b: YesNo = False


class Recipe(_Block):
    model: ModelChoice
    method: Method = Method()
    data: Data
    run: Run
    output: Annotated[str, _text()]

    @model_validator(mode="after")
    def _settings_fit(self) -> Recipe:
        if problems := [*_batch_problems(self), *_method_problems(self)]:
            raise _clash(problems)
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
    def anneal_steps(self) -> int:
        """T_a in updates, at least 1."""
        return max(1, round(self.method.anneal * self.steps))

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
        return "\n".join(_yaml_lines(self.model_dump())) + "\n"


# --- Settings that must fit each other ---------------------------------------------------------------------


class _Problem(NamedTuple):
    path: KeyPath
    sentence: str


def _clash(problems: Iterator[_Problem] | Sequence[_Problem]) -> PydanticCustomError:
    found = list(problems)
    return PydanticCustomError("clash", "{sentence}", {"sentence": found[0].sentence, "problems": found})


def _batch_problems(recipe: Recipe) -> Iterator[_Problem]:
    run, data = recipe.run, recipe.data
    if run.tokens > BILLION and not run.allow_over_1b:
        yield _Problem(
            ("run", "tokens"),
            f"run.tokens is {run.tokens:_}, more than one billion, and run.allow_over_1b is false; "
            "lower the first or set the second to true",
        )
    if run.batch_tokens % data.block:
        yield _not_a_multiple("run.batch_tokens", run.batch_tokens, "data.block", data.block)
    elif recipe.blocks_per_step % run.micro_batch:
        yield _Problem(
            ("run", "micro_batch"),
            f"run.micro_batch is {run.micro_batch}, which does not divide the {recipe.blocks_per_step} blocks of "
            f"one update (run.batch_tokens {run.batch_tokens:_} / data.block {data.block:_})",
        )
    for key in ("tokens", "save_every", "eval_every", "log_every"):
        value = getattr(run, key)
        if value is not None and value % run.batch_tokens:
            yield _not_a_multiple(f"run.{key}", value, "run.batch_tokens", run.batch_tokens)
    if data.held_out_tokens is not None and data.held_out_tokens < data.block:
        yield _Problem(
            ("data", "held_out_tokens"),
            f"data.held_out_tokens is {data.held_out_tokens:_}, less than one block (data.block {data.block:_})",
        )


def _not_a_multiple(key: str, value: int, unit_key: str, unit: int) -> _Problem:
    below = value // unit * unit
    fits = f"{below:_} or {below + unit:_}" if below else f"{unit:_}"
    sentence = f"{key} is {value:_}, which is not a multiple of {unit_key}, {unit:_}; {fits} would be"
    return _Problem(tuple(key.split(".")), sentence)


def _method_problems(recipe: Recipe) -> Iterator[_Problem]:
    method, heads = recipe.method, recipe.method.heads
    if method.name == "full" and recipe.model.dtype != "float32":
        yield _Problem(
            ("model", "dtype"),
            f"model.dtype is {recipe.model.dtype}, and method.name full updates the weights in place, which needs "
            "float32",
        )
    if method.name in _BRANCHLESS:
        return
    if isinstance(heads, ScoredHeads):
        if heads.criterion in ("all", "none") and heads.per_layer != "half":
            yield _Problem(
                ("method", "heads", "per_layer"),
                f"method.heads.per_layer {heads.per_layer} has no effect with method.heads.criterion "
                f"{heads.criterion}; remove it",
            )
        if heads.criterion == "none" and method.schedule != "off":
            yield _Problem(
                ("method", "heads", "criterion"),
                f"method.heads.criterion none leaves nothing for method.schedule {method.schedule} to act on; "
                "choose heads, or schedule: off",
            )
    if method.schedule == "off" and not method.train_kvo:
        yield _Problem(
            ("method", "train_kvo"),
            "method.train_kvo false with method.schedule off leaves nothing to train; change one of the two",
        )
    if method.schedule != "fixed" and method.lam is not None:
        yield _Problem(
            ("method", "lam"),
            f"method.lam is only for method.schedule fixed, and the schedule is {method.schedule}; remove it",
        )
    if method.schedule == "fixed" and method.lr_scale.lam != 1:
        yield _Problem(
            ("method", "lr_scale", "lam"),
            f"method.lr_scale.lam {method.lr_scale.lam:g} has no effect with method.schedule fixed, whose λ is not "
            "trained; remove it",
        )
    yield from _branch_problems(recipe)


def _branch_problems(recipe: Recipe) -> Iterator[_Problem]:
    """A constant λ wants W_D = 0, and W_D = 0 wants a λ that is not 0 throughout (both gradients would be 0)."""
    method = recipe.method
    if method.schedule == "fixed" and method.w_d_init == "kaiming":
        yield _Problem(
            ("method", "w_d_init"),
            "method.schedule fixed with method.w_d_init kaiming would not start as the base model, since λ is "
            "not 0 at the first step; use w_d_init: zeros",
        )
    elif method.schedule == "fixed" and method.lam == 0:
        yield _Problem(
            ("method", "lam"),
            "method.lam 0 with method.w_d_init zeros is a branch that never leaves 0; give another lam",
        )
    elif method.schedule in ("paper", "land") and method.w_d_init == "zeros" and not _lam_leaves_zero(recipe):
        yield _Problem(
            ("method", "w_d_init"),
            f"method.w_d_init zeros with method.schedule {method.schedule} is a branch that never leaves 0 in a "
            f"run of {recipe.steps} updates (run.tokens / run.batch_tokens) with annealing over "
            f"{recipe.anneal_steps} (method.anneal {method.anneal:g}); lengthen them, or use kaiming",
        )


def _lam_leaves_zero(recipe: Recipe) -> bool:
    """Is λ(t) ever not 0 while W_D is? `paper` only at 0 < t < T_a, `land` at every t > 0."""
    return (recipe.anneal_steps if recipe.method.schedule == "paper" else recipe.steps) > 1


# --- Loading -----------------------------------------------------------------------------------------------


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides, whose values are YAML.

    Raises DexError, in one sentence, for anything that cannot be read or does not fit.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DexError(f"{path} does not exist; the folder recipes/ of dex has some to start from.") from None
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
        raise DexError(f"{name} is not a recipe: it holds {_shown(values)}, not the blocks {_named_keys(())}.")
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
            raise DexError(f"{override!r} on the command line: {block} is {_shown(here)} and has no keys.")
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

    def _order(self, problem: _Problem) -> tuple[bool, int]:
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


def _problems(error: ValidationError) -> Iterator[_Problem]:
    for found in error.errors(include_url=False):
        path: KeyPath = tuple(key for key in found["loc"] if not str(key).startswith("<"))
        if found["type"] == "clash":
            yield from found["ctx"]["problems"]
        elif found["type"] == "extra_forbidden":
            yield _Problem(path, _unknown_key(path))
        elif found["type"] == "missing":
            yield _Problem(path, f"{_dotted(path)} is missing")
        else:
            expected = found["msg"] if found["type"] == "expected" else _expected_block(path)
            yield _Problem(path, f"{_dotted(path)}: {_shown(found['input'])} was given, {expected}")


def _unknown_key(path: KeyPath) -> str:
    block, key = _without_indices(path[:-1]), str(path[-1])
    known = _KEYS.get(block, [])
    if key in known:  # of the other kind of heads
        return f"{_dotted(path)} has no effect beside method.heads.plan; give one of the two"
    elsewhere = [".".join((*place, key)) for place, keys in _KEYS.items() if key in keys]
    if near := difflib.get_close_matches(key, known, n=1):
        hint = f"did you mean {_dotted((*path[:-1], near[0]))}?"
    elif elsewhere:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        hint = f"{_dotted(path[:-1]) or 'a recipe'} has {_named_keys(block)}"
    return f"{_dotted(path)} is not a key of a recipe; {hint}"


def _expected_block(path: KeyPath) -> str:
    if path == ("data", "train"):
        return "a list of sources is expected"
    if path == ("method", "layers"):
        return "a list of layer indices or null is expected"
    if path == ("method", "train"):
        return "a list of names or null is expected"
    return f"a block with {_named_keys(_without_indices(path))} is expected"


def _shown(value: Any) -> str:
    """A value as a sentence names it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "a block" if value else "an empty block"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _without_indices(path: KeyPath) -> tuple[str, ...]:
    return tuple(key for key in path if isinstance(key, str))


def _named_keys(block: tuple[str, ...]) -> str:
    *first, last = _KEYS[block]
    return f"{', '.join(first)} and {last}" if first else last


def _keys_by_block(model: type[BaseModel], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[str]]:
    """The keys of every block, by its path without list indices."""
    keys: dict[tuple[str, ...], list[str]] = {path: list(model.model_fields)}
    for name, field in model.model_fields.items():
        for block in _blocks_in(field.annotation):
            for place, names in _keys_by_block(block, (*path, name)).items():
                keys[place] = keys.get(place, []) + names
    return keys


def _blocks_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [block for argument in get_args(annotation) for block in _blocks_in(argument)]


_KEYS = _keys_by_block(Recipe)


# --- Writing -----------------------------------------------------------------------------------------------

PLAIN = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
# Words that YAML 1.1 reads as booleans are quoted too, so that other readers see `off` as we do.
NOT_PLAIN = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def _yaml_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        elif isinstance(value, list) and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for item in value:
                first, *others = _yaml_lines(item)
                yield f"{indent}  - {first}"
                yield from (f"{indent}    {line}" for line in others)
        elif isinstance(value, list):
            yield f"{indent}{key}: [{', '.join(_yaml_scalar(item) for item in value)}]"
        else:
            yield f"{indent}{key}: {_yaml_scalar(value)}"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in NOT_PLAIN
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")  # 1e-05 is a string in YAML 1.1
    return json.dumps(value)
