"""Buffers that do not lie where they could: what they rest on instead, and the holes they leave.

Compiled; see packing.search for the method.
"""

from __future__ import annotations

from engine.packing.board import HOLE_CUT, HUGE, RAISED, align_up, change, kernel


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
def collect_refused(board, state, begin, end):
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
def settle_refused(board, state, count):
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
def hole(board, state, begin, end):
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
