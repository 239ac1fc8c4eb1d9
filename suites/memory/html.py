"""A memory map as one self-contained page: address over time per arena, drawn on a canvas.

It does not judge: conflicts are those of a judgement that is handed in. Columns of numbers travel
as base64 of little-endian arrays, so a page of hundreds of thousands of buffers stays usable.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from zlib import crc32

import numpy as np

from engine.ir import Graph
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from suites.findings import Judgement
from suites.memory.folding import pattern_of
from suites.memory.map_checks import TRANSIENT_ARENA
from suites.memory.render_text import layout_digest, peak_of

COLOURS = 12
"""Colours of the page; buffers whose names differ in a layer's number only share one."""
PLACEHOLDER = "/*DATA*/"


@dataclass(frozen=True)
class Scene:
    """One picture: buffers over the ops of a graph, or the mappings of an arena that all stay.

    height     bytes of the arena; `width` in ops, 1 where nothing moves
    labels     per buffer, the number of its entry in `words` (streams, or categories)
    alias      per buffer, the number of the buffer it is an alias of, or -1
    peak       op at which most is live, and the numbers of what is live then; the note says in
               which schedule
    """

    title: str
    height: int
    width: int
    ops: tuple[str, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int, int, int], ...]
    labels: tuple[int, ...]
    words: tuple[str, ...]
    alias: tuple[int, ...]
    pools: tuple[tuple[str, int, int], ...] = ()
    peak: int = 0
    peak_live: tuple[int, ...] = ()
    peak_note: str = ""
    conflicts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict:
        """What the page reads."""
        bad = [int(n in self.conflicts) for n in range(len(self.names))]
        colours = [crc32(pattern_of(name).encode()) % COLOURS for name in self.names]
        columns = list(zip(*self.spans, strict=True)) or [(), (), (), ()]
        return {
            "title": self.title,
            "height": self.height,
            "width": self.width,
            "ops": list(self.ops),
            "names": "\n".join(name.replace("\n", " ") for name in self.names),
            "streams": list(self.words),
            "pools": [list(pool) for pool in self.pools],
            "peak": self.peak,
            "peakLive": list(self.peak_live),
            "peakNote": self.peak_note,
            "offences": len(self.conflicts),
            "conflicts": {str(n): list(texts) for n, texts in self.conflicts.items()},
            "columns": {
                "offset": _packed(columns[0], "<f8"),
                "size": _packed(columns[1], "<f8"),
                "first": _packed(columns[2], "<i4"),
                "last": _packed(columns[3], "<i4"),
                "alias": _packed(self.alias, "<i4"),
                "colour": _packed(colours, "u1"),
                "stream": _packed(self.labels, "u1"),
                "bad": _packed(bad, "u1"),
            },
        }


def _packed(values: Sequence[int], kind: str) -> str:
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()


def render_html(
    memory_map: MemoryMap,
    graphs: Mapping[int, Sequence[Graph]] | None = None,
    judgement: Judgement | None = None,
) -> str:
    """The page; with graphs ops have names, with a judgement its conflicts are red."""
    judged = judgement or Judgement()
    document = {
        "facts": [[key, value] for key, value in _facts(memory_map)],
        "findings": [str(finding) for finding in judged.findings],
        "notChecked": [str(entry) for entry in judged.not_checked],
        "scenes": [scene.to_json() for scene in scenes_of(memory_map, graphs or {}, judged)],
    }
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    # A name may hold "</script>" or "<!--"; in JSON the sign can be written so that HTML is blind.
    text = text.replace("<", "\\u003c")
    before, after = template().split(PLACEHOLDER)
    return before + text + after


def template() -> str:
    """The page without data."""
    return (files("suites.memory") / "map_page.html").read_text(encoding="utf-8")


def _facts(memory_map: MemoryMap) -> Iterator[tuple[str, str]]:
    for part in ("model", "recipe", "kv"):
        for key, value in sorted(getattr(memory_map, part).items()):
            yield f"{part}.{key}", value if isinstance(value, str) else json.dumps(value)
    for rank in memory_map.ranks:
        for row, size in rank.inventory_mib.items():
            yield f"rank {rank.rank} {row}", f"{size:,.3f} MiB"
        yield f"rank {rank.rank} layout", layout_digest(rank)


def scenes_of(
    memory_map: MemoryMap, graphs: Mapping[int, Sequence[Graph]], judged: Judgement
) -> Iterator[Scene]:
    """Per rank, one scene for each graph and one for each arena of mappings that stay."""
    for rank in memory_map.ranks:
        by_name = {graph.name: graph for graph in graphs.get(rank.rank, ())}
        held: dict[str, list[Temporary]] = {}
        for t in rank.temporaries:
            held.setdefault(t.graph, []).append(t)
        for name, temporaries in held.items():
            yield _graph_scene(rank, name, temporaries, by_name.get(name), judged)
        arenas: dict[str, list[Allocation]] = {}
        for a in rank.allocations:
            if a.arena != TRANSIENT_ARENA or not held:
                arenas.setdefault(a.arena, []).append(a)
        for arena, allocations in arenas.items():
            yield _arena_scene(rank, arena, allocations, judged)


def _conflicts(
    judged: Judgement, places: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[int, tuple[str, ...]]:
    """Per buffer of a scene, what the findings at one of these places say about it."""
    number = {name: n for n, name in enumerate(names)}
    found: dict[int, list[str]] = {}
    for finding in judged.findings:
        steps = finding.where.split(" / ")
        if not any(steps[: len(place)] == list(place) for place in places):
            continue
        told = [steps[-1], *(finding.data.get(key) for key in ("first", "second", "name"))]
        for entry in told:
            name = entry.get("name") if isinstance(entry, Mapping) else entry
            if name in number:
                texts = found.setdefault(number[name], [])
                if (text := f"{finding.name}: {finding.message}") not in texts:
                    texts.append(text)
    return {n: tuple(texts) for n, texts in sorted(found.items())}


def _graph_scene(
    rank: RankMap,
    name: str,
    temporaries: Sequence[Temporary],
    graph: Graph | None,
    judged: Judgement,
) -> Scene:
    pools = [a for a in rank.allocations if a.arena == TRANSIENT_ARENA]
    names = tuple(t.name for t in temporaries)
    number = {name: n for n, name in enumerate(names)}
    streams = tuple(dict.fromkeys(t.stream for t in temporaries))
    ops = tuple(op.name for op in graph.ops) if graph else ()
    peak, live, late = peak_of(temporaries, graph)
    return Scene(
        title=f"rank {rank.rank}, graph {name}",
        height=max(
            [a.offset + a.nbytes for a in pools] + [t.offset + t.nbytes for t in temporaries]
        ),
        width=max(len(ops), 1 + max(t.last_read for t in temporaries)),
        ops=ops,
        names=names,
        spans=tuple((t.offset, t.nbytes, t.first_write, t.last_read) for t in temporaries),
        labels=tuple(streams.index(t.stream) for t in temporaries),
        words=streams,
        alias=tuple(number.get(t.alias_of, -1) for t in temporaries),
        pools=tuple((a.name, a.offset, a.nbytes) for a in pools),
        peak=peak,
        peak_live=tuple(number[t.name] for t in live),
        peak_note=f"with stream {late} as late as the waits allow" if late else "",
        # What is wrong with a graph under any plan is reported without a rank.
        conflicts=_conflicts(
            judged, [(f"rank {rank.rank}", f"graph {name}"), (f"graph {name}",)], names
        ),
    )


def _arena_scene(
    rank: RankMap, arena: str, allocations: Sequence[Allocation], judged: Judgement
) -> Scene:
    names = tuple(a.name for a in allocations)
    categories = tuple(dict.fromkeys(a.category for a in allocations))
    return Scene(
        title=f"rank {rank.rank}, arena {arena}",
        height=max(a.offset + a.nbytes for a in allocations),
        width=1,
        ops=(),
        names=names,
        spans=tuple((a.offset, a.nbytes, 0, 0) for a in allocations),
        labels=tuple(categories.index(a.category) for a in allocations),
        words=categories,
        alias=(-1,) * len(allocations),
        conflicts=_conflicts(
            judged, [(f"rank {rank.rank}", step) for step in (f"arena {arena}", *names)], names
        ),
    )
