"""Making a packing problem smaller before the search, without losing any placement.

A buffer that conflicts with all others of its part can lie at the bottom of it: whatever lies
below it can move up by its size. What is left may fall into parts that share no buffer, and so
on. None of this depends on the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.packing.sections import maximal_sections, neighbours_of
from engine.packing.tricks import Tricks


@dataclass(frozen=True)
class Part:
    """Buffers to be placed from `base_bytes` up, independent of all other parts.

    indices     of its buffers in the whole problem, in an order that does not depend on that of
                the input: by first section, last section, size, alignment
    sections    sets of positions in `indices`
    neighbours  per position, the positions it conflicts with
    """

    base_bytes: int
    indices: tuple[int, ...]
    sections: tuple[frozenset[int], ...]
    sizes: np.ndarray
    alignments: np.ndarray
    neighbours: tuple[np.ndarray, ...]

    @property
    def bound_bytes(self) -> int:
        """Least end of the part's highest buffer, its base included."""
        sums = (sum(int(self.sizes[i]) for i in section) for section in self.sections)
        return self.base_bytes + max(sums)

    @property
    def widths(self) -> np.ndarray:
        """Per buffer, the number of its sections."""
        widths = np.zeros(len(self.indices), dtype=np.int64)
        for section in self.sections:
            widths[list(section)] += 1
        return widths

    @property
    def loads(self) -> np.ndarray:
        """Per buffer, the largest sum of sizes over its sections."""
        loads = np.zeros(len(self.indices), dtype=np.int64)
        for section in self.sections:
            members = list(section)
            loads[members] = np.maximum(loads[members], self.sizes[members].sum())
        return loads


@dataclass(frozen=True)
class Reduced:
    """Offsets that are settled, the parts that are left, and what was saved."""

    settled: dict[int, int]
    parts: tuple[Part, ...]
    sections_merged: int


def _components(sections: Sequence[frozenset[int]]) -> list[list[frozenset[int]]]:
    """Sections grouped so that no buffer is in two groups, in order of their first section."""
    leader = {index: index for section in sections for index in section}

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for section in sections:
        first, *others = section
        for index in others:
            leader[find(index)] = find(first)
    groups: dict[int, list[frozenset[int]]] = {}
    for section in sections:
        groups.setdefault(find(next(iter(section))), []).append(section)
    return list(groups.values())


def _part(
    base_bytes: int, sections: Sequence[frozenset[int]], sizes: Sequence[int], aligns: Sequence[int]
) -> Part:
    spans: dict[int, list[int]] = {}
    for number, section in enumerate(sections):
        for index in section:
            spans.setdefault(index, []).append(number)
    indices = sorted(
        spans, key=lambda i: (spans[i][0], -spans[i][-1], -sizes[i], -aligns[i], spans[i], i)
    )
    position = {index: p for p, index in enumerate(indices)}
    local = tuple(frozenset(position[i] for i in section) for section in sections)
    return Part(
        base_bytes,
        tuple(indices),
        local,
        np.array([sizes[i] for i in indices], dtype=np.int64),
        np.array([aligns[i] for i in indices], dtype=np.int64),
        tuple(neighbours_of(local, len(indices))),
    )


def reduce_problem(
    sizes: Sequence[int],
    alignments: Sequence[int],
    sections: Sequence[frozenset[int]],
    tricks: Tricks,
) -> Reduced:
    """Settles what can be settled and splits the rest; buffers in no section get offset 0.

    Up to buffers that are interchangeable the result does not depend on the order of the input.
    """
    settled = dict.fromkeys(set(range(len(sizes))).difference(*sections), 0)
    parts: list[Part] = []
    merged = 0
    open_parts: list[tuple[int, list[frozenset[int]]]] = [(0, [s for s in sections if s])]
    while open_parts:
        base, rows = open_parts.pop()
        if not rows:
            continue
        if tricks.merge_sections:
            kept = maximal_sections(rows)
            merged += len(rows) - len(kept)
            rows = kept
        common = frozenset.intersection(*rows) if tricks.spanning else frozenset()
        unit = math.lcm(*(alignments[i] for i in frozenset().union(*rows)))
        fixed = (i for i in common if sizes[i] % unit == 0)
        bottom = sorted(fixed, key=lambda i: (-sizes[i], i))
        if bottom:
            for index in bottom:
                settled[index] = base
                base += sizes[index]
            rest = [row.difference(bottom) for row in rows]
            open_parts.append((base, [row for row in rest if row]))
            continue
        groups = _components(rows)
        if len(groups) > 1:
            open_parts += [(base, group) for group in groups]
        else:
            parts.append(_part(base, rows, sizes, alignments))
    return Reduced(settled, tuple(parts), merged)
