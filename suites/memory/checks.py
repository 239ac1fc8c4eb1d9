"""All static checks of a memory map: every finding, not just the first, and what was not checked.

It does not know the planner, the executor or how a map came about: a map and, where there are
any, the graphs it was planned for are all it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.ir import Graph
from engine.memmap import Allocation, MemoryMap, RankMap, memory_map_from_json
from suites.findings import Finding, Judgement, NotChecked
from suites.memory import life_checks, map_checks
from suites.memory.documents import check_inventory, check_schema
from suites.memory.graph_checks import check_graph
from suites.memory.lifetimes import Oracle
from suites.memory.map_checks import in_rank

RANKS_WITHIN_BYTES = 4 * 1024**2
"""How far the fixed memory of the ranks may differ: the seed's ranks were within 4 MiB."""
EQUAL_CATEGORIES = ("state",)
"""Allocations of these categories are the same on all ranks: the KV state is replicated."""
RANK_CHECKS = (
    map_checks.names_once,
    map_checks.allocation_forms,
    map_checks.allocations_apart,
    map_checks.temporaries_inside,
    map_checks.aliases_inside,
)
PLAN_CHECKS = (life_checks.buffers_apart, life_checks.empties_nowhere)
AGAINST_GRAPH = (
    life_checks.names_match,
    life_checks.sizes_match,
    life_checks.lives_match,
    life_checks.aliases_match,
)


def check_rank(rank: RankMap, graphs: Sequence[Graph] = ()) -> Judgement:
    """Everything about one rank's map; with its graphs also lives, order, aliases and legality."""
    findings = [finding for check in RANK_CHECKS for finding in check(rank)]
    not_checked = list(map_checks.unreadable_dtypes(rank))
    oracles = {graph.name: Oracle(graph) for graph in graphs}
    for oracle in oracles.values():
        findings += check_graph(oracle.graph, oracle)
    planned = map_checks.by_graph(rank)
    if oracles:
        findings += _graph_names(rank.rank, planned, oracles)
    elif planned:
        not_checked.append(
            NotChecked(
                "lives, order between streams, in-place legality, strides",
                "the graphs are not at hand; lives were taken as the map states them",
            )
        )
    for name in dict.fromkeys([*planned, *oracles]):
        subject = life_checks.Subject(rank.rank, name, planned.get(name, ()), oracles.get(name))
        findings += [finding for check in PLAN_CHECKS for finding in check(subject)]
        if subject.oracle is not None and name in planned:
            findings += [finding for check in AGAINST_GRAPH for finding in check(subject)]
    return Judgement(tuple(findings), tuple(not_checked))


def _graph_names(
    rank: int, planned: Mapping[str, object], oracles: Mapping[str, Oracle]
) -> Iterator[Finding]:
    with_temporaries = {n for n, o in oracles.items() if life_checks.placed_by_a_map(o)}
    for name in sorted(set(planned) - set(oracles)):
        yield Finding(
            "graph-unknown",
            in_rank(rank, f"graph {name}"),
            f"the map has its temporaries, but the graphs are {sorted(oracles)}",
            {"graph": name},
        )
    for name in sorted(with_temporaries - set(planned)):
        yield Finding(
            "graph-unknown",
            in_rank(rank, f"graph {name}"),
            f"has temporaries, but the map places only those of {sorted(planned)}",
            {"graph": name},
        )


def check_map(
    memory_map: MemoryMap,
    graphs: Mapping[int, Sequence[Graph]] | None = None,
    *,
    budget_bytes_max: int | None = None,
    ranks_within_bytes: int | None = RANKS_WITHIN_BYTES,
    equal_categories: Sequence[str] = EQUAL_CATEGORIES,
) -> Judgement:
    """Everything about a map of all ranks.

    graphs              per rank, the graphs its temporaries were planned for
    budget_bytes_max    fixed memory that no rank may exceed
    ranks_within_bytes  by how much the ranks' fixed memory may differ, None for no limit
    """
    findings, not_checked = [], []
    for rank in memory_map.ranks:
        judged = check_rank(rank, (graphs or {}).get(rank.rank, ()))
        findings += judged.findings
        not_checked += judged.not_checked
    findings += rank_numbers(memory_map)
    findings += ranks_agree(memory_map, equal_categories)
    if ranks_within_bytes is not None:
        findings += ranks_balanced(memory_map, ranks_within_bytes)
    if budget_bytes_max is None:
        not_checked.append(NotChecked("budget", "no budget was given"))
    else:
        findings += within_budget(memory_map, budget_bytes_max)
    return Judgement(tuple(findings), tuple(dict.fromkeys(not_checked)))


def check_document(
    document: Mapping, graphs: Mapping[int, Sequence[Graph]] | None = None, **limits
) -> Judgement:
    """Everything about a `memmap/1` document; `limits` are those of `check_map`.

    A document that breaks its schema is not looked at further.
    """
    broken = tuple(check_schema(document))
    if broken:
        return Judgement(broken, (NotChecked("everything else", "the document breaks its schema"),))
    judged = check_map(memory_map_from_json(document), graphs, **limits)
    return Judgement(judged.findings + tuple(check_inventory(document)), judged.not_checked)


def rank_numbers(memory_map: MemoryMap) -> Iterator[Finding]:
    """The ranks are numbered from zero without gaps."""
    numbers = [rank.rank for rank in memory_map.ranks]
    if sorted(numbers) != list(range(len(numbers))):
        yield Finding(
            "rank-numbers",
            "map",
            f"ranks are {numbers}, expected 0 to {len(numbers) - 1} once each",
            {"ranks": numbers},
        )


def within_budget(memory_map: MemoryMap, budget_bytes_max: int) -> Iterator[Finding]:
    """No rank's fixed memory exceeds the budget."""
    for rank in memory_map.ranks:
        fixed = sum(allocation.nbytes for allocation in rank.allocations)
        if fixed > budget_bytes_max:
            yield Finding(
                "over-budget",
                in_rank(rank.rank),
                f"{fixed} bytes are fixed, {fixed - budget_bytes_max} more than the "
                f"{budget_bytes_max} allowed",
                {"fixed_bytes": fixed, "budget_bytes_max": budget_bytes_max},
            )


def ranks_balanced(memory_map: MemoryMap, within_bytes: int) -> Iterator[Finding]:
    """The fixed memory of all ranks is alike: the heaviest decides how many KV tokens all have."""
    fixed = {r.rank: sum(a.nbytes for a in r.allocations) for r in memory_map.ranks}
    if not fixed:
        return
    light, heavy = min(fixed, key=fixed.get), max(fixed, key=fixed.get)
    apart = fixed[heavy] - fixed[light]
    if apart > within_bytes:
        yield Finding(
            "ranks-unbalanced",
            "map",
            f"rank {heavy} has {fixed[heavy]} bytes fixed, rank {light} has {fixed[light]}: "
            f"{apart} apart, {within_bytes} allowed",
            {"fixed_bytes": {str(rank): size for rank, size in fixed.items()}},
        )


def ranks_agree(memory_map: MemoryMap, equal_categories: Sequence[str]) -> Iterator[Finding]:
    """What must be the same on all ranks is.

    Replicated allocations agree in everything but their place; allocations of one name agree in
    category and dtype, and where they also have one shape, in alignment and order; graphs have
    the same temporaries with the same alias edges and streams.
    """
    if not memory_map.ranks:
        return
    first = memory_map.ranks[0]
    for other in memory_map.ranks[1:]:
        yield from _same_replicas(first, other, equal_categories)
        yield from _same_attributes(first, other)
        yield from _same_order(first, other)
        yield from _same_temporaries(first, other)


def _differs(first: RankMap, other: RankMap, what: str, have: object, want: object) -> Finding:
    return Finding(
        "ranks-differ",
        f"ranks {first.rank} and {other.rank} / {what}",
        f"rank {first.rank} has {want}, rank {other.rank} has {have}",
        {"what": what, "ranks": [first.rank, other.rank]},
    )


def _same_replicas(first: RankMap, other: RankMap, categories: Sequence[str]) -> Iterator[Finding]:
    for category in categories:
        mine, theirs = (
            {a.name: (a.nbytes, a.shape) for a in r.allocations if a.category == category}
            for r in (first, other)
        )
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                what = f"{category} {name}"
                yield _differs(first, other, what, theirs.get(name), mine.get(name))


def _same_attributes(first: RankMap, other: RankMap) -> Iterator[Finding]:
    mine = {a.name: a for a in first.allocations}
    for a in other.allocations:
        if (b := mine.get(a.name)) is None:
            continue
        compared = ("category", "dtype", *(("alignment",) if a.shape == b.shape else ()))
        for what in compared:
            if getattr(a, what) != getattr(b, what):
                yield _differs(
                    first, other, f"{what} of {a.name}", getattr(a, what), getattr(b, what)
                )


def _same_order(first: RankMap, other: RankMap) -> Iterator[Finding]:
    common = {_likeness(a) for a in first.allocations} & {_likeness(a) for a in other.allocations}
    orders = []
    for rank in (first, other):
        held = [a for a in rank.allocations if _likeness(a) in common]
        # At equal offsets an empty mapping comes first, whatever the order it was written in.
        held.sort(key=lambda a: (a.arena, a.offset, a.nbytes, a.name))
        orders.append([(a.arena, a.name) for a in held])
    for (arena, want), (_, have) in zip(*orders, strict=True):
        if want != have:
            yield _differs(first, other, f"order in arena {arena}", have, want)
            return


def _likeness(a: Allocation) -> tuple:
    return a.arena, a.name, a.shape


def _same_temporaries(first: RankMap, other: RankMap) -> Iterator[Finding]:
    mine, theirs = (
        {(t.graph, t.name): (t.alias_of, t.stream) for t in r.temporaries} for r in (first, other)
    )
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            what = f"graph {key[0]}, temporary {key[1]} (alias of, stream)"
            yield _differs(first, other, what, theirs.get(key), mine.get(key))


def check_repeat(first: MemoryMap, second: MemoryMap) -> Iterator[Finding]:
    """Two maps of the same input are the same, entry by entry and in the same order."""
    for mine, theirs in zip(first.ranks, second.ranks, strict=False):
        for kind in ("allocations", "temporaries"):
            a, b = getattr(mine, kind), getattr(theirs, kind)
            where = in_rank(mine.rank, kind)
            if len(a) != len(b):
                yield Finding("not-repeatable", where, f"{len(a)} the first time, then {len(b)}")
            for one, other in zip(a, b, strict=False):
                if one != other:
                    yield Finding("not-repeatable", where, f"{one} the first time, then {other}")
                    break
    if len(first.ranks) != len(second.ranks):
        message = f"{len(first.ranks)} ranks the first time, then {len(second.ranks)}"
        yield Finding("not-repeatable", "map", message)
