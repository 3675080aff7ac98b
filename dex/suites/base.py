"""What every suite of `dex eval` has to say for itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dex.settings import Block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated
    from dex.evaluation.records import Record, Task


@dataclass
class Outcome:
    """What a suite found: its tasks, a record of every item, and figures beside them.

    settings: what else decides the items, and is known only now (a data set's commit, a harness' version), under
    names that no setting has. files: writes further files, such as plots, into the result's folder.
    """

    tasks: dict[str, Task]
    records: list[Record]
    figures: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    files: Callable[[Path], None] | None = None


class Suite(Block):
    """A kind of evaluation: its settings are what `--set` sets, and what a study's `suites` hold.

    A subclass gives `name` as a Literal with a default, and `run`. Nothing in these files imports torch before it is
    needed, so that settings are refused at once.
    """

    if TYPE_CHECKING:
        name: str

    what: ClassVar[str]  # "which asks for needles in a haystack", for sentences
    # Settings that only say which items there are: results may differ in them, since items are compared one by one.
    which_items: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raise DexError for what is missing (a package, a file), before a model is loaded."""

    def inputs(self) -> dict[str, Any]:
        """Hashes of the files that the settings name: a result is one of theirs, and not of what they become."""
        return {}

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        """Score every item. `answers` holds what an interrupted evaluation had of them; see `answer_all`."""
        raise NotImplementedError
