"""Model cards, from the templates in model_cards/: only what is known, and nothing that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import safe_open
from transformers import PretrainedConfig

from dex import __version__
from dex.models import EMBEDDED, ModelSource
from dex.output import write_whole


def write_adapter_card(folder: Path, source: ModelSource, schedule: str, branch: dict[str, Any] | None) -> None:
    """README.md of an adapter folder, with the lines of code that load it."""
    tensors = _tensor_names(folder / "adapter_model.safetensors")
    trained = {"dex_weight": "K, V, O", "dex_w_d": "W_D", "dex_lam": "λ"}
    present = [label for part, label in trained.items() if any(name.endswith(part) for name in tensors)]
    steps = _first_tensor(folder / "adapter_model.safetensors", "dex_step")
    _write(
        folder,
        "adapter.md.jinja",
        source,
        schedule=schedule,
        steps=steps,
        branch_layers=sum(name.endswith("dex_w_d") for name in tensors),
        trained=", ".join(present) if steps else "nothing yet",
        branch=branch if steps else None,
    )


def write_lora_card(folder: Path, source: ModelSource, config: Any, result: dict[str, Any] | None) -> None:
    """README.md of a LoRA that was trained as a baseline."""
    result = result or {}
    facts = {name: result.get(name) for name in ("method", "tokens", "steps", "trained_parameters", "held_out_loss")}
    _write(folder, "lora.md.jinja", source, rank=config.r, alpha=config.lora_alpha, **facts)


def write_folded_card(
    folder: Path, source: ModelSource, certificate: dict[str, Any], branch: dict[str, Any] | None
) -> None:
    """README.md of a folded folder, with its certificate."""
    _write(
        folder,
        "folded.md.jinja",
        source,
        measured=certificate["folded_against_attached"],
        text=certificate["text"],
        dtype=certificate["dtype"],
        branch=branch,
    )


_TITLES = {
    "diff-v1": "a DIFF Transformer V1 (arXiv:2410.05258)",
    "diff-v2": "a DIFF Transformer V2",
    "diffllama": "transformers' DiffLlama",
    "base": "a model of the base's own layout",
}


def write_layout_card(folder: Path, source: ModelSource, config: PretrainedConfig, record: dict[str, Any]) -> None:
    """README.md of a folder in a DIFF layout, converted (with its divergence) or fresh."""
    divergence = record.get("divergence")
    names = ("heads", "norm", "seed", "options", "dtype", "parameters", "parameters_of_the_base", "parameters_wanted")
    _write(
        folder,
        "layout.md.jinja",
        source,
        layout=record["layout"],
        title=_TITLES[record["layout"]],
        fresh=divergence is None,
        needs_code=hasattr(config, "auto_map"),
        settings={name.replace("_", " "): record[name] for name in names if record.get(name) not in (None, {})},
        divergence=divergence,
        text=record.get("text"),
        dtype=record["dtype"],
    )


def write_trained_card(folder: Path, source: ModelSource, config: PretrainedConfig, result: dict[str, Any]) -> None:
    """README.md of a model whose own weights were trained; `result` is the run's result.json."""
    _write(
        folder,
        "trained.md.jinja",
        source,
        method=result["method"],
        needs_code=hasattr(config, "auto_map"),
        model_type=config.model_type,
        loss=result["held_out_loss"],
        **{key: result[key] for key in ("tokens", "steps", "trained_parameters")},
    )


def hub_id(source: ModelSource) -> str | None:
    """The base's Hub id, which is what `base_model` of a card holds; None for a local folder or file."""
    if source.id in EMBEDDED:
        return EMBEDDED[source.id].hub_id
    return source.id if source.commit else None


def _write(folder: Path, template: str, source: ModelSource, **facts: Any) -> None:
    environment = Environment(
        loader=PackageLoader("dex.model_cards", ""), undefined=StrictUndefined, keep_trailing_newline=True
    )
    base = {
        "base_model": hub_id(source),
        "base_id": source.id if source.commit or source.id in EMBEDDED else Path(source.id).name,
        "commit": source.commit,
        "gguf": EMBEDDED[source.id].file if source.id in EMBEDDED else None,
        "dex_version": __version__,
    }
    write_whole(folder / "README.md", environment.get_template(template).render(**base, **facts))


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _first_tensor(file: Path, suffix: str) -> int:
    with safe_open(file, "pt") as tensors:
        name = next(name for name in tensors.keys() if name.endswith(suffix))  # noqa: SIM118
        return int(tensors.get_tensor(name))
