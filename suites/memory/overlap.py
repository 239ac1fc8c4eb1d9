"""Which buffers share bytes although neither is over before the other begins, found in two ways.

It knows rectangles and an order, not where they come from. `overlap_plain` compares every pair;
`overlap_sweep` walks the buffers in order of their first op over a map of who held which bytes
last, and is fast enough for a million. Both return the same pairs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Precedes = Callable[[int, int], bool]
"""Whether the buffer of the first number is over before that of the second begins."""


@dataclass(frozen=True)
class Spans:
    """Buffers as bytes `start` to before `end`, and ops `first` up to and including `last`.

    owner  buffers with the same owner share bytes on purpose and are never reported
    """

    start: Sequence[int]
    end: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]
    owner: Sequence[int]

    def __len__(self) -> int:
        return len(self.start)

    def by_index(self) -> Precedes:
        """The order of a single stream: over before the other begins, by op index."""
        first, last = self.first, self.last
        return lambda a, b: last[a] < first[b]


def overlap_plain(spans: Spans, precedes: Precedes | None = None) -> list[tuple[int, int]]:
    """All offending pairs of numbers, lower number first, sorted; quadratic in time."""
    precedes = precedes or spans.by_index()
    start, end = np.asarray(spans.start), np.asarray(spans.end)
    owner = np.asarray(spans.owner)
    pairs = []
    for one in range(len(spans)):
        low = np.maximum(start[one + 1 :], start[one])
        high = np.minimum(end[one + 1 :], end[one])
        meets = (low < high) & (owner[one + 1 :] != owner[one])
        for other in (np.flatnonzero(meets) + one + 1).tolist():
            if not precedes(one, other) and not precedes(other, one):
                pairs.append((one, other))
    return pairs


class _Ground:
    """The bytes of an arena, cut into stretches that remember who held them last.

    Stretch i runs from cuts[i] to before cuts[i + 1]; the first and the last are nobody's.
    """

    def __init__(self) -> None:
        self.cuts: list[int] = [-1]
        self.holders: list[tuple[int, ...]] = [()]

    def hold(self, start: int, end: int, newcomer: int, precedes: Precedes) -> list[int]:
        """Put the newcomer on its bytes; who was there before, in order of address.

        An earlier holder stays beside the newcomer unless it is over before the newcomer begins.
        """
        cuts, holders = self.cuts, self.holders
        low = bisect_right(cuts, start) - 1
        high = bisect_left(cuts, end)
        before = holders[low:high]
        seen: dict[int, None] = {}
        for names in before:
            seen.update(dict.fromkeys(names))
        kept = {name for name in seen if not precedes(name, newcomer)}
        if kept:
            new_cuts = [start, *cuts[low + 1 : high]]
            new_holders = [(*(n for n in names if n in kept), newcomer) for names in before]
        else:
            new_cuts, new_holders = [start], [(newcomer,)]
        if cuts[low] < start:
            new_cuts.insert(0, cuts[low])
            new_holders.insert(0, before[0])
        if high == len(cuts) or cuts[high] > end:
            new_cuts.append(end)
            new_holders.append(before[-1])
        cuts[low:high] = new_cuts
        holders[low:high] = new_holders
        return list(seen)


def overlap_sweep(spans: Spans, precedes: Precedes | None = None) -> list[tuple[int, int]]:
    """The same pairs as `overlap_plain`, in about n log n steps when few buffers offend.

    A buffer displaces from its bytes whoever is over before it. Order is transitive, so asking
    the last holders is enough; only behind a holder that offends can an earlier one offend too,
    and those are looked up among the buffers it displaced.
    """
    precedes = precedes or spans.by_index()
    start, end, owner = spans.start, spans.end, spans.owner
    ground = _Ground()
    displaced: dict[int, list[int]] = {}
    pairs: set[tuple[int, int]] = set()
    order = sorted(range(len(spans)), key=lambda n: (spans.first[n], n))
    for newcomer in order:
        if start[newcomer] >= end[newcomer]:
            continue
        held = ground.hold(start[newcomer], end[newcomer], newcomer, precedes)
        displaced[newcomer] = held
        waiting, asked = list(held), set(held)
        while waiting:
            holder = waiting.pop()
            if precedes(holder, newcomer):
                continue
            meets = start[holder] < end[newcomer] and start[newcomer] < end[holder]
            if meets and owner[holder] != owner[newcomer]:
                pairs.add((min(holder, newcomer), max(holder, newcomer)))
            fresh = [name for name in displaced[holder] if name not in asked]
            asked.update(fresh)
            waiting += fresh
    return sorted(pairs)
