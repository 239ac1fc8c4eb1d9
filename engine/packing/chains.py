"""The bottom layer of a niche: buffers that lie side by side from one wall to the other.

Compiled; see packing.search for the method. In a niche every section is either covered by a
buffer on the floor, or its floor stays empty, which it can only where the section has bytes to
spare. So the buffers on the floor form a chain from wall to wall; one that is in no chain cannot
lie on the floor, and a niche without a chain is a dead end.
"""

from __future__ import annotations

from engine.packing.board import CHAINED, HUGE, change, kernel
from engine.packing.support import raised, support


@kernel
def _walk(board, state, begin, end, floor, forward):
    """Marks in a row of `work` the edges of sections that chains from one wall reach."""
    mark = state.work[0] if forward else state.work[1]
    mark[begin : end + 1] = 0
    mark[begin if forward else end] = 1
    for step in range(end - begin):
        s = begin + step if forward else end - 1 - step
        if forward and mark[s] == 0:
            continue
        section = state.section[s]
        if floor + board.grain + section.remaining <= board.capacity:
            if forward:
                mark[s + 1] = 1
            elif mark[s + 1]:
                mark[s] = 1
        for i in range(board.starts_at[s], board.starts_at[s + 1]):
            if state.bound[i].placed == 0 and state.bound[i].low == floor:
                if forward:
                    mark[board.buffer[i].last] = 1
                elif mark[board.buffer[i].last]:
                    mark[s] = 1


@kernel
def _cut_niche(board, state, tricks, begin, end, floor):
    """Refuses what is in no chain of a niche: how many, or -1 - s where all chains end at s."""
    _walk(board, state, begin, end, floor, True)
    if state.work[0, end] == 0:
        broken = end - 1
        while state.work[0, broken] == 0:
            broken -= 1
        return -1 - broken
    _walk(board, state, begin, end, floor, False)
    refused = 0
    for s in range(begin, end):
        for i in range(board.starts_at[s], board.starts_at[s + 1]):
            bound = state.bound[i]
            if bound.placed or bound.low != floor:
                continue
            if state.work[0, s] == 0 or state.work[1, board.buffer[i].last] == 0:
                refused += 1
                base = bound.refused if bound.refused >= 0 else floor
                change(
                    board,
                    state,
                    i,
                    raised(board, state, tricks, i, support(board, state, i, False)),
                    base,
                )
    return refused


@kernel
def cut_chains(board, state, tricks, begin, end):
    """Applies this to all niches in [begin, end): a section that fails or -1, how many refused."""
    refused = 0
    s = begin
    while s < end:
        floor = state.section[s].floor
        e = s + 1
        changed = state.section[s].unchained
        while e < end and state.section[e].floor == floor:
            changed |= state.section[e].unchained
            e += 1
        walled = s == begin or state.section[s - 1].floor > floor
        if e < end and state.section[e].floor < floor:
            walled = False
        if s > begin:
            changed |= state.section[s - 1].unchained
        if e < end:
            changed |= state.section[e].unchained
        if walled and changed and floor < HUGE:
            count = _cut_niche(board, state, tricks, s, e, floor)
            if count != 0:
                state.registers[CHAINED] += 1
            if count < 0:
                return -1 - count, refused
            refused += count
        s = e
    if refused == 0:
        for s in range(begin, end):
            state.section[s].unchained = 0
    return -1, refused
