"""What the suites that run lm-evaluation-harness share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from dex.evaluation.harness_tasks import Known, TaskChoice
from dex.settings import text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated


class OnHarness(Suite):
    """A subclass has the settings `tasks`, `shots` and `chat`, whose defaults are its own."""

    which_items: ClassVar[tuple[str, ...]] = ("tasks", "data", "limit", "data_of_tasks")
    known: ClassVar[dict[str, Known]]  # what dex knows of the tasks that are its default

    if TYPE_CHECKING:
        tasks: list[str]
        shots: int | None
        chat: bool

    data: Annotated[str | None, text(null=True)] = None  # a folder of <task>.jsonl; null: the Hub's data sets
    limit: Annotated[int | None, whole(above=0, null=True)] = None  # the first items of each task

    def check(self) -> None:
        from dex.evaluation.harness_tasks import load_tasks

        load_tasks(self.choice())

    def inputs(self) -> dict[str, Any]:
        from dex.evaluation.inputs import file_hashes, local_files

        return file_hashes(local_files(self.data))

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.evaluation.harness import run_harness

        return run_harness(evaluated, answers, self.choice(), self.limit, self.chat)

    def choice(self) -> TaskChoice:
        data = Path(self.data).expanduser() if self.data else None
        return TaskChoice(self.tasks, self.known, self.shots, data)
