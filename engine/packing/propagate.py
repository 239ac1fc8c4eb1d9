"""What a partial placement implies: floors of sections, raised bounds, and dead ends.

Compiled; see packing.search for the method. Each inference has a switch in Tricks and a counter.
"""

from __future__ import annotations

from engine.packing.board import CAPACITY_CUT, HUGE, RELEASE_CUT, SECTION_CUT, kernel
from engine.packing.chains import cut_chains
from engine.packing.support import collect_refused, hole, settle_refused


@kernel
def _release_bound(board, state, s):
    """End of the section's unplaced buffers if each could be cut up but starts at its bound."""
    lows, sizes = state.work[0], state.work[1]
    count = 0
    for q in range(board.member_at[s], board.member_at[s + 1]):
        i = board.member[q]
        if state.bound[i].placed == 0:
            low = state.bound[i].low
            p = count
            while p > 0 and lows[p - 1] > low:
                lows[p] = lows[p - 1]
                sizes[p] = sizes[p - 1]
                p -= 1
            lows[p] = low
            sizes[p] = board.buffer[i].size
            count += 1
    end = 0
    for p in range(count):
        end = max(end, lows[p]) + sizes[p]
    return end


@kernel
def _over_capacity(board, state, tricks, s, highest, last_end):
    """Whether a section's unplaced buffers cannot all lie between their bounds and the capacity.

    highest    the largest of their bounds; where all sizes fit above it no sorting is needed
    last_end   the largest bound plus size
    """
    section = state.section[s]
    if highest + section.remaining <= board.capacity:
        return False
    if last_end > board.capacity:
        state.registers[CAPACITY_CUT] += 1
        return True
    if tricks.section_bound and section.floor + section.remaining > board.capacity:
        state.registers[SECTION_CUT] += 1
        return True
    if (
        tricks.release_bound
        and section.unplaced > 1
        and _release_bound(board, state, s) > board.capacity
    ):
        state.registers[RELEASE_CUT] += 1
        return True
    return False


@kernel
def _floors(board, state, tricks, begin, end):
    """Computes the floors that moved in sections [begin, end); a section that cannot hold or -1"""
    for s in range(begin, end):
        section = state.section[s]
        if not (section.moved or section.stale):
            continue
        floor = HUGE
        highest = 0
        last_end = 0
        for q in range(board.member_at[s], board.member_at[s + 1]):
            i = board.member[q]
            bound = state.bound[i]
            if bound.placed == 0:
                floor = min(floor, bound.low)
                highest = max(highest, bound.low)
                last_end = max(last_end, bound.low + board.buffer[i].size)
        section.floor = floor
        section.moved = 0
        if section.stale and floor < HUGE:
            if _over_capacity(board, state, tricks, s, highest, last_end):
                return s
            section.stale = 0
    return -1


@kernel
def propagate(board, state, tricks, begin, end):
    """Raises bounds and floors in sections [begin, end); a section that cannot hold, or -1."""
    refused = 1
    while refused > 0:
        if tricks.support:
            settle_refused(board, state, collect_refused(board, state, begin, end))
        if tricks.holes:
            i = hole(board, state, begin, end)
            if i >= 0:
                return board.buffer[i].first
        failed = _floors(board, state, tricks, begin, end)
        refused = 0
        if failed < 0 and tricks.chains and board.solid:
            failed, refused = cut_chains(board, state, tricks, begin, end)
        if failed >= 0:
            return failed
    return -1
