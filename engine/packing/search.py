"""Exact search for offsets within a capacity: which buffer lies on the floor of a section?

State is one lower bound per unplaced buffer (`low`); the floor of a section is the least bound
of its unplaced buffers. A niche is a run of sections at equal floor between higher ones. In a
placement in which no buffer can drop, either an unplaced buffer that lies inside a niche sits
exactly on its floor, or none does and each of them rests on another's top. The search picks a
section of a niche and branches over the buffers that can sit there and over "none of them"; a
buffer placed lifts everything it conflicts with above its top. Every placement can be turned
into one of these by dropping buffers, so an exhausted search proves that nothing fits.

Unplaced buffers that share no section any more, not even through others, are searched one part
after the other; a part that fails skips the choices made in finished parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from numba import njit

from engine.packing.board import (
    FRAME_COUNT,
    HUGE,
    OPTION_COUNT,
    SKIPPED,
    SPILLED,
    STACK_COUNT,
    TRAIL_COUNT,
    TWINS,
    change,
    kernel,
    place,
    reset,
    undo,
)
from engine.packing.propagate import propagate
from engine.packing.support import raised, support

FOUND, EXHAUSTED, LIMIT = 1, 0, 2
KERNEL_FILES = ("board.py", "chains.py", "propagate.py", "support.py")


@kernel
def _smallest_part(state, begin, end):
    """The narrowest run of sections in [begin, end) that unplaced buffers hold together."""
    part_begin = -1
    part_end = -1
    s = begin
    while s < end:
        if state.section[s].unplaced == 0 and state.section[s].crossing == 0:
            s += 1
            continue
        e = s
        while state.section[e].crossing > 0:
            e += 1
        e += 1
        if part_begin < 0 or e - s < part_end - part_begin:
            part_begin = s
            part_end = e
        s = e
    return part_begin, part_end


@kernel
def _next_part(board, state, tricks):
    """Where to go on: inside the innermost range that still has unplaced buffers, or -1, -1."""
    if not tricks.components:
        left = state.registers[STACK_COUNT] < board.buffer.size
        return (0, state.section.size) if left else (-1, -1)
    for d in range(state.registers[FRAME_COUNT] - 1, -1, -1):
        begin, end = _smallest_part(state, state.frame[d].begin, state.frame[d].end)
        if begin >= 0:
            return begin, end
    return _smallest_part(state, 0, state.section.size)


@kernel
def _sits_in_niche(board, state, i):
    """Whether no section of i has a lower floor than i's bound."""
    for q in range(board.buffer[i].home_from, board.buffer[i].home_to):
        if state.section[board.home[q]].floor < state.bound[i].low:
            return False
    return True


@kernel
def _twin_waits(board, state, i):
    """Whether an unplaced twin of i comes before it."""
    twin = board.buffer[i].twin_before
    while twin >= 0:
        if state.bound[twin].placed == 0:
            return True
        twin = board.buffer[twin].twin_before
    return False


@kernel
def _forget(state):
    """Marks as unknown the options of sections within reach of what moved since the last choice."""
    last_touched = -1
    reached = state.work[1]
    for s in range(state.section.size):
        if state.section[s].touched:
            last_touched = s
            state.section[s].touched = 0
        reached[s] = last_touched
    for s in range(state.section.size):
        section = state.section[s]
        if section.known and reached[section.reach_to - 1] >= section.reach_from:
            section.known = 0


@kernel
def _count_options(board, state, tricks, s, stamp):
    """Finds how many buffers can sit on the floor of s, and whether none may."""
    section = state.section[s]
    count = 0
    next_floor = HUGE
    section.known = 1
    section.reach_from = s
    section.reach_to = s + 1
    for q in range(board.member_at[s], board.member_at[s + 1]):
        i = board.member[q]
        bound = state.bound[i]
        if bound.placed:
            continue
        if bound.low > section.floor:
            next_floor = min(next_floor, bound.low)
            continue
        section.reach_from = min(section.reach_from, board.buffer[i].first)
        section.reach_to = max(section.reach_to, board.buffer[i].last)
        if bound.seen != stamp:
            bound.seen = stamp
            bound.top = -1
            if _sits_in_niche(board, state, i):
                bound.top = support(board, state, i, False)
        if bound.top < 0:
            section.options = -1
            return
        next_floor = min(next_floor, raised(board, state, tricks, i, bound.top))
        if not (tricks.twins and _twin_waits(board, state, i)):
            count += 1
    section.options = count
    section.none = 1 if next_floor + section.remaining <= board.capacity else 0


@kernel
def _choose(board, state, tricks, weight, lowest_only, begin, end, stamp):
    """The section to branch on in [begin, end)."""
    _forget(state)
    lowest = HUGE
    for s in range(begin, end):
        lowest = min(lowest, state.section[s].floor)
    best = -1
    best_score = 0.0
    for s in range(begin, end):
        section = state.section[s]
        if section.floor == HUGE or (lowest_only and section.floor > lowest):
            continue
        if not section.known:
            _count_options(board, state, tricks, s, stamp)
        if section.options < 0:
            continue
        score = weight[s] if tricks.learned_weights else 1.0
        score /= section.options + section.none
        if not tricks.fewest_options:
            score = 1.0
        score -= 1e-9 * section.floor / board.capacity
        if best < 0 or score > best_score:
            best, best_score = s, score
            if section.options + section.none <= 1:
                break
    return best


@kernel
def _open(board, state, tricks, priority, s, begin, end):
    """A new frame: the buffers that can sit on the floor of s, highest priority first."""
    d = state.registers[FRAME_COUNT]
    start = state.registers[OPTION_COUNT]
    if d >= state.frame.size or start + state.section[s].unplaced > state.options.size:
        state.registers[SPILLED] = 1
        return
    count = 0
    for q in range(board.member_at[s], board.member_at[s + 1]):
        i = board.member[q]
        if state.bound[i].placed or state.bound[i].low != state.section[s].floor:
            continue
        if tricks.twins and _twin_waits(board, state, i):
            state.registers[TWINS] += 1
            continue
        p = start + count
        while p > start and priority[state.options[p - 1]] < priority[i]:
            state.options[p] = state.options[p - 1]
            p -= 1
        state.options[p] = i
        count += 1
    frame = state.frame[d]
    frame.begin = begin
    frame.end = end
    frame.trail = state.registers[TRAIL_COUNT]
    frame.stack = state.registers[STACK_COUNT]
    frame.option = start
    frame.next = 0
    frame.count = count
    frame.none = state.section[s].none
    state.registers[OPTION_COUNT] = start + count
    state.registers[FRAME_COUNT] = d + 1


@kernel
def _refuse_all(board, state, tricks, frame):
    """No option of the frame sits on the floor: each of them, twins included, rests higher."""
    for k in range(frame.option, frame.option + frame.count):
        i = state.options[k]
        while i >= 0:
            bound = state.bound[i]
            if bound.placed == 0:
                top = support(board, state, i, False)
                refused = bound.refused if bound.refused >= 0 else bound.low
                change(board, state, i, raised(board, state, tricks, i, top), refused)
            i = board.buffer[i].twin_after if tricks.twins else -1


@kernel
def _advance(board, state, tricks):
    """Applies the next option of the innermost open frame, closing exhausted ones; False at end"""
    while state.registers[FRAME_COUNT] > 0:
        frame = state.frame[state.registers[FRAME_COUNT] - 1]
        undo(board, state, frame)
        k = frame.next
        frame.next = k + 1
        if k < frame.count:
            place(board, state, state.options[frame.option + k])
            return True
        if k == frame.count and frame.none:
            _refuse_all(board, state, tricks, frame)
            return True
        state.registers[FRAME_COUNT] -= 1
        state.registers[OPTION_COUNT] = frame.option
        while tricks.components and state.registers[FRAME_COUNT] > 0:
            other = state.frame[state.registers[FRAME_COUNT] - 1]
            if other.begin < frame.end and frame.begin < other.end:
                break
            state.registers[FRAME_COUNT] -= 1
            state.registers[SKIPPED] += 1
    return False


def _kernel_fingerprint() -> int:
    """Of the sources that are compiled into `search`; see _compile_lazily."""
    here = Path(__file__)
    return zlib.crc32(b"".join(here.with_name(n).read_bytes() for n in KERNEL_FILES))


def _compile_lazily(fingerprint: int) -> Callable:
    """The search, compiled at its first call and kept on disk.

    The cache notices changes of this file and of closure variables only, hence the fingerprint.
    """

    @njit(cache=True, error_model="numpy")
    def search(board, state, tricks, priority, weight, lowest_only, nodes_max):
        """Looks at up to nodes_max choices; (FOUND, EXHAUSTED or LIMIT, choices made).

        priority [buffers]: of a section's options the highest is tried first. weight [sections]:
        how often a section has failed, raised here. lowest_only: branch at the lowest floor only.
        On FOUND, state.bound holds the offsets as `low`. state.registers starts with COUNTERS.
        """
        assert fingerprint != 0, "part of the cache key"
        reset(board, state)
        begin, end = 0, state.section.size
        nodes = 0
        while True:
            failed = propagate(board, state, tricks, begin, end)
            if state.registers[SPILLED]:
                return LIMIT, nodes
            if failed < 0:
                begin, end = _next_part(board, state, tricks)
                if begin < 0:
                    return FOUND, nodes
                if nodes >= nodes_max:
                    return LIMIT, nodes
                nodes += 1
                s = _choose(board, state, tricks, weight, lowest_only, begin, end, nodes)
                _open(board, state, tricks, priority, s, begin, end)
                if state.registers[SPILLED]:
                    return LIMIT, nodes
            else:
                weight[failed] += 1.0
            if not _advance(board, state, tricks):
                return EXHAUSTED, nodes
            frame = state.frame[state.registers[FRAME_COUNT] - 1]
            begin, end = frame.begin, frame.end

    return search


search = _compile_lazily(_kernel_fingerprint())
