"""What a partial placement implies: floors of sections, raised bounds, and dead ends.

Compiled; see packing.search for the method. Each inference has a switch in Tricks and a counter.
"""

from __future__ import annotations

from engine.packing.board import (
    CAPACITY_CUT,
    HOLE_CUT,
    HUGE,
    RAISED,
    RELEASE_CUT,
    SECTION_CUT,
    align_up,
    change,
    kernel,
)


@kernel
def support(board, state, i, settled_only):
    """Least top of the unplaced neighbours of i, aligned for i; HUGE if it has none.

    settled_only leaves out neighbours that were refused themselves.
    """
    top = HUGE
    for q in range(board.buffer[i].near_from, board.buffer[i].near_to):
        j = board.near[q]
        other = state.bound[j]
        if other.placed == 0 and not (settled_only and other.refused >= 0):
            top = min(top, other.low + board.buffer[j].size)
    return top if top == HUGE else align_up(top, board.buffer[i].alignment)


@kernel
def raised(board, state, tricks, i, top):
    """The next offset for a buffer that does not lie at its bound: on the least top."""
    low = state.bound[i].low
    if tricks.support:
        return min(max(top, low), board.capacity + 1)
    return min(low + max(board.grain, board.buffer[i].alignment), board.capacity + 1)


@kernel
def _collect_refused(board, state, begin, end):
    """Lists the refused buffers of a range in work[0], with goals on buffers never refused."""
    count = 0
    for i in range(board.starts_at[begin], board.starts_at[end]):
        bound = state.bound[i]
        if bound.placed == 0 and bound.refused >= 0:
            bound.goal = max(bound.low, support(board, state, i, True))
            state.work[0, count] = i
            count += 1
    return count


@kernel
def _settle_refused(board, state, count):
    """Raises each refused buffer onto the least top it can rest on.

    They may rest on each other, so they are settled in order of goal, as shortest paths are:
    climbing step by step would take as many steps as the capacity holds buffers.
    """
    while count > 0:
        best = 0
        for k in range(1, count):
            if state.bound[state.work[0, k]].goal < state.bound[state.work[0, best]].goal:
                best = k
        i = state.work[0, best]
        count -= 1
        state.work[0, best] = state.work[0, count]
        bound = state.bound[i]
        goal = min(bound.goal, board.capacity + 1)
        bound.goal = -1
        if goal > bound.low:
            state.registers[RAISED] += 1
            change(board, state, i, goal, bound.refused)
        top = goal + board.buffer[i].size
        for q in range(board.buffer[i].near_from, board.buffer[i].near_to):
            j = board.near[q]
            other = state.bound[j]
            if other.goal >= 0:
                other.goal = min(
                    other.goal, max(other.low, align_up(top, board.buffer[j].alignment))
                )


@kernel
def _hole(board, state, begin, end):
    """A refused buffer that would still fit where it was refused, or -1."""
    for i in range(board.starts_at[begin], board.starts_at[end]):
        bound = state.bound[i]
        if bound.placed or bound.refused < 0:
            continue
        top = bound.refused + board.buffer[i].size
        filled = False
        for q in range(board.buffer[i].near_from, board.buffer[i].near_to):
            other = state.bound[board.near[q]]
            if other.placed == 0 and other.low < top:
                filled = True
                break
        if not filled:
            state.registers[HOLE_CUT] += 1
            return i
    return -1


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
def propagate(board, state, tricks, begin, end):
    """Raises bounds and floors in sections [begin, end); a section that cannot hold, or -1."""
    if tricks.support:
        _settle_refused(board, state, _collect_refused(board, state, begin, end))
    if tricks.holes:
        i = _hole(board, state, begin, end)
        if i >= 0:
            return board.buffer[i].first
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
