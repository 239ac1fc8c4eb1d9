"""Who holds which page of the KV pool: a free list, reference counts, and a conservation law."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PageCounts:
    """How the pool's pages divide; free + cached + used = total.

    free    held by nobody
    cached  held by the prefix cache alone, given up when a sequence needs pages
    used    held by at least one sequence
    """

    free: int
    cached: int
    used: int

    @property
    def total(self) -> int:
        """All pages of the pool."""
        return self.free + self.cached + self.used


class PagePool:
    """Pages 0..total-1; each is held by any number of sequences and at most once by the cache."""

    def __init__(self, total: int):
        assert total > 0, f"a pool needs pages, not {total}"
        self._holders = [0] * total
        self._in_cache = [False] * total
        # Taken from the end, so that the lowest page goes out first and runs are repeatable.
        self._free = list(range(total - 1, -1, -1))
        self._cached = 0

    @property
    def total(self) -> int:
        """Pages of the pool."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages held by nobody."""
        return len(self._free)

    @property
    def counts(self) -> PageCounts:
        """The division of the pool at this moment."""
        return PageCounts(self.free, self._cached, self.total - self.free - self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, each now held by one sequence; the caller made sure there are."""
        assert 0 <= count <= self.free, f"{count} pages asked of {self.free} free ones"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._idle(page), f"page {page} was free and held"
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more sequence reads these pages."""
        for page in pages:
            assert not self._idle(page), f"page {page} is free and cannot be shared"
            if self._holders[page] == 0:
                self._cached -= 1
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence gives these pages up."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released more often than held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._let_go(page)

    def _let_go(self, page: int) -> None:
        if self._in_cache[page]:
            self._cached += 1
        else:
            self._free.append(page)

    def cache(self, page: int) -> None:
        """The prefix cache takes hold of a page that a sequence has just filled."""
        assert self._holders[page] > 0, f"page {page} enters the cache without a sequence"
        assert not self._in_cache[page], f"page {page} enters the cache twice"
        self._in_cache[page] = True

    def uncache(self, page: int) -> None:
        """The prefix cache gives a page up."""
        assert self._in_cache[page], f"page {page} leaves the cache without being in it"
        self._in_cache[page] = False
        if self._holders[page] == 0:
            self._cached -= 1
            self._free.append(page)

    def held(self, page: int) -> bool:
        """Whether any sequence holds the page."""
        return self._holders[page] > 0

    def _idle(self, page: int) -> bool:
        return self._holders[page] == 0 and not self._in_cache[page]

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Conservation, recounted from nothing: `tables` are the pages of every live sequence."""
        holders = [0] * self.total
        for table in tables:
            for page in table:
                holders[page] += 1
        assert holders == self._holders, "page holders differ from the sequences' tables"
        idle = [page for page in range(self.total) if self._idle(page)]
        assert sorted(self._free) == idle, "the free list differs from the pages nobody holds"
        alone = sum(c and not h for c, h in zip(self._in_cache, holders, strict=True))
        assert alone == self._cached, f"{alone} pages are cached, {self._cached} are counted"
        assert self.counts.total == self.total, f"{self.counts} do not add up to {self.total}"
