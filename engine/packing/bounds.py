"""Lower bounds on the peak of any placement.

What is live at once must lie side by side, so the largest sum of sizes over a section (a set of
buffers any two of which conflict) is a bound; the liveness bound is that over all moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.packing.data import Buffer


def liveness_bound_bytes(buffers: Sequence[Buffer]) -> int:
    """The largest sum of sizes of buffers live at one moment."""
    change: dict[int, int] = {}
    for buffer in buffers:
        for start, stop in buffer.lives:
            change[start] = change.get(start, 0) + buffer.size
            change[stop] = change.get(stop, 0) - buffer.size
    level = highest = 0
    for time in sorted(change):
        level += change[time]
        highest = max(highest, level)
    assert level == 0, f"{level} bytes are still live after the last end"
    return highest


def clique_bound_bytes(sizes: Sequence[int], sections: Iterable[Iterable[int]]) -> int:
    """The largest sum of sizes over the given cliques, and at least the largest single size."""
    sums = (sum(sizes[index] for index in section) for section in sections)
    return max(max(sums, default=0), max(sizes, default=0))
