"""`dex reproduce FOLDER -o OUT`: make a trained folder again from its dex.lock, and say whether it came out the same.

OUT/original.lock      what is reproduced
OUT/run                the run, made again by `dex train` from the base and the data on: heads are scored again
OUT/folded             the fold, made again, where the lock has one
OUT/reproduction.json  the verdict, and all that it rests on

The weights are compared by hash. On a CPU, where all that decides the order of sums is as it was (versions, the code,
the processor, threads and processes), they have to be equal to the bit; a run is made with as many threads as the one
that it repeats. Elsewhere the losses of the held-out blocks are compared in pairs, and λ of every layer.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dex.console import say
from dex.environment import environment
from dex.errors import DexError
from dex.evaluation.paired import Interval, paired_difference
from dex.evaluation.tables import interval
from dex.lock import (
    LOCK,
    WEIGHTS,
    Branch,
    Files,
    Lock,
    LockedFold,
    LockedResult,
    changed_weights,
    find_lock,
    hash_files,
    read_lock,
    read_lock_file,
)
from dex.output import refuse_output_over, refuse_to_overwrite, write_json
from dex.pins import local_paths
from dex.processes import join, on_first
from dex.recipe import Recipe, parse_recipe
from dex.recipe_yaml import yaml_lines
from dex.run_folder import differences, trained_folder
from dex.verbs.fold import fold
from dex.verbs.train import check_settings, train

SCHEMA = 1
ORIGINAL, RUN, FOLDED, REPRODUCTION = "original.lock", "run", "folded", "reproduction.json"
MARGIN = 0.01  # nats a token, which is 1 % of the perplexity
LAM_MARGIN = 0.01  # λ is of the order of 1
DIFFERENT = "different"


class Difference(NamedTuple):
    """What was another thing when the original was made."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.then)} and is {_shown(self.now)} here"


def reproduce(
    folder: str | Path, output: str | Path, *, margin: float = MARGIN, force: bool = False
) -> dict[str, Any]:
    """Train, and fold, what a dex.lock describes again into `output`; return what reproduction.json holds.

    folder: a run, its adapter/ or model/, or a folded folder; or a repository on the Hub that holds one of these.
    margin: of the difference in held-out loss, in nats, within which runs that cannot be equal to the bit count as
    the same. The same call goes on where it was stopped; where the run stops before its end, returns
    {"finished": False, ...} as `train` does.
    Raises DexError, before any work, for a folder without a usable lock, a base or data that are not there any more
    or not the same, a package that is missing, and an output that holds anything else.
    """
    join()
    output = Path(output)
    lock = on_first(lambda: _lock_of(str(folder)))
    recipe = _recipe_of(lock, folder, output)
    on_first(lambda: _refuse_what_is_gone(lock))
    check_settings(recipe)
    opened = on_first(lambda: _open(output, str(folder), lock, force))
    differing = _differences(lock)
    for line in (*map(str, differing), *_notes(lock)):
        say(line)
    with _threads_of(lock.environment):
        try:
            result = train(recipe, force=force, like=lock)
        except DexError:
            if opened:
                on_first(lambda: _close(output))
            raise
    if not result.get("finished", True):
        return {**result, "go_on": f"dex reproduce {folder} -o {output}"}
    return on_first(lambda: _finish(lock, recipe, output, differing, margin, force))


# Before the work


def _lock_of(folder: str) -> Lock:
    lock = find_lock(folder)
    if lock is None:
        raise DexError(
            f"{folder} has no {LOCK}, so nothing says how it was made; name a run of dex train, its adapter/ or "
            "model/, or what dex fold made of one."
        )
    at = Path(folder)
    places = {at: lock.fold.files} if lock.fold else {at / name: lock.files for name in ("", "adapter", "model")}
    for place, files in places.items():
        if changed := changed_weights(place, files):
            raise DexError(
                f"{place / changed[0]} was changed after {LOCK} was written, which names another file; reproduce the "
                "folder as it was made."
            )
    return lock


def _recipe_of(lock: Lock, folder: str | Path, output: Path) -> Recipe:
    """The lock's recipe, into `output`; without a limit of hours, and without reports to trackers."""
    text = "\n".join(yaml_lines(lock.recipe))
    recipe = parse_recipe(text, f"The recipe in {Path(folder) / LOCK}")
    run = recipe.run.model_copy(update={"hours": None, "track": []})
    return recipe.model_copy(update={"run": run, "output": str(output / RUN)})


def _refuse_what_is_gone(lock: Lock) -> None:
    for key, path in local_paths(lock).items():
        if key != "method.heads.plan" and not Path(path).expanduser().exists():
            raise DexError(
                f"The run was made with {key} {path}, which is not here; put it there, or run the command in the "
                "folder where a relative path begins."
            )


def _open(output: Path, folder: str, lock: Lock, force: bool) -> bool:
    """Take the output, or go on in it; what --force replaces is deleted when its successor is there.

    Returns whether it was taken by this call: another one may be at work in it.
    """
    refuse_output_over(output, folder)
    original = output / ORIGINAL
    taken = original.is_file()
    if not taken or read_lock_file(original) != lock:
        refuse_to_overwrite(output, force, ORIGINAL)
        (output / REPRODUCTION).unlink(missing_ok=True)  # the verdict on another lock
    write_json(original, lock.to_dict())
    return not taken


def _close(output: Path) -> None:
    """A reproduction that could not begin leaves nothing."""
    if not (output / RUN).exists():
        (output / ORIGINAL).unlink(missing_ok=True)
        if not any(output.iterdir()):
            output.rmdir()


@contextmanager
def _threads_of(then: Mapping[str, Any]) -> Iterator[None]:
    """Compute with as many threads as the original did, where both are on a CPU: the order of sums depends on it."""
    threads, on_cpu = torch.get_num_threads(), str(then["device"]).startswith("CPU")
    try:
        if on_cpu and not torch.accelerator.is_available() and then["threads"] != threads:
            torch.set_num_threads(then["threads"])
        yield
    finally:
        torch.set_num_threads(threads)


def _differences(lock: Lock) -> list[Difference]:
    """What is not as it was in a start of the run, or in the fold; threads are what they will be set to."""
    found = []
    with _threads_of(lock.environment):
        for then in (lock.environment, *lock.earlier):
            found += [Difference(*each) for each in differences(then, environment())]
    if lock.fold:
        with _threads_of(lock.fold.environment):
            found += [Difference(*each) for each in differences(lock.fold.environment, environment())]
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _notes(lock: Lock) -> list[str]:
    commit = lock.environment["commit"] or ""
    if not commit.endswith("+"):
        return []
    return [f"the code of the original was not quite that of commit {commit[:-1]}: files differed"]


# After it


def _finish(
    lock: Lock, recipe: Recipe, output: Path, differing: list[Difference], margin: float, force: bool
) -> dict[str, Any]:
    """Fold again, compare, and write down what came of it."""
    trained, made = trained_folder(recipe), read_lock(output / RUN)
    if made is None:
        raise DexError(f"{output / RUN} has lost its {LOCK}; pass --force to make it again.")
    if changed := changed_weights(trained, made.files):
        raise DexError(f"{trained / changed[0]} was changed after its run; pass --force to make it again.")
    files = {f"{RUN}/{trained.name}": other_files(lock.files, trained)}
    if lock.fold is not None:
        _fold_again(lock.fold, recipe, trained, output / FOLDED, force)
        files[FOLDED] = other_files(lock.fold.files, output / FOLDED)
    else:
        shutil.rmtree(output / FOLDED, ignore_errors=True)  # of another lock, replaced with --force
    losses = compare_losses(lock.result, made.result)
    lam = compare_lam(lock.result.branch, made.result.branch)
    expected = not differing and str(lock.environment["device"]).startswith("CPU")
    verdict, why = judge(files, losses["difference"], lam, expected, margin)
    reproduction = {
        "schema": SCHEMA,
        "verdict": verdict,
        "why": why,
        "equality_expected": expected,
        "margin": margin,
        "differences": [each._asdict() for each in differing],
        "notes": _notes(lock),
        "other_files": files,
        "layers_with_other_heads": _other_heads(lock, made),
        "held_out_loss": {**losses, "difference": losses["difference"]._asdict()},
        "lam": lam,
        "environment": made.environment,
    }
    write_json(output / REPRODUCTION, reproduction)
    return reproduction


def _fold_again(fold_then: LockedFold, recipe: Recipe, adapter: Path, folded: Path, force: bool) -> None:
    """Fold as the original was, unless the folder is there already, of this adapter and undamaged."""
    made = None if force else read_lock(folded)
    if made and made.fold and not other_files(made.files, adapter) and not other_files(made.fold.files, folded):
        return
    scale = fold_then.lambda_scale
    with _threads_of(fold_then.environment):
        fold(
            adapter,
            folded,
            lambda_scale=None if scale == 1.0 else scale,
            text=fold_then.text["source"],
            into_unquantised=recipe.model.quantise is not None,
            force=folded.exists(),
        )


def other_files(then: Files, folder: Path) -> list[str]:
    """The files of a lock that are not in a folder, or not the same there."""
    now = hash_files(folder)
    return sorted(name for name in then if then[name] != now.get(name))


def compare_losses(then: LockedResult, now: LockedResult) -> dict[str, Any]:
    """The mean loss of the run less that of the original, in pairs by held-out block, with its 95 % interval."""
    blocks = {block.id: block for block in then.losses}
    if blocks.keys() != {block.id for block in now.losses}:
        raise DexError("The held-out blocks are not those of the original, so their losses cannot be compared.")
    pairs = [(block, blocks[block.id]) for block in now.losses]
    ours, theirs = [a.score for a, _ in pairs], [b.score for _, b in pairs]
    weights, groups = [b.weight for _, b in pairs], [b.group for _, b in pairs]
    return {
        "then": then.held_out_loss,
        "now": now.held_out_loss,
        "difference": paired_difference(ours, theirs, weights, groups),
        "largest_of_a_block": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
    }


def compare_lam(then: Branch | None, now: Branch | None) -> dict[str, Any] | None:
    """λ of every layer with a branch, then and now, and the largest distance; None for a run without a branch."""
    if then is None or now is None:
        return None
    distance = max(abs(a - b) for a, b in zip(then["lam"], now["lam"], strict=True))
    return {"then": then["lam"], "now": now["lam"], "largest_difference": distance}


def judge(
    files: Mapping[str, list[str]], difference: Interval, lam: dict[str, Any] | None, expected: bool, margin: float
) -> tuple[str, str]:
    """The verdict, and what it rests on. files: the names of other files in each folder. expected: are none?

    Where weights differ and may, the whole interval of the difference has to lie within the margin (its mean, where
    one document leaves no interval), and λ of every layer within its own.
    """
    weights = [f"{folder}/{name}" for folder, names in files.items() for name in names if name.endswith(WEIGHTS)]
    if not weights:
        return "the same to the bit", f"the weights of {' and '.join(files)} have the hashes of the lock"
    if expected:
        return DIFFERENT, (
            f"{' and '.join(weights)} came out otherwise, although the versions, the code and the machine are those "
            "of the original"
        )
    bounds = [difference.mean if bound is None else bound for bound in (difference.low, difference.high)]
    distance = lam["largest_difference"] if lam else 0.0
    within = max(map(abs, bounds)) <= margin and distance <= LAM_MARGIN
    measured = f"{' and '.join(weights)} do not have the hashes of the lock; "
    measured += f"held-out loss − the original's is {interval(difference, sign=True)} nats"
    if lam:
        measured += f", and λ differs by at most {distance:.2g}"
    return (f"the same within {margin:g} nats" if within else DIFFERENT), measured


def _other_heads(lock: Lock, made: Lock) -> list[int] | None:
    """The layers in which other heads were chosen this time; None for a method that chooses none."""
    if lock.heads is None or made.heads is None:
        return None
    pairs = zip(lock.heads["heads"], made.heads["heads"], strict=True)
    return [layer_idx for layer_idx, (then, now) in enumerate(pairs) if then != now]


# In words


def describe(reproduction: dict[str, Any]) -> str:
    """The lines that are printed."""
    if not reproduction.get("finished", True):
        return f"{reproduction['stopped']} after step {reproduction['step']}; go on with: {reproduction['go_on']}"
    lines = [f"{reproduction['verdict']}: {reproduction['why']}"]
    if layers := reproduction["layers_with_other_heads"]:
        lines.append(f"other heads were chosen in the layers {', '.join(map(str, layers))}")
    others = [
        f"{folder}/{name}"
        for folder, names in reproduction["other_files"].items()
        for name in names
        if not name.endswith(WEIGHTS)
    ]
    if others:
        lines.append(f"beside the weights, {', '.join(others)} differ from the original's")
    if not reproduction["equality_expected"]:
        lines.append("equal weights are expected on a CPU alone, where nothing differs from the original's machine")
    return "\n".join(lines)


def refusal(reproduction: dict[str, Any]) -> str | None:
    """The sentence with which the command ends where the runs differ."""
    if reproduction.get("verdict") != DIFFERENT:
        return None
    return f"The reproduction is not the original: {reproduction['why']}."


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)
