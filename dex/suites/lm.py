"""The eleven tasks of the papers, and any other of lm-evaluation-harness, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dex.evaluate.harness_tasks import Known, TaskChoice
from dex.settings import YesNo, distinct, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluate.answers import Answers
    from dex.evaluate.evaluated import Evaluated

# The score of each: acc_norm (log-likelihood per character) where the choices are sentences of several lengths and
# the field reports it, acc elsewhere. Every record has both where the harness has both.
TASKS = {
    "arc_challenge": Known("acc_norm", "arc", ("question", "choices", "answerKey")),
    "arc_easy": Known("acc_norm", "arc", ("question", "choices", "answerKey")),
    "boolq": Known("acc", "super_glue", ("passage", "question", "label")),
    "copa": Known("acc", "super_glue", ("premise", "question", "choice1", "choice2", "label")),
    "hellaswag": Known("acc_norm", "hellaswag", ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "mnli": Known("acc", "glue", ("premise", "hypothesis", "label")),
    "openbookqa": Known("acc_norm", "openbookqa", ("question_stem", "choices", "answerKey")),
    "piqa": Known("acc_norm", "piqa", ("goal", "sol1", "sol2", "label")),
    "wic": Known("acc", "super_glue", ("sentence1", "sentence2", "start1", "end1", "label")),
    "winogrande": Known("acc", "winogrande", ("sentence", "option1", "option2", "answer")),
    "wsc": Known("acc", "super_glue", ("text", "span1_text", "span2_text", "span2_index", "label")),
}


class Lm(Suite):
    what: ClassVar[str] = "which runs tasks of lm-evaluation-harness"
    which_items: ClassVar[tuple[str, ...]] = ("tasks", "data", "limit", "data_of_tasks")

    name: Literal["lm"] = "lm"
    tasks: Annotated[list[Annotated[str, text()]], distinct("a list of different tasks")] = list(TASKS)
    data: Annotated[str | None, text(null=True)] = None  # a folder of <task>.jsonl; null: the Hub's data sets
    limit: Annotated[int | None, whole(above=0, null=True)] = None  # the first items of each task
    shots: Annotated[int, whole(at_least=0)] = 0  # examples in the prompt
    chat: YesNo = False  # put prompts into the chat template

    def check(self) -> None:
        from dex.evaluate.harness_tasks import load_tasks

        load_tasks(self._choice())

    def inputs(self) -> dict[str, Any]:
        from dex.evaluate.inputs import file_hashes, local_files

        return file_hashes(local_files(self.data))

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.evaluate.harness import run_harness

        ran = run_harness(evaluated, answers, self._choice(), self.limit, self.chat)
        return Outcome(ran.tasks, ran.records, ran.figures, ran.settings)

    def _choice(self) -> TaskChoice:
        return TaskChoice(self.tasks, TASKS, self.shots, Path(self.data).expanduser() if self.data else None)
