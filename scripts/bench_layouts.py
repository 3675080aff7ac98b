"""The benchmark's figures of the DIFF layouts; scripts/bench.py prints them (`--only layouts`).

DIFF V1 is compared with transformers' DiffLlama that has the same weights (the benchmark stops if their outputs
differ), DIFF V2 with the base that it was made of, and Dex beside it. All in float32, on the CPU, with SDPA.
`forward` is a prefill, with the logits of the last token only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import finalize

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bench_models import PAIRABLE, SMOLLM2, TINY, Shape, decode, diff_v1, half_of_the_heads, llama, prefill
from bench_timing import Step, alternate, figure, ratio
from dex.layouts.diffllama import to_diffllama
from dex.layouts.to_diff_v2 import to_diff_v2

LENGTHS = (512, 2_048, 4_096)
NAME = "layouts"
Lines = Iterator[dict[str, Any]]
Models = dict[str, nn.Module]


@cache
def v1_and_diffllama(shape: Shape) -> Models:
    v1 = diff_v1(shape)
    models: Models = {"diff-v1": v1, "diffllama": to_diffllama(v1)}
    ids = torch.arange(16)[None]
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits for model in models.values())
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    return models


@cache
def base_and_v2(shape: Shape) -> Models:
    base = llama(shape)
    return {"base": base, "diff-v2": to_diff_v2(base)}


@cache
def base_v2_and_dex(shape: Shape) -> Models:
    attached = get_peft_model(llama(shape), half_of_the_heads(shape)).eval()
    folded = get_peft_model(llama(shape), half_of_the_heads(shape)).merge_and_unload().eval()
    return {**base_and_v2(shape), "attached": attached, "folded": folded}


def compared(what: str, seconds: dict[str, list[float]], where: str, targets: dict[str, float]) -> Lines:
    """Every model over the one that it is compared with: DiffLlama, or the base."""
    other = "diffllama" if "diffllama" in seconds else "base"
    for name in seconds:
        if name != other:
            yield line(what, name, other, where, ratio(seconds[name], seconds[other]), targets.get(name))


def line(what: str, name: str, other: str, where: str, value: float, target: float | None) -> dict[str, Any]:
    """The figure; a target is met if the value, as it is printed, meets it."""
    full_name, value = f"{NAME}, {what}, {name} / {other} ({where})", round(value, 4)
    if target is None:
        return figure(full_name, value, "none", True)
    return figure(full_name, value, f"≤ {target}", value <= target)


def turns(length: int, tokens: int, most: int) -> int:
    """As many repeats as make about so many tokens: the same time for every length, but for attention's share."""
    return max(1, min(most, round(tokens / length)))


# ---- attention alone ---------------------------------------------------------------------------------------


def attention(repeats: int, build: Callable[[Shape], Models], shape: Shape, lengths: Sequence[int]) -> Lines:
    """One attention module; for V1 and DiffLlama also its core, from q, k and v after rotary to o_proj's input."""
    models: Any = build(shape._replace(layers=1, vocab=64))
    for length in sorted(lengths):
        inputs = _attention_inputs(next(iter(models.values())), length)
        modules = {name: model.model.layers[0].self_attn for name, model in models.items()}
        rounds = turns(length, repeats * 8_192, 20 * repeats)
        steps: dict[str, Step] = {name: partial(_attend, module, inputs) for name, module in modules.items()}
        seconds = alternate(steps, rounds)
        yield from compared("attention", seconds, f"T={length}", {"diff-v2": 2.1})
        if "diffllama" in modules:
            seconds = alternate({name: _core_step(name, module, inputs) for name, module in modules.items()}, rounds)
            yield from compared("attention core", seconds, f"T={length}", {"diff-v1": 0.9})


def _attention_inputs(model: Any, length: int) -> dict[str, Any]:
    hidden = torch.randn(1, length, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        position_embeddings = model.model.rotary_emb(hidden, position_ids=torch.arange(length)[None])
    return {"hidden_states": hidden, "position_embeddings": position_embeddings, "attention_mask": None}


@torch.no_grad()
def _attend(module: nn.Module, inputs: dict[str, Any]) -> None:
    module(**inputs)


@torch.no_grad()
def _core_step(name: str, module: Any, inputs: dict[str, Any]) -> Step:
    hidden = inputs["hidden_states"]
    heads = (projection(hidden) for projection in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (each.view(*hidden.shape[:2], -1, module.head_dim).transpose(1, 2) for each in heads)
    q, k = apply_rotary_pos_emb(q, k, *inputs["position_embeddings"])
    core = torch.no_grad()(partial({"diff-v1": _v1_core, "diffllama": _diffllama_core}[name], module, q, k, v))
    with _input_of(module.o_proj) as seen:
        module(**inputs)
    torch.testing.assert_close(core(), seen[0], rtol=1e-4, atol=1e-4)  # it is the module's own core
    return core


@contextmanager
def _input_of(module: nn.Module) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    yield seen
    handle.remove()


def _v1_core(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second, _ = module.attend(q, k, v, None)
    u: Tensor = module.combine(first, second)
    return u.to(q.dtype).flatten(2)


def _diffllama_core(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DiffLlamaAttention.forward after the cache and before o_proj, which has no function of its own."""
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
    outs = [attend(module, q, k, half, None, dropout=0.0, scaling=module.scaling)[0] for half in halves]
    first, second = torch.cat(outs, dim=-1).chunk(2, dim=2)
    lambda_1 = torch.exp(torch.sum(module.lambda_q1 * module.lambda_k1, dim=-1, dtype=torch.float32)).to(q.dtype)
    lambda_2 = torch.exp(torch.sum(module.lambda_q2 * module.lambda_k2, dim=-1, dtype=torch.float32)).to(q.dtype)
    out = first - (lambda_1 - lambda_2 + module.lambda_init) * second
    return ((1 - module.lambda_init) * module.groupnorm(out)).flatten(2)


# ---- whole models ------------------------------------------------------------------------------------------


def forward(repeats: int, build: Callable[[Shape], Models], shape: Shape, lengths: Sequence[int]) -> Lines:
    targets = {"diff-v1": 1.0, "diff-v2": 1.35}
    for where, models, length in _whole_models(build, shape, lengths):
        rounds = 10 * repeats if "tiny" in where else turns(length, repeats * 1_280, 2 * repeats)
        seconds = alternate({name: prefill(model, length) for name, model in models.items()}, rounds, warm_up=False)
        yield from compared("forward", seconds, where, targets)


def decode_step(repeats: int, build: Callable[[Shape], Models], shape: Shape, lengths: Sequence[int]) -> Lines:
    targets = {"diff-v1": 1.0, "diff-v2": 1.2}
    for where, models, length in _whole_models(build, shape, lengths):
        rounds = (20 if "tiny" in where else 5) * repeats
        seconds = alternate({name: decode(model, length) for name, model in models.items()}, rounds)
        yield from compared("decode step", seconds, where, targets)


def _whole_models(
    build: Callable[[Shape], Models], shape: Shape, lengths: Sequence[int]
) -> Iterator[tuple[str, Models, int]]:
    """(where, models, length): the shape at every length, then the tiny one at the shortest.

    Every model has run once at the shortest length.
    """
    for each, each_lengths, prefix in ((shape, sorted(lengths), ""), (TINY, [min(lengths)], "tiny, ")):
        models = build(each)
        for model in models.values():
            prefill(model, min(lengths))()
        for length in each_lengths:
            yield f"{prefix}T={length}", models, length


# ---- memory ------------------------------------------------------------------------------------------------


def memory(repeats: int, lengths: Sequence[int]) -> Lines:
    """The most bytes that a forward pass holds at once: with the weights, without, and by one attention module alone.

    The bytes are counted tensor by tensor, so they are the same in every run. Without a gradient a forward pass holds
    one layer's intermediate tensors at a time: they are counted in a model of two layers, the weights in one of all.
    """
    deep, shallow = (v1_and_diffllama(PAIRABLE._replace(layers=layers)) for layers in (PAIRABLE.layers, 2))
    weights = {name: sum(p.numel() * p.element_size() for p in model.parameters()) for name, model in deep.items()}
    for length in sorted(lengths):
        forward, attention, inputs = {}, {}, _attention_inputs(shallow["diff-v1"], length)
        for name, model in shallow.items():
            module: Any = model.get_submodule("model.layers.0.self_attn")
            forward[name] = peak_of_live_tensors(model, prefill(model, length))
            attention[name] = peak_of_live_tensors(module, partial(_attend, module, inputs))
        whole = {name: weights[name] + forward[name] for name in forward}
        for what, of, target in (
            ("forward", whole, 1.0),
            ("forward without weights", forward, None),
            ("attention", attention, None),
        ):
            value = of["diff-v1"] / of["diffllama"]
            yield line(f"memory, {what}", "diff-v1", "diffllama", f"T={length}", value, target)


def peak_of_live_tensors(model: nn.Module, step: Step) -> int:
    """The most bytes of tensors that were alive at once in a step, those from before it left out."""
    counter = _LiveTensors([*model.parameters(), *model.buffers()])
    with counter:
        step()
    return counter.peak


class _LiveTensors(TorchDispatchMode):
    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes


# ---- the figures -------------------------------------------------------------------------------------------


def figures(lengths: Sequence[int]) -> dict[str, Callable[[int], Lines]]:
    """What measures the figures whose names start so; the same function under several names measures all of them."""
    v1: dict[str, Any] = {"build": v1_and_diffllama, "shape": PAIRABLE, "lengths": lengths}
    v2: dict[str, Any] = {"build": base_v2_and_dex, "shape": SMOLLM2, "lengths": lengths}
    attention_v1, attention_v2 = partial(attention, **v1), partial(attention, **{**v2, "build": base_and_v2})
    measures: dict[str, Callable[[int], Lines]] = {
        "attention, diff-v1": attention_v1,
        "attention core": attention_v1,
        "attention, diff-v2": attention_v2,
        "memory": partial(memory, lengths=lengths),
    }
    for what, measure in {"forward": forward, "decode step": decode_step}.items():
        measures[f"{what}, diff-v1"] = partial(measure, **v1)
        of_the_base = partial(measure, **v2)
        measures |= {f"{what}, {name}": of_the_base for name in ("diff-v2", "attached", "folded")}
    return {f"{NAME}, {name}": measure for name, measure in measures.items()}
