"""The state of the exact search: what is placed, what offsets are still possible, how to undo.

Compiled; see packing.search for the method. Scalars that change live in `registers`, an array,
so that compiled functions can change them.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit

HUGE = 1 << 62

kernel = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")
"""For functions called from compiled code only: leaving out the wrappers saves a third of the
compile time."""


def _record(*names: str) -> np.dtype:
    return np.dtype([(name, np.int64) for name in names])


BUFFER = _record(
    *("size", "alignment", "twin_before", "twin_after", "first", "last"),
    *("home_from", "home_to", "near_from", "near_to"),
)
"""What never changes of a buffer. twin_before, twin_after: the interchangeable buffers next to it
in index, or -1. first, last: half-open range of sections it spans, holes included. home_from,
home_to and near_from, near_to: its ranges in `home` (its sections) and `near` (its conflicts)."""

Board = namedtuple("Board", "capacity grain solid buffer starts_at member_at member home near")
"""The problem, constant. grain divides every offset of interest. solid: no buffer has holes among
its sections. Buffers are in order of `first`;
those that start with section s are starts_at[s]..starts_at[s + 1], those that are in it are
member[member_at[s]:member_at[s + 1]]."""

BOUND = _record("low", "placed", "refused", "seen", "top", "goal")
"""low: least offset still possible (the offset, once placed). refused: the offset at which the
buffer was last refused, or -1. seen, top: the choice that last looked at it, and what it saw.
goal: of a refused buffer, the least top it can rest on; -1 once settled."""

SECTION = _record(
    *("remaining", "unplaced", "crossing", "floor", "moved", "stale"),
    *("touched", "unchained", "known", "options", "none", "reach_from", "reach_to"),
)
"""remaining, unplaced: bytes and count of unplaced buffers. crossing: unplaced buffers that span
this section and the next. moved: its floor must be computed anew. stale: its checks must be made
again, because a bound rose. touched: something moved since the last choice. unchained: the
same since the last look at chains. known: options (-1
outside a niche) and none are still right; they depend on sections [reach_from, reach_to)."""

TRAIL = _record("buffer", "low", "refused")
FRAME = _record("begin", "end", "trail", "stack", "option", "next", "count", "none")
"""One choice: the range of sections it is about, marks to undo to, its options and the next."""

State = namedtuple("State", "bound section trail stack frame options work registers")

COUNTERS = (
    "choices_skipped",
    "supports_raised",
    "section_bound_cuts",
    "release_bound_cuts",
    "hole_cuts",
    "twins_skipped",
    "capacity_cuts",
    "chain_cuts",
)
SKIPPED, RAISED, SECTION_CUT, RELEASE_CUT, HOLE_CUT, TWINS, CAPACITY_CUT, CHAINED = range(8)
TRAIL_COUNT, STACK_COUNT, OPTION_COUNT, FRAME_COUNT, SPILLED = range(8, 13)


def new_state(board: Board) -> State:
    """Room for one search, which sets the values; a search that needs more room gives up."""
    buffers, sections = len(board.buffer), len(board.member_at) - 1
    frames = 8 * buffers + 64
    return State(
        np.zeros(buffers, dtype=BOUND),
        np.zeros(sections, dtype=SECTION),
        np.zeros(16 * (len(board.near) + buffers) + 4096, dtype=TRAIL),
        np.zeros(buffers, dtype=np.int64),
        np.zeros(frames, dtype=FRAME),
        np.zeros(16 * frames + 4 * buffers, dtype=np.int64),
        np.zeros((2, max(buffers, sections + 1)), dtype=np.int64),
        np.zeros(SPILLED + 1, dtype=np.int64),
    )


@kernel
def align_up(offset, alignment):
    rest = offset % alignment
    return offset if rest == 0 else offset + alignment - rest


@kernel
def reset(board, state):
    """Nothing placed, every offset possible, every check due."""
    for s in range(state.section.size):
        section = state.section[s]
        section.remaining = 0
        section.unplaced = 0
        section.crossing = 0
        section.moved = 1
        section.stale = 1
        section.touched = 1
        section.unchained = 1
        section.known = 0
    state.registers[:] = 0
    for i in range(board.buffer.size):
        bound = state.bound[i]
        bound.low = 0
        bound.placed = 0
        bound.refused = -1
        bound.seen = -1
        bound.goal = -1
        count_in(board, state, i, 1)


@kernel
def count_in(board, state, i, sign):
    """Adds a buffer to what is unplaced, or with sign -1 takes it away."""
    buffer = board.buffer[i]
    for q in range(buffer.home_from, buffer.home_to):
        section = state.section[board.home[q]]
        section.remaining += sign * buffer.size
        section.unplaced += sign
        section.moved = 1
        section.touched = 1
        section.unchained = 1
    for s in range(buffer.first, buffer.last - 1):
        state.section[s].crossing += sign


@kernel
def change(board, state, i, low, refused):
    """Sets a buffer's bound and refusal, to be undone later; its sections need new checks."""
    at = state.registers[TRAIL_COUNT]
    if at >= state.trail.size:
        state.registers[SPILLED] = 1
        return
    bound = state.bound[i]
    entry = state.trail[at]
    entry.buffer = i
    entry.low = bound.low
    entry.refused = bound.refused
    state.registers[TRAIL_COUNT] = at + 1
    if low > bound.low:
        for q in range(board.buffer[i].home_from, board.buffer[i].home_to):
            section = state.section[board.home[q]]
            section.moved = 1
            section.stale = 1
            section.touched = 1
            section.unchained = 1
    bound.low = low
    bound.refused = refused


@kernel
def place(board, state, i):
    """The buffer lies at its bound; what it conflicts with lies above its top."""
    state.bound[i].placed = 1
    state.stack[state.registers[STACK_COUNT]] = i
    state.registers[STACK_COUNT] += 1
    count_in(board, state, i, -1)
    buffer = board.buffer[i]
    top = state.bound[i].low + buffer.size
    for q in range(buffer.near_from, buffer.near_to):
        j = board.near[q]
        other = state.bound[j]
        if other.placed == 0 and (other.low < top or other.refused >= 0):
            low = max(other.low, align_up(top, board.buffer[j].alignment))
            change(board, state, j, low, -1)


@kernel
def undo(board, state, frame):
    """Back to the moment before the frame's first option."""
    while state.registers[TRAIL_COUNT] > frame.trail:
        state.registers[TRAIL_COUNT] -= 1
        entry = state.trail[state.registers[TRAIL_COUNT]]
        bound = state.bound[entry.buffer]
        if bound.low != entry.low:
            buffer = board.buffer[entry.buffer]
            for q in range(buffer.home_from, buffer.home_to):
                section = state.section[board.home[q]]
                section.moved = 1
                section.touched = 1
                section.unchained = 1
        bound.low = entry.low
        bound.refused = entry.refused
    while state.registers[STACK_COUNT] > frame.stack:
        state.registers[STACK_COUNT] -= 1
        i = state.stack[state.registers[STACK_COUNT]]
        state.bound[i].placed = 0
        count_in(board, state, i, 1)
    state.registers[OPTION_COUNT] = frame.option + frame.count
