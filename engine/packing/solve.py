"""Packing from end to end: greedy first, then the exact search towards a capacity or the bound.

Results depend on the input and the node budget only. A deadline, if one is given, can end the
search early, and then the placement is the best found so far.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from engine.packing.bounds import clique_bound_bytes
from engine.packing.data import Buffer, Instance, Placement
from engine.packing.errors import DoesNotFitError, GaveUpError, PackingInputError
from engine.packing.greedy import best_greedy, orders_of
from engine.packing.portfolio import search_part
from engine.packing.reduce import Part, Reduced, reduce_problem
from engine.packing.sections import clique_sections, sections_of
from engine.packing.tricks import ALL_TRICKS, Tricks

NODES_MAX = 20_000_000
"""Choices of the search before it gives up on a capacity that was asked for."""
NODES_MAX_UNASKED = 60_000
"""Choices of the search for the lowest peak when no capacity is asked for."""
BISECTIONS_MAX = 6
"""Peaks tried between the bound and the best known one; each gets an equal share of nodes."""

Conflicts = np.ndarray | Iterable[tuple[int, int]] | Callable[[int, int], bool]


@dataclass(frozen=True)
class _Run:
    """One call of the packer: the problem in sections, the budget, and what was counted."""

    ids: tuple[str, ...]
    sizes: tuple[int, ...]
    durations: np.ndarray
    reduced: Reduced
    bound_bytes: int
    tricks: Tricks
    seed: int
    out_of_time: Callable[[], bool]
    counters: Counter

    def placement(self, offsets: Sequence[int], strategy: str) -> Placement:
        ends = (offset + size for offset, size in zip(offsets, self.sizes, strict=True))
        return Placement(
            self.ids,
            tuple(int(offset) for offset in offsets),
            int(max(ends, default=0)),
            self.bound_bytes,
            strategy,
            MappingProxyType(dict(sorted(self.counters.items()))),
        )

    def joined(self, parts: Iterable[tuple[Part, np.ndarray]]) -> list[int]:
        """Offsets of the whole problem from those of its parts."""
        offsets = dict(self.reduced.settled)
        for part, local in parts:
            for index, offset in zip(part.indices, local.tolist(), strict=True):
                offsets[index] = part.base_bytes + offset
        return [offsets[index] for index in range(len(self.sizes))]


def _greedy_part(run: _Run, part: Part, target_bytes: int) -> tuple[np.ndarray, str]:
    orders = orders_of(part.sizes, part.widths, part.loads)
    offsets, name, tried = best_greedy(
        part.sizes, part.alignments, part.neighbours, orders, target_bytes - part.base_bytes
    )
    run.counters["greedy_orders"] += tried
    return offsets, name


def _greedy(run: _Run, target_bytes: int) -> tuple[list[tuple[Part, np.ndarray]], str]:
    """Every part placed greedily; the strategy names the order of the highest part."""
    placed, highest, strategy = [], -1, "greedy:settled"
    for part in run.reduced.parts:
        offsets, name = _greedy_part(run, part, target_bytes)
        peak = part.base_bytes + int((offsets + part.sizes).max())
        if peak > highest:
            highest, strategy = peak, f"greedy:{name}"
        placed.append((part, offsets))
    return placed, strategy


def _search(
    run: _Run, placed: Sequence[tuple[Part, np.ndarray]], capacity_bytes: int, nodes_max: int
) -> tuple[str, list[tuple[Part, np.ndarray]], str]:
    """Parts that do not fit are searched: verdict, all parts' offsets if found, and strategy."""
    found, strategy, left = [], "greedy", nodes_max
    for part, offsets in placed:
        if part.base_bytes + int((offsets + part.sizes).max()) <= capacity_bytes:
            found.append((part, offsets))
            continue
        durations = run.durations[list(part.indices)]
        outcome = search_part(
            part, durations, capacity_bytes, left, run.tricks, run.seed, run.out_of_time
        )
        run.counters.update(outcome.counters)
        left -= outcome.counters["nodes"]
        if outcome.offsets is None:
            return outcome.verdict, [], ""
        found.append((part, outcome.offsets))
        strategy = f"search:{outcome.order}"
    return "found", found, strategy


def _fit(run: _Run, capacity_bytes: int, nodes_max: int) -> Placement:
    if run.bound_bytes > capacity_bytes:
        raise DoesNotFitError(
            f"buffers need {run.bound_bytes} bytes at one moment; the capacity is {capacity_bytes}",
            run.counters,
        )
    placed, strategy = _greedy(run, capacity_bytes)
    verdict, found, searched = _search(run, placed, capacity_bytes, nodes_max)
    if verdict == "proven":
        raise DoesNotFitError(
            f"no placement within {capacity_bytes} bytes exists, although the buffers live at one "
            f"moment sum to {run.bound_bytes} at most; {run.counters['nodes']} choices prove it",
            run.counters,
        )
    if verdict == "open":
        peak = run.placement(run.joined(placed), strategy).peak_bytes
        raise GaveUpError(
            f"no placement within {capacity_bytes} bytes found in {run.counters['nodes']} choices; "
            f"lower bound {run.bound_bytes}, greedy peak {peak}: ask for more choices or capacity",
            run.counters,
        )
    return run.placement(run.joined(found), strategy if searched == "greedy" else searched)


def _lowest(run: _Run, nodes_max: int) -> Placement:
    """The best placement found: half of the choices at the bound, the rest between it and greedy"""
    placed, strategy = _greedy(run, run.bound_bytes)
    best = run.placement(run.joined(placed), strategy)
    low, share = run.bound_bytes, nodes_max // 2
    for step in range(BISECTIONS_MAX + 1):
        if best.peak_bytes <= low or share <= 0 or run.out_of_time():
            break
        target = low if step == 0 else (low + best.peak_bytes) // 2
        if step and target == low:
            break
        verdict, found, strategy = _search(run, placed, target, share)
        if verdict == "found":
            best, placed = run.placement(run.joined(found), strategy), found
        else:
            low = target
        share = (nodes_max - nodes_max // 2) // BISECTIONS_MAX
    return run.placement(best.offsets, best.strategy)


def _run(
    ids: Sequence[str],
    sizes: Sequence[int],
    alignments: Sequence[int],
    durations: Sequence[int],
    sections: Sequence[frozenset[int]],
    tricks: Tricks,
    seed: int,
    out_of_time: Callable[[], bool] = lambda: False,
) -> _Run:
    reduced = reduce_problem(sizes, alignments, sections, tricks)
    counters = Counter(
        sections_merged=reduced.sections_merged,
        buffers_settled=len(reduced.settled),
        parts=len(reduced.parts),
    )
    return _Run(
        tuple(ids),
        tuple(sizes),
        np.array(durations, dtype=np.int64),
        reduced,
        clique_bound_bytes(sizes, sections),
        tricks,
        seed,
        out_of_time,
        counters,
    )


def _timer(deadline_s: float | None, clock: Callable[[], float]) -> Callable[[], bool]:
    if deadline_s is None:
        return lambda: False
    end = clock() + deadline_s
    return lambda: clock() >= end


def pack(
    buffers: Sequence[Buffer],
    capacity: int | None = None,
    deadline_s: float | None = None,
    *,
    nodes_max: int | None = None,
    tricks: Tricks = ALL_TRICKS,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Offsets for buffers that live in time.

    capacity    bytes to fit into; None asks for the lowest peak that the budget finds
    deadline_s  seconds after which no further run of the search is started; None for no limit.
                Results are reproducible when it is not reached
    nodes_max   choices the search may make; by default NODES_MAX, or NODES_MAX_UNASKED without a
                capacity
    seed        of the random part of the search's restarts
    Raises PackingInputError for malformed buffers, DoesNotFitError when it is proven that they do
    not fit, GaveUpError when the budget ran out first.
    """
    instance = Instance(tuple(buffers))
    run = _run(
        [buffer.id for buffer in buffers],
        instance.sizes,
        instance.alignments,
        [sum(stop - start for start, stop in buffer.lives) for buffer in buffers],
        sections_of(buffers),
        tricks,
        seed,
        _timer(deadline_s, clock),
    )
    if capacity is None:
        return _lowest(run, NODES_MAX_UNASKED if nodes_max is None else nodes_max)
    return _fit(run, capacity, NODES_MAX if nodes_max is None else nodes_max)


def _neighbours(count: int, sizes: Sequence[int], conflicts: Conflicts) -> list[np.ndarray]:
    """Conflicts in any accepted form as ascending neighbours, without buffers of size 0."""
    linked = np.zeros((count, count), dtype=bool)
    if callable(conflicts):
        for i in range(count):
            for j in range(i):
                linked[i, j] = conflicts(i, j)
    elif isinstance(conflicts, np.ndarray):
        if conflicts.shape != (count, count):
            raise PackingInputError(
                f"conflict matrix has shape {conflicts.shape}; accepted: {(count, count)}"
            )
        linked |= conflicts.astype(bool)
    else:
        for i, j in conflicts:
            if not (0 <= i < count and 0 <= j < count):
                raise PackingInputError(f"conflict ({i}, {j}) is outside 0..{count - 1}")
            linked[i, j] = True
    linked |= linked.T
    empty = np.array(sizes) == 0
    linked[empty] = False
    linked[:, empty] = False
    np.fill_diagonal(linked, False)
    return [np.flatnonzero(row) for row in linked]


def pack_conflicts(
    sizes: Sequence[int],
    alignments: Sequence[int],
    conflicts: Conflicts,
    *,
    cuts: Iterable[Iterable[int]] = (),
    capacity: int | None = None,
    nodes_max: int = 0,
    tricks: Tricks = ALL_TRICKS,
    seed: int = 0,
) -> Placement:
    """Offsets for buffers whose conflicts are any graph, not only lives in one order of time.

    conflicts   a predicate on two indices, a boolean matrix [buffers, buffers] or pairs; either
                direction of a pair counts for both
    cuts        sets of indices any two of which conflict, such as what is live at one moment of
                one stream; the lower bound is the largest sum over these and over cliques found
                greedily
    nodes_max   choices of the exact search; 0 for greedy only
    The ids of the placement are the indices as text. Errors are those of pack.
    """
    ids = [str(index) for index in range(len(sizes))]
    checked = Instance(
        tuple(Buffer(i, 0, 1, s, a) for i, s, a in zip(ids, sizes, alignments, strict=True))
    )
    neighbours = _neighbours(len(sizes), sizes, conflicts)
    solid = [[i for i in cut if sizes[i]] for cut in cuts]
    sections = clique_sections(neighbours, solid)
    ones = [1] * len(ids)
    run = _run(ids, checked.sizes, checked.alignments, ones, sections, tricks, seed)
    return _lowest(run, nodes_max) if capacity is None else _fit(run, capacity, nodes_max)
