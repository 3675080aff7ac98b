"""Which files of a folder are published: those of a whole model or adapter, its card and its records.

Anything else that lies there stays: an optimiser's state, checkpoints, a file with secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import get_token

from dex.cards.base import base_on_hub
from dex.cards.evaluation import EVALUATION
from dex.cards.facts import FACTS
from dex.cards.front_matter import README
from dex.cards.kind import ADAPTERS, Kind, kind_of
from dex.cards.licence import licence_files
from dex.console import say
from dex.errors import DexError
from dex.json_object import read_json
from dex.lock import CERTIFICATE, LOCK, Lock
from dex.models import check_weight_files
from dex.run_folder import RECIPE

WEIGHTS = {True: "adapter_model.safetensors", False: "model.safetensors"}  # by: is it an adapter?
_CONFIG = ("config.json", "adapter_config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_RECORDS = (LOCK, CERTIFICATE, "heads.json", "layout.json", FACTS, EVALUATION)
# What an earlier push may have left in a repository. Licences and whatever people put there themselves are not of it.
_PUSHED = (
    *_CONFIG,
    *_TOKENIZER,
    *_RECORDS,
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "configuration_diff_*.py",
    "modeling_diff_*.py",
)
_WEIGHTS_OF_ANY = ("*.safetensors", "*.bin", "*.gguf", "*.pth", "*.pt", "*.h5", "*.msgpack")
_OF_ANOTHER = (*_WEIGHTS_OF_ANY, "*.index.json", "configuration_*.py", "modeling_*.py", "tokenization_*.py")
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")


@dataclass(frozen=True)
class Published:
    """What of a folder goes up: its kind, its weight files, all others, and what stays where it is. Paths in it."""

    path: Path
    kind: Kind
    weights: list[str]
    others: list[str]
    left_out: list[str]

    @property
    def is_adapter(self) -> bool:
        return self.kind in ADAPTERS

    @property
    def records(self) -> list[str]:
        """What dex and its libraries wrote of it, in JSON."""
        return [name for name in self.others if name in (*_RECORDS, *_CONFIG)]


def is_pushed_kind(name: str) -> bool:
    """May a file of this name be of an earlier push?"""
    return _is_one_of(name, _PUSHED)


def is_model_file(name: str) -> bool:
    """Does a repository with this file hold a model?"""
    return name in _CONFIG[:2] or _is_one_of(name, _WEIGHTS_OF_ANY)


def is_of_another_model(name: str) -> bool:
    """Is it a weight file of any format, or code, beside which what is pushed would not be what is loaded?"""
    return "/" not in name and _is_one_of(name, _OF_ANOTHER)


def read_published(path: Path) -> Published:
    """What of a folder is published.

    Raises DexError for what is no whole model, adapter or DIFF model of dex's, and for a run, naming what to push.
    """
    _refuse_other_places(path)
    kind = kind_of(path)
    adapter = kind in ADAPTERS
    weights = _weights(path, adapter)
    present = _files_in(path)
    code = [] if adapter else _code(path)
    if adapter:
        _refuse_local_base(path)
    legal = [file.name for file in licence_files(path)]
    known = (*_CONFIG, *_TOKENIZER, *_RECORDS, README, *code, *legal)
    others = [name for name in present if _is_one_of(name, known)]
    if lacking := [name for name in code if name not in others]:
        raise DexError(f"{path} has no {lacking[0]}, which config.json names as the model's code; lay it out again.")
    if not adapter and not any(name in others for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise DexError(f"{path} has no tokenizer, which every model needs; make the folder again.")
    if kind in ("lora", "trained") and LOCK not in others and FACTS not in others:
        raise DexError(
            f"{path} is not known to be made by dex (no {LOCK} or {FACTS}); push it with `hf upload`, or write its "
            f"card first: dex card {path}."
        )
    taken = {*weights, *others}
    for name in others:
        refuse_secrets(path / name, (path / name).read_bytes())
    return Published(path, kind, weights, others, [name for name in present if name not in taken])


def refuse_uncertified(path: Path, lock: Lock | None) -> None:
    """Raise DexError for a folded model without the certificate that its fold was given, passed."""
    there = (path / CERTIFICATE).is_file()
    certificate = read_json(path / CERTIFICATE) if there else None
    made = lock.fold.certificate if lock is not None and lock.fold is not None else certificate
    if made is not None and (certificate != made or made.get("passed") is not True):
        raise DexError(
            f"{path / CERTIFICATE} is not the certificate that the fold was given, or it did not pass; put that "
            "back, or fold again."
        )


def refuse_changed(published: Published, lock: Lock, hashes: dict[str, str]) -> None:
    """Raise DexError for weights or a config.json that dex.lock does not have; say which other files differ.

    A chat template or the name of an adapter's base may be mended by hand, weights may not.
    """
    recorded = lock.fold.files if lock.fold is not None else lock.files
    differing = [name for name, digest in hashes.items() if recorded.get(name, digest) != digest]
    unknown = [name for name in published.weights if name not in recorded]
    if decisive := [name for name in (*differing, *unknown) if name in (*published.weights, "config.json")]:
        raise DexError(
            f"{published.path / decisive[0]} is not what {LOCK} says was made (its SHA-256 differs); put the former "
            "one back, or make the folder again."
        )
    if edited := [name for name in differing if name not in _RECORDS]:
        say(f"changed since {LOCK} was written: {', '.join(edited)}")


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_other_places(path: Path) -> None:
    if not path.exists():
        raise DexError(f"{path} does not exist; name a folder that dex fold, train or convert wrote.")
    if not path.is_dir():
        raise DexError(f"{path} is a file, and a model is published as a folder; name one that dex wrote.")
    if not (path / RECIPE).is_file():
        return
    if (path / "adapter").is_dir():
        raise DexError(
            f"{path} is a run; push what it trained, {path / 'adapter'}, or a stock model made of that: "
            f"dex fold {path / 'adapter'} -o FOLDER."
        )
    if (path / "model").is_dir():
        raise DexError(f"{path} is a run; push what it trained: {path / 'model'}.")
    raise DexError(f"{path} is a run that has not finished; go on with it: dex train {path / RECIPE}.")


def _weights(path: Path, adapter: bool) -> list[str]:
    """The weight files, and the index of shards."""
    single = WEIGHTS[adapter]
    names = check_weight_files(path, str(path), single)
    index = path / f"{single}.index.json"
    if not index.is_file():
        return names
    if (path / single).is_file() and single not in names:
        raise DexError(f"{path} has weights twice, {single} and {index.name}; delete those that are not meant.")
    if odd := [name for name in names if "/" in name or "\\" in name]:
        raise DexError(f"{index} names {odd[0]}, which is no file of this folder; make the folder again.")
    return [*names, index.name]


def _refuse_local_base(path: Path) -> None:
    """An adapter whose base is a path loads on this machine alone, and tells others where its user's files lie."""
    if base_on_hub(path) is None:
        config = path / "adapter_config.json"
        base = read_json(config).get("base_model_name_or_path")
        raise DexError(
            f"{config} names {base} as the base, which is no model on the Hub, and dex card --base-model changes the "
            "card alone; write the base's Hub id there as base_model_name_or_path and evaluate the adapter again, "
            f"whose results are of the former file, or push a stock model instead: dex fold {path} -o FOLDER."
        )


def _code(path: Path) -> list[str]:
    """The Python files that config.json names: those of DIFF V1 and V2 are the model."""
    references = read_json(path / "config.json").get("auto_map", {})
    return sorted({f"{str(each).split('.')[0]}.py" for each in _values(references)})


def _values(references: Any) -> list[Any]:
    return list(references.values()) if isinstance(references, dict) else []


def _files_in(path: Path) -> list[str]:
    """Every file, and every folder that holds none of the kinds known here, by name."""
    inside = [entry for entry in sorted(path.iterdir()) if not (entry.is_dir() and not any(entry.iterdir()))]
    names = [entry.name for entry in inside if entry.is_file()]
    for folder in (entry for entry in inside if entry.is_dir()):
        if folder.name == "additional_chat_templates":
            names += [f"{folder.name}/{file.name}" for file in sorted(folder.iterdir())]
        else:
            names.append(f"{folder.name}/")
    return names


def refuse_secrets(file: Path, content: bytes) -> None:
    """A token in a card or a configuration would be published with it."""
    token = get_token()
    if _TOKEN.search(content) or (token and token.encode() in content):
        raise DexError(f"{file} has an access token of the Hub in it; remove it, and revoke the token.")
