"""Questions about long texts, and summaries: HotpotQA, Qasper, XSum, MultiNews, or texts of one's own."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from dex.settings import Block, Problem, YesNo, choice, clash, distinct, expected, text, whole
from dex.suites.base import Outcome, Suite

if TYPE_CHECKING:
    from dex.evaluation.answers import Answers
    from dex.evaluation.context_qa import Answered
    from dex.evaluation.evaluated import Evaluated
    from dex.evaluation.reading import Reading
    from dex.evaluation.records import Record

Truncate = Literal["middle", "start"]


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise expected("a URL such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        sentence = "judge.url holds a user, a password or a query; put the key into the environment variable instead"
        raise clash([Problem(("judge", "url"), sentence)])
    return value


def _variable(value: Any) -> str:
    """A sentence about a wrong value would repeat it, and it may be the key."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
        sentence = "judge.key_variable is the name of an environment variable in capitals, and never the key itself"
        raise clash([Problem(("judge", "key_variable"), sentence)])
    return value


class JudgeSettings(Block):
    """An OpenAI-compatible server. Where it is, is not kept: the same judge at another place goes on."""

    url: Annotated[str, text(), AfterValidator(_url)] = Field(exclude=True)
    model: Annotated[str, text()]
    key_variable: Annotated[str, BeforeValidator(_variable)] = Field("OPENAI_API_KEY", exclude=True)


class ContextQa(Suite):
    what: ClassVar[str] = "which asks questions about long texts and for summaries"
    which_items: ClassVar[tuple[str, ...]] = ("tasks", "data", "items", "items_seed")

    name: Literal["context-qa"] = "context-qa"
    # null: all four, or all of the folder
    tasks: Annotated[list[Annotated[str, text()]] | None, distinct("a list of different tasks")] = None
    data: Annotated[str | None, text(null=True)] = None  # a folder with <task>.jsonl; null: the Hub
    items: Annotated[int, whole(above=0)] = 100  # of each task
    items_seed: Annotated[int, whole(at_least=0)] = 0  # which draws them
    length: Annotated[int, whole(above=0)] = 4096  # tokens of prompt and answer together
    truncate: Annotated[Truncate, choice(Truncate)] = "middle"  # where longer texts are cut
    answer_tokens: Annotated[int, whole(above=0)] = 32  # at most, of an answer to a question
    summary_tokens: Annotated[int, whole(above=0)] = 256
    chat: YesNo = False  # ask in the model's chat template
    judge: JudgeSettings | None = None  # grades the answers besides

    def check(self) -> None:
        from dex.errors import DexError
        from dex.evaluation.reading import check_tasks

        packages = ["torchmetrics", "rouge_score", *(["openai"] if self.judge else [])]
        if lacking := [package for package in packages if find_spec(package) is None]:
            raise DexError(f"The suite {self.name} needs {' and '.join(lacking)}: pip install 'dex-llm[eval]'.")
        check_tasks(self._tasks(), self.data)

    def inputs(self) -> dict[str, Any]:
        from dex.evaluation.inputs import file_hashes, local_files

        return file_hashes(local_files(self.data))

    def run(self, evaluated: Evaluated, answers: Answers) -> Outcome:
        from dex.errors import DexError
        from dex.evaluation import context_qa
        from dex.evaluation.reading import read_task

        if self.length > evaluated.context:
            raise DexError(
                f"length is {self.length:,} tokens, and {evaluated.label} has a context of {evaluated.context:,}; "
                f"set length={evaluated.context} or lower."
            )
        prompts = context_qa.Prompts(
            evaluated.tokenizer,
            self.length,
            {"question": self.answer_tokens, "summary": self.summary_tokens},
            self.truncate,
            self.chat,
        )
        readings = [read_task(task, self.data, self.items, self.items_seed) for task in self._tasks()]
        answered = context_qa.answer_items(evaluated, readings, prompts, answers)
        records = context_qa.records_of(answered)
        figures = context_qa.figures_of(records, readings)
        outcome = Outcome(
            context_qa.tasks_of(readings),
            records,
            {"tasks": figures},
            {
                "data_content": {reading.name: reading.identity for reading in readings},
                "metrics": {name: version(name) for name in ("torchmetrics", "rouge-score")},
            },
        )
        if self.judge is not None:
            self._judge(outcome, answered, readings, answers, evaluated.label)
        return outcome

    def _judge(
        self,
        outcome: Outcome,
        answered: list[Answered],
        readings: list[Reading],
        answers: Answers,
        label: str,
    ) -> None:
        from dex.evaluation import context_qa
        from dex.evaluation.judge import Judge

        assert self.judge is not None
        kept = str(answers.file or "memory")
        judge = Judge(self.judge.url, self.judge.model, self.judge.key_variable, kept)
        records: list[Record] = context_qa.judged(answered, judge, answers, label)
        outcome.records += records
        outcome.tasks |= context_qa.judged_tasks(readings)
        outcome.figures["judge"] = context_qa.judged_figures(records)
        outcome.settings["judge_rubric"] = context_qa.rubric_hash()

    def _tasks(self) -> list[str]:
        from dex.evaluation.reading import KNOWN, tasks_in

        if self.tasks is not None:
            return self.tasks
        return tasks_in(self.data) if self.data is not None else list(KNOWN)
