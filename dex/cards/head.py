"""The YAML head of a card that dex writes: what the Hub finds and lists the model by."""

from __future__ import annotations

from huggingface_hub import ModelCardData

from dex.cards.evaluation import eval_results
from dex.cards.folder import Folder
from dex.cards.kind import ADAPTERS, Kind
from dex.lock import Lock

ORDER = [
    "base_model",
    "base_model_relation",
    "library_name",
    "pipeline_tag",
    "license",
    "license_name",
    "license_link",
    "language",
    "datasets",
    "tags",
    "model_name",
    "eval_results",
]
_ENDING: dict[Kind, str] = {"adapter": "adapter", "lora": "adapter", "fresh": "fresh", "trained": "trained"}


def head_of(folder: Folder) -> ModelCardData:
    """What is known of the folder; what is not stays out."""
    facts, adapter = folder.facts, folder.kind in ADAPTERS
    licence = facts.licence
    results = eval_results(folder.evaluation) if folder.evaluation else []
    relation = "adapter" if adapter else "finetune"
    return ModelCardData(
        base_model=facts.base_model,
        base_model_relation=relation if facts.base_model else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        license=licence.id if licence else None,
        license_name=licence.name if licence else None,
        license_link=licence.link if licence else None,
        language=facts.language or None,
        datasets=_datasets(folder.lock) or None,
        tags=_tags(folder),
        model_name=_name(folder) if results else None,
        eval_results=results or None,
    )


def _tags(folder: Folder) -> list[str]:
    """`dex` on all that dex made: `dex push` knows its own repositories by it."""
    tags = {
        "dex": True,
        "differential-attention": folder.has_differential_attention,
        "lora": folder.kind == "lora",
        "adapter": folder.kind in ADAPTERS,
        folder.layout: folder.layout is not None,
    }
    return [tag for tag, applies in tags.items() if tag is not None and applies]


def _name(folder: Folder) -> str:
    """The base's own name, what was done to it, and what came out."""
    base = (folder.facts.base_model or folder.facts.base.name).split("/")[-1]
    done = "control" if folder.control else folder.layout or folder.method
    parts = [part for part in (done, _ENDING.get(folder.kind)) if part is not None]
    return "-".join([base, *(parts or [folder.kind])])


def _datasets(lock: Lock | None) -> list[str]:
    """The Hub ids among the sources of the recipe: those that have a commit."""
    if lock is None:
        return []
    sources = zip(lock.recipe["data"]["train"], lock.data.revisions, strict=True)
    return list(dict.fromkeys(source["source"] for source, commit in sources if commit is not None))
