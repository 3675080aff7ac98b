"""The eleven tasks of the papers, and any other of lm-evaluation-harness, in this process."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from dex.evaluation.harness_tasks import Known
from dex.settings import YesNo, distinct, text, whole
from dex.suites.on_harness import OnHarness

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


class Lm(OnHarness):
    what: ClassVar[str] = "which runs tasks of lm-evaluation-harness"
    known: ClassVar[dict[str, Known]] = TASKS

    name: Literal["lm"] = "lm"
    tasks: Annotated[list[Annotated[str, text()]], distinct("a list of different tasks")] = list(TASKS)
    shots: Annotated[int, whole(at_least=0)] = 0  # examples in the prompt
    chat: YesNo = False  # put prompts into the chat template
