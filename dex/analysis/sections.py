"""The sections of a report in their order, and running them on a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dex.analysis import (
    attention,
    branch,
    example,
    importance,
    landscape,
    maps,
    outliers,
    quantised,
    redundancy,
)
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Findings
from dex.analysis.subject import Progress, Subject
from dex.console import Bar
from dex.errors import DexError
from dex.settings import one_of

SECTIONS: dict[str, Callable[[Subject, Progress], Findings]] = {
    "branch": branch.analyze,
    "attention": attention.analyze,
    "maps": maps.analyze,
    "example": example.analyze,
    "redundancy": redundancy.analyze,
    "importance": importance.analyze,
    "outliers": outliers.analyze,
    "quantised": quantised.analyze,
    "landscape": landscape.analyze,
}


def chosen(names: Sequence[str] | None) -> list[str]:
    """The sections of these names in their order; all for None. Raises DexError for a name that none has."""
    for name in names or ():
        if name not in SECTIONS:
            raise DexError(f"{name!r} is not a section; there is {one_of(name, list(SECTIONS))}.")
    return [name for name in SECTIONS if names is None or name in names]


def run_sections(
    subject: Subject, names: Sequence[str]
) -> tuple[dict[str, Findings], dict[str, str], dict[str, float]]:
    """What each section found; of those that do not apply, why; and the seconds that each took."""
    found, left_out, seconds = dict[str, Findings](), dict[str, str](), dict[str, float]()
    for name in names:
        began = time.monotonic()
        try:
            found[name] = _with_a_bar(subject, name)
            seconds[name] = round(time.monotonic() - began, 1)
        except LeftOut as reason:
            left_out[name] = str(reason)
    return found, left_out, seconds


def _with_a_bar(subject: Subject, name: str) -> Findings:
    bar: Bar | None = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # only the section knows how much there is to do
            bar = Bar(f"{subject.evaluated.label}: {name}", total, "steps").__enter__()
        bar.update(done)

    try:
        return SECTIONS[name](subject, progress)
    finally:
        if bar is not None:
            bar.__exit__(None, None, None)
