"""Giving buffers that may not meet their own bytes: greedy orders, repaired until they fit.

Every order is deterministic and the effort is bounded by counting rounds, not by a clock, so
the same input has the same layout on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.units import round_up

ROUNDS_MAX = 200
"""Repairs that each order gets to fit into the lower bound."""
SLACKS = (1 / 512, 1 / 128, 1 / 32)
"""Shares above the lower bound that are tried in turn when no order fits into it."""


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


def _lowest_hole(size: int, taken: list[tuple[int, int]]) -> int:
    """Lowest place for `size` bytes beside the taken spans, which are sorted."""
    cursor = 0
    for start, end in taken:
        if start - cursor >= size:
            return cursor
        if end > cursor:
            cursor = end
    return cursor


def place(
    buffers: Buffers, order: Sequence[int], limit: int | None = None
) -> tuple[list[int], int | None]:
    """Place the buffers one by one in the given order, each in the lowest hole.

    Returns the offsets and None; with a limit, the place in the order of the first buffer that
    would end above it, where placing stops.
    """
    sizes, neighbours = buffers.sizes, buffers.neighbours
    offsets = [-1] * len(sizes)
    for position, number in enumerate(order):
        size = sizes[number]
        taken = [(at, at + sizes[n]) for n in neighbours[number] if (at := offsets[n]) >= 0]
        taken.sort()
        offsets[number] = at = _lowest_hole(size, taken)
        if limit is not None and at + size > limit:
            return offsets, position
    return offsets, None


def peak_of(buffers: Buffers, offsets: Sequence[int]) -> int:
    """End of the highest buffer."""
    return max((o + s for o, s in zip(offsets, buffers.sizes, strict=True)), default=0)


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


def _fitted(
    buffers: Buffers, order: Sequence[int], limit: int, rounds_max: int
) -> list[int] | None:
    """Offsets within the limit, None when the rounds are used up.

    Whichever buffer does not fit moves half way up the order, and placing starts over: buffers
    that are hard to place gather at the front. Since a round ends at the first that does not
    fit, most rounds are short.
    """
    order = list(order)
    for _ in range(rounds_max):
        offsets, position = place(buffers, order, limit)
        if position is None:
            return offsets
        if position == 0:
            return None
        order.insert(position // 2, order.pop(position))
    return None


def place_well(
    buffers: Buffers, lower_bound: int, step: int = 1, rounds_max: int = ROUNDS_MAX
) -> list[int]:
    """Offsets with the lowest peak found: at the lower bound, or near it, or the best greedy one.

    step  sizes are multiples of it, and so is every limit that is tried
    """
    orders = list(_orders(buffers))
    for order in orders:
        if (offsets := _fitted(buffers, order, lower_bound, rounds_max)) is not None:
            return offsets
    static = [place(buffers, order)[0] for order in orders]
    best = min(static, key=lambda offsets: peak_of(buffers, offsets))
    for slack in SLACKS:
        limit = round_up(lower_bound + int(lower_bound * slack), step)
        if limit >= peak_of(buffers, best):
            break
        for order in orders[:2]:
            if (offsets := _fitted(buffers, order, limit, rounds_max // 2)) is not None:
                return offsets
    return best
