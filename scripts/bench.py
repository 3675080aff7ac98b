"""The benchmark: one JSON line per figure, {"figure", "value", "target", "met"}.

    python scripts/bench.py [--only PREFIX] [--repeats 5] [--lengths T ...]

Ratios are medians of runs that alternate in one process, so that a machine whose speed drifts, drifts for both.
Models have SmolLM2-135M's shape and random weights: time and memory do not depend on the values. Peak memory is of
whole processes, each with one model. Run it on a machine that does nothing else. The figures of the DIFF layouts, all
of which start with "layouts", are in bench_layouts.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import bench_layouts
from bench_models import SMOLLM2, half_of_the_heads, llama
from bench_timing import Step, alternate, figure, ratio, resident
from dex.loss import causal_lm_loss, chunked_cross_entropy
from dex.quiet import quiet_libraries
from dex.stats import attention_entropy, entropy

VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = SMOLLM2
SAME_LOSS = ", same loss"


def smollm2() -> LlamaForCausalLM:
    return llama(SMOLLM2)


def model_for(method: str) -> nn.Module:
    """A model that trains by the method's rule: dex, kvo, full or lora."""
    model = smollm2()
    method = method.removesuffix(SAME_LOSS)
    if method == "full":
        return model.train()
    if method == "lora":
        config: Any = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    else:
        config = half_of_the_heads(SMOLLM2, schedule="off" if method == "kvo" else "paper")
    return get_peft_model(model, config).train()


def stock_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss as transformers computes it, with all logits."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return causal_lm_loss(model, ids, ids)


def training_step(method: str, model: nn.Module, batch: int, length: int = 256) -> Step:
    """Forward, backward and fused AdamW on random tokens, [batch, length].

    Dex and its control use dex's chunked loss, as `dex train` does; full fine-tuning and LoRA use transformers' own,
    as its Trainer does. `… same loss` gives them dex's, to tell the method's share from the loss's.
    """
    loss = stock_loss if method in ("full", "lora") else own_loss
    ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        loss(model, ids).backward()
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare_products(batch: int, length: int = 256) -> Step:
    """The matrix products that a step of K, V, O training cannot do without, and nothing else.

    Forward of every projection and of the head; input gradients of all but the first layer's q, k and v (nothing
    before them trains); weight gradients of K, V and O; attention's products over the causal half.
    """
    tokens = batch * length
    sizes = {
        "q": (WIDTH, WIDTH),
        "k": (KV_HEADS * HEAD_DIM, WIDTH),
        "v": (KV_HEADS * HEAD_DIM, WIDTH),
        "o": (WIDTH, WIDTH),
        "gate": (INNER, WIDTH),
        "up": (INNER, WIDTH),
        "down": (WIDTH, INNER),
    }
    weights = {name: torch.randn(shape) for name, shape in sizes.items()}
    inputs = {width: torch.randn(tokens, width) for width in {w for shape in sizes.values() for w in shape}}
    head = torch.randn(VOCAB, WIDTH)
    chunk = torch.randn(2**24 // VOCAB, VOCAB)
    q = torch.randn(batch * HEADS, length, HEAD_DIM)
    half = torch.randn(batch * HEADS, length // 2, HEAD_DIM)
    p = torch.randn(batch * HEADS, length, length // 2)

    def products() -> None:
        for layer in range(LAYERS):
            for name, weight in weights.items():
                x, y = inputs[weight.shape[1]], inputs[weight.shape[0]]
                torch.mm(x, weight.t())
                if layer > 0 or name not in "qkv":
                    torch.mm(y, weight)
                if name in "kvo":
                    torch.mm(y.t(), x)
            for _ in range(3):  # QKᵀ, then dP and (as their transposes) dV and dK, and so PV, dQ
                torch.bmm(q, half.transpose(1, 2))
                torch.bmm(p, half)
        for rows in inputs[WIDTH].split(len(chunk)):
            torch.mm(rows, head.t())
            torch.mm(chunk[: len(rows)], head)

    return products


# --- the figures ------------------------------------------------------------------------------------------


def forward(repeats: int) -> Iterator[dict[str, Any]]:
    ids = torch.randint(0, VOCAB, (2, 512), generator=torch.Generator().manual_seed(1))
    models = {
        "base": smollm2(),
        "attached": get_peft_model(smollm2(), half_of_the_heads(SMOLLM2)).eval(),
        "folded": get_peft_model(smollm2(), half_of_the_heads(SMOLLM2)).merge_and_unload().eval(),
    }

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    seconds = alternate({name: partial(run, model) for name, model in models.items()}, 2 * repeats)
    attached, folded = (ratio(seconds[name], seconds["base"]) for name in ("attached", "folded"))
    yield figure("forward, attached / base (2×512)", attached, "≤ 1.03", attached <= 1.03)
    yield figure("forward, folded / base (2×512)", folded, "1.00 ± 0.01", abs(folded - 1) <= 0.01)


def step_time(repeats: int) -> Iterator[dict[str, Any]]:
    methods = ("dex", "kvo", "full", "full" + SAME_LOSS, "lora", "lora" + SAME_LOSS)
    steps = {method: training_step(method, model_for(method), 8) for method in methods}
    steps["products"] = bare_products(8)
    seconds = alternate(steps, repeats)
    targets = {"kvo": 1.02, "full": 0.62, "lora": 0.95, "products": 1.25}
    targets |= {name + SAME_LOSS: targets[name] for name in ("full", "lora")}
    for other, target in targets.items():
        value = ratio(seconds["dex"], seconds[other])
        yield figure(f"step, dex / {other} (8×256)", value, f"≤ {target}", value <= target)


def step_difference(repeats: int) -> Iterator[dict[str, Any]]:
    """Seconds that a step of Dex takes longer than one of K, V, O alone: the same for any number of tokens."""
    models = {method: model_for(method) for method in ("dex", "kvo")}
    extra, noise = {}, {}
    for batch in (2, 4, 8):
        seconds = alternate({m: training_step(m, model, batch) for m, model in models.items()}, 2 * repeats)
        differences = [a - b for a, b in zip(seconds["dex"], seconds["kvo"], strict=True)]
        extra[batch] = statistics.median(differences)
        noise[batch] = statistics.stdev(differences) / len(differences) ** 0.5
        yield figure(f"step, dex − kvo, seconds ({batch}×256)", extra[batch], "compared below", True)
    growth, limit = extra[8] - extra[2], 2 * (noise[8] ** 2 + noise[2] ** 2) ** 0.5
    yield figure(
        "step, dex − kvo, seconds more at 8×256 than at 2×256", growth, f"≤ 2σ = {limit:.3f}", growth <= limit
    )


def memory(repeats: int) -> Iterator[dict[str, Any]]:
    methods = ("dex", "full", "lora", "full" + SAME_LOSS, "lora" + SAME_LOSS)
    peak = {method: _in_child("peak-memory", method) for method in methods}
    for other in methods[1:]:
        target = 0.62 if "full" in other else 0.95
        value = peak["dex"] / peak[other]
        yield figure(f"memory, peak of a step, dex / {other} (8×256)", value, f"≤ {target}", value <= target)


def scoring(repeats: int) -> Iterator[dict[str, Any]]:
    model = smollm2()
    ids = torch.randint(0, VOCAB, (1, 2_048), generator=torch.Generator().manual_seed(1))

    def plain() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)

    seconds = alternate({"score": lambda: attention_entropy(model, [{"input_ids": ids}]), "plain": plain}, repeats)
    value = ratio(seconds["score"], seconds["plain"])
    yield figure("scoring, entropy / plain forward (T=2048)", value, "≤ 1.6", value <= 1.6)
    extra = {length: _in_child("scoring-memory", str(length)) for length in (2_048, 4_096)}
    maps = _in_child("map-memory", "4096")
    value = extra[4_096] / maps
    yield figure("scoring, extra memory / output_attentions (T=4096)", value, "≤ 1/8", value <= 1 / 8)
    growth = extra[4_096] / extra[2_048]
    yield figure("scoring, extra memory at T=4096 / at T=2048", growth, "linear: ≤ 2.2", growth <= 2.2)


def logits(repeats: int) -> Iterator[dict[str, Any]]:
    hidden = torch.randn(1, 4_096, 64, requires_grad=True)
    weight = torch.randn(128_000, 64)
    labels = torch.randint(0, 128_000, (1, 4_096))
    largest = _LargestTensor()
    with largest:
        chunked_cross_entropy(hidden, weight, labels).backward()
    share = largest.numel / (4_096 * 128_000)
    yield figure("logits, largest tensor / all logits (128k × 4k)", share, "bounded: ≤ 1/16", share <= 1 / 16)
    own = hidden.grad
    assert own is not None
    hidden.grad = None
    F.cross_entropy((hidden @ weight.T)[0, :-1], labels[0, 1:]).backward()
    assert hidden.grad is not None
    error = ((own - hidden.grad).norm() / hidden.grad.norm()).item()
    yield figure("logits, relative error of the gradient", error, "≤ 1e-5", error <= 1e-5)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            # The head's own weight, and views of it, were there before.
            if isinstance(value, Tensor) and value.shape[-1:] != (64,) and value.shape[:1] != (64,):
                self.numel = max(self.numel, value.numel())
        return out


FIGURES: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "forward": forward,
    "step, dex /": step_time,
    "step, dex −": step_difference,
    "memory": memory,
    "scoring": scoring,
    "logits": logits,
}


# --- memory of a whole process ----------------------------------------------------------------------------


def _in_child(what: str, argument: str) -> float:
    command = [sys.executable, __file__, "--child", what, argument]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_memory(method: str) -> float:
    """Peak bytes of a process that makes two training steps of a method."""
    step = training_step(method, model_for(method), 8)
    step()
    step()
    return resident()


def scoring_memory(length: str) -> float:
    """Bytes by which scoring one layer's shape raises the peak of a process."""
    query, key = _one_layer(int(length))
    entropy(query[..., :64, :], key[..., :64, :], None, HEAD_DIM**-0.5)  # what the first call allocates for good
    before = resident()
    entropy(query, key, None, HEAD_DIM**-0.5)
    return max(resident() - before, 1)


def map_memory(length: str) -> float:
    """The same for the map of one layer and its entropy, as output_attentions gives it."""
    query, key = _one_layer(int(length))
    key = key.repeat_interleave(HEADS // KV_HEADS, 1)
    (query[..., :64, :] @ key[..., :64, :].transpose(-1, -2)).softmax(-1)
    before = resident()
    mask = torch.ones(int(length), int(length), dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) * HEAD_DIM**-0.5).masked_fill_(mask, -torch.inf)
    p = scores.softmax(-1)
    -(p * p.clamp(min=1e-30).log()).sum(-1)
    return resident() - before


def _one_layer(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, HEADS, length, HEAD_DIM), torch.randn(1, KV_HEADS, length, HEAD_DIM)


CHILDREN = {"peak-memory": peak_memory, "scoring-memory": scoring_memory, "map-memory": map_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PREFIX", help="only the figures whose name starts with it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=bench_layouts.LENGTHS,
        metavar="T",
        help="the context lengths of the layouts' figures",
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    quiet_libraries()
    disable_progress_bar()
    if options.child:
        print(CHILDREN[options.child[0]](options.child[1]))
        return
    measures = FIGURES | bench_layouts.figures(options.lengths)
    chosen = [name for name in measures if name.startswith(options.only) or options.only.startswith(name)]
    for measure in dict.fromkeys(measures[name] for name in chosen):
        for line in measure(options.repeats):
            if line["figure"].startswith(options.only):
                print(json.dumps(line, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
