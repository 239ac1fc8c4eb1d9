"""Greedy placement: buffers one after another in several orders, each in the lowest hole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def _aligned(offsets: np.ndarray | int, alignment: int) -> np.ndarray | int:
    return -(-offsets // alignment) * alignment


def lowest_hole(starts: np.ndarray, ends: np.ndarray, size: int, alignment: int) -> int:
    """The lowest aligned offset where `size` bytes overlap none of the intervals given."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    candidates = np.concatenate(([0], np.maximum.accumulate(ends)))
    candidates = _aligned(candidates, alignment)
    free = candidates[:-1] + size <= starts
    position = int(np.argmax(free)) if free.any() else len(starts)
    return int(candidates[position])


def place_in_order(
    order: Sequence[int],
    sizes: np.ndarray,
    alignments: np.ndarray,
    neighbours: Sequence[np.ndarray],
) -> np.ndarray:
    """Offsets [buffers] when each buffer in turn takes the lowest hole among those before it."""
    offsets = np.full(len(sizes), -1, dtype=np.int64)
    for index in order:
        others = neighbours[index]
        others = others[offsets[others] >= 0]
        starts = offsets[others]
        offsets[index] = lowest_hole(
            starts, starts + sizes[others], int(sizes[index]), int(alignments[index])
        )
    return offsets


def orders_of(sizes: np.ndarray, widths: np.ndarray, loads: np.ndarray) -> Mapping[str, np.ndarray]:
    """Named orders, best bets first; ties go to the lower index.

    widths   per buffer, in how many sections it is live
    loads    per buffer, the largest sum of sizes over its sections
    """

    def descending(*keys: np.ndarray) -> np.ndarray:
        return np.lexsort([-key for key in reversed(keys)])

    return {
        "size": descending(sizes, widths),
        "area": descending(sizes * widths, sizes),
        "width": descending(widths, sizes),
        "load": descending(loads, sizes),
        "load-area": descending(loads, sizes * widths),
        "input": np.arange(len(sizes)),
    }


def best_greedy(
    sizes: np.ndarray,
    alignments: np.ndarray,
    neighbours: Sequence[np.ndarray],
    orders: Mapping[str, np.ndarray],
    bound_bytes: int,
) -> tuple[np.ndarray, str, int]:
    """The offsets with the lowest peak, the name of its order and how many orders were tried.

    Stops early when a peak reaches `bound_bytes`; of equal peaks the first order wins.
    """
    best: tuple[int, str, np.ndarray] | None = None
    tried = 0
    for name, order in orders.items():
        offsets = place_in_order(order, sizes, alignments, neighbours)
        peak = int((offsets + sizes).max(initial=0))
        tried += 1
        if best is None or peak < best[0]:
            best = (peak, name, offsets)
        if best[0] <= bound_bytes:
            break
    assert best is not None, "greedy placement needs at least one order"
    return best[2], best[1], tried
