"""The busiest moment of a graph: what is live at once at worst, and in which schedule.

It does not know any plan. Streams may run ahead of each other as far as the waits allow, so each
schedule that holds one stream back as long as possible is looked at besides the order of issue.
"""

from __future__ import annotations

from dataclasses import dataclass

from suites.memory.lifetimes import Family, Oracle


@dataclass(frozen=True)
class Moment:
    """One op running, and the temporaries that are live then.

    late  the stream that is held back, empty for the order of issue
    """

    op: int
    late: str
    live: tuple[Family, ...]

    @property
    def live_bytes(self) -> int:
        """Bytes live at that moment."""
        return sum(family.extent[1] - family.extent[0] for family in self.live)


def late_order(oracle: Oracle, stream: str) -> list[int]:
    """All ops, those of `stream` as late as others wait for them."""
    ops = oracle.graph.ops
    held = [index for index, op in enumerate(ops) if op.stream == stream]
    order: list[int] = []
    for index, op in enumerate(ops):
        if op.stream == stream:
            continue
        while held and oracle.finished_before[index] >> held[0] & 1:
            order.append(held.pop(0))
        order.append(index)
    return order + held


def busiest_moment(oracle: Oracle) -> Moment | None:
    """The moment with most live bytes over the order of issue and each late order."""
    families = [
        f
        for f in {f.head: f for f in oracle.families.values()}.values()
        if f.kind == "temp" and f.accesses
    ]
    streams = dict.fromkeys(op.stream for op in oracle.graph.ops)
    schedules = [("", list(range(len(oracle.graph.ops))))]
    if len(streams) > 1:
        schedules += [(stream, late_order(oracle, stream)) for stream in streams]
    best = None
    for late, order in schedules:
        moment = _busiest(families, order, late)
        if moment and (best is None or moment.live_bytes > best.live_bytes):
            best = moment
    return best


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _busiest(families: list[Family], order: list[int], late: str) -> Moment | None:
    time = {op: at for at, op in enumerate(order)}
    lives = []
    change = [0] * (len(order) + 1)
    for family in families:
        times = [time[op] for op in _bits(family.accesses)]
        lives.append((min(times), max(times)))
        size = family.extent[1] - family.extent[0]
        change[lives[-1][0]] += size
        change[lives[-1][1] + 1] -= size
    level, best, at = 0, 0, None
    for moment in range(len(order)):
        level += change[moment]
        if level > best:
            best, at = level, moment
    if at is None:
        return None
    live = [f for f, (first, last) in zip(families, lives, strict=True) if first <= at <= last]
    return Moment(order[at], late, tuple(live))
