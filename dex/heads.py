"""Which heads of each layer get the differential branch: criteria and the head plan.

    entropy     the k heads of a layer with the HIGHEST mean attention entropy (dex/stats.py)
    importance  the k heads of a layer with the LOWEST  mean over sequences of |∂L/∂ξ_h|
    random      k heads of a layer, drawn from a seed
    all, none   every head, no head

ξ_h is a gate at 1 that multiplies head h's output: O_h ← ξ_h O_h. By the chain rule it needs no gate,

    ∂L/∂ξ_h = Σ_t Σ_d O_h[t, d] · ∂L/∂O_h[t, d]

and concat_h(O_h) is the input of `o_proj`.

    L layers, B batch, T tokens, H query heads, D head_dim        scores [L, H]        heads [B, T, H, D]

To add a criterion: a function that scores a model's heads, a function that picks a layer's heads by their
scores, and a line in `CRITERIA`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from dex.errors import DexError
from dex.output import refuse_to_overwrite_file, write_whole
from dex.settings import did_you_mean
from dex.stats import attention_entropy, evaluating, real_tokens_first

Batch = Mapping[str, Tensor]
OnProgress = Callable[[int], None]

# ---- scores ------------------------------------------------------------------------------------------------


def importance(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    on_progress: OnProgress | None = None,
    num_heads: int | None = None,
) -> Tensor:
    """Mean over sequences of |∂L/∂ξ_h|, [L, H] float64; L is a sequence's own mean next-token loss.

    num_heads: of each layer, whose outputs `o_proj` reads; the config's query heads where it is not given.

    One backward pass per batch: sequences do not see each other, so the gradient of their summed losses holds
    the gradient of each. Only the head outputs are differentiated: no parameter gets a gradient, none has to
    require one, and padding does not count. Batches are those of `attention_entropy`.
    """
    num_heads = num_heads or model.config.num_attention_heads
    totals = torch.zeros(model.config.num_hidden_layers, num_heads, dtype=torch.float64)
    num_sequences = 0
    with torch.enable_grad(), evaluating(model), head_outputs(model) as outputs:
        for batch in batches:
            inputs, position = real_tokens_first(batch, model.device)
            losses = sequence_losses(model(**inputs, use_cache=False).logits, inputs["input_ids"], position)
            gradients = torch.autograd.grad(losses.sum(), outputs)
            for layer_idx, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                totals[layer_idx] += gate_gradients(output, gradient, num_heads).abs().sum(0).cpu()
            num_sequences += int((position > 0).any(1).sum())  # a single token has no loss
            if on_progress is not None:
                on_progress(num_sequences)
    if num_sequences == 0:
        raise DexError("Importance needs calibration sequences of two tokens or more, and there are none.")
    return totals / num_sequences


def gate_gradients(output: Tensor, gradient: Tensor, num_heads: int) -> Tensor:
    """∂L/∂ξ_h of every sequence, [B, H], from concat_h(O_h) and its gradient, both [B, T, H·D]."""
    product = output.detach().float() * gradient.float()
    return product.unflatten(-1, (num_heads, -1)).sum((1, 3))


def sequence_losses(logits: Tensor, input_ids: Tensor, position: Tensor) -> Tensor:
    """Mean next-token loss of every sequence, [B]; position −1 is padding, 0 is predicted by nothing."""
    is_target = position[:, 1:] > 0
    targets = input_ids[:, 1:].masked_fill(~is_target, -100)
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")  # [B, T − 1]
    return losses.sum(1) / is_target.sum(1).clamp(min=1)


@contextmanager
def head_outputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """A list that holds concat_h(O_h) of every layer, [B, T, H·D], after each forward pass."""
    outputs: list[Tensor] = [torch.empty(0)] * len(model.get_decoder().layers)

    def keep(layer_idx: int, output: Tensor) -> None:
        # With frozen parameters nothing before the first o_proj requires a gradient: start there.
        outputs[layer_idx] = output if output.requires_grad else output.requires_grad_()

    with observed_head_outputs(model, keep):
        yield outputs


@contextmanager
def observed_head_outputs(model: PreTrainedModel, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `observe` with a layer's index and concat_h(O_h), [B, T, H·D], before `o_proj`, in every forward pass."""

    def hook(layer_idx: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
        return lambda _, args: observe(layer_idx, args[0])

    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(hook(layer_idx))
        for layer_idx, layer in enumerate(model.get_decoder().layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- choice ------------------------------------------------------------------------------------------------

PerLayer = int | Literal["half"]


def highest(scores: list[float], k: int, draw: random.Random) -> list[int]:
    return sorted(range(len(scores)), key=lambda head: (-scores[head], head))[:k]


def lowest(scores: list[float], k: int, draw: random.Random) -> list[int]:
    return sorted(range(len(scores)), key=lambda head: (scores[head], head))[:k]


def drawn(scores: list[float], k: int, draw: random.Random) -> list[int]:
    return draw.sample(range(len(scores)), k)


def every(scores: list[float], k: int, draw: random.Random) -> list[int]:
    return list(range(len(scores)))


def nothing(scores: list[float], k: int, draw: random.Random) -> list[int]:
    return []


class Criterion(NamedTuple):
    score: Callable[..., Tensor] | None  # (model, batches, on_progress=) → [L, H]; None: looks at no model
    pick: Callable[[list[float], int, random.Random], list[int]]  # (a layer's scores, k, …) → its heads


CRITERIA: dict[str, Criterion] = {
    "entropy": Criterion(attention_entropy, highest),
    "importance": Criterion(importance, lowest),
    "random": Criterion(None, drawn),
    "all": Criterion(None, every),
    "none": Criterion(None, nothing),
}


def choose(scores: Tensor, per_layer: PerLayer, criterion: str, seed: int = 0) -> list[list[int]]:
    """The chosen heads of every layer, ascending; of equal scores the lower head index wins.

    "random", "all" and "none" read only the shape of the scores. A random layer depends on the seed and on its
    own index, not on how many layers there are.
    """
    pick = find_criterion(criterion).pick
    k = heads_per_layer(per_layer, scores.shape[1])
    if not scores.isfinite().all():
        raise DexError(f"Some {criterion} scores are not finite numbers; score the model in float32.")
    return [
        sorted(pick(row, k, random.Random(f"{seed}/{layer_idx}"))) for layer_idx, row in enumerate(scores.tolist())
    ]


def find_criterion(name: str) -> Criterion:
    if name not in CRITERIA:
        raise DexError(f"There is no head criterion {name!r}; choose one of {', '.join(CRITERIA)}.")
    return CRITERIA[name]


def heads_per_layer(per_layer: PerLayer, num_heads: int) -> int:
    k = num_heads // 2 if per_layer == "half" else per_layer
    if not isinstance(k, int) or not 0 <= k <= num_heads:
        raise DexError(f"{per_layer} heads per layer were asked for, but a layer has {num_heads} (0 to {num_heads}).")
    return k


# ---- the plan ----------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelIdentity(_Strict):
    """The model that a plan was made for."""

    id: str
    commit: str | None  # None: a local folder or file
    fingerprint: str
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)


class DataIdentity(_Strict):
    """The calibration data that a plan was scored on: sequences × length tokens."""

    source: str
    fingerprint: str
    sequences: int = Field(ge=1)
    length: int = Field(ge=1)


class HeadPlan(_Strict):
    """The heads of each layer that get the branch, and how they were chosen: a file in `heads/`."""

    version: Literal[1] = 1
    model: ModelIdentity
    criterion: str
    per_layer: int | None  # None: it differs from layer to layer
    heads: list[list[int]]
    scores: list[list[Annotated[float, Field(allow_inf_nan=False)]]] | None
    data: DataIdentity | None
    seed: int | None
    dex_version: str

    @model_validator(mode="after")
    def _fits_its_model(self) -> Self:
        num_layers, num_heads = self.model.num_layers, self.model.num_heads
        if len(self.heads) != num_layers:
            raise ValueError(f"heads lists {len(self.heads)} layers, but the model has {num_layers}")
        for layer_idx, heads in enumerate(self.heads):
            for head in heads:
                if not 0 <= head < num_heads:
                    raise ValueError(f"layer {layer_idx} lists head {head}, but heads are 0 to {num_heads - 1}")
            if len(set(heads)) < len(heads):
                raise ValueError(f"layer {layer_idx} lists a head twice: {heads}")
            if self.per_layer is not None and len(heads) != self.per_layer:
                raise ValueError(f"layer {layer_idx} lists {len(heads)} heads, but per_layer is {self.per_layer}")
        if self.scores is not None and [len(row) for row in self.scores] != [num_heads] * num_layers:
            raise ValueError(f"scores are not {num_layers} layers × {num_heads} heads")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DexError(f"The head plan {path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise DexError(f"The head plan {path} is not JSON: {error}.") from error
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise DexError(f"The head plan {path} cannot be used: {_reason(error)}.") from error

    def save(self, path: Path, force: bool = False) -> None:
        refuse_to_overwrite_file(path, force)
        write_whole(path, _one_line_per_layer(json.dumps(self.model_dump(), indent=2, ensure_ascii=False)) + "\n")

    def check(self, num_layers: int, num_heads: int, fingerprint: str) -> None:
        """Refuse a model that the plan was not made for."""
        made_for = self.model
        name = made_for.id if made_for.commit is None else f"{made_for.id} at {made_for.commit}"
        if (made_for.num_layers, made_for.num_heads) != (num_layers, num_heads):
            raise DexError(
                f"The head plan was made for {name}, with {made_for.num_layers} layers of {made_for.num_heads} "
                f"heads, but this model has {num_layers} layers of {num_heads} heads; make a plan for it with "
                "`dex heads`."
            )
        if made_for.fingerprint != fingerprint:
            raise DexError(
                f"The head plan was made for {name}, whose weights have the fingerprint {made_for.fingerprint}, "
                f"but this model's weights have {fingerprint}; make a plan for it with `dex heads`."
            )


def make_plan(
    model: PreTrainedModel,
    model_id: str,
    commit: str | None,
    fingerprint: str,
    criterion: str = "entropy",
    per_layer: PerLayer = "half",
    batches: Iterable[Batch] = (),
    data: DataIdentity | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> HeadPlan:
    """Score the model's heads and choose. `batches` and `data` are used by the criteria that score only."""
    num_layers, num_heads = model.config.num_hidden_layers, model.config.num_attention_heads
    score = find_criterion(criterion).score
    heads_per_layer(per_layer, num_heads)  # refused before the work
    scores = None if score is None else score(model, batches, on_progress=on_progress)
    heads = choose(torch.zeros(num_layers, num_heads) if scores is None else scores, per_layer, criterion, seed)
    return HeadPlan(
        model=ModelIdentity(
            id=model_id, commit=commit, fingerprint=fingerprint, num_layers=num_layers, num_heads=num_heads
        ),
        criterion=criterion,
        per_layer=len(heads[0]),
        heads=heads,
        scores=None if scores is None else [[float(f"{value:.6g}") for value in row] for row in scores.tolist()],
        data=None if scores is None else data,
        seed=seed if criterion == "random" else None,
        dex_version=version("dex-llm"),
    )


def _one_line_per_layer(text: str) -> str:
    """Put the lists of numbers in indented JSON on one line each.

    No JSON string holds a line break, so nothing but a list without lists matches.
    """
    return re.sub(r"\[\n([^\[\]{}]*)\n *\]", lambda row: f"[{' '.join(row[1].split())}]", text)


def _reason(error: ValidationError) -> str:
    """The first thing that is wrong with a plan, in half a sentence; a misspelt key before the one it replaces."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"it has an unknown key {place}{_nearest(first['loc'])}"
    if first["type"] == "missing":
        return f"it has no key {place}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"{place or 'it'} is wrong ({first['msg'][0].lower()}{first['msg'][1:]})"


def _nearest(location: tuple[Any, ...]) -> str:
    owner: Any = {"model": ModelIdentity, "data": DataIdentity}.get(str(location[0]), HeadPlan)
    return did_you_mean(str(location[-1]), owner.model_fields)
