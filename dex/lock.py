"""dex.lock: what a trained folder was made of, how, and what came of it; enough to make it again.

One JSON file. `dex train` writes it into the run's folder and into its adapter/ or model/, `dex fold` writes that of
the adapter, with `fold` filled in, into the folder that it makes. It is made of a run: an adapter that `dex convert`
wrote, or a training loop of one's own, has none, and neither has what is folded from it.

    recipe       the recipe, every default written out, Hub ids at their commits
    model, data  which base and which tokens: commits, fingerprints, and how far into the data the run went
    heads        the head plan
    environment  versions, the commit of dex (with a + where files differ from it), the machine, the threads
    earlier      the environments of earlier starts of the run, where they were others
    result       the figures at the end, and the loss of every held-out block
    files        SHA-256 of what was trained: weights, configuration, tokenizer
    fold         how it was folded, with the certificate, and SHA-256 of the folded folder's files

Nothing of the machine's user is in it but what the recipe says: a local base or data set is there by the path that
was given, absolute or not, since a path made relative to a folder that travels would lead nowhere; what lies there is
known by its hash. The run's own output is there by its name alone.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from pydantic import ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict

from dex.console import say
from dex.errors import DexError
from dex.hashing import sha256
from dex.heads import HeadPlan
from dex.models import LICENCE_FILE, hub_errors_explained
from dex.output import write_json
from dex.settings import Block

LOCK, SCHEMA = "dex.lock", 1
CERTIFICATE = "certificate.json"  # what `dex fold` measured, beside the folded weights
WEIGHTS = ".safetensors"
# What is written about the files, after them.
NOT_HASHED = (LOCK, "README.md", "card.json", "evaluation.json", CERTIFICATE)

Files = dict[str, str]  # name → SHA-256 in hex
Bounds = dict[Literal["mean", "low", "high"], float | None]


class Environment(TypedDict):
    """Of `dex.environment.environment()`, what is read again; there is more in it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    commit: str | None
    packages: dict[str, str]
    device: str
    threads: Annotated[int, Field(ge=1)]


class Branch(TypedDict):
    """λ and the branch ratio of every adapted layer, and the mean ratio."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    layers: list[int]
    lam: list[float]
    ratio: list[float]
    mean_ratio: float
    inert: bool


class Text(TypedDict):
    """The text of a certificate."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    source: str


class LockedModel(Block):
    """The base. `content` is a hash of a local one's config and weights, `commit` that of a Hub id."""

    id: str
    revision: str | None
    commit: str | None
    fingerprint: str
    content: str | None


class Cursor(Block):
    """How far into its data the run went: tokens, updates, blocks; and the seed of their order."""

    tokens: int
    steps: int
    blocks: int
    seed: int


class LockedData(Block):
    """The data: a commit for each source (None: local), fingerprints of its tokens, and the account of them."""

    revisions: list[str | None]
    packed: str
    held_out: str
    report: dict[str, Any]
    cursor: Cursor


class BlockScore(Block):
    """The loss of one held-out block, in nats; `group` is its document, `weight` its number of targets."""

    id: str
    group: str
    weight: float
    score: float


class LockedResult(Block):
    method: str
    tokens: int
    steps: int
    trained_parameters: int
    held_out_loss: Bounds
    held_out_perplexity: Bounds
    branch: Branch | None
    losses: list[BlockScore]


class LockedFold(Block):
    """The fold. `text` is what it was certified on, `lambda_scale` what every λ was multiplied by."""

    text: Text
    lambda_scale: Annotated[float, Field(allow_inf_nan=False)]
    certificate: dict[str, Any]
    environment: Environment
    files: Files


class Lock(Block):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")  # pydantic has a `schema` of its own
    recipe: dict[str, Any]
    model: LockedModel
    data: LockedData
    heads: dict[str, Any] | None
    environment: Environment
    earlier: list[Environment] = Field(default_factory=list)
    result: LockedResult
    files: Files
    fold: LockedFold | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Lock:
        """What is written down twice is the same twice."""
        run, cursor = self.recipe.get("run", {}), self.data.cursor
        for key, value in (("seed", cursor.seed), ("tokens", cursor.tokens)):
            if run.get(key) != value:
                raise ValueError(f"recipe.run.{key} is {run.get(key)} and data.cursor.{key} {value}")
        sources = len(self.recipe.get("data", {}).get("train", []))
        if len(self.data.revisions) != sources:
            raise ValueError(f"data.revisions lists {len(self.data.revisions)} of the recipe's {sources} sources")
        if self.heads is not None:
            HeadPlan.model_validate(self.heads)
        return self

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        return self.model_dump(by_alias=True)

    def of(self, folder: Path) -> Lock:
        """This lock, with the hashes of the trained files in a folder."""
        return self.model_copy(update={"files": hash_files(folder)})

    def folded(self, folder: Path, certificate: dict[str, Any], environment: dict[str, Any]) -> Lock:
        """The lock of what was folded from this one's adapter into a folder."""
        fold = LockedFold(
            text=certificate["text"],
            lambda_scale=certificate["lambda_scale"],
            certificate=certificate,
            environment=Environment(**environment),  # type: ignore[typeddict-item]
            files=hash_files(folder),
        )
        return self.model_copy(update={"fold": fold})


def read_lock(folder: Path) -> Lock | None:
    """The lock in a folder, None where there is none.

    Raises DexError where it is damaged, or was written in another schema.
    """
    return read_lock_file(folder / LOCK)


def read_lock_file(path: Path) -> Lock | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        schema = values["schema"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "it is no JSON of dex") from error
    if schema != SCHEMA:
        raise DexError(f"{path} is of schema {schema}, and this dex reads {SCHEMA}; use the dex that wrote it.")
    try:
        return Lock.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise _damaged(path, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from error


def find_lock(model: str) -> Lock | None:
    """The lock of a folder or of a Hub repository, None where there is none. Raises DexError as `read_lock` does."""
    with hub_errors_explained(model, None):
        return read_lock(_folder_of(model))


def find_adapter_lock(adapter: str) -> tuple[Lock | None, list[str]]:
    """The lock of an adapter that is loaded already, and which of its weight files are not those of the lock.

    An adapter that was trained on in its own folder, after its run, still has the run's lock. Offline, a lock that is
    not in the cache beside the adapter counts as none.
    """
    try:
        folder = _folder_of(adapter)
    except LocalEntryNotFoundError:
        return None, []
    lock = read_lock(folder)
    return lock, changed_weights(folder, lock.files) if lock else []


def _folder_of(model: str) -> Path:
    """The folder that is named, or the Hub's copy in the cache, with the lock if the repository has one."""
    if not Path(model).exists():
        try:
            return Path(hf_hub_download(model, LOCK)).parent
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            pass
    return Path(model)


def write_lock(folder: Path, lock: Lock) -> None:
    write_json(folder / LOCK, lock.to_dict())


def refuse_other_inputs(lock: Lock, inputs: dict[str, Any], report: dict[str, Any]) -> None:
    """Raise DexError if a run that repeats a lock's has not its base, or not its tokens, and say which changed.

    inputs: the base and the data as the run found them; report: the account of the data.
    """
    _refuse_other_base(lock, inputs["model"])
    for key in ("held_out", "packed"):
        if (before := getattr(lock.data, key)) != (now := inputs["data"][key]):
            changed = _changed_inputs(lock.data.report["inputs"], report["inputs"]) or "they became other tokens"
            raise DexError(
                f"The data is not that which the run was made with: {changed} (data.{key} was {before} and is {now} "
                "here); put the former data back."
            )


def _refuse_other_base(lock: Lock, base: dict[str, str | None]) -> None:
    was = lock.model
    differing = [key for key in ("fingerprint", "content") if base[key] != getattr(was, key)]
    if differing == ["content"] and lock.environment["packages"].get("transformers") != version("transformers"):
        say(f"{was.id} has another content hash, which covers what this version of transformers puts into a config")
    elif differing:
        key = differing[0]
        raise DexError(
            f"The base {was.id} is not the one that the run was made with: its {key} was {getattr(was, key)} and is "
            f"{base[key]} here; put the former one back."
        )


def _changed_inputs(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Which source or setting of the data is another one, in half a sentence."""
    for was, source in zip(before["sources"], now["sources"], strict=True):
        if was == source:
            continue
        if "files" in was and "files" in source:
            kept = {tuple(file) for file in was["files"]} & {tuple(file) for file in source["files"]}
            names = sorted({name for name, digest in (*was["files"], *source["files"]) if (name, digest) not in kept})
            return f"{', '.join(names[:3])} changed" if names else "a source is read otherwise"
        return f"{source.get('id', source['kind'])} changed"
    other = [key for key in before if before[key] != now.get(key)]
    return f"{other[0].replace('_', ' ')} differs" if other else None


def hash_files(folder: Path) -> Files:
    """SHA-256 of every file in a folder but the card, the licence, the certificate, the lock and what is hidden."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    shown = [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]
    return {name: sha256(folder / name) for name in shown if not _is_about_the_files(Path(name).name)}


def _is_about_the_files(name: str) -> bool:
    return name in NOT_HASHED or LICENCE_FILE.fullmatch(name) is not None


def changed_weights(folder: Path, files: Files) -> list[str]:
    """The weight files in a folder that are not those of a lock; files that are not there do not count."""
    named = [name for name in files if name.endswith(WEIGHTS) and (folder / name).is_file()]
    return [name for name in named if sha256(folder / name) != files[name]]


def _damaged(path: Path, reason: str) -> DexError:
    return DexError(f"{path} is damaged ({reason}); fetch the folder again, or put its own copy back.")
