"""Restarts of the exact search under several orders, within a budget counted in choices.

Search times are heavy-tailed: most runs that succeed do so after about one choice per buffer, so
many short runs with growing allowance beat one long run. Nothing here depends on a clock except
an optional deadline, which can only end the search early.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.packing.reduce import Part
from engine.packing.tricks import Tricks

SPARE_CHOICES = 50
CHOICES_PER_BUFFER = 1.25
"""Together the allowance of a run in the first round."""
GROWTH = 1.05
"""Factor on the allowance from round to round."""
LONG_SHARE = 0.25
"""After each round one run may take this share of all choices so far: such runs grow
geometrically, so that a problem without a placement is soon searched to its end."""
NOISE = (0.0, 0.3, 1.0, 0.03)
"""Random factors exp(-noise..noise) on what is tried first, round by round, over and over."""
ORDERS = (
    ("width", False),
    ("size", True),
    ("life", True),
    ("volume", True),
    ("area", False),
    ("area", True),
)
"""What is tried first in a section, and whether to branch only at the lowest floor: wide niches
suit crowded problems with long lives, the lowest floor suits many similar buffers."""


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    verdict   "found", "proven" that nothing fits, or "open" when the budget ran out
    offsets   of the part's buffers, from its base, when found
    """

    verdict: str
    offsets: np.ndarray | None
    order: str
    counters: Counter


def board_of(part: Part, capacity_bytes: int):
    """The part in the arrays of packing.board."""
    from engine.packing.board import BUFFER, Board  # compiled code is loaded only where needed

    rows: list[list[int]] = [[] for _ in part.indices]
    for number, section in enumerate(part.sections):
        for i in section:
            rows[i].append(number)
    member_at, member = _ragged([sorted(section) for section in part.sections])
    home_at, home = _ragged(rows)
    near_at, near = _ragged([row.tolist() for row in part.neighbours])
    buffers = np.zeros(len(rows), dtype=BUFFER)
    buffers["size"], buffers["alignment"] = part.sizes, part.alignments
    buffers["first"] = first = np.array([row[0] for row in rows])
    assert (np.diff(first) >= 0).all(), "a part lists its buffers by first section"
    buffers["last"] = [row[-1] + 1 for row in rows]
    buffers["home_from"], buffers["home_to"] = home_at[:-1], home_at[1:]
    buffers["near_from"], buffers["near_to"] = near_at[:-1], near_at[1:]
    buffers["twin_before"] = buffers["twin_after"] = -1
    latest: dict[tuple, int] = {}
    for i, row in enumerate(rows):
        key = (tuple(row), int(part.sizes[i]), int(part.alignments[i]))
        if key in latest:
            buffers["twin_before"][i] = latest[key]
            buffers["twin_after"][latest[key]] = i
        latest[key] = i
    solid = all(len(row) == row[-1] + 1 - row[0] for row in rows)
    grain = math.gcd(*part.sizes.tolist(), *part.alignments.tolist())
    starts_at = np.searchsorted(first, np.arange(len(part.sections) + 1))
    return Board(capacity_bytes, grain, solid, buffers, starts_at, member_at, member, home, near)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    starts[1:] = np.cumsum([len(row) for row in rows])
    return starts, np.array([value for row in rows for value in row], dtype=np.int64)


def priorities(part: Part, durations: np.ndarray) -> dict[str, np.ndarray]:
    """Per order name, what to try first: the buffer with the highest value."""
    sizes = part.sizes.astype(np.float64)
    return {
        "width": part.widths.astype(np.float64),
        "size": sizes,
        "life": durations.astype(np.float64),
        "volume": sizes * durations,
        "area": sizes * part.widths,
    }


@dataclass(frozen=True)
class _Attempt:
    """One run to make: what is tried first, where, learning which weights, for how long."""

    order: str
    lowest_only: bool
    priority: np.ndarray
    weight: np.ndarray
    nodes_max: int


def _factors(noise: random.Random, strength: float, count: int) -> np.ndarray:
    """Random factors [count], all 1 at strength 0."""
    return np.exp([strength * (2 * noise.random() - 1) for _ in range(count)])


def _attempts(
    part: Part, durations: np.ndarray, nodes_max: int, tricks: Tricks, seed: int, spent: Counter
) -> Iterator[_Attempt]:
    """The runs to make, without end; `spent` tells the choices made so far."""
    values = priorities(part, durations)
    count = len(part.indices)
    orders = ORDERS if tricks.portfolio else ORDERS[:1]
    weights = [np.ones(len(part.sections)) for _ in range(len(orders) + 1)]
    long_order, long_lowest = ORDERS[0]
    if not tricks.restarts:
        yield _Attempt(long_order, long_lowest, values[long_order], weights[-1], nodes_max)
        return
    noise = random.Random(seed)
    allowance = SPARE_CHOICES + CHOICES_PER_BUFFER * count
    for strength in itertools.cycle(NOISE):
        for (name, lowest_only), weight in zip(orders, weights[:-1], strict=True):
            priority = values[name] * _factors(noise, strength, count)
            yield _Attempt(name, lowest_only, priority, weight, int(allowance))
        long_run = int(LONG_SHARE * spent["nodes"])
        yield _Attempt(long_order, long_lowest, values[long_order], weights[-1], long_run)
        allowance *= GROWTH


def search_part(
    part: Part,
    durations: np.ndarray,
    capacity_bytes: int,
    nodes_max: int,
    tricks: Tricks,
    seed: int = 0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Looks for offsets below capacity_bytes (the part's base included) with nodes_max choices.

    durations   per buffer of the part, how long it lives, in any unit
    """
    from engine.packing.board import COUNTERS, new_state
    from engine.packing.search import EXHAUSTED, FOUND, search

    board = board_of(part, capacity_bytes - part.base_bytes)
    state = new_state(board)
    counters: Counter = Counter()
    left = nodes_max
    for attempt in _attempts(part, durations, nodes_max, tricks, seed, counters):
        if left <= 0 or out_of_time():
            break
        status, nodes = search(
            board,
            state,
            tricks,
            attempt.priority,
            attempt.weight,
            attempt.lowest_only,
            min(left, attempt.nodes_max),
        )
        left -= max(nodes, 1)
        counters.update(nodes=nodes, runs=1)
        counters.update(dict(zip(COUNTERS, state.registers.tolist(), strict=False)))
        if status == FOUND:
            return Outcome("found", state.bound["low"].copy(), attempt.order, counters)
        if status == EXHAUSTED:
            return Outcome("proven", None, attempt.order, counters)
    return Outcome("open", None, "", counters)
