"""`dex convert --layout`: a pretrained model as a DIFF Transformer, with its divergence from the base measured.

The divergence is that of the written folder, loaded again, on text that no scale was fitted on. It is printed and
kept in layout.json. Where the layout promises the same function, a larger difference than rounding is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from dex import __version__
from dex.agreement import agreement
from dex.cards import write_card
from dex.console import Bar, say
from dex.data import Source, calibration
from dex.errors import DexError
from dex.layouts.body import body, on_meta
from dex.layouts.diffllama import from_diffllama, refuse_what_diffllama_lacks, to_diffllama
from dex.layouts.to_diff_v1 import Heads, Norm, V1Options, to_diff_v1, v1_of
from dex.layouts.to_diff_v2 import to_diff_v2
from dex.models import (
    ANY,
    DIFF,
    device,
    fingerprint,
    load_config,
    load_model,
    refuse_quantised,
    save_model,
)
from dex.output import refuse_output_over, refuse_to_overwrite, whole_folder, write_json

LAYOUTS = ("diff-v2", "diff-v1", "diffllama")
MADE_HERE = "layout.json"
TOLERANCE = 1e-4  # of the largest logit, where the layout promises the same function in float32


@dataclass(frozen=True)
class Target:
    """The layout to make. heads, norm and seed are those of DIFF V1 and DiffLlama; None: the layout's own default."""

    layout: str
    heads: Heads | None = None
    norm: Norm | None = None
    seed: int | None = None  # of the λ vectors; None: 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversion:
    """What is going to be done: a function of the base and of text to fit scales on, and what it promises."""

    run: Callable[[PreTrainedModel, Tensor], PreTrainedModel]
    settings: dict[str, Any]  # what is recorded
    exact: bool  # is the function promised to stay the same, in float32


def lay_out(
    model: str | Path,
    output: str | Path,
    target: Target | str,
    *,
    text: str = "pydoc",
    sequences: int = 16,
    length: int = 512,
    held_out: float = 0.0,
    revision: str | None = None,
    dtype: str = "auto",
    force: bool = False,
) -> dict[str, Any]:
    """Write the folder of a model in another layout; returns what layout.json holds.

    sequences × length tokens of text: the first half to fit scales on, the second to measure the divergence on.
    held_out is the share of the documents that neither may see, because something will be evaluated on them.
    Raises DexError for a layout that the model cannot have, with the reason, before its weights are read.
    """
    model, output = str(model), Path(output)
    target = Target(target) if isinstance(target, str) else target
    if target.layout not in LAYOUTS:
        raise DexError(f"{target.layout!r} is not a layout; there are: {', '.join(LAYOUTS)}.")
    if length < 2 or sequences < 2:
        raise DexError(
            f"--length is {length} and --sequences {sequences}; both must be at least 2: a token to predict, and "
            "text to fit on and to measure on."
        )
    refuse_output_over(output, model)
    refuse_to_overwrite(output, force, MADE_HERE)
    config = load_config(model, revision, ANY)
    refuse_quantised(config)
    conversion = plan_conversion(config, target, model)
    base = load_model(model, revision, dtype, families=ANY)
    windows, text_fingerprint = calibration(Source(text), base.tokenizer, sequences, length, held_out)
    if len(windows) < 2:
        raise DexError(
            f"{text} gives one window of {length} tokens, and two are needed, to fit on and to measure on; use more "
            "text or a lower --length."
        )
    fitting, measuring = windows.tensor_split(2)
    base.model.to(device())
    say(f"laying {model} out as {target.layout}")
    made = conversion.run(base.model, fitting)
    made.generation_config = base.model.generation_config
    with whole_folder(output, force, MADE_HERE) as partial:
        save_model(made, base.tokenizer, partial)
        del made
        again = load_model(str(partial), families=ANY).model.to(device())
        divergence = measure_divergence(base.model, again, measuring)
        if conversion.exact and base.model.dtype == torch.float32:
            _refuse_difference(divergence, target.layout)
        record = {
            "layout": target.layout,
            **conversion.settings,
            "dtype": str(base.model.dtype).removeprefix("torch."),
            "base": {**base.source.to_dict(), "fingerprint": fingerprint(base.model)},
            "parameters": again.num_parameters(),
            "parameters_of_the_base": base.model.num_parameters(),
            "divergence": divergence,
            "text": {"source": text, "fingerprint": text_fingerprint, "positions": measuring.numel()},
            "dex_version": __version__,
        }
        write_json(partial / MADE_HERE, record)
        write_card(partial, base.source)
    return record


def plan_conversion(config: PretrainedConfig, target: Target, model: str) -> Conversion:
    """How a model of this configuration becomes the target. Raises DexError, with the reason, if it cannot."""
    if config.model_type in DIFF:
        return _between_v1_and_diffllama(config, target, model)
    if target.layout == "diff-v2":
        _refuse_v1_settings(target, "diff-v2 has one way to be laid out")
        return Conversion(lambda base, _: to_diff_v2(base), {}, exact=True)
    options = _v1_options(config, target)
    settings = {"heads": options.heads, "norm": options.norm, "seed": options.seed, "options": target.options}
    _, v1 = v1_of(body(on_meta(config)), options)
    if target.layout == "diffllama":
        refuse_what_diffllama_lacks(v1)
        return Conversion(lambda base, text: to_diffllama(to_diff_v1(base, options, text)), settings, exact=False)
    return Conversion(lambda base, text: to_diff_v1(base, options, text), settings, options.exact)


def _v1_options(config: PretrainedConfig, target: Target) -> V1Options:
    """A DiffLlama is made by way of a V1, whose heads' norm has the eps of all the other norms."""
    seed = target.seed or 0
    if target.layout == "diff-v1":
        if "head_norm" in target.options:
            raise DexError("--option head_norm is for dex init; a pretrained model's norm is chosen with --norm.")
        if target.norm == "off" and "head_norm_eps" in target.options:
            raise DexError("--option head_norm_eps has no effect with --norm off; remove it.")
        return V1Options(target.heads or "doubled", target.norm or "calibrate", seed, target.options)
    if target.norm not in (None, "calibrate") or target.options:
        raise DexError("DiffLlama has the norm of its heads and no options; leave out --norm and --option.")
    return V1Options(target.heads or "paired", "calibrate", seed, {"head_norm_eps": config.rms_norm_eps})


def _between_v1_and_diffllama(config: PretrainedConfig, target: Target, model: str) -> Conversion:
    pairs: dict[tuple[str, str], Callable[[PreTrainedModel], PreTrainedModel]] = {
        ("diff_v1", "diffllama"): to_diffllama,
        ("diffllama", "diff-v1"): from_diffllama,
    }
    if (config.model_type, target.layout) not in pairs:
        raise DexError(
            f"{model} is laid out as {config.model_type} already, and cannot become {target.layout}; "
            "give the pretrained model that it was made from."
        )
    _refuse_v1_settings(target, f"{model} has its heads and norm already")
    if target.layout == "diffllama" and config.head_norm != "anneal":  # how far it has annealed is in the weights
        refuse_what_diffllama_lacks(config)
    convert = pairs[config.model_type, target.layout]
    return Conversion(lambda base, _: convert(base), {}, exact=True)


def _refuse_v1_settings(target: Target, why: str) -> None:
    if target.heads or target.norm or target.options or target.seed is not None:
        raise DexError(f"{why}; leave out --heads, --norm, --option and --seed.")


# ---- divergence --------------------------------------------------------------------------------------------


def measure_divergence(base: PreTrainedModel, model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    """KL(base ‖ model), top-1 agreement, largest logit difference and both losses, in nats, on input_ids [N, T]."""
    losses = {"loss_of_the_base": 0.0, "loss": 0.0}
    targets = input_ids.numel() - len(input_ids)

    def logits() -> Iterator[tuple[Tensor, Tensor]]:
        with torch.no_grad(), Bar("measuring the divergence", input_ids.numel(), "tokens") as bar:
            for index, row in enumerate(input_ids.to(base.device), 1):
                a, b = (m(input_ids=row[None], use_cache=False).logits[0] for m in (base, model))
                for name, values in zip(losses, (a, b), strict=True):
                    losses[name] += F.cross_entropy(values[:-1].float(), row[1:], reduction="sum").item() / targets
                yield a, b
                bar.update(index * len(row))

    measured = asdict(agreement(logits()))
    return {**measured, "bit_equal": measured["max_logit_difference"] == 0.0, **losses}


def _refuse_difference(divergence: dict[str, Any], layout: str) -> None:
    difference, largest = divergence["max_logit_difference"], divergence["largest_logit"]
    if not difference <= TOLERANCE * largest:
        raise DexError(
            f"{layout} should compute what its base does, and max |Δlogit| is {difference:.3g} of {largest:.3g}; no "
            "folder was written. This is a fault of dex or of a library: please report it with the model's name."
        )


def describe(record: dict[str, Any]) -> str:
    """The lines that are printed."""
    measured, text = record["divergence"], record["text"]
    growth = record["parameters"] / record["parameters_of_the_base"] - 1.0
    bits = "; bit for bit the same" if measured["bit_equal"] else ""
    return (
        f"{record['layout']}: {record['parameters']:,} parameters ({growth:+.1%}), {record['dtype']}\n"
        f"divergence from the base on {text['positions']:,} positions of {text['source']}: KL {measured['kl']:.2g}, "
        f"top-1 agreement {measured['top1_agreement']:.4f}, loss {measured['loss']:.4f} "
        f"(base {measured['loss_of_the_base']:.4f}), max |Δlogit| {measured['max_logit_difference']:.2g} "
        f"of {measured['largest_logit']:.3g}{bits}"
    )
