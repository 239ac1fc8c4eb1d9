"""Sections: sets of buffers that are all live at once, so that any two buffers that may not
overlap share a section.

With lives in time, a section is a span between two neighbouring starts or ends. With conflicts
given as a graph, a section is any clique, and the sections must cover every edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.packing.data import Buffer
from engine.packing.errors import PackingInputError


def sections_of(buffers: Sequence[Buffer]) -> list[frozenset[int]]:
    """The sets of indices live at once, in order of time; buffers of size 0 are in none."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for index, buffer in enumerate(buffers):
        if buffer.size:
            for start, stop in buffer.lives:
                events.setdefault(start, ([], []))[0].append(index)
                events.setdefault(stop, ([], []))[1].append(index)
    live: set[int] = set()
    sections: list[frozenset[int]] = []
    for time in sorted(events):
        starting, stopping = events[time]
        live.difference_update(stopping)
        live.update(starting)
        sections.append(frozenset(live))
    assert not live, f"buffers {sorted(live)} never end"
    return [section for section in sections if section]


def maximal_sections(sections: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The same conflicts with fewer sections: one contained in its neighbour says nothing new."""
    kept: list[frozenset[int]] = []
    for section in sections:
        if kept and section <= kept[-1]:
            continue
        while kept and kept[-1] <= section:
            kept.pop()
        if section:
            kept.append(section)
    return kept


def neighbours_of(sections: Iterable[frozenset[int]], count: int) -> list[np.ndarray]:
    """Per buffer of `count`, the ascending indices of the buffers it may not overlap."""
    found: list[set[int]] = [set() for _ in range(count)]
    before: frozenset[int] = frozenset()
    for section in sections:
        arrived = section - before  # pairs of two that stayed are known from the section before
        for index in arrived:
            found[index] |= section
        for index in section & before:
            found[index] |= arrived
        before = section
    for index, others in enumerate(found):
        others.discard(index)
    return [np.array(sorted(others), dtype=np.int64) for others in found]


def clique_sections(
    neighbours: Sequence[np.ndarray], cliques: Iterable[Iterable[int]] = ()
) -> list[frozenset[int]]:
    """Sections that cover every edge of a conflict graph: the given cliques, then greedy ones.

    A clique with a pair that does not conflict is refused.
    """
    linked = [set(row.tolist()) for row in neighbours]
    open_edges = [{j for j in row if j > i} for i, row in enumerate(linked)]
    sections: list[frozenset[int]] = []

    def take(members: list[int]) -> None:
        for position, i in enumerate(members):
            open_edges[i].difference_update(members[position + 1 :])
        sections.append(frozenset(members))

    for clique in cliques:
        members = sorted(set(clique))
        for position, i in enumerate(members):
            strangers = [j for j in members[position + 1 :] if j not in linked[i]]
            if strangers:
                raise PackingInputError(
                    f"cut {members}: buffers {i} and {strangers[0]} do not conflict"
                )
        take(members)
    for i, row in enumerate(linked):
        while open_edges[i]:
            members, common = [i], set(row)
            for j in sorted(open_edges[i]) + sorted(row):
                if j in common:
                    members.append(j)
                    common &= linked[j]
            take(sorted(members))
    alone = set(range(len(linked))).difference(*sections)
    return sections + [frozenset({index}) for index in sorted(alone)]
