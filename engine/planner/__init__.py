"""The memory planner: from graphs to one byte offset per temporary, under a named strategy.

`none`     every temporary of every graph has bytes of its own
`pools`    one fixed pool per phase, a carry pool between phases, one pool for op scratch
`planned`  any two temporaries share bytes when one is over before the other begins
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import UsageError, must_be_one_of
from engine.ir import Graph
from engine.planner.lives import (
    Group,
    clocks_of,
    conflicts_of,
    groups_of,
    lower_bound_bytes,
)
from engine.planner.place import Buffers, neighbours_of, place
from engine.planner.plan import ARENA, Arena, GraphPlan, Plan, to_allocations, to_temporaries
from engine.planner.pools import pool_names, same_instance
from engine.planner.ranks import for_rank, widest
from engine.planner.search import place_well
from engine.units import round_up

__all__ = [
    "ARENA",
    "STRATEGIES",
    "Arena",
    "GraphPlan",
    "Plan",
    "plan_graphs",
    "plan_ranks",
    "to_allocations",
    "to_temporaries",
]

STRATEGIES = ("planned", "pools", "none")


@dataclass(frozen=True)
class _Subject:
    """One graph with what every strategy asks about it."""

    graph: Graph
    groups: tuple[Group, ...]
    conflicts: np.ndarray
    lower_bound: int


def plan_graphs(graphs: Sequence[Graph], strategy: str, alignment: int = 256) -> Plan:
    """Plan all graphs of a rank; offsets are multiples of `alignment` bytes.

    Raises UsageError for an unknown strategy; asserts on graphs that are not legal.
    """
    if strategy not in STRATEGIES:
        raise UsageError(must_be_one_of("scratch strategy", strategy, STRATEGIES))
    assert alignment > 0, f"alignment is {alignment}"
    assert len({g.name for g in graphs}) == len(graphs), "two graphs have one name"
    subjects = [_subject(graph, alignment) for graph in graphs]
    pools = {"none": _no_reuse, "pools": _phase_pools, "planned": _full_reuse}[strategy]
    return _assemble(strategy, alignment, subjects, pools(subjects, alignment))


def plan_ranks(
    graphs: Sequence[Sequence[Graph]], strategy: str, alignment: int = 256
) -> tuple[Plan, ...]:
    """One layout for all ranks, planned once (see `planner.ranks`); a plan for each of them."""
    common = plan_graphs([widest(same) for same in zip(*graphs, strict=True)], strategy, alignment)
    return tuple(for_rank(common, own) for own in graphs)


def _subject(graph: Graph, alignment: int) -> _Subject:
    clocks = clocks_of(graph)
    groups = groups_of(graph, alignment)
    conflicts = conflicts_of(groups, clocks)
    bound = lower_bound_bytes(groups, clocks, conflicts, alignment)
    return _Subject(graph, groups, conflicts, bound)


@dataclass(frozen=True)
class _Placed:
    """Per graph and group, the name of its pool and the offset inside it."""

    categories: Mapping[str, str]
    pools: Sequence[Sequence[str]]
    offsets: Sequence[Sequence[int]]


def _buffers(subject: _Subject, picked: Sequence[int], conflicts: np.ndarray, step: int) -> Buffers:
    groups = [subject.groups[number] for number in picked]
    return Buffers(
        sizes=tuple(round_up(group.size_bytes, step) for group in groups),
        first=tuple(group.first_access for group in groups),
        last=tuple(group.last_access for group in groups),
        neighbours=neighbours_of(conflicts[np.ix_(picked, picked)]),
    )


def _solid(subject: _Subject) -> list[int]:
    return [n for n, group in enumerate(subject.groups) if group.size_bytes > 0]


def _no_reuse(subjects: Sequence[_Subject], alignment: int) -> _Placed:
    offsets, end = [], 0
    for subject in subjects:
        row = []
        for group in subject.groups:
            row.append(end)
            end += round_up(group.size_bytes, alignment)
        offsets.append(row)
    return _Placed({ARENA: "temporaries"}, [[ARENA] * len(row) for row in offsets], offsets)


def _full_reuse(subjects: Sequence[_Subject], alignment: int) -> _Placed:
    offsets = []
    for subject in subjects:
        picked = _solid(subject)
        buffers = _buffers(subject, picked, subject.conflicts, alignment)
        placed = place_well(buffers, subject.lower_bound, alignment)
        row = [0] * len(subject.groups)
        for number, offset in zip(picked, placed, strict=True):
            row[number] = offset
        offsets.append(row)
    return _Placed({ARENA: "temporaries"}, [[ARENA] * len(row) for row in offsets], offsets)


def _phase_pools(subjects: Sequence[_Subject], alignment: int) -> _Placed:
    categories: dict[str, str] = {}
    pools, offsets = [], []
    for subject in subjects:
        named = pool_names(subject.graph, subject.groups)
        conflicts = subject.conflicts | same_instance(subject.graph, subject.groups)
        row = [0] * len(subject.groups)
        for pool, category in dict.fromkeys(named):
            picked = [n for n in _solid(subject) if named[n] == (pool, category)]
            buffers = _buffers(subject, picked, conflicts, alignment)
            placed = place(buffers, range(len(picked)))
            categories[pool] = category
            for number, offset in zip(picked, placed, strict=True):
                row[number] = offset
        pools.append([pool for pool, _ in named])
        offsets.append(row)
    return _Placed(dict(sorted(categories.items())), pools, offsets)


def _assemble(strategy: str, alignment: int, subjects: Sequence[_Subject], placed: _Placed) -> Plan:
    """Give every pool its place in the address space and every graph its offsets."""
    sizes = dict.fromkeys(placed.categories, 0)
    for subject, pools, offsets in zip(subjects, placed.pools, placed.offsets, strict=True):
        for group, pool, offset in zip(subject.groups, pools, offsets, strict=True):
            sizes[pool] = max(sizes[pool], offset + round_up(group.size_bytes, alignment))
    arenas, start = {}, 0
    for pool, category in placed.categories.items():
        arenas[pool] = Arena(pool, category, start, sizes[pool])
        start += sizes[pool]
    graphs = {}
    for subject, pools, offsets in zip(subjects, placed.pools, placed.offsets, strict=True):
        starts = [
            arenas[pool].offset_bytes + offset for pool, offset in zip(pools, offsets, strict=True)
        ]
        graphs[subject.graph.name] = _graph_plan(subject, starts, alignment)
    return Plan(strategy, alignment, graphs, arenas)


def _graph_plan(subject: _Subject, starts: Sequence[int], alignment: int) -> GraphPlan:
    solid = _solid(subject)
    low = min((starts[n] for n in solid), default=0)
    ends = (starts[n] + round_up(subject.groups[n].size_bytes, alignment) for n in solid)
    high = max(ends, default=0)
    offsets, sizes, heads, first, last = {}, {}, {}, {}, {}
    for group, start in zip(subject.groups, starts, strict=True):
        head = next(iter(group.places))
        for name, place_in_group in group.places.items():
            # An empty tensor gets the place past all others, where no live buffer can be.
            offsets[name] = start + place_in_group if group.sizes[name] else high
            sizes[name] = group.sizes[name]
            heads[name] = head
            first[name] = group.first_access
            last[name] = group.last_access
    assert high - low >= subject.lower_bound, (
        f"{subject.graph.name}: peak {high - low} is below its lower bound {subject.lower_bound}"
    )
    return GraphPlan(
        graph=subject.graph.name,
        digest=subject.graph.digest,
        offsets=offsets,
        sizes=sizes,
        heads=heads,
        first_write=first,
        last_access=last,
        peak_bytes=high - low,
        lower_bound_bytes=subject.lower_bound,
    )
