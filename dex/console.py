"""What a person watches while a command runs: messages and progress, on stderr, so that stdout holds results.

Of several processes the first one speaks.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dex.processes import is_first

_PLAIN_LINE_EVERY = 10.0  # seconds; a log file is read afterwards, and a line a step would drown it


def say(message: str) -> None:
    """One line on stderr."""
    if is_first():
        print(message, file=sys.stderr, flush=True)


class Bar:
    """Progress of a long piece of work: a bar with the time left on a terminal, plain lines elsewhere.

    with Bar("training", 30_720, "tokens") as bar:
        bar.update(512, "loss 2.80")
    """

    def __init__(self, what: str, total: int, unit: str, start: int = 0) -> None:
        self.what, self.total, self.unit, self.start, self.done = what, total, unit, start, start
        self._began = self._last_line = time.monotonic()
        self._rich: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Bar:
        self._began = self._last_line = time.monotonic()
        console = Console(stderr=True)
        if console.is_terminal and is_first():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._rich = Progress(*columns, console=console)
            self._task = self._rich.add_task(self.what, total=self.total, completed=self.start, figures=self.unit)
            self._rich.start()
        return self

    @property
    def rate(self) -> float:
        """Units per second since the start of this bar."""
        return (self.done - self.start) / max(time.monotonic() - self._began, 1e-9)

    def update(self, done: int, figures: str = "") -> None:
        self.done = done
        text = f"{self.unit}, {self.rate:,.0f}/s" + (f", {figures}" if figures else "")
        if self._rich is not None:
            self._rich.update(self._task, completed=done, figures=text)
        elif time.monotonic() - self._last_line >= _PLAIN_LINE_EVERY or done >= self.total:
            left = (self.total - done) / max(self.rate, 1e-9)
            say(f"{self.what}: {done:,} of {self.total:,} {text}, {left:,.0f} s left")
            self._last_line = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
