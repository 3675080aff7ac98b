"""The oracle of the suites on lm-evaluation-harness: its own HFLM and its own command on the same files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM

from dex.evaluation import harness_tasks
from dex.evaluation.evaluated import Evaluated
from dex.evaluation.harness_tasks import TaskChoice, load_tasks
from dex.suites.instruct import TASKS as OF_INSTRUCT
from dex.suites.lm import TASKS as OF_LM

KNOWN = OF_LM | OF_INSTRUCT


def write_rows(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, own in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
    return folder


def local_tasks(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    return load_tasks(TaskChoice(names, KNOWN, data=folder))


def plain_harness(
    evaluated: Evaluated,
    folder: Path,
    names: Sequence[str],
    shots: int | None = 0,
    chat: bool = False,
    generation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `simple_evaluate` returns; the data are read by the loader of JSON in the package datasets."""
    folders = {KNOWN[name].folder for name in names if name in KNOWN}
    manager = harness_tasks._index(tuple(sorted(folders)) if all(name in KNOWN for name in names) else ())
    tasks = []
    for name in names:
        files = {"test": str(folder / f"{name}.jsonl")}
        own: dict[str, Any] = {"test_split": "test", "validation_split": None, "training_split": None}
        if shots:
            files["train"] = str(folder / f"{name}.train.jsonl")
            own |= {"training_split": "train", "fewshot_split": "train"}
        data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
        tasks.append({"task": name, **data, **own})
    found: dict[str, Any] | None = simple_evaluate(
        HFLM(pretrained=evaluated.model, tokenizer=evaluated.tokenizer, batch_size=2),
        tasks=[{"group": "oracle", "task": tasks}],
        num_fewshot=shots,
        bootstrap_iters=0,
        apply_chat_template=chat,
        gen_kwargs=generation,
        task_manager=manager,
    )
    assert found is not None
    return found
