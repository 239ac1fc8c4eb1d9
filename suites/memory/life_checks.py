"""Checks of planned temporaries: what shares bytes, and whether the map agrees with the graph.

It does not know the planner. With a graph, lives and order come from the lifetime oracle and the
map is compared with them one by one; without, the map's own op indices are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.ir import Graph
from engine.memmap import Temporary
from suites.findings import Finding
from suites.memory.lifetimes import Oracle
from suites.memory.map_checks import (
    alias_head,
    both_ways,
    described,
    facts,
    in_rank,
    shared_bytes,
    span_text,
)
from suites.memory.overlap import Precedes, Spans


@dataclass(frozen=True)
class Subject:
    """The temporaries of one graph on one rank, with the graph's oracle where there is one."""

    rank: int
    graph: str
    temporaries: Sequence[Temporary]
    oracle: Oracle | None

    @property
    def ops(self) -> tuple[str, ...]:
        """Op names by index, empty without a graph."""
        return tuple(op.name for op in self.oracle.graph.ops) if self.oracle else ()

    def where(self, *more: str) -> str:
        """The `where` of a finding about this graph."""
        return in_rank(self.rank, f"graph {self.graph}", *more)

    def knows(self, t: Temporary) -> bool:
        """True when the oracle has a life for this temporary."""
        return (
            self.oracle is not None
            and t.name in self.oracle.families
            and self.oracle.families[t.name].accesses != 0
        )


def _own_bytes(held: Sequence[Temporary]) -> list[Temporary]:
    """Temporaries that hold bytes of their own: aliases inside their base are left out."""
    by_name = {t.name: t for t in held}
    kept = []
    for t in held:
        base = by_name.get(t.alias_of) if t.alias_of else None
        inside = (
            base is not None
            and base.offset <= t.offset
            and t.offset + t.nbytes <= base.offset + base.nbytes
        )
        if t.nbytes > 0 and t.first_write <= t.last_read and not inside:
            kept.append(t)
    return kept


def _owner(subject: Subject, t: Temporary, by_name: dict[str, Temporary]) -> str:
    if subject.knows(t):
        return subject.oracle.families[t.name].head
    head = alias_head(t, by_name)
    return head.name if head else t.name


def _order(subject: Subject, held: Sequence[Temporary]) -> Precedes:
    """Over before the other begins: by the oracle where it knows both, else by the map."""
    families = [subject.oracle.families[t.name] if subject.knows(t) else None for t in held]

    def precedes(one: int, other: int) -> bool:
        a, b = families[one], families[other]
        if a is not None and b is not None:
            return a.is_over_before(b)
        return held[one].last_read < held[other].first_write

    return precedes


def _first_ops(subject: Subject, held: Sequence[Temporary]) -> list[int]:
    return [
        subject.oracle.families[t.name].first if subject.knows(t) else t.first_write for t in held
    ]


def _scratch_names(subject: Subject) -> set[str]:
    ops = subject.oracle.graph.ops if subject.oracle else ()
    return {name for op in ops for name in op.scratch}


def buffers_apart(subject: Subject) -> Iterator[Finding]:
    """Buffers that are not aliases of each other and may live at once share no bytes."""
    held = _own_bytes(subject.temporaries)
    by_name = {t.name: t for t in subject.temporaries}
    owners = {name: n for n, name in enumerate(dict.fromkeys(t.name for t in subject.temporaries))}
    spans = Spans(
        [t.offset for t in held],
        [t.offset + t.nbytes for t in held],
        _first_ops(subject, held),
        [t.last_read for t in held],
        [owners.setdefault(_owner(subject, t, by_name), -1) for t in held],
    )
    scratch = _scratch_names(subject)
    for one, other in both_ways(spans, _order(subject, held)):
        a, b = sorted((held[one], held[other]), key=lambda t: (t.first_write, t.name))
        name = _overlap_name(subject, a, b, scratch)
        offset, size = shared_bytes(a.offset, a.nbytes, b.offset, b.nbytes)
        reason = {
            "overlap": "neither is over before the other begins",
            "touching-overlap": "one op reads the first while it writes the second",
            "scratch-shared": "both are scratch of ops that may run at the same time",
        }[name]
        yield Finding(
            name,
            subject.where(),
            f"{described(a, subject.ops)} and {described(b, subject.ops)} share "
            f"{span_text(offset, size)}, and {reason}",
            {"first": facts(a), "second": facts(b), "shared_bytes": [offset, offset + size]},
        )


def _overlap_name(subject: Subject, a: Temporary, b: Temporary, scratch: set[str]) -> str:
    if a.name in scratch and b.name in scratch:
        return "scratch-shared"
    last, first = a.last_read, b.first_write
    if subject.knows(a) and subject.knows(b):
        last, first = (
            subject.oracle.families[a.name].last,
            subject.oracle.families[b.name].first,
        )
    return "touching-overlap" if last == first else "overlap"


def _at_its_base(t: Temporary, by_name: dict[str, Temporary]) -> bool:
    """An empty slice may point to the end of its base, where another buffer may begin."""
    base = by_name.get(t.alias_of) if t.alias_of else None
    return base is not None and base.offset <= t.offset <= base.offset + base.nbytes


def empties_nowhere(subject: Subject) -> Iterator[Finding]:
    """A tensor without bytes does not point into a buffer that lives at the same time."""
    held = list(subject.temporaries)
    by_name = {t.name: t for t in held}
    precedes = _order(subject, held)
    for number, t in enumerate(held):
        if t.nbytes > 0 or _at_its_base(t, by_name):
            continue
        for other, b in enumerate(held):
            if not b.offset <= t.offset < b.offset + b.nbytes:
                continue
            if _owner(subject, t, by_name) == _owner(subject, b, by_name):
                continue
            if not precedes(number, other) and not precedes(other, number):
                yield Finding(
                    "empty-at-live-offset",
                    subject.where(t.name),
                    f"has no bytes and offset {t.offset}, inside {described(b, subject.ops)}",
                    {"offset": t.offset, "second": facts(b)},
                )


def placed_by_a_map(oracle: Oracle) -> set[str]:
    """Names of the temporaries that a map places, so no views of persistent tensors."""
    return {
        name
        for name, tensor in oracle.graph.tensors.items()
        if tensor.kind == "temp" and oracle.families[name].kind == "temp"
    }


def names_match(subject: Subject) -> Iterator[Finding]:
    """The map places exactly the temporaries that the graph has."""
    oracle = subject.oracle
    assert oracle is not None, "needs the graph"
    expected = placed_by_a_map(oracle)
    placed = {t.name for t in subject.temporaries}
    for name in sorted(expected - placed):
        size = oracle.graph.tensors[name].size_bytes(oracle.graph.limits)
        yield Finding(
            "temporary-missing",
            subject.where(name),
            f"{size} bytes of the graph have no place in the map",
            {"name": name, "nbytes": size},
        )
    for t in subject.temporaries:
        if t.name not in expected:
            yield Finding(
                "temporary-unknown",
                subject.where(t.name),
                f"{described(t)} is no temporary of the graph",
                facts(t),
            )


def sizes_match(subject: Subject) -> Iterator[Finding]:
    """Every temporary has the bytes of its shape, strides and dtype under the graph's limits."""
    graph = _graph(subject)
    for t in subject.temporaries:
        if t.name not in graph.tensors:
            continue
        tensor = graph.tensors[t.name]
        needed = tensor.size_bytes(graph.limits)
        if needed != t.nbytes:
            yield Finding(
                "size-too-small" if t.nbytes < needed else "size-too-large",
                subject.where(t.name),
                f"{t.nbytes} bytes, but {tensor.dtype} {list(tensor.dims(graph.limits))} with "
                f"strides {tensor.strides} needs {needed}",
                {"nbytes": t.nbytes, "needed_bytes": needed},
            )


def _graph(subject: Subject) -> Graph:
    assert subject.oracle is not None, "needs the graph"
    return subject.oracle.graph


def lives_match(subject: Subject) -> Iterator[Finding]:
    """Every life of the map is the oracle's, at both ends, and so is the stream."""
    ops = _graph(subject).ops
    for t in subject.temporaries:
        if not subject.knows(t):
            continue
        family = subject.oracle.families[t.name]
        for wrong, name, have, want in (
            (t.first_write > family.first, "life-starts-late", t.first_write, family.first),
            (t.first_write < family.first, "life-starts-early", t.first_write, family.first),
            (t.last_read < family.last, "life-ends-early", t.last_read, family.last),
            (t.last_read > family.last, "life-ends-late", t.last_read, family.last),
        ):
            if wrong:
                yield Finding(
                    name,
                    subject.where(t.name),
                    f"{described(t, subject.ops)}, but by the ops it is op {want} "
                    f"{ops[want].name} instead of {have}",
                    {**facts(t), "expected_op": want},
                )
        stream = ops[family.first].stream
        if t.stream != stream:
            yield Finding(
                "stream-mismatch",
                subject.where(t.name),
                f"stream {t.stream!r}, but op {family.first} {ops[family.first].name} "
                f"runs on {stream!r}",
                {"stream": t.stream, "expected": stream},
            )


def aliases_match(subject: Subject) -> Iterator[Finding]:
    """Alias edges are the graph's, and every member of a family lies at its place in it."""
    graph = _graph(subject)
    placed = {t.name: t for t in subject.temporaries}
    for t in subject.temporaries:
        if t.name not in graph.tensors:
            continue
        family = subject.oracle.families[t.name]
        declared = graph.tensors[t.name].alias_of
        takes_over = declared is None and family.head != t.name
        right = t.alias_of in family.places if takes_over else t.alias_of == declared
        if not right:
            wanted = f"a member of the family of {family.head}" if takes_over else declared
            yield Finding(
                "alias-mismatch",
                subject.where(t.name),
                f"alias of {t.alias_of} in the map, of {wanted} in the graph",
                {"alias_of": t.alias_of, "expected": declared or family.head},
            )
        base = placed.get(declared or family.head)
        if base is None or base is t:
            continue
        wanted_at = base.offset + family.places[t.name] - family.places[base.name]
        if t.offset != wanted_at:
            yield _misplaced(subject, t, base, wanted_at, takes_over)


def _misplaced(
    subject: Subject, t: Temporary, base: Temporary, wanted_at: int, takes_over: bool
) -> Finding:
    shared = shared_bytes(t.offset, t.nbytes, base.offset, base.nbytes)[1]
    name = "alias-misplaced"
    if takes_over:
        name = "inplace-shifted" if shared else "inplace-not-shared"
    return Finding(
        name,
        subject.where(t.name),
        f"{described(t, subject.ops)} lies at {t.offset}, not at {wanted_at}, its place beside "
        f"{described(base, subject.ops)}",
        {"first": facts(t), "second": facts(base), "expected_offset": wanted_at},
    )
