"""Fold an adapter into a stock checkpoint, and prove it.

    W_O,h ← (I − λ W_D) W_O,h for every selected head, K and V from their trained copies; multiplied in float64,
    cast once to the base checkpoint's dtype. The dial: any multiple S·λ can be folded in the place of λ.

The certificate: a fresh process that does not import dex loads the written folder with plain
`AutoModelForCausalLM`, and its logits on real text are compared with the attached model's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dex.adapter import load_onto, read_adapter_config
from dex.agreement import Agreement, agreement
from dex.cards import write_card
from dex.cards.facts import Told
from dex.cards.write import told_to
from dex.console import say
from dex.data import Source, calibration
from dex.environment import environment
from dex.errors import DexError
from dex.lock import CERTIFICATE, LOCK, find_adapter_lock, write_lock
from dex.models import LoadedModel, load_config, load_model, refuse_quantised, save_model
from dex.output import refuse_to_overwrite, whole_folder, write_json
from dex.tuner import DexConfig
from dex.tuner.callback import branch_state
from dex.tuner.scaling import check_scales, scale_lambda, scale_name

FLOAT32_TOLERANCE = 1e-4  # of the largest logit
MADE_HERE = CERTIFICATE
BLOCKS, LENGTH = 4, 256  # of real text: 1024 positions, and 200 MB of logits for a vocabulary of 49k


def fold(
    adapter: str | Path,
    output: str | Path,
    *,
    lambda_scale: float | None = None,
    text: str = "pydoc",
    into_unquantised: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Write the stock folder of an adapter and its certificate (certificate.json); return the certificate.

    lambda_scale: S folds with S·λ in place of λ, 0 with K, V and O alone; None is 1, as trained. An adapter that was
    trained on a base quantised by dex is folded into the base as it was before, if `into_unquantised` says so.

    Raises DexError, and leaves no folder, if the base is quantised otherwise, a scale is given for an adapter without
    a branch, or the certificate is above tolerance.
    """
    folders = {Path(output): lambda_scale}
    [certificate] = _fold_each(str(adapter), folders, text, into_unquantised, force)
    return certificate


def fold_at_scales(
    adapter: str | Path,
    output: str | Path,
    scales: Sequence[float],
    *,
    text: str = "pydoc",
    into_unquantised: bool = False,
    force: bool = False,
) -> dict[str, dict[str, Any]]:
    """`fold` at several scales of λ, the base loaded once: `output`/lambda-<S> for each, whole and certified.

    Returns the certificates by the names of their folders. Those that are written stay where a later one fails.
    """
    if not scales:
        raise DexError("No scale was given; name one or more.")
    names = [f"lambda-{scale_name(scale)}" for scale in scales]
    if again := [name for name in names if names.count(name) > 1]:
        raise DexError(f"The scale {again[0].removeprefix('lambda-')} is given twice; each is folded once.")
    folder = Path(output)
    _refuse_among_others(folder)
    folders = {folder / name: scale for name, scale in zip(names, scales, strict=True)}
    return dict(zip(names, _fold_each(str(adapter), folders, text, into_unquantised, force), strict=True))


def _refuse_among_others(output: Path) -> None:
    """Raise if the folder that shall hold one folder a scale holds anything else, such as a model."""
    if output.is_dir() and (others := [each.name for each in output.iterdir() if "lambda-" not in each.name]):
        raise DexError(
            f"{output} holds {min(others)}, and folds at several scales want a folder to themselves; name one."
        )


@dataclass(frozen=True)
class _Work:
    """What the folds of one adapter share."""

    adapter: str
    config: DexConfig | LoraConfig
    base: LoadedModel
    input_ids: Tensor
    told: Told | None  # what the adapter's card was told
    text: dict[str, Any]  # which text the certificate is made on
    rounding: Agreement | None


def _fold_each(
    adapter: str, folders: Mapping[Path, float | None], text: str, into_unquantised: bool, force: bool
) -> list[dict[str, Any]]:
    """The certificates of the folds, each folder with its scale; what can be refused is, before any work."""
    for folder in folders:
        refuse_to_overwrite(folder, force, MADE_HERE)
    config = read_adapter_config(adapter)
    check_scales([scale for scale in folders.values() if scale is not None], adapter, config)
    _refuse_quantised_training(adapter, config, into_unquantised)
    refuse_quantised(load_config(config.base_model_name_or_path, config.revision))
    told = told_to(adapter)
    base = load_model(config.base_model_name_or_path, config.revision)
    input_ids, fingerprint = calibration(Source(text), base.tokenizer, BLOCKS, LENGTH)
    rounding = None if base.model.dtype == torch.float32 else _rounding_of(base, config, input_ids)
    about_text = {"source": text, "fingerprint": fingerprint, "positions": input_ids.numel()}
    work = _Work(adapter, config, base, input_ids, told, about_text, rounding)
    own = {name: parameter.data for name, parameter in base.model.named_parameters()}
    certificates = []
    for folder, scale in folders.items():
        certificates.append(_fold_once(work, folder, 1.0 if scale is None else scale, force))
        for name, parameter in base.model.named_parameters():
            parameter.data = own[name]  # merging has put others in their place, and left these as they were
    return certificates


def _fold_once(work: _Work, output: Path, scale: float, force: bool) -> dict[str, Any]:
    base, input_ids = work.base, work.input_ids
    layout, dtype = _layout(base.model), base.model.dtype
    with whole_folder(output, force, MADE_HERE) as partial, _scratch(output) as scratch:
        attached = load_onto(base, work.adapter)
        attached_logits = scratch / "attached"
        with scale_lambda(attached, scale) if scale != 1.0 else nullcontext():
            _write_logits(attached, input_ids, attached_logits)
            branch = branch_state(attached, input_ids[0])
            say("folding" if scale == 1.0 else f"folding with {scale_name(scale)} · λ")
            folded = attached.merge_and_unload()
        _check_layout(folded, layout)
        save_model(folded, base.tokenizer, partial)
        say("certifying: a fresh process without dex loads the folder")
        witness = _ask_witness(partial, input_ids, scratch, dtype)
        measured = agreement(_pairs(attached_logits, scratch / "folded", len(input_ids)))
        certificate = {
            "passed": _passes(measured, work.rounding),
            "dtype": str(dtype).removeprefix("torch."),
            "lambda_scale": scale,
            "folded_against_attached": asdict(measured),
            "rounding_of_the_base": None if work.rounding is None else asdict(work.rounding),
            "tolerance": _tolerance(work.rounding),
            "text": work.text,
            "class": witness["class"],
            "trained_on": getattr(work.config, "base_quantised", None) or "the base as it is",
            "loaded_without_dex": not witness["imported_dex"],
            "branch": branch,
        }
        _refuse_if_failed(certificate)
        write_json(partial / MADE_HERE, certificate)
        _write_lock(work.adapter, partial, certificate)
        write_card(partial, base.source, made_from=work.adapter, told=work.told)
    return certificate


def _write_lock(adapter: str, folder: Path, certificate: dict[str, Any]) -> None:
    """The adapter's lock, with the fold; none where the adapter has none, or that of other weights."""
    lock, others = find_adapter_lock(adapter)
    if others:
        say(f"{others[0]} of {adapter} is not the file of its {LOCK}: the folded folder gets none")
    elif lock is not None:
        write_lock(folder, lock.folded(folder, certificate, environment()))


def _refuse_quantised_training(adapter: str, config: Any, into_unquantised: bool) -> None:
    quantised = getattr(config, "base_quantised", None)
    if quantised is not None and not into_unquantised:
        raise DexError(
            f"{adapter} was trained on its base in {quantised}, into which nothing can be folded exactly; pass "
            "--into-unquantised to fold it into the base as it is, which training has not seen."
        )
    if quantised is None and into_unquantised:
        raise DexError(f"--into-unquantised has no effect: {adapter} was trained on its base as it is; leave it out.")


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A folder for logits beside the output, where there must be room anyway."""
    scratch = output.parent / f".{output.name}.scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _layout(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def _check_layout(folded: nn.Module, layout: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
    if _layout(folded) != layout:
        raise DexError("The folded model's tensors are not those of its base (names, shapes or dtypes differ).")


def _write_logits(model: nn.Module, input_ids: Tensor, folder: Path) -> None:
    folder.mkdir(parents=True)
    for index, row in enumerate(input_ids):
        with torch.no_grad():
            logits = model(input_ids=row[None], use_cache=False).logits[0]
        save_file({"logits": logits.cpu().contiguous()}, folder / f"{index}.safetensors")


def _pairs(a: Path, b: Path, blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(blocks):
        yield tuple(load_file(folder / f"{index}.safetensors")["logits"] for folder in (a, b))


def _ask_witness(folder: Path, input_ids: Tensor, scratch: Path, dtype: torch.dtype) -> dict[str, Any]:
    (scratch / "folded").mkdir()
    save_file({"input_ids": input_ids}, scratch / "tokens.safetensors")
    witness = Path(__file__).with_name("fold_witness.py")
    arguments = [folder, scratch / "tokens.safetensors", scratch / "folded", str(dtype).removeprefix("torch.")]
    done = subprocess.run(
        [sys.executable, "-P", str(witness), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DexError(f"The folded folder does not load in a fresh process: {last}")
    report: dict[str, Any] = json.loads((scratch / "folded" / "report.json").read_text())
    for problem in ("missing_keys", "unexpected_keys"):
        if report[problem]:
            raise DexError(f"The folded folder loads with {problem.replace('_', ' ')}: {report[problem]}.")
    return report


def _rounding_of(base: LoadedModel, config: Any, input_ids: Tensor) -> Agreement:
    """How far the base in its own dtype is from the base in float32: the yardstick for a rounded fold."""
    say(f"measuring what rounding to {base.model.dtype} does to the base itself")
    exact = load_model(config.base_model_name_or_path, config.revision, dtype="float32")

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for row in input_ids:
            with torch.no_grad():
                yield tuple(m.model(input_ids=row[None], use_cache=False).logits[0] for m in (exact, base))

    return agreement(pairs())


def _tolerance(rounding: Agreement | None) -> str:
    if rounding is None:
        return f"max |Δlogit| ≤ {FLOAT32_TOLERANCE:g} of the largest logit"
    return "KL no larger, and top-1 agreement no smaller, than what rounding does to the base itself"


def _passes(measured: Agreement, rounding: Agreement | None) -> bool:
    if rounding is None:
        return measured.max_logit_difference <= FLOAT32_TOLERANCE * measured.largest_logit
    return measured.kl <= rounding.kl and measured.top1_agreement >= rounding.top1_agreement


def _refuse_if_failed(certificate: dict[str, Any]) -> None:
    measured = certificate["folded_against_attached"]
    if not certificate["passed"]:
        raise DexError(
            f"The folded model is not the attached one: max |Δlogit| {measured['max_logit_difference']:.3g} "
            f"(largest logit {measured['largest_logit']:.3g}), KL {measured['kl']:.3g}, top-1 agreement "
            f"{measured['top1_agreement']:.4f}; the tolerance is: {certificate['tolerance']}. No folder was written."
        )
    if not certificate["loaded_without_dex"]:
        raise DexError(
            "The witness process imported dex, so it proves nothing; is dex in its site-packages' .pth files?"
        )


def describe(certificate: dict[str, Any]) -> str:
    """The lines that are printed."""
    measured, text = certificate["folded_against_attached"], certificate["text"]
    return (
        f"certificate passed on {text['positions']:,} positions of {text['source']} ({certificate['dtype']}): "
        f"max |Δlogit| {measured['max_logit_difference']:.2g} of {measured['largest_logit']:.3g}, "
        f"KL {measured['kl']:.2g} nats, top-1 agreement {measured['top1_agreement']:.4f}"
    )
