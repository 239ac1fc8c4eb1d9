"""Who runs and who waits: admission in order of arrival, pages, preemption of the youngest."""

from __future__ import annotations

from collections import deque

from engine.delivery import SchedulerStats
from engine.prefix import Granted, PrefixCache, extend_keys
from engine.request import Core
from engine.sequence import Sequence


class Seating:
    """Slots and pages of all sequences; `running` is in order of admission, oldest first."""

    def __init__(self, core: Core, prefix: PrefixCache, slots: int, stats: SchedulerStats):
        self._core, self._prefix, self._stats = core, prefix, stats
        self._slots = list(range(slots - 1, -1, -1))
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def admit(self) -> None:
        """Seat those that wait, in order; the first that finds no room holds up the rest."""
        while self.waiting and self._slots:
            sequence = self.waiting[0]
            granted = self._prefix.acquire(
                self.reusable_keys(sequence),
                self.pages_for(len(sequence.ids)),
                # Room for everyone's next page: without it the newcomer would be preempted soon.
                reserve=len(self.running),
            )
            if granted is None:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.slot = self._slots.pop()
            self._seat(sequence, granted)
            if not sequence.admitted:
                sequence.admitted, sequence.cached_tokens = True, granted.tokens
                self._stats.prompt_tokens += sequence.request.counted * len(sequence.request.ids)

    def _seat(self, sequence: Sequence, granted: Granted) -> None:
        sequence.pages = granted.pages
        sequence.computed = sequence.resumed = granted.tokens
        sequence.stored = granted.tokens // self._core.page_tokens
        if granted.window is not None:
            self._core.import_window(sequence.slot, granted.window)
        # Windows are kept at the prompt's last borders, and where known pages lacked one.
        count, page_tokens = len(sequence.request.ids), self._core.page_tokens
        sequence.borders = {granted.known_pages, count // page_tokens, (count - 1) // page_tokens}

    def renew(self, sequence: Sequence) -> None:
        """Let a sequence that has not run yet use what others have cached since its admission."""
        if sequence.computed > sequence.resumed or not self._prefix.enabled:
            return
        keys = self.reusable_keys(sequence)
        if self._prefix.reach(keys) * self._core.page_tokens > sequence.computed:
            self._prefix.release(sequence.pages)
            known = sequence.resumed
            granted = self._prefix.acquire(keys, len(sequence.pages), known_tokens=known)
            assert granted is not None, "pages just given back are not to be had"
            self._seat(sequence, granted)
            sequence.cached_tokens = granted.tokens

    def follows(self, sequence: Sequence, leaders: list[Sequence]) -> bool:
        """Whether it should wait, not having run yet, as one of these is about to compute the
        page that it needs next."""
        if sequence.computed > sequence.resumed:
            return False
        index = sequence.computed // self._core.page_tokens
        keys = self.reusable_keys(sequence)
        return index < len(keys) and any(keys[index] in o.keys[index : index + 1] for o in leaders)

    def reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the pages a hit may cover: one id must be left to run, and every row of a
        prompt whose log-probabilities are still owed."""
        if not self._prefix.enabled or sequence.prompt_rows_owed:
            return []
        page_tokens = self._core.page_tokens
        extend_keys(sequence.keys, self._prefix.root, sequence.ids, page_tokens)
        return sequence.keys[: (len(sequence.ids) - 1) // page_tokens]

    def pages_for(self, positions: int) -> int:
        """Pages that so many positions take."""
        return -(-positions // self._core.page_tokens)

    def grow(self, sequence: Sequence, positions: int) -> bool:
        """Give the sequence pages for that many positions; False if the pool has none left."""
        count = self.pages_for(positions) - len(sequence.pages)
        if count > 0:
            if not self._prefix.make_room(count):
                return False
            sequence.pages += self._prefix.pool.allocate(count)
        return True

    def preempt_youngest(self) -> None:
        """Send the last one admitted back to the head of the queue; it loses only time."""
        sequence = self.running[-1]
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self._stats.preemptions += 1

    def end(self, sequence: Sequence, reason: str) -> None:
        """Take everything from a sequence and tell its sink."""
        if sequence.slot is not None:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        self._stats.ended[reason.split(":")[0]] += sequence.request.counted
        sequence.request.sink.end(reason, sequence.cached_tokens)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self._prefix.release(sequence.pages)
        sequence.slot, sequence.pages, sequence.drafts = None, [], []
        sequence.computed = sequence.resumed = sequence.stored = 0

    def check(self) -> None:
        """Conservation of pages and slots."""
        self._prefix.pool.check(s.pages for s in self.running)
        self._prefix.check()
        taken = [s.slot for s in self.running]
        assert len(set(taken + self._slots)) == len(taken) + len(self._slots), "a slot is shared"
        assert all(not s.pages and s.slot is None for s in self.waiting), "a waiting one holds"
