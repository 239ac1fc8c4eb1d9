"""Placing buffers one by one, each in the lowest hole beside those it may not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


def place_among(
    buffers: Buffers, offsets: list[int], order: Sequence[int], limit: int | None = None
) -> int | None:
    """Give the buffers of `order` their places in `offsets`, where -1 means not placed yet.

    Returns None; with a limit, the position in the order of the first buffer that would end above
    it. Placing stops there, and what this call has placed is taken back.
    """
    sizes, neighbours = buffers.sizes, buffers.neighbours
    for position, number in enumerate(order):
        size = sizes[number]
        taken = [(at, at + sizes[n]) for n in neighbours[number] if (at := offsets[n]) >= 0]
        taken.sort()
        at = _lowest_hole(size, taken)
        if limit is not None and at + size > limit:
            for placed in order[:position]:
                offsets[placed] = -1
            return position
        offsets[number] = at
    return None


def place(buffers: Buffers, order: Sequence[int]) -> list[int]:
    """Offsets of all buffers, placed in the given order."""
    offsets = [-1] * len(buffers.sizes)
    place_among(buffers, offsets, order)
    return offsets


def peak_of(buffers: Buffers, offsets: Sequence[int]) -> int:
    """End of the highest buffer."""
    return max((o + s for o, s in zip(offsets, buffers.sizes, strict=True)), default=0)


def orders_of(buffers: Buffers, numbers: Sequence[int]) -> list[list[int]]:
    """Orders to place in: crowded, large, large times long, long first; then oldest first."""
    sizes, first, last = buffers.sizes, buffers.first, buffers.last

    def life(n: int) -> int:
        return last[n] - first[n] + 1

    crowd = {n: sizes[n] + sum(sizes[m] for m in buffers.neighbours[n]) for n in numbers}
    keys = (
        lambda n: (-crowd[n], -sizes[n], first[n], n),
        lambda n: (-sizes[n], -life(n), first[n], n),
        lambda n: (-sizes[n] * life(n), first[n], n),
        lambda n: (-life(n), -sizes[n], first[n], n),
        lambda n: (first[n], -life(n), n),
    )
    return [sorted(numbers, key=key) for key in keys]
