"""A language model behind an OpenAI-compatible URL grades answers by a fixed rubric.

A reply is a digit and nothing else. The key comes from the environment and goes nowhere but into the requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dex.errors import DexError

RUBRIC = """\
You grade an answer by comparing it with reference answers. The references are right; where there are several, the one
that suits the answer best counts. Wording does not matter, and neither do style and length by themselves.

4: says what a reference says; nothing of substance is missing or wrong
3: says it but for a detail that is missing or wrong
2: about half of it is there and right
1: a little of it is there and right
0: wrong, empty, or no answer to the task

Reply with one digit from 0 to 4 and nothing else."""
ASKED = """\
TASK
{task}

REFERENCES
{references}

ANSWER
{answer}"""
HIGHEST = 4

AT_ONCE = 4  # requests
RETRIES = 6  # for what may pass: no connection, a busy or failing server; waits double from half a second to eight
TIMEOUT = 120.0  # seconds, for one reply
UNPARSABLE_SHARE = 0.05  # more replies without a grade stop the judging


@dataclass(frozen=True)
class Graded:
    """An answer to be graded."""

    task: str
    references: Sequence[str]
    answer: str

    def messages(self) -> list[Any]:
        references = "\n".join(f"- {reference}" for reference in self.references)
        asked = ASKED.format(task=self.task, references=references, answer=self.answer)
        return [{"role": "system", "content": RUBRIC}, {"role": "user", "content": asked}]


def grade(reply: str) -> float | None:
    """From 0 to 1; None for a reply that is no grade."""
    return int(reply) / HIGHEST if re.fullmatch(f"[0-{HIGHEST}]", reply.strip(), re.ASCII) else None


class Judge:
    """Asks `model` at `url`. `kept` says where the answers to be graded are, for sentences."""

    def __init__(self, url: str, model: str, key_variable: str, kept: str) -> None:
        import openai

        self.url, self.model, self.key_variable, self.kept = url, model, key_variable, kept
        self._key = os.environ.get(key_variable) or "none"  # a server of one's own asks for none
        self._client = openai.OpenAI(base_url=url, api_key=self._key, max_retries=RETRIES, timeout=TIMEOUT)

    def replies(self, graded: Sequence[Graded]) -> list[str]:
        """Raises DexError where the judge does not reply."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self._reply, graded))

    def _reply(self, graded: Graded) -> str:
        import openai

        try:
            made = self._client.chat.completions.create(model=self.model, messages=graded.messages(), temperature=0.0)
            reply = made.choices[0].message.content
        except openai.APITimeoutError:
            raise self._failed(f"did not reply within {TIMEOUT:.0f} s") from None
        except openai.APIConnectionError as error:
            raise self._failed(f"cannot be reached ({self._safe(error.__cause__ or error)})") from None
        except openai.APIStatusError as error:
            raise self._failed(self._refusal(error.status_code, error)) from None
        except (openai.OpenAIError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise self._failed(f"does not reply as an OpenAI-compatible server ({self._safe(error)})") from None
        return str(reply or "")

    def _refusal(self, status: int, error: Exception) -> str:
        if status in (401, 403):
            given = "is not set" if self._key == "none" else "holds no key that it takes"
            return f"refuses the request ({status}: {self.key_variable} {given})"
        if status == 404:
            return f"has no model {self.model!r} or is no OpenAI-compatible URL, which mostly ends in /v1 (404)"
        if status == 429:
            return f"is too busy or its quota is used up (429, after {RETRIES} more tries)"
        return f"failed ({self._safe(error)})"

    def _safe(self, error: BaseException) -> str:
        """An error's first line, without the key, which a server may have repeated in it."""
        text = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        return text.replace(self._key, "***")[:200]

    def _failed(self, why: str) -> DexError:
        return DexError(
            f"The judge at {self.url} {why}; the answers are kept in {self.kept}, and the same command goes on with "
            "the judging alone once it replies (judge.url may be another)."
        )


class Unparsable:
    """Counts the replies without a grade among `total`, and refuses too many."""

    def __init__(self, total: int, model: str) -> None:
        self.total, self.model, self.count = total, model, 0

    def check(self, replies: Sequence[str]) -> None:
        """Raise DexError, naming the newest, where more than 5 % are none."""
        faulty = [reply for reply in replies if grade(reply) is None]
        self.count += len(faulty)
        if faulty and self.count > UNPARSABLE_SHARE * self.total:
            raise DexError(
                f"The judge {self.model} gives no grade: of {self.total} replies at most 5 % may be other than a "
                f"digit from 0 to {HIGHEST}, and {self.count} are, such as {faulty[-1][:80]!r}; mend the judge, and "
                "the same command goes on with the judging."
            )
