"""A pretrained model as a DIFF Transformer V1: as close as its layout allows.

The base's head n is A_n v_n, A_n its map. A diff head has two maps and values of two heads' width:

    doubled   diff head n: both maps are A_n, values [v_n, v_n+1] (the next key/value head's). Then u = (1 − λ) A_n V,
              whose first half is the base's head: its columns of W_O are kept, the second half's start at zero.
              Without the norm this is exact. Twice the query, key and value heads: the KV cache doubles.
    paired    diff head i: the maps of two base heads, each on both their values. Same shapes as the base; a warm
              start only: it would need A_1 − λ A_2 to be A_1 and A_2.

The norm makes every head's output one length, and the base's are not: its columns of W_O get the scale that loses
least (`calibrate`), or the norm takes over from a constant scale during training (`anneal`).
λ starts at λ_init exactly: of the four vectors, drawn as in the paper, q2 and k2 start equal to q1 and k1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dex.errors import DexError
from dex.layouts.body import body, build, weights_of
from dex.layouts.configuration_diff_v1 import DiffV1Config
from dex.layouts.head_map import NEW, HeadMap, Weights, map_heads
from dex.layouts.modeling_diff_v1 import DiffV1Attention, DiffV1ForCausalLM
from dex.layouts.options import diff_v1_config

Heads = Literal["doubled", "paired"]
Norm = Literal["calibrate", "anneal", "off"]


@dataclass(frozen=True)
class V1Options:
    """How heads become diff heads, what happens to the norm, and the configuration's own options (controls)."""

    heads: Heads = "doubled"
    norm: Norm = "calibrate"
    seed: int = 0  # of the λ vectors
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Does the V1 start as the function that its base is?"""
        return self.heads == "doubled" and self.norm != "calibrate"


def to_diff_v1(base: PreTrainedModel, options: V1Options, input_ids: Tensor) -> PreTrainedModel:
    """The base in DIFF V1's layout, in its dtype; scales are measured on input_ids [N, T].

    Raises DexError for paired heads where the number of key/value heads is odd.
    """
    heads, config = v1_of(body(base), options)
    weights = map_heads(weights_of(base), heads, config.head_dim)
    for layer_idx in range(config.num_hidden_layers):
        weights |= new_tensors(config, layer_idx, base.dtype, options.seed)
    model = build(DiffV1ForCausalLM, config, weights).to(base.device)
    if base.device.type == "meta":
        return model  # its shapes are all that there is
    measured = measure(base, model, heads, input_ids)
    for layer, moments in zip(model.get_decoder().layers, measured, strict=True):
        _set_scales(layer.self_attn, moments, options.exact)
    return model


def v1_of(shape: dict[str, Any], options: V1Options) -> tuple[HeadMap, DiffV1Config]:
    """Which heads of the base each head of the V1 is made of, and its configuration. `shape` is the base's `body`."""
    H, G = shape["num_attention_heads"], shape["num_key_value_heads"]
    heads = doubled(H, G) if options.heads == "doubled" else paired(H, G)
    sizes = {"num_attention_heads": len(heads.q), "num_key_value_heads": len(heads.k)}
    value = options.config.get("lambda_value")
    if options.heads == "doubled" and value is not None and value * options.config.get("lambda_sign", -1) == -1:
        raise DexError(
            "With this λ the two equal maps of doubled heads cancel; choose another --option lambda_value."
        )
    head_norm = {"calibrate": "rms", "anneal": "anneal", "off": "off"}[options.norm]
    return heads, diff_v1_config(**{**shape, **sizes, "head_norm": head_norm, **options.config})


def doubled(H: int, G: int) -> HeadMap:
    twice = [head for head in range(H) for _ in range(2)]
    own_and_next = [head for group in range(G) for head in (group, (group + 1) % G)]
    return HeadMap(
        twice, [g for g in range(G) for _ in range(2)], own_and_next, [n for h in range(H) for n in (h, NEW)]
    )


def paired(H: int, G: int) -> HeadMap:
    """Key/value heads 2m and 2m+1 make a pair, and so do the query heads that use them, in order."""
    if G % 2:
        raise DexError(
            f"The base has {G} key/value heads, an odd number, which cannot be joined in pairs; use --heads doubled."
        )
    group = H // G
    pairs = [(2 * m + which) * group + n for m in range(G // 2) for n in range(group) for which in (0, 1)]
    return HeadMap(pairs, list(range(G)), list(range(G)), pairs)


def new_tensors(config: DiffV1Config, layer_idx: int, dtype: torch.dtype, seed: int) -> Weights:
    """What a layer has and its base has not: λ vectors with λ = λ_init, a gain of one, an annealing at its start."""
    D, prefix = config.head_dim, f"model.layers.{layer_idx}.self_attn"
    new: Weights = {}
    if config.lambda_mode == "learned":
        generator = torch.Generator().manual_seed(seed + layer_idx)
        q, k = (config.lambda_std_dev * torch.randn(D, generator=generator) for _ in range(2))
        new |= {"lambda_q1": q, "lambda_k1": k, "lambda_q2": q.clone(), "lambda_k2": k.clone()}
    if config.head_norm != "off":
        new["subln.weight"] = torch.ones(2 * D, dtype=dtype)
    if config.head_norm == "anneal":
        new["head_rms"] = torch.ones(config.num_attention_heads // 2, dtype=dtype)
        new["head_norm_step"] = torch.zeros(1, dtype=torch.int64)
    return {f"{prefix}.{name}": tensor for name, tensor in new.items()}


# ---- scales ------------------------------------------------------------------------------------------------


@dataclass
class Moments:
    """Of one layer, over all tokens: z is the input of its o_proj, O the base's head for the same columns."""

    dot: Tensor  # Σ z·O of every D-wide block, [2h] float64
    square: Tensor  # Σ z·z, [2h]
    rms: Tensor  # mean RMS of z over a diff head's 2D, [h]


def measure(base: PreTrainedModel, model: PreTrainedModel, heads: HeadMap, input_ids: Tensor) -> list[Moments]:
    """Feed every layer of `model` what the base's layer gets, so that errors do not add up over the layers."""
    D, h = model.config.head_dim, len(heads.o) // 2
    ours, theirs = (m.get_decoder().layers for m in (model, base))
    totals = [
        Moments(torch.zeros(2 * h).double(), torch.zeros(2 * h).double(), torch.zeros(h).double()) for _ in ours
    ]
    model.set_attn_implementation(base.config._attn_implementation)

    def add(layer_idx: int, kwargs: dict[str, Any], base_heads: Tensor) -> None:
        attention, total = ours[layer_idx].self_attn, totals[layer_idx]
        with _input_of(attention.o_proj) as seen:
            attention(**kwargs)
        z = seen[0].double().unflatten(-1, (-1, D)).flatten(0, 1).cpu()  # [N, 2h, D]
        target = base_heads.double().unflatten(-1, (-1, D)).flatten(0, 1).cpu()[:, heads.o]  # NEW blocks do not count
        total.dot += (z * target).sum((0, 2))
        total.square += (z * z).sum((0, 2))
        total.rms += z.unflatten(1, (h, 2)).pow(2).mean((2, 3)).sqrt().sum(0) / input_ids.numel()

    with torch.no_grad(), _observed_heads(theirs, add):
        for row in input_ids.to(base.device):
            base.get_decoder()(row[None], use_cache=False)
    return totals


@contextmanager
def _input_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """The inputs that a module gets within the block, in order."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _observed_heads(layers: nn.ModuleList, observe: Callable[[int, dict[str, Any], Tensor], None]) -> Iterator[None]:
    """After every attention layer, call observe(layer_idx, its keyword arguments, the input of its o_proj)."""
    with ExitStack() as stack:
        for layer_idx, attention in enumerate(layer.get_submodule("self_attn") for layer in layers):
            seen = stack.enter_context(_input_of(attention.get_submodule("o_proj")))

            def after(
                _: nn.Module, args: Any, kwargs: Any, out: Any, layer_idx: int = layer_idx, seen: Any = seen
            ) -> None:
                observe(layer_idx, kwargs, seen.pop())

            handle = attention.register_forward_hook(after, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@torch.no_grad()
def _set_scales(attention: DiffV1Attention, moments: Moments, exact: bool) -> None:
    """Scale W_O's columns so that the layer's output is the base's, or (with the norm, or paired) nearest to it."""
    D, outside = attention.head_dim, 1.0 - attention.lambda_init
    scale = moments.dot / moments.square.clamp(min=torch.finfo(torch.float64).tiny)
    if exact:
        inside = 1.0 + attention.config.lambda_sign * attention.lam().double().item()
        scale = torch.full_like(scale, 1.0 / (outside * inside))
    if attention.config.head_norm == "anneal":
        rms = moments.rms / outside
        attention.head_rms.copy_(rms)
        scale *= attention.head_rms.double().cpu().repeat_interleave(2)  # as it was rounded
    weight = attention.o_proj.weight
    weight.copy_(weight.double() * scale.repeat_interleave(D).to(weight.device))
