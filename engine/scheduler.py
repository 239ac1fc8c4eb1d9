"""Continuous batching: which ids of which sequences the next step parts, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.delivery import Part, SchedulerStats, deliver
from engine.errors import RequestError, UsageError, must_be_one_of
from engine.kvcache import PageCounts, PagePool
from engine.prefix import PrefixCache, extend_keys, keeps_window, next_kept
from engine.request import Core, DraftStep, SequenceStep
from engine.sampler import BrokenLogitsError
from engine.seating import Seating
from engine.sequence import Request, Sequence
from engine.units import MIB

POLICIES = ("throughput", "latency")
LATENCY_CHUNK_TOKENS = 256
"""Prompt ids in one step under `latency` while other sequences wait for their next token."""
LOGIT_BYTES_MAX = 64 * MIB
"""Logits that prompt log-probabilities may ask of one step."""


@dataclass(frozen=True)
class StepReport:
    """What one step ran: `decode` if every sequence ran its newest id (and drafts) only."""

    kind: str
    tokens: int
    sequences: int


class Scheduler:
    """Owns slots, pages and queues; one thread calls it, results go to the requests' sinks.

    A sequence that waits is admitted in order of arrival, never overtaken. When pages run out
    the youngest sequence goes back to the head of the queue and later parts its ids again;
    nothing that was delivered changes.

    prefill_chunk    ids of a step that has prompt ids in it, at most
    history_tokens   ids before a step's first that the model's n-grams need
    """

    def __init__(
        self,
        core: Core,
        prefix: PrefixCache | None = None,
        *,
        policy: str = "throughput",
        max_concurrency: int | None = None,
        draft_tokens: int | None = None,
        prefill_chunk: int | None = None,
        history_tokens: int = 8,
        clock: Callable[[], float] = time.monotonic,
    ):
        if policy not in POLICIES:
            raise UsageError(must_be_one_of("scheduler-policy", policy, POLICIES))
        slots = core.slots if max_concurrency is None else max_concurrency
        if not 1 <= slots <= core.slots:
            raise UsageError(f"max-concurrency is {slots}; this package accepts 1 to {core.slots}")
        drafts = core.draft_tokens if draft_tokens is None else draft_tokens
        if not 0 <= drafts <= core.draft_tokens:
            raise UsageError(
                f"mtp-draft-tokens is {drafts}; this package accepts 0 to {core.draft_tokens}"
            )
        assert core.tokens_per_step_max >= core.slots, "a step must hold one id per slot"
        self._core = core
        self._prefix = prefix or PrefixCache(core, PagePool(core.pages))
        self._policy = policy
        self._draft_tokens = drafts
        self._prefill_chunk = min(prefill_chunk or 2**31, core.tokens_per_step_max)
        self._prompts_turn = False
        self._history_tokens = history_tokens
        self._clock = clock
        self._logit_rows_max = max(1, LOGIT_BYTES_MAX // (4 * core.vocab_size))
        self.stats = SchedulerStats.for_drafts(drafts)
        self._seats = Seating(core, self._prefix, slots, self.stats)

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._seats.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for pages."""
        return len(self._seats.waiting)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._seats.running or self._seats.waiting)

    @property
    def page_counts(self) -> PageCounts:
        """The division of the page pool."""
        return self._prefix.pool.counts

    @property
    def tokens_max(self) -> int:
        """Positions that one sequence can have: the model's limit or the whole pool."""
        return min(self._core.positions_max, self._core.pages * self._core.page_tokens)

    def check_request(self, request: Request) -> None:
        """Raise RequestError for what could never be served; callable from any thread."""
        count, vocab = len(request.ids), self._core.vocab_size
        if count == 0:
            raise RequestError("the prompt has no tokens; at least 1 is needed")
        lowest, highest = min(request.ids), max(request.ids)
        if lowest < 0 or highest >= vocab:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"prompt token id {wrong} is out of range; accepted: 0 to {vocab - 1}"
            )
        if count + request.max_tokens > self.tokens_max:
            raise RequestError(
                f"the prompt has {count} tokens and max_tokens is {request.max_tokens}, together "
                f"{count + request.max_tokens}; the limit is {self.tokens_max} tokens"
            )

    def sequence(self, request: Request) -> Sequence:
        """The request, checked, as something to enqueue; callable from any thread."""
        self.check_request(request)
        return Sequence(request, self._clock())

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self._seats.waiting.append(sequence)

    def submit(self, request: Request) -> Sequence:
        """Check and enqueue in one."""
        sequence = self.sequence(request)
        self.enqueue(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before the next step; one that has ended stays as it is."""
        sequence.cancelled = True

    def fail_all(self, reason: str) -> None:
        """End every sequence with an error: the core is lost."""
        for sequence in [*self._seats.running, *self._seats.waiting]:
            self._seats.end(sequence, f"error: {reason}")

    def step(self) -> StepReport | None:
        """Admit, run one step of the core, deliver its tokens; None if there was nothing to run.

        Whatever the core raises passes through; its state is unknown then.
        """
        for sequence in [s for s in [*self._seats.running, *self._seats.waiting] if s.cancelled]:
            self._seats.end(sequence, "cancelled")
        self._seats.admit()
        parts = self._plan()
        if not parts:
            return None
        logits = self._core.step([self._step_of(part) for part in parts])
        for part, rows in zip(parts, logits, strict=True):
            assert len(rows) == len(part.rows), (
                f"{len(rows)} rows came, {len(part.rows)} were asked"
            )
            self._absorb(part, rows)
        self._draft([part.sequence for part in parts])
        decode = all(part.known == 1 for part in parts)
        tokens = sum(part.known + len(part.drafts) for part in parts)
        return StepReport("decode" if decode else "prefill", tokens, len(parts))

    def check(self) -> None:
        """Conservation of pages and slots; also holds between any two steps."""
        self._seats.check()

    def check_idle(self) -> None:
        """Conservation when nothing runs: every page is free or cached."""
        self.check()
        counts = self._prefix.pool.counts
        assert counts.used == 0, f"nothing runs, but {counts.used} pages are in use"

    # Planning one step

    def _plan(self) -> list[Part]:
        """What the next step runs: everyone's newest id, then as much of prompts as fits.

        A step with prompt ids holds at most `prefill_chunk` ids in all, of which drafts get what
        half of the room allows. If that is no room at all, prompts and the others take turns.
        """
        ready = self._ready()
        prompts = any(s.left > 1 for s in self._seats.running)
        room = (self._prefill_chunk if prompts else self._core.tokens_per_step_max) - len(ready)
        if prompts and room < 1:
            self._prompts_turn = not self._prompts_turn
            if self._prompts_turn:
                return self._plan_prefill(self._prefill_chunk, others_decode=True)
            prompts, room = False, self._core.tokens_per_step_max - len(ready)
        budget = room // 2 if prompts else room
        parts = []
        for sequence in ready:
            drafts = self._affordable_drafts(sequence, budget)
            budget -= len(drafts)
            room -= len(drafts)
            parts.append(self._part(sequence, 1, drafts))
        return parts + self._plan_prefill(room, bool(ready)) if prompts else parts

    def _ready(self) -> list[Sequence]:
        """Sequences with one id left to run, all with a page for it; the youngest make room."""
        ready = [s for s in self._seats.running if s.left == 1]
        for sequence in ready:
            while sequence.slot is not None and not self._seats.grow(sequence, len(sequence.ids)):
                self._seats.preempt_youngest()
        return [s for s in ready if s.slot is not None]

    def _affordable_drafts(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """As many drafts as the step and the free pages allow; nobody is preempted for them."""
        drafts = sequence.drafts[: max(0, budget)]
        while drafts and not self._seats.grow(sequence, len(sequence.ids) + len(drafts)):
            drafts.pop()
        return tuple(drafts)

    def _plan_prefill(self, budget: int, others_decode: bool) -> list[Part]:
        prompts = [s for s in self._seats.running if s.left > 1]
        if self._policy == "latency" and others_decode:
            budget = min(budget, LATENCY_CHUNK_TOKENS)
        parts, rows = [], self._logit_rows_max
        for place, sequence in enumerate(prompts):
            self._seats.renew(sequence)
            if self._seats.follows(sequence, prompts[:place]):
                continue
            share = budget
            if self._policy == "latency":
                share = -(-budget // (len(prompts) - place))
            if sequence.prompt_rows_owed:
                share = min(share, rows)
            known = min(share, sequence.left, self._to_border(sequence))
            if known > 0:
                part = self._part(sequence, known, ())
                parts.append(part)
                budget -= known
                rows -= len(part.rows)
        return parts

    def _to_border(self, sequence: Sequence) -> int:
        """Ids up to the next page border whose window is to be kept."""
        page_tokens = self._core.page_tokens
        if not self._prefix.enabled:
            return self._core.positions_max
        full = sequence.computed // page_tokens
        border = min(b for b in (next_kept(full), *sequence.borders) if b > full)
        return border * page_tokens - sequence.computed

    def _part(self, sequence: Sequence, known: int, drafts: tuple[int, ...]) -> Part:
        """The logits wanted: those of prompt rows owed, and from the newest id on."""
        start, rows = sequence.computed, []
        if sequence.prompt_rows_owed:
            last = min(start + known, len(sequence.request.ids) - 1)
            rows = list(range(sequence.prompt_reported - start, last - start))
        if known == sequence.left and sequence.request.max_tokens > 0:
            rows += range(known - 1, known + len(drafts))
        return Part(sequence, known, drafts, tuple(rows))

    def _step_of(self, part: Part) -> SequenceStep:
        sequence, start = part.sequence, part.sequence.computed
        end = start + part.known + len(part.drafts)
        return SequenceStep(
            slot=sequence.slot,
            start=start,
            ids=(*sequence.ids[start : start + part.known], *part.drafts),
            history=tuple(sequence.ids[max(0, start - self._history_tokens) : start]),
            pages=tuple(sequence.pages[: self._seats.pages_for(end)]),
            logit_rows=part.rows,
        )

    # What a step brings

    def _absorb(self, part: Part, logits: np.ndarray) -> None:
        sequence, start = part.sequence, part.sequence.computed
        sequence.computed += part.known
        sequence.drafts = []
        try:
            reason = deliver(part, start, logits, self.stats)
        except BrokenLogitsError as error:
            self._seats.end(sequence, f"error: {error}")
            return
        self._store(sequence)
        if reason is not None:
            self._seats.end(sequence, reason)

    def _store(self, sequence: Sequence) -> None:
        """Offer full pages to the prefix cache, and the window where the sequence stands."""
        if not self._prefix.enabled:
            return
        page_tokens = self._core.page_tokens
        full = sequence.computed // page_tokens
        extend_keys(sequence.keys, self._prefix.root, sequence.ids, page_tokens)
        for index in range(sequence.stored, full):
            self._prefix.add_page(sequence.keys, index, sequence.pages)
        sequence.stored = max(sequence.stored, full)
        kept = keeps_window(full) or full in sequence.borders
        if full and kept and sequence.computed == full * page_tokens:
            key = sequence.keys[full - 1]
            if self._prefix.wants_window(key):
                self._prefix.add_window(key, self._core.export_window(sequence.slot))

    def _draft(self, stepped: list[Sequence]) -> None:
        """Ask for drafts of those that have just run and whose next step could use some."""
        alive = [s for s in stepped if s.slot is not None and s.left == 1]
        sequences = [s for s in alive if self._drafts_useful(s) > 0]
        if not sequences:
            return
        asked = [DraftStep(s.slot, s.computed - 1, s.ids[-1]) for s in sequences]
        ids = self._core.draft(asked).ids
        assert ids.min() >= 0 and ids.max() < self._core.vocab_size, "a draft is no token id"
        for sequence, row in zip(sequences, ids, strict=True):
            sequence.drafts = [int(i) for i in row[: self._drafts_useful(sequence)]]

    def _drafts_useful(self, sequence: Sequence) -> int:
        """Drafts that could be accepted before the sequence or a border to be kept ends them."""
        return min(self._draft_tokens, sequence.wanted - 1, self._to_border(sequence) - 1)
