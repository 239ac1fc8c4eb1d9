"""Static checks of one rank's map by itself: names, sizes, places, arenas, lives by op index.

It does not know the planner or the graphs; lives are taken as the map states them, so buffers on
different streams are judged only where a graph is at hand (life_checks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from engine.ir import ITEM_BYTES
from engine.memmap import ROW_OF_CATEGORY, Allocation, RankMap, Temporary
from suites.findings import Finding, NotChecked
from suites.memory.overlap import Spans, overlap_plain, overlap_sweep

TRANSIENT_ARENA = "temporaries"
TRANSIENT_CATEGORIES = ("temporaries", "graph_scratch_pools", "operator_scratch")
ITEM_SIZES: Mapping[str, int] = {
    **ITEM_BYTES,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}
"""Bytes of an item by the names of the graph and by those of checkpoint files."""
PLAIN_UP_TO = 200
"""Buffers up to which both overlap implementations run and must agree."""


def span_text(start: int, size: int) -> str:
    """A byte range for people."""
    return f"bytes {start}..{start + size}"


def described(temporary: Temporary, ops: Sequence[str] = ()) -> str:
    """A temporary with its bytes and ops, by name where the graph is known."""
    first, last = (
        f"{index} {ops[index]}" if 0 <= index < len(ops) else str(index)
        for index in (temporary.first_write, temporary.last_read)
    )
    place = span_text(temporary.offset, temporary.nbytes)
    return f"{temporary.name} ({place}, ops {first} to {last}, {temporary.stream})"


def facts(temporary: Temporary) -> dict:
    """A temporary as the data of a finding."""
    return {
        "name": temporary.name,
        "bytes": [temporary.offset, temporary.offset + temporary.nbytes],
        "ops": [temporary.first_write, temporary.last_read],
        "stream": temporary.stream,
    }


def in_rank(rank: int, *more: str) -> str:
    """The `where` of a finding about a rank."""
    return " / ".join([f"rank {rank}", *more])


def names_once(rank: RankMap) -> Iterator[Finding]:
    """Every allocation of a rank and every temporary of a graph has a name of its own."""
    allocations = Counter(a.name for a in rank.allocations)
    temporaries = Counter((t.graph, t.name) for t in rank.temporaries)
    for name, count in allocations.items():
        if count > 1:
            yield Finding(
                "duplicate-name",
                in_rank(rank.rank, name),
                f"{count} allocations have this name",
                {"name": name, "count": count},
            )
    for (graph, name), count in temporaries.items():
        if count > 1:
            yield Finding(
                "duplicate-name",
                in_rank(rank.rank, f"graph {graph}", name),
                f"{count} temporaries have this name",
                {"name": name, "graph": graph, "count": count},
            )


def allocation_forms(rank: RankMap) -> Iterator[Finding]:
    """Category, alignment and bytes of every allocation, each by itself."""
    for a in rank.allocations:
        where = in_rank(rank.rank, a.name)
        if a.category not in ROW_OF_CATEGORY:
            yield Finding(
                "unknown-category",
                where,
                f"category {a.category!r} is counted in no inventory row",
                {"category": a.category, "nbytes": a.nbytes},
            )
        if a.alignment < 1 or a.offset % a.alignment:
            yield Finding(
                "misaligned",
                where,
                f"offset {a.offset} is not a multiple of the alignment {a.alignment}",
                {"offset": a.offset, "alignment": a.alignment},
            )
        if a.dtype in ITEM_SIZES and (needed := prod(a.shape) * ITEM_SIZES[a.dtype]) != a.nbytes:
            padded = -(-needed // max(a.alignment, 1)) * max(a.alignment, 1)
            if not needed < a.nbytes <= padded:
                yield Finding(
                    "size-not-from-shape",
                    where,
                    f"{a.nbytes} bytes, but {a.dtype} {list(a.shape)} needs {needed}",
                    {"nbytes": a.nbytes, "needed_bytes": needed},
                )
        if a.arena == TRANSIENT_ARENA and a.category not in TRANSIENT_CATEGORIES:
            yield Finding(
                "persistent-in-transient-arena",
                where,
                f"category {a.category} in arena {a.arena}, whose bytes are reused in every step",
                {"category": a.category, "bytes": [a.offset, a.offset + a.nbytes]},
            )


def unreadable_dtypes(rank: RankMap) -> Iterator[NotChecked]:
    """Which allocations have a dtype whose item size is not known here."""
    strange = sorted({a.dtype for a in rank.allocations} - set(ITEM_SIZES))
    if strange:
        yield NotChecked(
            "size from shape", f"item size of {', '.join(strange)} is not known to the memory map"
        )


def allocations_apart(rank: RankMap) -> Iterator[Finding]:
    """Fixed mappings of one arena share no bytes: all of them live all the time."""
    arenas: dict[str, list[Allocation]] = {}
    for a in rank.allocations:
        arenas.setdefault(a.arena, []).append(a)
    for arena, held in arenas.items():
        spans = Spans(
            [a.offset for a in held],
            [a.offset + a.nbytes for a in held],
            [0] * len(held),
            [0] * len(held),
            range(len(held)),
        )
        for one, other in both_ways(spans):
            a, b = held[one], held[other]
            yield Finding(
                "allocations-overlap",
                in_rank(rank.rank, f"arena {arena}"),
                f"{a.name} ({span_text(a.offset, a.nbytes)}) and {b.name} "
                f"({span_text(b.offset, b.nbytes)}) share "
                f"{span_text(*shared_bytes(a.offset, a.nbytes, b.offset, b.nbytes))}",
                {"first": a.name, "second": b.name, "arena": arena},
            )


def shared_bytes(offset: int, size: int, other: int, other_size: int) -> tuple[int, int]:
    """(offset, size) of what two byte ranges have in common."""
    start, end = max(offset, other), min(offset + size, other + other_size)
    return start, max(end - start, 0)


def both_ways(spans: Spans, precedes=None) -> list[tuple[int, int]]:
    """The offending pairs by the sweep, compared with the plain way where that is quick."""
    pairs = overlap_sweep(spans, precedes)
    if len(spans) <= PLAIN_UP_TO:
        plain = overlap_plain(spans, precedes)
        assert pairs == plain, f"the sweep finds {pairs}, the plain comparison {plain}"
    return pairs


def temporaries_inside(rank: RankMap) -> Iterator[Finding]:
    """Every temporary lies inside one mapping of the temporaries arena and starts on its grid."""
    pools = sorted(
        (a for a in rank.allocations if a.arena == TRANSIENT_ARENA), key=lambda a: a.offset
    )
    top = max((pool.offset + pool.nbytes for pool in pools), default=0)
    for t in rank.temporaries:
        where = in_rank(rank.rank, f"graph {t.graph}", t.name)
        end = t.offset + t.nbytes
        if t.last_read < t.first_write:
            yield Finding(
                "life-inverted",
                where,
                f"first written by op {t.first_write}, last read by op {t.last_read}",
                facts(t),
            )
        home = next((p for p in pools if p.offset <= t.offset < p.offset + p.nbytes), None)
        if t.nbytes == 0 and 0 <= t.offset <= top:
            continue
        if home is None or end > top or t.offset < 0:
            yield Finding(
                "outside-arena",
                where,
                f"{span_text(t.offset, t.nbytes)} are not inside any mapping of the arena "
                f"{TRANSIENT_ARENA}, which ends at {top}",
                facts(t),
            )
            continue
        if end > home.offset + home.nbytes:
            yield Finding(
                "straddles-pools",
                where,
                f"{span_text(t.offset, t.nbytes)} begin in {home.name} "
                f"({span_text(home.offset, home.nbytes)}) and end outside it",
                {**facts(t), "pool": home.name},
            )
        if t.alias_of is None and t.offset % max(home.alignment, 1):
            yield Finding(
                "misaligned",
                where,
                f"offset {t.offset} is not a multiple of {home.alignment}, "
                f"the alignment of {home.name}",
                {"offset": t.offset, "alignment": home.alignment},
            )


def by_graph(rank: RankMap) -> Mapping[str, list[Temporary]]:
    """The temporaries of each graph in the map's order."""
    found: dict[str, list[Temporary]] = {}
    for t in rank.temporaries:
        found.setdefault(t.graph, []).append(t)
    return found


def alias_head(t: Temporary, by_name: Mapping[str, Temporary]) -> Temporary | None:
    """The temporary at the end of the alias chain, None when the chain breaks or closes."""
    seen = set()
    while t.alias_of is not None:
        if t.name in seen or t.alias_of not in by_name:
            return None
        seen.add(t.name)
        t = by_name[t.alias_of]
    return t


def aliases_inside(rank: RankMap) -> Iterator[Finding]:
    """Every alias names a temporary of its graph and stays within that one's bytes."""
    for graph, held in by_graph(rank).items():
        by_name = {t.name: t for t in held}
        for t in held:
            where = in_rank(rank.rank, f"graph {graph}", t.name)
            if t.alias_of is None:
                continue
            if alias_head(t, by_name) is None:
                yield Finding(
                    "alias-unknown",
                    where,
                    f"alias of {t.alias_of}, from which no chain leads to a buffer of this graph",
                    {"alias_of": t.alias_of},
                )
                continue
            base = by_name[t.alias_of]
            if t.nbytes and not _is_inside(t, base):
                yield Finding(
                    "alias-outside-base",
                    where,
                    f"{described(t)} reaches outside its base {described(base)}",
                    {"first": facts(t), "second": facts(base)},
                )


def _is_inside(t: Temporary, base: Temporary) -> bool:
    return base.offset <= t.offset and t.offset + t.nbytes <= base.offset + base.nbytes
