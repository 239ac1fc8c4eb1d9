"""One memory map as readable text: the form that is kept under snapshot.

It does not judge. Order is deterministic, figures are aligned by line and not by column width of
the whole table, and op indices are left out where a name will do, so small changes give small
differences.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from engine.ir import Graph
from engine.memmap import INVENTORY_ROWS, MemoryMap, RankMap, Temporary
from engine.units import MIB
from suites.memory.folding import folded
from suites.memory.lifetimes import Oracle
from suites.memory.peak import busiest_moment

LARGEST = 50
"""Allocations listed per rank; those that differ only in a layer's number count once."""
LIVE_LISTED = 25
"""Buffers listed of those live at a graph's peak."""


def render_map(memory_map: MemoryMap, graphs: Mapping[int, Sequence[Graph]] | None = None) -> str:
    """The whole map as text; with graphs the writers of what is live at the peak have names."""
    lines = [*_fingerprint(memory_map), "", *_kv(memory_map), ""]
    lines += _inventory(memory_map.ranks)
    first: dict[str, list[str]] = {}
    for rank in memory_map.ranks:
        by_name = {graph.name: graph for graph in (graphs or {}).get(rank.rank, ())}
        sections = _sections(_rank(rank, by_name))
        lines += ["", f"# rank {rank.rank}", *_told(sections, first)]
        first = first or sections
    return "\n".join(lines) + "\n"


def _sections(lines: Iterator[str]) -> dict[str, list[str]]:
    """Lines under the heading they follow."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in lines:
        if line.startswith("## "):
            heading = line
            found[heading] = []
        else:
            found[heading].append(line)
    return found


def _told(sections: Mapping[str, list[str]], first: Mapping[str, list[str]]) -> Iterator[str]:
    """All of the first rank; of a later one, the lines that the first does not have."""
    if not first:
        for heading, lines in sections.items():
            yield from (heading, *lines)
        return
    alike = True
    for heading, lines in sections.items():
        own = [line for line in lines if line not in first.get(heading, ())]
        if own or heading not in first:
            alike = False
            yield from (heading + (", unlike the first rank" if heading in first else ""), *own)
    for heading in first:
        if heading not in sections:
            alike = False
            yield f"without {heading[3:]}"
    if alike:
        yield "as the first rank"


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _fingerprint(memory_map: MemoryMap) -> Iterator[str]:
    yield "# fingerprint"
    for title in ("model", "recipe"):
        facts = getattr(memory_map, title)
        for key in sorted(facts):
            yield f"{title}.{key} = {_value(facts[key])}"
    for rank in memory_map.ranks:
        yield f"rank {rank.rank} layout = {layout_digest(rank)}"


def layout_digest(rank: RankMap) -> str:
    """Sixteen hex digits over every allocation and temporary of a rank, in order."""
    rows = [
        *([a.name, a.category, a.nbytes, a.arena, a.offset, a.alignment] for a in rank.allocations),
        *(
            [t.graph, t.name, t.nbytes, t.offset, t.first_write, t.last_read, t.stream, t.alias_of]
            for t in rank.temporaries
        ),
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _kv(memory_map: MemoryMap) -> Iterator[str]:
    yield "# kv"
    for key in sorted(memory_map.kv):
        value = memory_map.kv[key]
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield f"{key}[{index}] = {_value(entry)}"
        else:
            yield f"{key} = {_value(value)}"


def _inventory(ranks: Sequence[RankMap]) -> Iterator[str]:
    yield "# inventory, MiB per rank"
    yield f"{'row':32}" + "".join(f"{f'rank {rank.rank}':>14}" for rank in ranks)
    rows = [rank.inventory_bytes for rank in ranks]
    for row in INVENTORY_ROWS:
        yield f"{row:32}" + "".join(f"{held[row] / MIB:>14,.3f}" for held in rows)
    fixed = [held["core_fixed_mappings"] for held in rows]
    if fixed:
        yield f"ranks lie within {(max(fixed) - min(fixed)) / MIB:,.3f} MiB"


def _rank(rank: RankMap, graphs: Mapping[str, Graph]) -> Iterator[str]:
    yield "## arenas"
    for name, (count, size, end) in _arenas(rank).items():
        yield f"{name}: {size:,} bytes in {count} mappings, ends at {end:,}"
    ordered = sorted(rank.allocations, key=lambda a: (-a.nbytes, a.name))
    kinds = folded(
        ordered, lambda a: a.name, lambda a: (a.nbytes, a.category, a.dtype, a.shape, a.arena)
    )
    yield f"## largest allocations, {LARGEST} kinds at most"
    yield f"{len(rank.allocations)} allocations of {len(kinds)} kinds"
    for kind in kinds[:LARGEST]:
        a = kind.items[0]
        yield f"{a.nbytes:>14,}  {kind.title}  {a.category}  {a.dtype} {list(a.shape)}"
    held: dict[str, list[Temporary]] = {}
    for t in rank.temporaries:
        held.setdefault(t.graph, []).append(t)
    for name, temporaries in held.items():
        yield from _graph(name, temporaries, graphs.get(name))


def _arenas(rank: RankMap) -> dict[str, tuple[int, int, int]]:
    """Per arena: mappings, bytes, end."""
    found: dict[str, tuple[int, int, int]] = {}
    for a in rank.allocations:
        count, size, end = found.get(a.arena, (0, 0, 0))
        found[a.arena] = (count + 1, size + a.nbytes, max(end, a.offset + a.nbytes))
    return dict(sorted(found.items()))


def own_buffers(temporaries: Sequence[Temporary]) -> list[Temporary]:
    """Temporaries that are not on the bytes of another one."""
    names = {t.name for t in temporaries}
    return [t for t in temporaries if t.alias_of is None or t.alias_of not in names]


def live_at_peak(temporaries: Sequence[Temporary]) -> tuple[int, list[Temporary]]:
    """The op index at which most bytes are live by the map's lives, and what is live then.

    Aliases are left out. With several streams the map's op indices show one schedule only.
    """
    own = [t for t in own_buffers(temporaries) if t.nbytes]
    change: Counter[int] = Counter()
    for t in own:
        change[t.first_write] += t.nbytes
        change[t.last_read + 1] -= t.nbytes
    level, best, at = 0, 0, 0
    for op in sorted(change):
        level += change[op]
        if level > best:
            best, at = level, op
    return at, [t for t in own if t.first_write <= at <= t.last_read]


def _graph(name: str, temporaries: Sequence[Temporary], graph: Graph | None) -> Iterator[str]:
    own = own_buffers(temporaries)
    top = max((t.offset + t.nbytes for t in temporaries), default=0)
    yield f"## graph {name}"
    yield f"temporaries: {len(own)}, and {len(temporaries) - len(own)} aliases"
    yield f"bytes without reuse: {sum(t.nbytes for t in own):,}"
    yield f"highest byte: {top:,}"
    at, live, late = peak_of(temporaries, graph)
    when = f", with stream {late} as late as the waits allow" if late else ""
    yield f"live at the peak: {sum(t.nbytes for t in live):,} bytes in {len(live)} buffers"
    yield f"the peak is at: {_op(at, graph)}{when}"
    live.sort(key=lambda t: (-t.nbytes, t.name))
    for t in live[:LIVE_LISTED]:
        yield f"{t.nbytes:>14,}  {t.name}  written by {_op(t.first_write, graph)} on {t.stream}"
    if len(live) > LIVE_LISTED:
        rest = live[LIVE_LISTED:]
        yield f"{sum(t.nbytes for t in rest):>14,}  in {len(rest)} smaller ones"


def peak_of(
    temporaries: Sequence[Temporary], graph: Graph | None
) -> tuple[int, list[Temporary], str]:
    """Op, live buffers and held back stream of the peak, by the graph where there is one."""
    moment = busiest_moment(Oracle(graph)) if graph else None
    if moment is None:
        return *live_at_peak(temporaries), ""
    by_name = {t.name: t for t in temporaries}
    live = [by_name[f.head] for f in moment.live if f.head in by_name]
    return moment.op, [t for t in live if t.nbytes], moment.late


def _op(index: int, graph: Graph | None) -> str:
    return graph.ops[index].name if graph and index < len(graph.ops) else f"op {index}"
