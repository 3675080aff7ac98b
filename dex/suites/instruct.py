"""Instruction following: IFEval, and other tasks of lm-evaluation-harness whose answers are generated."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dex.errors import DexError
from dex.evaluation.harness_tasks import Known, TaskChoice
from dex.settings import YesNo, distinct, text, whole
from dex.suites.base import Outcome
from dex.suites.on_harness import OnHarness

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.evaluated import Evaluated

TASKS = {"ifeval": Known("prompt_level_strict_acc", "ifeval", ("key", "prompt", "instruction_id_list", "kwargs"))}
PACKAGES_OF_IFEVAL = ("langdetect", "immutabledict", "nltk")


class Instruct(OnHarness):
    what: ClassVar[str] = "which asks for answers that follow instructions"
    known: ClassVar[dict[str, Known]] = TASKS

    name: Literal["instruct"] = "instruct"
    tasks: Annotated[list[Annotated[str, text()]], distinct("a list of different tasks")] = list(TASKS)
    shots: Annotated[int | None, whole(at_least=0, null=True)] = None  # examples in the prompt; null: the task's own
    max_tokens: Annotated[int | None, whole(above=0, null=True)] = None  # of an answer; null: the task's own
    chat: YesNo = True  # put prompts into the chat template

    def check(self) -> None:
        from dex.evaluation.harness_tasks import require_harness

        require_harness()
        if self._has_ifeval():
            check_ifeval()
        super().check()

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        if self._has_ifeval():
            import langdetect

            langdetect.DetectorFactory.seed = 0  # it guesses at random otherwise, and scores with it
        return super().run(evaluated, answers)

    def choice(self) -> TaskChoice:
        return replace(super().choice(), max_tokens=self.max_tokens)

    def _has_ifeval(self) -> bool:
        return any("ifeval" in task for task in self.tasks)


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
