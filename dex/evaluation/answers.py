"""What the model has answered so far, so that an interrupted evaluation goes on, and work shared between processes.

A suite turns its items into requests, each with a key; `answer_all` asks the model for those that have no answer yet,
a batch at a time, and every answer is on the disk before the next batch begins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dex.console import Bar, say
from dex.errors import DexError
from dex.processes import agree, first_given, gather, is_first, place, stop_all


class Answers:
    """Answers by key, in JSON lines; with `file` None they are kept in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._known: dict[str, Any] = {}
        if file is not None and file.exists():
            self._read(file)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, answers: dict[str, Any]) -> None:
        """Keep answers, on the disk too where this is the first process."""
        self._known |= answers
        if self.file is None or not is_first():
            return
        lines = "".join(json.dumps([key, value], ensure_ascii=False) + "\n" for key, value in answers.items())
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            reason = error.strerror or error
            raise DexError(
                f"{self.file} could not be written: {reason}; make room, and the same command goes on."
            ) from error

    def _read(self, file: Path) -> None:
        """A last line that a kill cut is dropped from the file, since the next answer would be appended to it.

        Other damaged lines are passed over, and said: their requests are asked again.
        """
        whole, damaged = 0, 0
        lines = file.read_bytes().splitlines(keepends=True)
        for line in lines:
            answer = _parsed(line)
            if answer is not None:
                self._known[answer[0]] = answer[1]
            elif line.endswith(b"\n"):
                damaged += 1
            else:
                break
            whole += len(line)
        if damaged:
            say(f"{file} has {damaged} damaged lines, whose requests are asked again")
        if is_first() and whole < file.stat().st_size:
            with file.open("rb+") as cut:
                cut.truncate(whole)


def _parsed(line: bytes) -> tuple[str, Any] | None:
    """A key and its answer; None for a line that is damaged."""
    try:
        key, value = json.loads(line)
    except (ValueError, TypeError):
        return None
    return (key, value) if isinstance(key, str) and value is not None and line.endswith(b"\n") else None


def answer_all(
    keys: Sequence[str],
    batches: Sequence[Sequence[int]],
    compute: Callable[[Sequence[int]], Sequence[Any]],
    answers: Answers,
    what: str,
    sizes: Sequence[int] | None = None,
    unit: str = "requests",
) -> list[Any]:
    """The answer to every request, in the order of `keys`.

    batches: the requests that are computed together, by index, in the order in which they are done. compute: gets the
    indices of (what is left of) one batch and returns an answer, a JSON value, for each. Requests of one key are
    asked once. sizes: how much work each request is, in `unit`, for the progress bar.

    Of several processes each computes every n-th batch, and all of them get all the answers; they all call this with
    the same arguments.
    """
    own, world = place()
    asked: set[str] = set()
    todo = [new for batch in batches if (new := _not_yet(batch, keys, answers, asked))]
    sizes = sizes or [1] * len(keys)
    total, left = sum(sizes), sum(sizes[i] for batch in todo for i in batch)
    with Bar(what, total, unit, start=total - left) if is_first() and todo else nullcontext() as bar:
        for start in range(0, len(todo), world):
            together = todo[start : start + world]
            batch = together[own] if own < len(together) else []
            values = agree(lambda: list(compute(batch)) if batch else [])  # noqa: B023  (called at once)
            found = {keys[i]: value for i, value in zip(batch, values, strict=True)}
            for each in gather(found):
                found |= each
            problem = _kept(answers, found)
            if problem is not None:
                raise stop_all(problem)
            left -= sum(sizes[i] for batch in together for i in batch)
            if bar is not None:
                bar.update(total - left)
    return [answers[key] for key in keys]


def _kept(answers: Answers, found: dict[str, Any]) -> str | None:
    """Keep them; returns what all processes have to stop with where the first one cannot."""
    problem = None
    try:
        answers.add(found)
    except DexError as error:
        problem = str(error)
    return first_given(problem)


def _not_yet(batch: Sequence[int], keys: Sequence[str], answers: Answers, asked: set[str]) -> list[int]:
    left = []
    for index in batch:
        if keys[index] not in answers and keys[index] not in asked:
            asked.add(keys[index])
            left.append(index)
    return left
