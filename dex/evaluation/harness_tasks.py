"""Tasks of lm-evaluation-harness, found by name, on the Hub's data or on JSON lines of one's own, ready to be run.

FOLDER/<task>.jsonl takes the place of the data set: a row a line, in the data set's own fields. The harness makes
prompts, choices and targets of them as it does of the Hub's rows.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dex.commit import is_commit
from dex.errors import DexError

ITEMS, TRAIN = "items", "train"  # the splits of local data
# Those of the harness' own command: some tasks shuffle while they are loaded, and few-shot examples are drawn.
RANDOM_SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234
NAMES_SHOWN = 3


class Known(NamedTuple):
    """What dex knows of a task beforehand.

    metric: its score. folder: where the harness defines it: to index all of its 14,000 tasks takes 16 s. fields: what
    its templates read of a row; the harness itself would put a missing one's name into the prompt, or an empty text.
    """

    metric: str
    folder: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class TaskChoice:
    """Which tasks, and on what: the names, what is known of them, examples in the prompt, data of one's own.

    shots: None for each task's own number. max_tokens: of a generated answer; None for the task's own.
    """

    names: Sequence[str]
    known: Mapping[str, Known]
    shots: int | None = 0
    data: Path | None = None
    max_tokens: int | None = None


def require_harness() -> None:
    """Raise DexError where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise DexError("This suite needs lm-evaluation-harness: pip install 'dex-llm[eval]'.")


def harness_version() -> str:
    return f"lm-eval {importlib.metadata.version('lm-eval')}"


def load_tasks(choice: TaskChoice) -> dict[str, Any]:
    """The harness' task objects by name, groups as what they consist of.

    Raises DexError, in one sentence, for an unknown task, data that are not to be had or do not fit, and settings
    that a task does not take.
    """
    require_harness()
    manager = _manager(choice)
    tasks: dict[str, Any] = {}
    with bars_off():
        for name in choice.names:
            seed_harness()  # before each, so that no task depends on which others are asked for
            tasks |= _load_local(manager, name, choice) if choice.data is not None else _load(manager, name)
    for name, task in tasks.items():
        _refuse_what_is_not_run(name, task)
        _refuse_missing_metric(name, task)
        _set_shots(name, task, choice)
        if choice.max_tokens is not None and task.get_config("output_type") == "generate_until":
            task.set_config("generation_kwargs", {"max_gen_toks": choice.max_tokens}, update=True)
    return tasks


def seed_harness() -> None:
    import numpy as np

    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)


@contextmanager
def bars_off() -> Iterator[None]:
    """Without the harness' bars over the making of prompts, which have no switch, and those of `datasets`."""
    import datasets
    from lm_eval.api import task

    bar, were_off = task.tqdm, datasets.are_progress_bars_disabled()
    task.tqdm = lambda items, **_: items
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        task.tqdm = bar
        if not were_off:
            datasets.enable_progress_bars()


def data_of(task: Any) -> dict[str, str | None]:
    """Where a task's rows are from: a hash of the local file, or the Hub's id and commit."""
    dataset = task.dataset
    if isinstance(dataset, _Splits):
        return {"file": dataset.identity}
    files = [Path(file["filename"]) for split in dataset.values() for file in split.cache_files]
    commits = {file.parent.name for file in files if is_commit(file.parent.name)}  # as `datasets` lays them
    return {"id": task.get_config("dataset_path"), "commit": commits.pop() if len(commits) == 1 else None}


# Finding and loading


def _manager(choice: TaskChoice) -> Any:
    """The index of the harness' tasks: of a few folders, where all the names are known, or else of all."""
    if all(name in choice.known for name in choice.names):
        manager = _index(tuple(sorted({choice.known[name].folder for name in choice.names})))
        if all(name in manager.all_subtasks for name in choice.names):
            return manager
    manager = _index(())
    for name in choice.names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*choice.known, *manager.all_tasks], n=NAMES_SHOWN)
            hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "`lm-eval ls tasks` lists them."
            raise DexError(f"{name!r} is not a task of {harness_version()}; {hint}")
    return manager


@functools.cache
def _index(folders: tuple[str, ...]) -> Any:
    import lm_eval.tasks

    if not folders:
        return lm_eval.tasks.TaskManager()
    root = Path(lm_eval.tasks.__file__).parent
    paths = [root / folder for folder in folders if (root / folder).is_dir()]
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=paths)


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = manager.load([name])["tasks"]
    except ImportError as error:
        raise DexError(f"The task {name} needs a package that is not installed: {_reason(error)}.") from error
    except Exception as error:  # whatever the Hub, its client and the task's own code raise
        raise DexError(
            f"The task {name} could not be loaded ({_reason(error)}); its data are the Hub's, and data=FOLDER takes "
            f"FOLDER/{name}.jsonl in their place."
        ) from error
    return found


def _refuse_what_is_not_run(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise DexError(
            f"The task {name} runs code that the model writes, which dex does not do; leave this task out."
        )
    if getattr(task, "MULTIMODAL", False):
        raise DexError(
            f"The task {name} asks about images or sound, and dex has models of text; leave this task out."
        )


def _refuse_missing_metric(name: str, task: Any) -> None:
    """The harness takes what it has no metric for from the Hub, and goes on without one where that fails."""
    if task.get_config("process_results") is not None:
        return
    for metric, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None:
            raise DexError(
                f"The metric {metric} of the task {name} is not the harness' own, and the Hub, from which the "
                "package evaluate loads it, was not reached; go online, or leave this task out."
            )


def _set_shots(name: str, task: Any, choice: TaskChoice) -> None:
    own = task.get_config("num_fewshot")
    if choice.shots and own == 0:
        raise DexError(f"The task {name} takes no examples in its prompt by its definition; leave shots at 0.")
    shots = (own or 0) if choice.shots is None else choice.shots
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(FEWSHOT_SEED)
    if shots and choice.data is not None:
        _refuse_too_few_examples(name, task.dataset, shots, choice.data)


# Local data


class _Splits(dict[str, Any]):
    """Local data sets by split. A split that the task names itself, for its examples, is the training part."""

    identity: str = ""

    def __missing__(self, split: str) -> Any:
        return self.get(TRAIN, self[ITEMS])


def _load_local(manager: Any, name: str, choice: TaskChoice) -> dict[str, Any]:
    assert choice.data is not None
    if name not in manager.all_subtasks:
        raise DexError(f"{name} is a group of tasks, and data takes single ones; name its tasks.")
    known = choice.known.get(name)
    fields = known.fields if known else ()
    file, examples = choice.data / f"{name}.jsonl", choice.data / f"{name}.train.jsonl"
    splits = _Splits({ITEMS: _dataset(name, file, fields)})
    splits.identity = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    if examples.exists():
        splits[TRAIN] = _dataset(name, examples, fields)
    taken: list[bool] = []

    def local(**_: Any) -> _Splits:
        taken.append(True)
        return splits

    train = TRAIN if examples.exists() else None
    changes = {
        "custom_dataset": local,
        "test_split": ITEMS,
        "validation_split": None,
        "training_split": train,
        "fewshot_split": train,
    }
    with _in_words(name, file, splits[ITEMS].column_names, fields):
        tasks: dict[str, Any] = manager.load({"group": "dex", "task": [{"task": name, **changes}]})["tasks"]
    if not taken:
        raise DexError(f"The task {name} reads its data with code of its own, and takes none from a folder.")
    for task in tasks.values():
        _check_items(name, task, file, splits[ITEMS].column_names, fields)
    return tasks


def _dataset(name: str, file: Path, fields: Sequence[str]) -> Any:
    """The rows of a file. Raises DexError for a line that is no row, or lacks a field of the task."""
    import datasets
    import pyarrow

    rows = []
    for number, row in _rows(file, name):
        if lacking := [field for field in fields if row.get(field) is None]:
            there = [field for field in row if row[field] is not None]
            raise DexError(
                f"{file}, line {number}: the task {name} needs {_listed(lacking)}, and this row has "
                f"{_listed(there) or 'no field'}."
            )
        rows.append(row)
    if not rows:
        raise DexError(f"{file} holds no rows; the task {name} needs some.")
    try:
        return datasets.Dataset.from_list(rows)
    except (pyarrow.ArrowException, TypeError) as error:
        raise DexError(f"{file}: a field is not of one kind in all rows: {_reason(error)}.") from error


def _rows(file: Path, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    from dex.data.columns import json_lines

    if not file.exists():
        there = sorted(path.name for path in file.parent.glob("*.jsonl"))
        raise DexError(
            f"{file} does not exist, and the task {name} reads it; {file.parent} has {_listed(there) or 'no .jsonl'}."
        )
    return json_lines(file)


@contextmanager
def _in_words(name: str, file: Path, there: Sequence[str], fields: Sequence[str]) -> Iterator[None]:
    """Say what of the rows the task's own code did not find."""
    try:
        yield
    except DexError:
        raise
    except Exception as error:  # a template or a function of the task, which may raise anything
        needs = f"; it needs {_listed(fields)}" if fields else ""
        raise DexError(
            f"{file}: the rows are not of the schema of the task {name} ({type(error).__name__}: {_reason(error)})"
            f"{needs}, and they have {_listed(there)}."
        ) from error


def _check_items(name: str, task: Any, file: Path, there: Sequence[str], fields: Sequence[str]) -> None:
    """Make every item's prompt, choices and target: a target that is no choice would silently count as wrong."""
    for template in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        wanted = task.get_config(template)
        if isinstance(wanted, str) and wanted.isidentifier() and wanted not in task.features:
            raise DexError(f"{file}: the task {name} needs {wanted!r}, and the rows have {_listed(there)}.")
    with _in_words(name, file, there, fields):
        for number, doc in enumerate(task.eval_docs, start=1):
            text, target = task.doc_to_text(doc), task.doc_to_target(doc)
            if task.get_config("output_type") != "multiple_choice":
                continue
            choices = task.doc_to_choice(doc)
            right = text if task.multiple_input else target
            if not all(_is_choice(each, choices) for each in (right if isinstance(right, list) else [right])):
                raise DexError(
                    f"{file}, row {number}: the right answer is {right!r}, and there is no such one of "
                    f"{len(choices)} choices."
                )


def _is_choice(right: Any, choices: Sequence[str]) -> bool:
    return 0 <= right < len(choices) if isinstance(right, int) else right in choices


def _refuse_too_few_examples(name: str, splits: Any, shots: int, folder: Path) -> None:
    examples = len(splits[TRAIN]) if TRAIN in splits else 0
    if examples < shots:
        raise DexError(
            f"{shots} shots of the task {name} are drawn from {folder / f'{name}.train.jsonl'}, which "
            f"{f'holds {examples} rows' if examples else 'does not exist'}."
        )


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".:")
