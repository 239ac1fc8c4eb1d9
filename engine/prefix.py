"""The prefix cache: full pages of finished work, found again by a hash chain over their ids."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.kvcache import PagePool
from engine.request import Core

PAGE, WINDOW = "page", "window"


class BlockStore(Protocol):
    """Where blocks outlive the process (engine.prefix_disk).

    `get` may fail for any block at any time; then `has` denies it from there on.
    """

    def has(self, kind: str, key: bytes) -> bool: ...

    def get(self, kind: str, key: bytes) -> bytes | None: ...

    def put(self, kind: str, key: bytes, content: bytes) -> None: ...


@dataclass
class PrefixStats:
    """Counters since the start; `hit_tokens` by where the deepest block came from."""

    query_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    evicted_pages: int = 0


@dataclass(frozen=True)
class Granted:
    """Pages for a whole sequence; the first `tokens` positions are filled, and `window` is the
    slot state behind them (None when tokens is 0). `known_pages` leading pages were found, though
    for want of a window not all of them could be used."""

    pages: list[int]
    tokens: int
    window: bytes | None
    known_pages: int


@dataclass(eq=False)
class _Node:
    key: bytes
    parent: _Node | None
    page: int
    window: bytes | None = None
    children: int = 0
    used: int = 0


def keeps_window(border: int) -> bool:
    """Whether the window at this page border (in pages) is kept: 1..15, then ever sparser.

    A window is much larger than a page, so a long prompt keeps O(log) of them; what a prefix of
    `n` pages loses is below n/8, and a border where prompts part is kept from the second time on.
    """
    return border > 0 and border % _stride(border) == 0


def next_kept(border: int) -> int:
    """The first border behind this one whose window is kept."""
    stride = _stride(border + 1)
    return -(-(border + 1) // stride) * stride


def _stride(border: int) -> int:
    return 1 << max(0, border.bit_length() - 4)


def extend_keys(keys: list[bytes], root: bytes, ids: Sequence[int], page_tokens: int) -> None:
    """Append the keys of all full pages of `ids` that `keys` lacks; a key covers all ids so far."""
    for index in range(len(keys), len(ids) // page_tokens):
        page = array("q", ids[index * page_tokens : (index + 1) * page_tokens])
        keys.append(hashlib.sha256((keys[-1] if keys else root) + page.tobytes()).digest())


class PrefixCache:
    """Pages stay in the pool (as `cached`) and windows in host memory while both together are
    below `limit_bytes`; the least recently used leaf goes first. Blocks are also written to
    `disk`, if there is one, and found there when memory has lost them."""

    def __init__(
        self,
        core: Core,
        pool: PagePool,
        limit_bytes: int = 0,
        identity: str = "",
        disk: BlockStore | None = None,
    ):
        self._core = core
        self.pool = self._pool = pool
        self._limit_bytes = limit_bytes
        self._disk = disk
        self.root = hashlib.sha256(identity.encode()).digest()
        self._nodes: dict[bytes, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        # Leaves that no sequence holds, by last use; stale entries are dropped when popped.
        self._leaves: list[tuple[int, bytes]] = []
        self._clock = 0
        self._page_bytes = len(core.export_page(0)) if self.enabled else 0
        self._window_bytes = 0
        self.stats = PrefixStats()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._limit_bytes > 0 or self._disk is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of the pages and windows in memory."""
        return len(self._nodes) * self._page_bytes + self._window_bytes

    def acquire(
        self,
        keys: Sequence[bytes],
        pages_total: int,
        reserve: int = 0,
        known_tokens: int | None = None,
    ) -> Granted | None:
        """Pages for a sequence whose reusable prefix has `keys`; None if the pool lacks room for
        them and `reserve` pages more. `known_tokens` were found when it asked the last time.

        Pages that are found are shared, the others are fresh. A block that the disk cannot
        deliver is gone afterwards, so each round tries a shorter prefix.
        """
        while True:
            known, depth = self._reach(keys)
            shared = [self._nodes[k].page for k in keys[:depth] if k in self._nodes]
            self._pool.retain(shared)
            if not self.make_room(pages_total - len(shared), reserve):
                self.release(shared)
                return None
            pages = shared + self._pool.allocate(pages_total - len(shared))
            window = self._restore(keys[:depth], pages, len(shared))
            if depth == 0 or window is not None:
                self._count(keys, depth, len(shared), known_tokens)
                return self._granted(keys, pages, known, depth, window)
            self.release(pages)

    def _count(self, keys, depth: int, shared: int, known_tokens: int | None) -> None:
        page_tokens = self._core.page_tokens
        if known_tokens is None:
            self.stats.query_tokens += len(keys) * page_tokens
        source = "memory" if shared == depth else "disk"
        self.stats.hit_tokens[source] += depth * page_tokens - (known_tokens or 0)

    def _granted(self, keys, pages, known, depth, window) -> Granted:
        for index, key in enumerate(keys[:depth]):
            self._insert(keys, index, pages)
            self._touch(key)
        if depth:
            self.add_window(keys[depth - 1], window)
        return Granted(pages, depth * self._core.page_tokens, window, known)

    def reach(self, keys: Sequence[bytes]) -> int:
        """Leading pages that a hit would cover now."""
        return self._reach(keys)[1]

    def _reach(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many leading pages exist somewhere, and up to which of them a window does too."""
        known = 0
        while known < len(keys) and self._has(PAGE, keys[known]):
            known += 1
        depth = known
        while depth and not self._has(WINDOW, keys[depth - 1]):
            depth -= 1
        return known, depth

    def _has(self, kind: str, key: bytes) -> bool:
        node = self._nodes.get(key)
        if node is not None and (kind == PAGE or node.window is not None):
            return True
        return self._disk is not None and self._disk.has(kind, key)

    def _restore(self, keys: Sequence[bytes], pages: list[int], shared: int) -> bytes | None:
        """Fill pages from the disk beyond the shared ones; the window, or None on any loss."""
        if not keys:
            return None
        node = self._nodes.get(keys[-1])
        window = node.window if node is not None else None
        if window is None:
            window = self._disk.get(WINDOW, keys[-1])
        if window is None:
            return None
        whole = True
        for index in range(shared, len(keys)):
            content = self._disk.get(PAGE, keys[index])
            # Reading goes on after a loss, so that every bad block is found at once.
            whole = whole and content is not None
            if whole:
                self._core.import_page(pages[index], content)
        return window if whole else None

    def add_page(self, keys: Sequence[bytes], index: int, pages: list[int]) -> None:
        """Offer a full page that a sequence holds: `pages[index]`, complete up to `keys[index]`.

        If the same prefix is cached already, the sequence goes on with the cached page (equal
        bits) and its own is freed: `pages` changes in place.
        """
        if self._disk is not None and not self._disk.has(PAGE, keys[index]):
            self._disk.put(PAGE, keys[index], self._core.export_page(pages[index]))
        self._insert(keys, index, pages)

    def _insert(self, keys: Sequence[bytes], index: int, pages: list[int]) -> None:
        node = self._nodes.get(keys[index])
        if node is not None and node.page != pages[index]:
            self._pool.retain([node.page])
            self.release([pages[index]])
            pages[index] = node.page
        elif node is None and self._limit_bytes > 0:
            parent = self._nodes.get(keys[index - 1]) if index else None
            # Whoever holds a page of the tree holds all above it, so that what nobody holds can
            # always be evicted from the leaves up.
            if index and (parent is None or parent.page != pages[index - 1]):
                return
            node = _Node(keys[index], parent, pages[index])
            if parent is not None:
                parent.children += 1
            self._pool.cache(node.page)
            self._nodes[node.key] = self._by_page[node.page] = node
            self._touch(node.key)
            self._trim()

    def add_window(self, key: bytes, state: bytes) -> None:
        """Keep the slot state behind the page with this key."""
        if self._disk is not None and not self._disk.has(WINDOW, key):
            self._disk.put(WINDOW, key, state)
        node = self._nodes.get(key)
        if node is not None and node.window is None:
            node.window = state
            self._window_bytes += len(state)
            self._trim()

    def wants_window(self, key: bytes) -> bool:
        """Whether a window for this key would be kept and is not there yet."""
        node = self._nodes.get(key)
        in_memory = node is None or node.window is not None
        on_disk = self._disk is None or self._disk.has(WINDOW, key)
        return not (in_memory and on_disk)

    def release(self, pages: Sequence[int]) -> None:
        """A sequence gives up pages; those of the cache stay in it."""
        self._pool.release(pages)
        for page in reversed(pages):
            if page in self._by_page:
                self._offer(self._by_page[page])
        self._trim()

    def make_room(self, count: int, reserve: int = 0) -> bool:
        """Evict until `count` pages are free; False (and nothing evicted) if that cannot be, or
        would not leave `reserve` more that are free or cached."""
        counts = self._pool.counts
        if count + reserve > counts.free + counts.cached:
            return False
        while self._pool.free < count:
            evicted = self._evict()
            assert evicted, f"{self._pool.counts} hold no leaf to evict"
        return True

    def _touch(self, key: bytes) -> None:
        if (node := self._nodes.get(key)) is not None:
            self._clock += 1
            node.used = self._clock
            self._offer(node)

    def _offer(self, node: _Node) -> None:
        if node.children == 0 and not self._pool.held(node.page):
            heapq.heappush(self._leaves, (node.used, node.key))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = sorted({e for e in self._leaves if self._evictable(*e)})

    def _evictable(self, used: int, key: bytes) -> bool:
        node = self._nodes.get(key)
        if node is None or node.used != used or node.children:
            return False
        return not self._pool.held(node.page)

    def _trim(self) -> None:
        while self.size_bytes > self._limit_bytes and self._evict():
            pass

    def _evict(self) -> bool:
        """Forget the least recently used leaf that no sequence holds; False if there is none."""
        while self._leaves:
            used, key = heapq.heappop(self._leaves)
            if not self._evictable(used, key):
                continue
            node = self._nodes[key]
            del self._nodes[key], self._by_page[node.page]
            self._window_bytes -= len(node.window or b"")
            self._pool.uncache(node.page)
            self.stats.evicted_pages += 1
            if node.parent is not None:
                node.parent.children -= 1
                self._offer(node.parent)
            return True
        return False

    def check(self) -> None:
        """The tree's own bookkeeping, recounted."""
        children = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None:
                assert node.parent.key in self._nodes, "a cached page has lost its parent"
                children[node.parent.key] += 1
        assert all(n.children == children[k] for k, n in self._nodes.items()), "child counts"
        windows = sum(len(n.window or b"") for n in self._nodes.values())
        assert windows == self._window_bytes, (
            f"{windows} window bytes, {self._window_bytes} counted"
        )
