"""Who shares bytes with whom, when each buffer lives, and which buffers may not meet in memory.

"Live" is judged by happens-before, not by position: program order inside a stream plus the ops'
waits, transitively. A buffer may follow another on the same bytes only if every access of the
first has finished before any access of the second can start, in every schedule the waits allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.ir import Graph
from engine.units import round_up


@dataclass(frozen=True)
class Clocks:
    """How far every stream has come for certain when an op starts.

    stream    per op, the number of its stream
    position  per op, its place in its stream
    before    [ops, streams]: ops of that stream that have finished before this op starts
    """

    stream: np.ndarray
    position: np.ndarray
    before: np.ndarray


def clocks_of(graph: Graph) -> Clocks:
    """Happens-before of a graph as vector clocks; a wait must name an op issued earlier."""
    numbers: dict[str, int] = {}
    for op in graph.ops:
        numbers.setdefault(op.stream, len(numbers))
    width = len(numbers)
    issued = [0] * width
    last_of_stream = [[0] * width for _ in range(width)]
    after: list[list[int]] = []
    stream, position, before = [], [], []
    for index, op in enumerate(graph.ops):
        number = numbers[op.stream]
        clock = list(last_of_stream[number])
        for name in op.waits:
            other = graph.op_index[name]
            assert other < index, f"{graph.name}: {op.name} waits for {name}, which is issued later"
            clock = [max(pair) for pair in zip(clock, after[other], strict=True)]
        stream.append(number)
        position.append(issued[number])
        before.append(clock)
        issued[number] += 1
        clock = list(clock)
        clock[number] = issued[number]
        after.append(clock)
        last_of_stream[number] = clock
    shape = (len(graph.ops), width)
    return Clocks(
        np.array(stream, dtype=np.int64),
        np.array(position, dtype=np.int64),
        np.array(before, dtype=np.int64).reshape(shape),
    )


@dataclass(frozen=True)
class Group:
    """Root temporaries that share bytes because one takes over another's in place.

    places   byte offset of each root inside the group, in order of definition
    sizes    bytes of each root under the graph's limits
    accesses indices of all ops that touch any of them, ascending
    """

    places: Mapping[str, int]
    sizes: Mapping[str, int]
    accesses: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes from the group's first to past its last byte."""
        return max(place + self.sizes[name] for name, place in self.places.items())

    @property
    def first_access(self) -> int:
        """Index of the op that writes the group first."""
        return self.accesses[0]

    @property
    def last_access(self) -> int:
        """Index of the last op that touches the group."""
        return self.accesses[-1]


def _root_sizes(graph: Graph) -> dict[str, int]:
    sizes = {t.name: t.size_bytes(graph.limits) for t in graph.of_kind("temp")}
    for tensor in graph.tensors.values():
        root = graph.root(tensor.name)
        if tensor.alias_of is None or root not in sizes:
            continue
        assert tensor.kind == "temp", (
            f"{graph.name}: {tensor.name} of kind {tensor.kind} lies in temporary {root}, "
            f"whose bytes are given away when its last op has run"
        )
        start = graph.root_offset_bytes(tensor.name)
        end = start + tensor.size_bytes(graph.limits)
        assert start >= 0 and end <= sizes[root], (
            f"{graph.name}: {tensor.name} covers bytes {start}..{end} of {root}, "
            f"which has {sizes[root]}"
        )
    return sizes


def _takeovers(graph: Graph) -> list[tuple[str, str, int]]:
    """(root, root that takes over its bytes, byte offset of the second from the first)."""
    found = []
    for op in graph.ops:
        for source, target in op.inplace:
            first, second = graph.root(source), graph.root(target)
            kinds = {graph.tensors[first].kind, graph.tensors[second].kind}
            if first == second or "temp" not in kinds:
                continue
            assert kinds == {"temp"}, (
                f"{graph.name}: {op.name} writes {target} over {source}, but only one of them is "
                f"a temporary; declare the output as an alias instead"
            )
            old, new = (graph.tensors[n].size_bytes(graph.limits) for n in (source, target))
            assert new <= old, (
                f"{graph.name}: {op.name} writes {target} of {new} bytes over {source} of {old}"
            )
            delta = graph.root_offset_bytes(source) - graph.root_offset_bytes(target)
            found.append((first, second, delta))
    return found


def _placed_together(graph: Graph, roots: Sequence[str]) -> dict[str, tuple[str, int]]:
    """For each root, the first root of its group and the byte offset from it."""
    place = {root: (root, 0) for root in roots}
    members = {root: [root] for root in roots}
    for first, second, delta in _takeovers(graph):
        head, at = place[first]
        other, other_at = place[second]
        if head == other:
            assert other_at == at + delta, (
                f"{graph.name}: {second} would have to start at two places of {head}"
            )
            continue
        shift = at + delta - other_at
        for name in members.pop(other):
            place[name] = (head, place[name][1] + shift)
            members[head].append(name)
    return place


def groups_of(graph: Graph, alignment: int) -> tuple[Group, ...]:
    """The groups of a graph in order of first access; every root temporary is in exactly one."""
    sizes = _root_sizes(graph)
    place = _placed_together(graph, list(sizes))
    members: dict[str, list[str]] = {}
    for root in sizes:
        members.setdefault(place[root][0], []).append(root)
    accesses: dict[str, dict[int, None]] = {head: {} for head in members}
    roots = {name: graph.root(name) for name in graph.tensors}
    for index, op in enumerate(graph.ops):
        for name in op.touched:
            if roots[name] in place:
                accesses[place[roots[name]][0]][index] = None
    groups = []
    for head, names in members.items():
        assert accesses[head], f"{graph.name}: no op touches temporary {head}"
        base = min(place[name][1] for name in names)
        places = {name: place[name][1] - base for name in names}
        for name, start in places.items():
            assert start % alignment == 0, (
                f"{graph.name}: {name} takes over bytes {start} into another buffer, "
                f"not a multiple of {alignment}"
            )
        groups.append(Group(places, {n: sizes[n] for n in names}, tuple(accesses[head])))
    return tuple(sorted(groups, key=lambda group: group.first_access))


def _bounds(groups: Sequence[Group], clocks: Clocks) -> tuple[np.ndarray, np.ndarray]:
    """Per group: past its last position on each stream; how far each stream is before it starts."""
    width = clocks.before.shape[1]
    past = np.zeros((len(groups), width), dtype=np.int64)
    ready = np.zeros((len(groups), width), dtype=np.int64)
    for number, group in enumerate(groups):
        ops = np.array(group.accesses)
        np.maximum.at(past[number], clocks.stream[ops], clocks.position[ops] + 1)
        ready[number] = clocks.before[ops].min(axis=0)
    return past, ready


def conflicts_of(groups: Sequence[Group], clocks: Clocks) -> np.ndarray:
    """Boolean [groups, groups]: True where neither group is over before the other begins."""
    past, ready = _bounds(groups, clocks)
    over_before = np.ones((len(groups), len(groups)), dtype=bool)
    for stream in range(past.shape[1]):
        over_before &= past[:, None, stream] <= ready[None, :, stream]
    conflicts = ~(over_before | over_before.T)
    np.fill_diagonal(conflicts, False)
    return conflicts


def _schedules(clocks: Clocks) -> list[np.ndarray]:
    """Orders in which the ops may run: as issued, and with each stream held back to the last."""
    count, width = clocks.before.shape
    schedules = [np.arange(count)]
    for late in range(width if width > 1 else 0):
        held = np.flatnonzero(clocks.stream == late)
        order: list[int] = []
        done = 0
        for index in np.flatnonzero(clocks.stream != late):
            needed = int(clocks.before[index, late])
            order += held[done:needed].tolist() + [int(index)]
            done = max(done, needed)
        schedules.append(np.array(order + held[done:].tolist()))
    return schedules


def _heaviest_clique(sizes: Sequence[int], conflicts: np.ndarray) -> int:
    """Most bytes of buffers that conflict pairwise, grown greedily around each buffer."""
    packed = np.packbits(conflicts, axis=1, bitorder="little")
    linked = [int.from_bytes(row.tobytes(), "little") for row in packed]
    rank = {n: k for k, n in enumerate(sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)))}
    heaviest = 0
    for number, size in enumerate(sizes):
        common, weight = linked[number], size
        for other in sorted(np.flatnonzero(conflicts[number]).tolist(), key=rank.__getitem__):
            if common >> other & 1:
                weight += sizes[other]
                common &= linked[other]
        heaviest = max(heaviest, weight)
    return heaviest


def lower_bound_bytes(
    groups: Sequence[Group], clocks: Clocks, conflicts: np.ndarray, alignment: int
) -> int:
    """Most bytes that must lie side by side, sizes rounded to `alignment`.

    The larger of what is live at once in any of several possible schedules, and of buffers that
    conflict pairwise although no single moment need show them all. No plan can do with less.
    """
    if not groups:
        return 0
    sizes = np.array([round_up(group.size_bytes, alignment) for group in groups])
    flat = np.concatenate([np.array(group.accesses) for group in groups])
    starts = np.cumsum([0] + [len(group.accesses) for group in groups[:-1]])
    best = _heaviest_clique(sizes.tolist(), conflicts)
    for order in _schedules(clocks):
        time = np.empty(len(order), dtype=np.int64)
        time[order] = np.arange(len(order))
        change = np.zeros(len(order) + 1, dtype=np.int64)
        np.add.at(change, np.minimum.reduceat(time[flat], starts), sizes)
        np.add.at(change, np.maximum.reduceat(time[flat], starts) + 1, -sizes)
        best = max(best, int(np.cumsum(change).max()))
    return best
