"""The thread that steps the scheduler, and the road between it and the web server's event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.kvcache import PageCounts
from engine.openai_api import ApiError
from engine.sampler import Logprobs
from engine.scheduler import Scheduler, StepReport
from engine.sequence import Request, Sequence, Token
from engine.text import Text, TextStream


@dataclass(frozen=True)
class Piece:
    """A token of a choice and the text it brings; `offset` is where in the text it begins."""

    choice: int
    text: str
    token: Token
    offset: int
    reasoning: bool


@dataclass(frozen=True)
class PromptRow:
    """Log-probabilities of the prompt id at `position`."""

    choice: int
    position: int
    logprobs: Logprobs


@dataclass(frozen=True)
class End:
    """The last of a choice: why, and text that had been held back."""

    choice: int
    reason: str
    text: str
    cached_tokens: int
    reasoning: bool = False


class Outbox:
    """Results of one HTTP request, handed from the engine's thread to its asyncio queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unsent: list[Outbox]):
        self._loop, self._unsent = loop, unsent
        self._pending: list = []
        self.queue: asyncio.Queue = asyncio.Queue()

    def post(self, item: Piece | PromptRow | End) -> None:
        """Keep a result until the step is over."""
        if not self._pending:
            self._unsent.append(self)
        self._pending.append(item)

    def flush(self) -> None:
        """Wake the handler once for all that a step brought."""
        items, self._pending = self._pending, []
        # A loop that is closed has no handlers left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, items)

    def _spread(self, items: list) -> None:
        for item in items:
            self.queue.put_nowait(item)


class ChoiceSink:
    """Turns a sequence's tokens into pieces of text for one choice of an answer.

    `hidden` ids (ends of text) bring no text; `think_close` ends the reasoning that the answer
    opens with when it is not None.
    """

    def __init__(
        self,
        outbox: Outbox,
        choice: int,
        text: Text,
        stops: tuple[str, ...] = (),
        hidden: frozenset[int] = frozenset(),
        think_close: int | None = None,
    ):
        self._outbox, self._choice, self._text = outbox, choice, text
        self._stops, self._hidden, self._think_close = stops, hidden, think_close
        self._stream = TextStream(text, stops)
        self._reasoning = think_close is not None
        self._stopped = False

    def prompt(self, position: int, logprobs: Logprobs) -> None:
        """See engine.sequence.Sink."""
        self._outbox.post(PromptRow(self._choice, position, logprobs))

    def token(self, token: Token) -> bool:
        """See engine.sequence.Sink."""
        offset, reasoning, shown = self._stream.length, self._reasoning, ""
        if reasoning and token.id == self._think_close:
            shown = self._stream.finish()
            self._stream, self._reasoning = TextStream(self._text, self._stops), False
        elif token.id not in self._hidden:
            shown, self._stopped = self._stream.push(token.id)
        self._outbox.post(Piece(self._choice, shown, token, offset, reasoning))
        return self._stopped

    def end(self, reason: str, cached_tokens: int) -> None:
        """See engine.sequence.Sink."""
        tail = "" if self._stopped else self._stream.finish()
        self._outbox.post(End(self._choice, reason, tail, cached_tokens, self._reasoning))


@dataclass(frozen=True)
class Snapshot:
    """The scheduler between two steps; all numbers belong together."""

    pages: PageCounts
    running: int
    waiting: int


class EngineLoop:
    """Owns the scheduler once started; the other methods may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        waiting_max: int = 1024,
        stall_seconds_max: float = 30.0,
        on_step: Callable[[StepReport, float], None] = lambda report, seconds: None,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.scheduler = scheduler
        self.failure: Exception | None = None
        self._waiting_max, self._stall_seconds_max = waiting_max, stall_seconds_max
        self._on_step, self._on_failure, self._clock = on_step, on_failure, clock
        self._changed = threading.Condition()
        self._inbox: list[Sequence] = []
        self._unsent: list[Outbox] = []
        self._stopping = False
        self._turn_began_s: float | None = None
        self.last_step_s: float | None = None
        self.snapshot = Snapshot(scheduler.page_counts, 0, 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds_max: float = 5.0) -> bool:
        """End the thread after the step in progress; False if that step does not end in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds_max)
        return not self._thread.is_alive()

    def outbox(self) -> Outbox:
        """A place for results, read by the running asyncio loop."""
        return Outbox(asyncio.get_running_loop(), self._unsent)

    def submit(self, requests: list[Request]) -> list[Sequence]:
        """Queue all requests or none. Raises RequestError for a bad one, ApiError 429 when the
        queue is full and 503 when the engine is gone."""
        sequences = [self.scheduler.sequence(request) for request in requests]
        with self._changed:
            if self.failure is not None or self._stopping:
                raise ApiError(self.trouble() or "the server is shutting down", status=503)
            ahead = self.snapshot.waiting + len(self._inbox)
            if ahead + len(sequences) > self._waiting_max:
                raise ApiError(
                    f"{ahead} sequences wait already and {len(sequences)} more are asked for; "
                    f"the limit is {self._waiting_max}; try again later",
                    status=429,
                    code="queue_full",
                )
            self._inbox += sequences
            self._changed.notify()
        return sequences

    def cancel(self, sequences: list[Sequence]) -> None:
        """Give up sequences; their pages return before the next step."""
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            self._changed.notify()

    def trouble(self) -> str | None:
        """Why no token can be expected: the engine ended, or a step lasts too long."""
        if self.failure is not None:
            return f"the engine has ended: {self.failure}"
        began = self._turn_began_s
        if began is not None and self._clock() - began > self._stall_seconds_max:
            return (
                f"a step has not ended for {self._clock() - began:.1f} s; "
                f"{self._stall_seconds_max:g} s are allowed"
            )
        return None

    def idle_for(self, seconds: float) -> bool:
        """Whether nothing is to be done, and no step has ended for that long."""
        last = self.last_step_s
        idle = not (self._inbox or self.snapshot.running or self.snapshot.waiting)
        return idle and (last is None or self._clock() - last > seconds)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        # Whatever it is, the core's state is unknown: everyone is told, and the server ends.
        except Exception as error:
            with self._changed:
                self.failure = error
            self._turn_began_s = None
            self._take_inbox()
            self.scheduler.fail_all(str(error) or type(error).__name__)
            self._publish()
            self._on_failure()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._inbox or self.scheduler.busy or self._stopping):
                self._changed.wait()
            return not self._stopping

    def _turn(self) -> None:
        self._take_inbox()
        began = self._turn_began_s = self._clock()
        report = self.scheduler.step()
        self._turn_began_s = None
        assert report is not None or not self.scheduler.busy, "work waits, but no step ran"
        if report is not None:
            self.last_step_s = self._clock()
            self._on_step(report, self.last_step_s - began)
        if not self.scheduler.busy:
            self.scheduler.check_idle()
        self._publish()

    def _take_inbox(self) -> None:
        with self._changed:
            arrived, self._inbox = self._inbox, []
        for sequence in arrived:
            self.scheduler.enqueue(sequence)

    def _publish(self) -> None:
        s = self.scheduler
        self.snapshot = Snapshot(s.page_counts, s.running, s.waiting)
        for outbox in self._unsent:
            outbox.flush()
        self._unsent.clear()
