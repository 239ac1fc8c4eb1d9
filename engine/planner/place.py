"""Giving buffers that may not meet their own bytes: greedy placement in several orders.

Every order is deterministic and the effort is bounded by counting rounds, not by a clock, so
the same input has the same layout on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

REPAIRS_MAX = 40
"""Rounds of repair that each order gets before the search settles for the best layout so far."""


@dataclass(frozen=True)
class Buffers:
    """What placement needs to know: sizes in multiples of the alignment, lives, neighbours.

    neighbours  per buffer, the numbers of the buffers it may not overlap
    """

    sizes: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]


def neighbours_of(conflicts: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """The conflict matrix as one ascending tuple of numbers per buffer."""
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in conflicts)


def _fit(size: int, taken: list[tuple[int, int]], tight: bool) -> int:
    """Lowest place for `size` bytes beside the taken spans, or the tightest gap that holds it."""
    best, best_gap = -1, None
    cursor = 0
    for start, end in taken:
        gap = start - cursor
        if gap >= size and (best_gap is None or gap < best_gap):
            if not tight or gap == size:
                return cursor
            best, best_gap = cursor, gap
        if end > cursor:
            cursor = end
    return cursor if best_gap is None else best


@dataclass(frozen=True)
class Layout:
    """Offsets per buffer, the end of the highest, and the first buffer that left the target."""

    offsets: tuple[int, ...]
    peak: int
    first_over: int | None


def place(buffers: Buffers, order: Sequence[int], target: int = 0, tight: bool = False) -> Layout:
    """Place the buffers one by one in the given order, each where it fits among those placed."""
    sizes, neighbours = buffers.sizes, buffers.neighbours
    offsets = [-1] * len(sizes)
    peak, first_over = 0, None
    for number in order:
        size = sizes[number]
        taken = [(at, at + sizes[n]) for n in neighbours[number] if (at := offsets[n]) >= 0]
        taken.sort()
        offsets[number] = at = _fit(size, taken, tight)
        if at + size > peak:
            peak = at + size
            if peak > target and first_over is None:
                first_over = number
    return Layout(tuple(offsets), peak, first_over)


def _orders(buffers: Buffers) -> Iterator[list[int]]:
    """Static orders: large, long, large times long, crowded first; ties by age and number."""
    sizes, first, last = buffers.sizes, buffers.first, buffers.last
    numbers = range(len(sizes))

    def life(n: int) -> int:
        return last[n] - first[n] + 1

    yield sorted(numbers, key=lambda n: (-sizes[n], -life(n), first[n], n))
    yield sorted(numbers, key=lambda n: (-sizes[n] * life(n), first[n], n))
    yield sorted(numbers, key=lambda n: (-life(n), -sizes[n], first[n], n))
    yield sorted(numbers, key=lambda n: (first[n], -life(n), n))
    crowd = [sum(sizes[m] for m in buffers.neighbours[n]) + sizes[n] for n in numbers]
    yield sorted(numbers, key=lambda n: (-crowd[n], -sizes[n], first[n], n))


def place_well(buffers: Buffers, lower_bound: int, repairs_max: int = REPAIRS_MAX) -> Layout:
    """The lowest layout found; stops at the lower bound or when every order was repaired.

    Static orders first, into the lowest and into the tightest hole. Then each order is repaired
    for up to `repairs_max` rounds, the most promising first.
    """
    best: Layout | None = None
    tried: list[tuple[int, int, list[int]]] = []
    for number, order in enumerate(_orders(buffers)):
        for tight in (False, True):
            layout = place(buffers, order, lower_bound, tight)
            if best is None or layout.peak < best.peak:
                best = layout
            if best.peak <= lower_bound:
                return best
            if not tight:
                tried.append((layout.peak, number, order))
    assert best is not None
    for _, _, order in sorted(tried):
        best = min(best, _repaired(buffers, order, lower_bound, repairs_max), key=lambda x: x.peak)
        if best.peak <= lower_bound:
            break
    return best


def _repaired(buffers: Buffers, order: Sequence[int], lower_bound: int, repairs_max: int) -> Layout:
    """The best layout met while the buffer that first left the bound moves up in the order."""
    order = list(order)
    best = layout = place(buffers, order, lower_bound)
    for _ in range(repairs_max):
        at = order.index(layout.first_over) if layout.first_over is not None else 0
        if at == 0:
            break
        order.insert(at // 2, order.pop(at))
        layout = place(buffers, order, lower_bound)
        if layout.peak < best.peak:
            best = layout
    return best
