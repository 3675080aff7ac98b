"""Instruction following: IFEval, and other tasks of lm-evaluation-harness whose answers are generated."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.errors import DexError
from dex.evaluate.harness_tasks import Known, TaskChoice
from dex.settings import YesNo, distinct, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluate.answers import Answers
    from dex.evaluate.evaluated import Evaluated

TASKS = {"ifeval": Known("prompt_level_strict_acc", "ifeval", ("key", "prompt", "instruction_id_list", "kwargs"))}
PACKAGES_OF_IFEVAL = ("langdetect", "immutabledict", "nltk")


class Instruct(Suite):
    what: ClassVar[str] = "which asks for answers that follow instructions"
    which_items: ClassVar[tuple[str, ...]] = ("tasks", "data", "limit", "data_of_tasks")

    name: Literal["instruct"] = "instruct"
    tasks: Annotated[list[Annotated[str, text()]], distinct("a list of different tasks")] = list(TASKS)
    data: Annotated[str | None, text(null=True)] = None  # a folder of <task>.jsonl; null: the Hub's data sets
    limit: Annotated[int | None, whole(above=0, null=True)] = None  # the first items of each task
    shots: Annotated[int | None, whole(at_least=0, null=True)] = None  # examples in the prompt; null: the task's own
    max_tokens: Annotated[int | None, whole(above=0, null=True)] = None  # of an answer; null: the task's own
    chat: YesNo = True  # put prompts into the chat template

    def check(self) -> None:
        from dex.evaluate.harness_tasks import load_tasks, require_harness

        require_harness()
        if any("ifeval" in task for task in self.tasks):
            check_ifeval()
        load_tasks(self._choice())

    def inputs(self) -> dict[str, Any]:
        from dex.evaluate.inputs import file_hashes, local_files

        return file_hashes(local_files(self.data))

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.evaluate.harness import run_harness

        if any("ifeval" in task for task in self.tasks):
            import langdetect

            langdetect.DetectorFactory.seed = 0  # it guesses at random otherwise, and scores with it
        ran = run_harness(evaluated, answers, self._choice(), self.limit, self.chat)
        return Outcome(ran.tasks, ran.records, ran.figures, ran.settings)

    def _choice(self) -> TaskChoice:
        data = Path(self.data).expanduser() if self.data else None
        return TaskChoice(self.tasks, TASKS, self.shots, data, self.max_tokens)


def check_ifeval() -> None:
    """Raise DexError for what its scoring lacks: it would be missed only when all answers have been generated."""
    for package in PACKAGES_OF_IFEVAL:
        if importlib.util.find_spec(package) is None:
            raise DexError(f"IFEval is scored with the package {package}: pip install 'dex-llm[eval]'.")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise DexError(
            "IFEval counts words and sentences with nltk's punkt_tab, which is not on this machine; get it with "
            "`python -m nltk.downloader punkt_tab`, or copy it to a folder that NLTK_DATA names."
        ) from None
