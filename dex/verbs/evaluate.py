"""`dex eval`: load each model, run a suite on it, and write one result folder a model and suite.

The same command goes on where it was stopped: what the model had answered lies in OUT/<model>/.<suite>.partial until
the result takes its place. A result that is there already is not computed again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from dex.console import say
from dex.environment import environment
from dex.errors import DexError
from dex.evaluation.answers import Answers
from dex.evaluation.comparison import compare_results, table_cells
from dex.evaluation.evaluated import Evaluated, labels, load_evaluated, names_of
from dex.evaluation.records import RESULT, Result, read_result
from dex.evaluation.tables import interval, rendered, terminal
from dex.output import put_in_place, refuse_file_above, write_json
from dex.processes import agree, join, on_first
from dex.run_data import cache_dir
from dex.run_folder import used_alone
from dex.suites import Suite, suite_of

REQUEST, ANSWERS = "request.json", "answers.jsonl"


def evaluate(
    models: str | Path | Sequence[str | Path],
    output: str | Path,
    suite: Suite | str,
    *,
    batch_size: int = 4,
    dtype: str = "auto",
    revision: str | None = None,
    force: bool = False,
) -> list[Result]:
    """Evaluate models and adapters, in their order; writes `output`/<label>/<suite>/ for each.

    batch_size: requests in one forward pass; no score depends on it. Raises DexError, in one sentence, for whatever
    stops it; what was answered until then is kept.
    """
    models, output = names_of(models), Path(output)
    suite = suite_of(suite) if isinstance(suite, str) else suite
    join()
    names = labels(models)
    agree(suite.check)
    folders = [output / label / suite.name for label in names]
    on_first(lambda: _refuse_foreign(folders))
    results = []
    for model, label, folder in zip(models, names, folders, strict=True):
        with ExitStack() as stack:
            on_first(lambda: stack.enter_context(used_alone(folder, cache_dir())))  # noqa: B023
            evaluated = agree(lambda: load_evaluated(model, label, dtype, batch_size, revision))  # noqa: B023
            results.append(_evaluate_one(evaluated, folder, suite, force))
            del evaluated
    return results


def _evaluate_one(evaluated: Evaluated, folder: Path, suite: Suite, force: bool) -> Result:
    settings = {**suite.model_dump(mode="json"), "inputs": on_first(suite.inputs)}
    request: dict[str, Any] = {"model": evaluated.identity, "suite": suite.name, "settings": settings}
    finished = on_first(lambda: _finished(folder, request, force))
    if finished is not None:
        say(f"{folder} is there already; --force evaluates again")
        return finished
    with _kept_until_whole(folder, request, force) as partial:
        began = time.monotonic()
        outcome = suite.run(evaluated, Answers(partial / ANSWERS))
        result = Result(
            suite.name,
            evaluated.label,
            evaluated.identity,
            {**settings, **outcome.settings},
            outcome.tasks,
            outcome.records,
            outcome.figures,
            environment(),
            round(time.monotonic() - began, 1),
        )

        def write() -> None:
            if outcome.files is not None:
                outcome.files(partial)
            result.write(partial)

        on_first(write)
    return result


def _refuse_foreign(folders: Sequence[Path]) -> None:
    """Raise before any work where the output's place holds something else."""
    for folder in folders:
        refuse_file_above(folder)
        if folder.exists() and not (folder.is_dir() and ((folder / RESULT).exists() or not any(folder.iterdir()))):
            raise DexError(f"{folder} was not written by dex eval (it has no {RESULT}); choose another output.")


def _finished(folder: Path, request: dict[str, Any], force: bool) -> Result | None:
    """The result that is there already; None if there is none, or it is to be replaced."""
    if force or not (folder / RESULT).exists():
        return None
    result = read_result(folder)
    found = {"model": result.model, "suite": result.suite, "settings": result.settings}
    if (what := different(found, request)) is not None:
        raise DexError(f"{folder} holds a result of another {what}; choose another output, or pass --force.")
    return result


def different(found: dict[str, Any], request: dict[str, Any]) -> str | None:
    """What of the request a result or an interrupted evaluation does not have, as a sentence names it."""
    if found["model"] != request["model"]:
        was, now = (str(each["model"].get("id")) for each in (found, request))
        return f"model ({was})" if was != now else f"state of {now}: its weights or its dtype differ"
    for key, value in request["settings"].items():
        if key != "inputs" and found["settings"].get(key) != value:
            return f"{key} ({found['settings'].get(key)}, not {value})"
    before, after = (each["settings"].get("inputs") or {} for each in (found, request))
    if (changed := next((name for name, value in after.items() if before.get(name) != value), None)) is not None:
        return f"state of {changed}: it has changed since"
    return None


@contextmanager
def _kept_until_whole(folder: Path, request: dict[str, Any], force: bool) -> Iterator[Path]:
    """Yield the hidden folder with what was answered before; on success it takes the result's place.

    Answers to another request are not mixed with these: raises DexError for them, unless `force`, which drops them.
    """
    partial = folder.parent / f".{folder.name}.partial"
    on_first(lambda: _begin(folder, partial, request, force))
    yield partial

    def finish() -> None:
        try:
            put_in_place(partial, folder)
            for name in (REQUEST, ANSWERS):  # only now: a kill before leaves what the same command goes on from
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise DexError(f"{folder} could not be written: {error.strerror or error}.") from error

    on_first(finish)


def _begin(folder: Path, partial: Path, request: dict[str, Any], force: bool) -> None:
    """Go on with what an interrupted evaluation left, or start anew."""
    saved, answers = partial / REQUEST, partial / ANSWERS
    if saved.exists() and answers.exists() and answers.stat().st_size > 0:
        what = different(_read_request(saved), request)
        if what is None:
            say(f"going on with what {partial} holds")
            return
        if not force:
            raise DexError(
                f"{folder} was being evaluated with another {what}; finish that, or pass --force to drop it."
            )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise DexError(f"{partial} could not be written: {error.strerror or error}.") from error
    write_json(saved, request)


def _read_request(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(found["model"], dict) and isinstance(found["settings"], dict)):
            raise TypeError("it is no request")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DexError(f"{path} is damaged ({error}); pass --force to drop what was answered.") from error
    assert isinstance(found, dict)
    return found


def describe(results: Sequence[Result]) -> str:
    """The table that is printed: a row per task, a column per model."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task", overflow="fold")
    table.add_column("metric")
    for result in results:
        table.add_column(f"{result.label} [95 %]", justify="right", no_wrap=True)
    first = results[0]
    for name, task in first.tasks.items():
        cells = [interval(result.score(name)) if name in result.tasks else "" for result in results]
        table.add_row(name, task.metric, *cells)
    averages = [result.average() for result in results]
    if averages[0] is not None:
        table.add_row("average", "", *(interval(each) if each else "" for each in averages))
    text = rendered(table) + f"{len(first.records):,} items of each model"
    return text if len(results) == 1 else f"{text}\n\n{_differences(results)}"


def _differences(results: Sequence[Result]) -> str:
    """The other models against the first one."""
    try:
        table = terminal(*table_cells(compare_results([results])))
    except DexError as error:  # other tokenizers, say; the results stand all the same
        return f"Not compared: {error}"
    return f"{table}differences are from {results[0].label}; dex compare makes files of them"
