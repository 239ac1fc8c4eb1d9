"""What commands say while they work: log lines with the phase, and bars where someone watches."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 5.0


class Journal:
    """Log lines and progress of one rank on standard error.

    A line is `time rank=R phase="..." event key=value ...`; values are JSON, so that a text with
    spaces stays one value.
    """

    def __init__(
        self, rank: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.rank = rank
        self.phase = "start"
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._console = Console(file=self._stream)
        self._bars: Progress | None = None
        self._tasks: dict[str, int] = {}
        self._said_at: dict[str, float] = {}

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_bars()

    def enter(self, phase: str, **facts: object) -> None:
        """A new phase begins."""
        self._stop_bars()
        self.phase = phase
        self.log("begins", **facts)

    def log(self, event: str, **facts: object) -> None:
        """One line about the current phase."""
        self._stop_bars()
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        values = "".join(f" {name}={_value(value)}" for name, value in facts.items())
        line = f"{moment} rank={self.rank} phase={json.dumps(self.phase)} {event}{values}"
        self._stream.write(line + "\n")
        self._stream.flush()

    def progress(self, phase: str, done: int, total: int) -> None:
        """A part of a phase is done; a bar on a terminal, now and then a line elsewhere."""
        if phase != self.phase:
            self._stop_bars()
            self.phase = phase
        if self._console.is_terminal:
            self._bar(phase, done, total)
        else:
            self._line(phase, done, total)

    def part(self, phase: str) -> Callable[[int, int], None]:
        """`progress` of one phase, for what counts without knowing its name."""
        return lambda done, total: self.progress(phase, done, total)

    def _bar(self, phase: str, done: int, total: int) -> None:
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=self._console)
            self._bars.start()
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)

    def _line(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        finished = done >= total
        last = self._said_at.get(phase)
        if last is None or finished or now - last >= _LINE_EVERY_S:
            # A finished phase is said once, however often its end is reported.
            self._said_at[phase] = float("inf") if finished else now
            if last != float("inf"):
                percent = 100 if total == 0 else int(100 * done / total)
                self.log("progress", percent=percent)

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks = {}


def _value(value: object) -> str:
    if isinstance(value, Mapping | list | tuple | str):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
