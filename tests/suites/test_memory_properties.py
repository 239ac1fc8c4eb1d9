"""Properties of planner, oracle and checks over generated graphs, with a byte-level simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st

from engine.ir import Graph
from engine.memmap import RankMap, Temporary
from engine.planner import STRATEGIES, plan_graphs, to_allocations, to_temporaries
from engine.planner.lives import clocks_of, conflicts_of, groups_of
from fixtures.strategies import Eagerness, eager_map, eagernesses, graphs
from suites.memory.checks import check_rank
from suites.memory.graph_checks import check_graph
from suites.memory.lifetimes import Oracle
from suites.memory.overlap import Spans, overlap_plain, overlap_sweep

QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def planned(graph: Graph, strategy: str = "planned") -> RankMap:
    plan = plan_graphs([graph], strategy, alignment=64)
    return RankMap(0, to_allocations(plan), to_temporaries(plan, graph))


def mutated(rank: RankMap, name: str, **changes) -> RankMap:
    rows = tuple(replace(t, **changes) if t.name == name else t for t in rank.temporaries)
    return replace(rank, temporaries=rows)


@QUICK
@given(graphs())
def test_generated_graphs_are_legal(graph):
    assert check_graph(graph) == ()


@QUICK
@given(graphs(), st.sampled_from(STRATEGIES))
def test_planned_maps_have_no_finding(graph, strategy):
    assert check_rank(planned(graph, strategy), [graph]).findings == ()


@QUICK
@given(graphs())
def test_planner_and_oracle_agree_on_every_pair(graph):
    groups = groups_of(graph, 64)
    conflicts = conflicts_of(groups, clocks_of(graph))
    families = [Oracle(graph).families[next(iter(group.places))] for group in groups]
    for one, a in enumerate(families):
        for other, b in enumerate(families):
            if one != other:
                ordered = a.is_over_before(b) or b.is_over_before(a)
                assert conflicts[one, other] == (not ordered)


@QUICK
@given(graphs(), st.data())
def test_a_life_that_ends_or_starts_one_op_off_is_found(graph, data):
    rank = planned(graph)
    assume(rank.temporaries)
    t: Temporary = data.draw(st.sampled_from(rank.temporaries))
    for changes, name in (
        ({"last_read": t.last_read - 1}, "life-ends-early"),
        ({"last_read": t.last_read + 1}, "life-ends-late"),
        ({"first_write": t.first_write + 1}, "life-starts-late"),
        ({"first_write": t.first_write - 1}, "life-starts-early"),
    ):
        assert name in check_rank(mutated(rank, t.name, **changes), [graph]).names


def reaches(graph: Graph) -> np.ndarray:
    """[ops, ops]: True where the first has finished before the second starts, by plain closure."""
    number = {op.name: i for i, op in enumerate(graph.ops)}
    edges = np.zeros((len(graph.ops), len(graph.ops)), dtype=bool)
    for i, op in enumerate(graph.ops):
        earlier = [j for j in range(i) if graph.ops[j].stream == op.stream]
        for j in earlier + [number[name] for name in op.waits]:
            edges[j, i] = True
    for middle in range(len(graph.ops)):
        edges |= np.outer(edges[:, middle], edges[middle])
    return edges


@QUICK
@given(graphs(streams_max=4), st.data())
def test_a_missing_wait_is_found(graph, data):
    waiting = [i for i, op in enumerate(graph.ops) if op.waits]
    assume(waiting)
    index = data.draw(st.sampled_from(waiting))
    op = graph.ops[index]
    dropped = data.draw(st.sampled_from(op.waits))
    kept = tuple(name for name in op.waits if name != dropped)
    ops = tuple(replace(o, waits=kept) if o is op else o for o in graph.ops)
    broken = replace(graph, ops=ops)
    other = graph.op_index[dropped]
    written = {n for o in (op, graph.ops[other]) for n in o.outputs + o.scratch}
    shared = {n for n in written.intersection(op.touched, graph.ops[other].touched)}
    solid = any(graph.tensors[n].size_bytes({}) for n in shared)
    assume(solid and not reaches(broken)[other, index])
    names = {finding.name for finding in check_graph(broken)}
    assert names & {"missing-wait-raw", "missing-wait-war", "missing-wait-waw"}


@st.composite
def spans(draw) -> Spans:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 9), st.integers(0, 4)),
            max_size=25,
        )
    )
    owners = [draw(st.integers(0, 30)) for _ in rows]
    return Spans(
        [start for start, _, _, _ in rows],
        [start + size for start, size, _, _ in rows],
        [first for _, _, first, _ in rows],
        [first + life for _, _, first, life in rows],
        owners,
    )


@settings(max_examples=150, deadline=None, database=None)
@given(spans())
def test_both_overlap_implementations_agree_by_op_index(given_spans):
    assert overlap_sweep(given_spans) == overlap_plain(given_spans)


@QUICK
@given(graphs(ops_max=20), st.data())
def test_both_overlap_implementations_agree_under_happens_before(graph, data):
    oracle = Oracle(graph)
    heads = {f.head: f for f in oracle.families.values() if f.kind == "temp" and f.accesses}
    families = list(heads.values())
    starts = [data.draw(st.integers(0, 40)) for _ in families]
    found = Spans(
        starts,
        [start + 20 for start in starts],
        [f.first for f in families],
        [f.last for f in families],
        range(len(families)),
    )

    def precedes(a: int, b: int) -> bool:
        return families[a].is_over_before(families[b])

    assert overlap_sweep(found, precedes) == overlap_plain(found, precedes)


def schedule(graph: Graph, pick) -> list[int]:
    """One order in which the ops may run, chosen by `pick` among those that are ready."""
    edges, left, order = reaches(graph), set(range(len(graph.ops))), []
    while left:
        ready = sorted(i for i in left if not any(edges[j, i] for j in left))
        order.append(pick(ready))
        left.remove(order[-1])
    return order


class Bytes:
    """Memory in which every byte carries the tag of what was last written there."""

    def __init__(self, graph: Graph, places: dict[str, int]) -> None:
        self.graph, self.places = graph, places
        self.cells: dict[int, object] = {}

    def tags(self, name: str) -> list:
        at = self.places[name]
        return [self.cells.get(at + n) for n in range(self.graph.tensors[name].size_bytes({}))]

    def write(self, name: str, tag: object) -> None:
        at = self.places[name]
        for n in range(self.graph.tensors[name].size_bytes({})):
            self.cells[at + n] = (tag, n)


def replay(graph: Graph, places: dict[str, int], order: list[int]) -> dict:
    """What every op reads; outputs are spoilt first, so an input on the same bytes is lost."""
    oracle, memory, seen = Oracle(graph), Bytes(graph, places), {}
    for index in order:
        op = graph.ops[index]
        own = {oracle.families[n].head for n in op.inputs}
        for name in op.outputs + op.scratch:
            if oracle.families[name].head not in own:
                memory.write(name, ("spoilt", index))
        for name in op.inputs:
            seen[index, name] = memory.tags(name)
        for name in op.outputs + op.scratch:
            memory.write(name, (index, name))
        for name in op.outputs + op.scratch:
            seen[index, name, "kept"] = memory.tags(name)
    return seen


def apart(graph: Graph) -> dict[str, int]:
    """Places where no two families meet."""
    oracle, starts, end = Oracle(graph), {}, 0
    for family in dict.fromkeys(f.head for f in oracle.families.values()):
        starts[family] = end
        end += oracle.families[family].extent[1] + 1
    return {n: starts[f.head] + f.places[n] for n, f in oracle.families.items()}


def is_corrupted(graph: Graph, rank: RankMap, orders: list[list[int]]) -> bool:
    truth_places = apart(graph)
    truth = replay(graph, truth_places, list(range(len(graph.ops))))
    far = 10**6
    places = {name: far + at for name, at in truth_places.items()}
    places.update({t.name: t.offset for t in rank.temporaries})
    return any(replay(graph, places, order) != truth for order in orders)


@QUICK
@given(graphs(), st.sampled_from(STRATEGIES), st.data())
def test_planned_bytes_survive_every_schedule_tried(graph, strategy, data):
    order = schedule(graph, lambda ready: data.draw(st.sampled_from(ready)))
    assert not is_corrupted(graph, planned(graph, strategy), [order])


@settings(parent=QUICK, max_examples=80)
@given(graphs(), eagernesses(), st.data())
def test_an_eager_planner_is_caught_whenever_it_corrupts(graph, eagerness, data):
    rank = eager_map(graph, eagerness)
    order = schedule(graph, lambda ready: data.draw(st.sampled_from(ready)))
    latest = schedule(graph, max)
    if is_corrupted(graph, rank, [list(range(len(graph.ops))), order, latest]):
        names = check_rank(rank, [graph]).names
        assert {"overlap", "touching-overlap", "scratch-shared"}.intersection(names)


@pytest.mark.parametrize("follows", [0, 3])
def test_the_eager_planner_does_corrupt(follows):
    """The property above would prove nothing if the eager planner were always lucky."""

    def broken(graph: Graph) -> bool:
        rank = eager_map(graph, Eagerness(follows_aliases=follows))
        return is_corrupted(graph, rank, [list(range(len(graph.ops)))])

    unshrunk = settings(QUICK, max_examples=2000, phases=[Phase.generate], derandomize=True)
    found = find(graphs(), broken, settings=unshrunk)
    assert not check_rank(eager_map(found, Eagerness(follows)), [found]).is_clean
