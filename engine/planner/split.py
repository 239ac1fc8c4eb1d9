"""Cutting a conflict graph into small parts: buffers whose removal lets the rest fall apart.

A model's layers are chained by few buffers. Once those have their places, every layer is a small
problem of its own, and equal layers are the same problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.planner.place import Buffers


def components(buffers: Buffers, among: Iterable[int]) -> list[list[int]]:
    """The connected parts of the given buffers, each ascending, in order of their least number."""
    left = set(among)
    found = []
    for start in sorted(left):
        if start not in left:
            continue
        left.discard(start)
        waiting, part = [start], []
        while waiting:
            number = waiting.pop()
            part.append(number)
            for other in buffers.neighbours[number]:
                if other in left:
                    left.discard(other)
                    waiting.append(other)
        found.append(sorted(part))
    return found


def _separator(buffers: Buffers, part: Sequence[int]) -> list[int]:
    """The fewest buffers that reach over one moment near the middle of a part."""
    inside = set(part)
    order = sorted(part, key=lambda n: (buffers.first[n], n))
    place = {number: at for at, number in enumerate(order)}
    reach = [
        max((place[m] for m in buffers.neighbours[number] if m in inside), default=at)
        for at, number in enumerate(order)
    ]
    change = [0] * (len(order) + 1)
    for at, end in enumerate(reach):
        if end > at:
            change[at + 1] += 1
            change[end + 1] -= 1
    count, crossing = len(order), 0
    best, cut = None, 0
    for moment in range(1, count):
        crossing += change[moment]
        cost = (crossing, abs(moment - count // 2))
        if count // 4 <= moment <= count - count // 4 and (best is None or cost < best):
            best, cut = cost, moment
    return [number for at, number in enumerate(order[:cut]) if reach[at] >= cut]


def separators(buffers: Buffers, part_max: int) -> list[int]:
    """Buffers without which no connected part has more than `part_max` members, ascending."""
    assert part_max > 3, f"parts of {part_max} cannot be cut in the middle"
    taken: set[int] = set()
    waiting = components(buffers, range(len(buffers.sizes)))
    while waiting:
        part = waiting.pop()
        if len(part) <= part_max:
            continue
        crossing = set(_separator(buffers, part))
        taken |= crossing
        waiting += components(buffers, [n for n in part if n not in crossing])
    return sorted(taken)
