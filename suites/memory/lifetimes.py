"""The lifetime oracle: every buffer's life recomputed from a graph's ops alone.

It does not know the planner, its offsets or its idea of an alias. Happens-before is kept as one
bit set of finished ops per op; a family is everything that shares bytes by aliases, of any
depth, or by in-place pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from engine.ir import Graph, Op


@dataclass(frozen=True)
class Family:
    """Tensors on the same bytes.

    kind      of the tensor that no member aliases further
    places    byte offset of each member from the head
    accesses  bit set of the ops that touch any member
    ready     bit set of the ops that have finished before any of these can start
    extent    bytes from the first to past the last of any member, relative to the head
    """

    head: str
    kind: str
    places: Mapping[str, int]
    accesses: int
    ready: int
    extent: tuple[int, int]

    @property
    def first(self) -> int:
        """Index of the first op that touches the family, -1 when none does."""
        return (self.accesses & -self.accesses).bit_length() - 1

    @property
    def last(self) -> int:
        """Index of the last op that touches the family, -1 when none does."""
        return self.accesses.bit_length() - 1

    def is_over_before(self, other: Family) -> bool:
        """True when every access here has finished before any access of `other` can start."""
        return self.accesses & ~other.ready == 0


@dataclass(frozen=True)
class Access:
    """One op touching one tensor, at bytes relative to the head of the family."""

    op: int
    tensor: str
    reads: bool
    writes: bool


class Oracle:
    """Lives, order and accesses of one graph; nothing here changes after construction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def finished_before(self) -> tuple[int, ...]:
        """Per op, the bit set of ops that have finished before it starts.

        A wait for an op that is unknown or issued later orders nothing.
        """
        number = {op.name: index for index, op in enumerate(self.graph.ops)}
        latest: dict[str, int] = {}
        finished: list[int] = []
        for index, op in enumerate(self.graph.ops):
            known = 0
            causes = [number[name] for name in op.waits if number.get(name, index) < index]
            if op.stream in latest:
                causes.append(latest[op.stream])
            for cause in causes:
                known |= finished[cause] | 1 << cause
            finished.append(known)
            latest[op.stream] = index
        return tuple(finished)

    def is_ordered(self, first: int, second: int) -> bool:
        """True when one of two ops has finished before the other starts, or they are one op."""
        if first == second:
            return True
        early, late = min(first, second), max(first, second)
        return bool(self.finished_before[late] >> early & 1)

    @cached_property
    def _places(self) -> Mapping[str, tuple[str, int]]:
        """Per tensor, the head of its family and its byte offset from it."""
        links: dict[str, tuple[str, int]] = {}

        def find(name: str) -> tuple[str, int]:
            path, offset = [], 0
            while name in links:
                path.append(name)
                name = links[name][0]
            for step in reversed(path):
                offset += links[step][1]
                links[step] = (name, offset)
            return name, offset

        for tensor in self.graph.tensors.values():
            if tensor.alias_of in self.graph.tensors:
                base, at = find(tensor.alias_of)
                if base == tensor.name:
                    continue
                links[tensor.name] = (base, at + tensor.alias_offset_bytes)
        for op in self.graph.ops:
            for source, target in op.inplace:
                (head, at), (other, other_at) = find(source), find(target)
                if head != other:
                    links[other] = (head, at - other_at)
        return {name: find(name) for name in self.graph.tensors}

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """Every tensor's family, by the tensor's name."""
        graph = self.graph
        members: dict[str, dict[str, int]] = {}
        for name, (head, offset) in self._places.items():
            members.setdefault(head, {})[name] = offset
        touched = dict.fromkeys(members, 0)
        ready = dict.fromkeys(members, -1)
        for index, op in enumerate(graph.ops):
            for head in {self._places[name][0] for name in op.touched}:
                touched[head] |= 1 << index
                ready[head] &= self.finished_before[index]
        found = {}
        for head, places in members.items():
            spans = [
                (at, at + graph.tensors[name].size_bytes(graph.limits))
                for name, at in places.items()
            ]
            extent = (min(start for start, _ in spans), max(end for _, end in spans))
            kind = graph.tensors[head].kind
            family = Family(head, kind, places, touched[head], ready[head], extent)
            found.update(dict.fromkeys(places, family))
        return found

    @cached_property
    def accesses(self) -> Mapping[str, tuple[Access, ...]]:
        """Per family head, all accesses in issue order."""
        found: dict[str, list[Access]] = {}
        for index, op in enumerate(self.graph.ops):
            for name, (reads, writes) in _uses(op).items():
                access = Access(index, name, reads, writes)
                found.setdefault(self._places[name][0], []).append(access)
        return {head: tuple(rows) for head, rows in found.items()}

    def live_at(self, index: int) -> tuple[Family, ...]:
        """Temporary families with an access at or before and one at or after op `index`."""
        heads = {family.head: family for family in self.families.values()}
        return tuple(
            family
            for family in heads.values()
            if family.kind == "temp" and 0 <= family.first <= index <= family.last
        )


def _uses(op: Op) -> dict[str, tuple[bool, bool]]:
    """What an op does with each tensor it touches: (reads, writes)."""
    uses = dict.fromkeys(op.inputs, (True, False))
    for name in op.outputs + op.scratch:
        uses[name] = (name in op.inputs, True)
    return uses
