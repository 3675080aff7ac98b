"""What the templates are given: the facts of a folder as names and rows, with nothing in them that no file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dex.cards.facts import Facts
from dex.cards.folder import Folder
from dex.cards.kind import ADAPTERS
from dex.cards.licence import duties_of
from dex.evaluation.paired import Interval
from dex.evaluation.tables import interval
from dex.json_object import read_json
from dex.lock import CERTIFICATE
from dex.recipe_yaml import yaml_lines

Rows = list[tuple[str, str]]


def view_of(folder: Folder) -> dict[str, Any]:
    """The names that the templates know."""
    facts, lock = folder.facts, folder.lock
    licence = facts.licence
    duties = duties_of(licence.id, licence.name) if licence else None
    certificate = _read(folder.path / CERTIFICATE)
    branch = certificate["branch"] if certificate else lock.result.branch if lock else None
    return {
        "kind": folder.kind,
        "method": folder.method,
        "control": folder.control,
        "facts": facts,
        "base": facts.base,
        "base_model": facts.base_model,
        "base_name": facts.base_model or facts.base.name,
        "licence": licence,
        "duties": duties,
        "lock": lock,
        "rows": _rows(folder),
        "certificate": certificate,
        "lambda_scale": certificate.get("lambda_scale", 1.0) if certificate else 1.0,
        "branch": _branch(branch) if branch else None,
        "heads": _heads(folder),
        "recipe": "\n".join(yaml_lines(_without_folders(lock.recipe))) if lock else None,
        "seed": lock.data.cursor.seed if lock else None,
        "tokens": lock.result.tokens if lock else None,
        "evaluation": folder.evaluation,
        **_OF_KIND[folder.kind](folder),
    }


# ---- the table -------------------------------------------------------------------------------------------


def _rows(folder: Folder) -> Rows:
    lock = folder.lock
    rows: Rows = [] if folder.facts.base.scratch else [("base", _base(folder.facts))]
    if lock is not None:
        result, run = lock.result, lock.recipe["run"]
        rows += [("method", result.method), ("tokens, optimiser steps", f"{result.tokens:,}, {result.steps:,}")]
        rows += [("trained parameters", f"{result.trained_parameters:,}"), ("learning rate", f"{run['lr']:g}")]
        rows += [("seed", str(run["seed"]))]
    rows += _ROWS_OF_KIND[folder.kind](folder)
    in_results = folder.evaluation is not None and "perplexity" in folder.evaluation.suites
    if lock is not None and not in_results:  # the run's own interval is of other draws
        loss, perplexity = (_bounds(lock.result.held_out_loss), _bounds(lock.result.held_out_perplexity))
        of = " of the adapter as trained" if folder.kind == "folded" else ""
        rows += [(f"held-out loss{of}, nats per token", interval(loss))]
        rows += [(f"held-out perplexity{of}", interval(perplexity, 2))]
    return rows


def _base(facts: Facts) -> str:
    """The base and its commit, under the name that the card gives it and the one that the commit is of."""
    base, name = facts.base, facts.base_model or facts.base.name
    if facts.commit is not None:
        return f"`{name}` at commit `{facts.commit}`"
    return f"`{base.name}` at commit `{base.commit}`, named `{name}`" if base.commit is not None else f"`{name}`"


def _bounds(values: dict[Any, float | None]) -> Interval:
    mean = values["mean"]
    assert mean is not None
    return Interval(mean, values["low"], values["high"])


def _adapter_rows(folder: Folder) -> Rows:
    config = read_json(folder.path / "adapter_config.json")
    names, steps = _tensors(folder.path)
    parts = {"dex_weight": "K, V, O", "dex_w_d": "W_D", "dex_lam": "λ"}
    trained = [label for part, label in parts.items() if any(name.endswith(part) for name in names)]
    return [
        ("schedule of λ", config["schedule"]),
        ("optimiser steps done", f"{steps:,}"),
        ("layers with a branch", str(sum(name.endswith("dex_w_d") for name in names))),
        ("trained", ", ".join(trained) if steps else "nothing yet"),
    ]


def _lora_rows(folder: Folder) -> Rows:
    config = read_json(folder.path / "adapter_config.json")
    return [
        ("rank, alpha", f"{config['r']}, {config['lora_alpha']}"),
        ("on", ", ".join(sorted(config["target_modules"]))),
    ]


def _layout_rows(folder: Folder) -> Rows:
    record = read_json(folder.path / "layout.json")
    names = ("heads", "norm", "seed", "options", "dtype", "parameters", "parameters_of_the_base", "parameters_wanted")
    return [(n.replace("_", " "), str(record[n])) for n in names if record.get(n) not in (None, {})]


def _trained_rows(folder: Folder) -> Rows:
    return [("model type", f"`{read_json(folder.path / 'config.json')['model_type']}`")]


_ROWS_OF_KIND = {
    "adapter": _adapter_rows,
    "lora": _lora_rows,
    "folded": lambda _: [],
    "layout": _layout_rows,
    "fresh": _layout_rows,
    "trained": _trained_rows,
}


def _tensors(folder: Path) -> tuple[list[str], int]:
    """The names in an adapter, and how many optimiser steps were done."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        steps = [int(tensors.get_tensor(name)) for name in names if name.endswith("dex_step")]
        return names, max(steps, default=0)


# ---- what only some kinds have ---------------------------------------------------------------------------

TITLES = {
    "diff-v1": "a DIFF Transformer V1 (arXiv:2410.05258)",
    "diff-v2": "a DIFF Transformer V2",
    "diffllama": "transformers' DiffLlama",
    "base": "a model of the base's own layout",
}


def _of_adapter(folder: Folder) -> dict[str, Any]:
    return {
        "loadable": folder.facts.told.base_model or (None if folder.facts.base.gguf else folder.facts.base.hub_id),
        "commit": folder.facts.commit,
        "steps": _tensors(folder.path)[1] if folder.kind == "adapter" else None,
    }


def _of_layout(folder: Folder) -> dict[str, Any]:
    record = read_json(folder.path / "layout.json")
    return {"record": record, "title": TITLES[record["layout"]], **_of_model(folder)}


def _of_model(folder: Folder) -> dict[str, Any]:
    return {"needs_code": "auto_map" in read_json(folder.path / "config.json")}


_OF_KIND = {
    "adapter": _of_adapter,
    "lora": _of_adapter,
    "folded": _of_model,
    "layout": _of_layout,
    "fresh": _of_layout,
    "trained": _of_model,
}


def _branch(state: Mapping[str, Any]) -> dict[str, Any]:
    """λ and the ratio, in all and by layer."""
    layers: Sequence[int] = state.get("layers") or range(len(state["lam"]))
    by_layer = list(zip(layers, state["lam"], state["ratio"], strict=True))
    return {**state, "by_layer": by_layer}


def _heads(folder: Folder) -> dict[str, Any] | None:
    """The plan that is on record, or the heads that the adapter's configuration lists."""
    plan = (folder.lock.heads if folder.lock else None) or _read(folder.path / "heads.json")
    if plan is not None:
        chosen = sum(map(len, plan["heads"]))
        there = plan["model"]["num_layers"] * plan["model"]["num_heads"]
        data = plan.get("data")
        source = _own_name(data["source"]) if data else None
        return {**plan, "chosen": chosen, "there": there, "source": source}
    if folder.kind not in ADAPTERS:
        return None
    listed = read_json(folder.path / "adapter_config.json").get("heads")
    if not isinstance(listed, list):
        return None
    return {"criterion": None, "heads": listed, "chosen": sum(map(len, listed)), "there": None, "source": None}


def _without_folders(value: Any) -> Any:
    """A recipe without the folders of the machine that it ran on."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return _own_name(value) if isinstance(value, str) else value


def _own_name(source: str) -> str:
    return Path(source).name if source.startswith(("/", "~")) else source


def _read(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
