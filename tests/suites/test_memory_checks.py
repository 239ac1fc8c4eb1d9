"""The memory checks in what data files cannot show: messages, limits of knowledge, repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.ir import Graph, Op, Tensor
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from engine.planner import plan_graphs, to_allocations, to_temporaries
from suites.findings import Finding, Judgement, NotChecked, joined
from suites.memory import map_checks, names
from suites.memory.checks import check_document, check_map, check_rank, check_repeat
from suites.memory.documents import check_schema
from suites.memory.graph_checks import bytes_meet, check_graph
from suites.memory.lifetimes import Oracle
from suites.memory.overlap import Spans, overlap_plain, overlap_sweep


def temp(name: str, size: int = 64, **more) -> Tensor:
    return Tensor(name, "temp", "u8", (size,), **more)


def op(name: str, reads: str, writes: str, **more) -> Op:
    return Op(name, "any", tuple(reads.split()), tuple(writes.split()), **more)


def graph(tensors: list[Tensor], ops: list[Op]) -> Graph:
    io = [Tensor("in", "io", "u8", (8,)), Tensor("out", "io", "u8", (8,))]
    return Graph("g", {t.name: t for t in (*tensors, *io)}, tuple(ops), {})


def sending(waits: tuple[str, ...] = ("send",)) -> Graph:
    ops = [
        op("make", "in", "a"),
        op("send", "a", "sent", stream="comm", waits=("make",)),
        op("next", "in", "b"),
        op("end", "b sent", "out", waits=waits),
    ]
    return graph([temp("a"), temp("sent"), temp("b")], ops)


def planned(g: Graph) -> RankMap:
    plan = plan_graphs([g], "planned", alignment=64)
    return RankMap(0, to_allocations(plan), to_temporaries(plan, g))


def arena(size: int) -> Allocation:
    return Allocation("temporaries", "temporaries", size, "temporaries", 0, 64, "u8", (size,))


# What findings say


def test_an_overlap_names_both_buffers_their_bytes_and_ops():
    rank = planned(sending())
    places = {t.name: t.offset for t in rank.temporaries}
    moved = tuple(replace(t, offset=places["a"]) if t.name == "b" else t for t in rank.temporaries)
    (finding,) = check_rank(replace(rank, temporaries=moved), [sending()]).findings
    assert finding.name == "overlap"
    start = places["a"]
    assert finding.message == (
        f"a (bytes {start}..{start + 64}, ops 0 make to 1 send, compute) and "
        f"b (bytes {start}..{start + 64}, ops 2 next to 3 end, compute) share "
        f"bytes {start}..{start + 64}, and neither is over before the other begins"
    )
    assert finding.data["first"]["ops"] == [0, 1]
    assert finding.data["shared_bytes"] == [start, start + 64]
    assert str(finding).startswith("overlap: rank 0 / graph g: a (bytes")


def test_a_missing_wait_names_both_ops_and_tensors():
    (finding,) = check_graph(sending(waits=()))
    assert str(finding) == (
        "missing-wait-raw: graph g / end: op 3 end on compute reads sent (bytes 0..64 of sent) "
        "without waiting until op 1 send on comm has written sent"
    )


def test_all_findings_are_listed_not_just_the_first():
    rows = tuple(Temporary("g", f"t{n}", 64, 0, 0, 3, "compute") for n in range(5))
    judged = check_rank(RankMap(0, (arena(64),), rows))
    assert [finding.name for finding in judged.findings] == ["overlap"] * 10


# What is not known is said


def test_without_graphs_the_lives_are_reported_as_not_checked():
    judged = check_rank(planned(sending()))
    assert judged.is_clean
    assert [entry.check for entry in judged.not_checked] == [
        "lives, order between streams, in-place legality, strides"
    ]
    assert check_rank(planned(sending()), [sending()]).not_checked == ()


def test_a_budget_that_was_not_given_is_reported_as_not_checked():
    judged = check_map(MemoryMap({}, {}, (RankMap(0, (), ()),)))
    assert NotChecked("budget", "no budget was given") in judged.not_checked


def test_an_item_size_that_is_not_known_is_reported():
    odd = Allocation("w", "weights", 10, "weights", 0, 1, "f6", (10,))
    judged = check_rank(RankMap(0, (odd,), ()))
    assert judged.not_checked[0].reason.startswith("item size of f6 is not known")


def test_a_document_that_breaks_its_schema_is_not_judged_further():
    judged = check_document({"version": "memmap/1"})
    assert judged.names == ("schema",)
    assert judged.not_checked[0].check == "everything else"


def test_a_schema_finding_names_the_row_in_the_document():
    document = MemoryMap({}, {}, (planned(sending()),)).to_json()
    document["ranks"][0]["temporaries"][2]["nbytes"] = "64"
    (finding,) = check_schema(document)
    assert finding.where == "ranks / 0 / temporaries / 2 / nbytes"


@pytest.mark.parametrize("document", [None, 3, [], {"ranks": 3}, {"ranks": [3]}])
def test_anything_may_be_handed_to_the_schema_check(document):
    assert {finding.name for finding in check_schema(document)} == {"schema"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", 5),
        ("name", None),
        ("stream", "gpu"),
        ("offset", 1.5),
        ("nbytes", True),
    ],
)
def test_rows_told_apart_by_form_are_still_checked_one_by_one(key, value):
    document = MemoryMap({}, {}, (planned(sending()),)).to_json()
    document["ranks"][0]["temporaries"][1][key] = value
    assert [f.where for f in check_schema(document)] == [f"ranks / 0 / temporaries / 1 / {key}"]


# Repeats


def test_two_equal_maps_repeat():
    maps = [MemoryMap({}, {}, (planned(sending()),)) for _ in range(2)]
    assert list(check_repeat(*maps)) == []


def test_another_layout_the_second_time_is_found():
    first = MemoryMap({}, {}, (planned(sending()),))
    rank = first.ranks[0]
    turned = first.with_rank(replace(rank, temporaries=rank.temporaries[::-1]))
    fewer = first.with_rank(replace(rank, temporaries=rank.temporaries[1:]))
    none = replace(first, ranks=())
    for second in (turned, fewer, none):
        assert {finding.name for finding in check_repeat(first, second)} == {"not-repeatable"}


# The oracle


def test_a_family_has_its_aliases_of_any_depth_and_its_successors():
    tensors = [
        temp("a"),
        temp("v", 32, alias_of="a", alias_offset_bytes=32),
        temp("w", 8, alias_of="v", alias_offset_bytes=8),
        temp("b"),
    ]
    ops = [
        op("one", "in", "a"),
        op("two", "a", "b", inplace=(("a", "b"),)),
        op("end", "w", "out"),
    ]
    family = Oracle(graph(tensors, ops)).families["w"]
    assert dict(family.places) == {"a": 0, "v": 32, "w": 40, "b": 0}
    assert (family.head, family.first, family.last) == ("a", 0, 2)
    assert family.extent == (0, 64)


def test_order_goes_through_streams_and_waits():
    ops = [
        op("a", "in", "x"),
        op("b", "in", "y", stream="comm", waits=("a",)),
        op("c", "in", "z", stream="copy", waits=("b",)),
        op("d", "in", "w"),
    ]
    oracle = Oracle(graph([temp(n) for n in "xyzw"], ops))
    assert oracle.finished_before == (0, 0b1, 0b11, 0b1)
    assert oracle.is_ordered(2, 0)
    assert not oracle.is_ordered(1, 3)


def test_a_wait_for_a_later_or_unknown_op_orders_nothing():
    ops = [op("a", "in", "x", waits=("b", "nobody")), op("b", "in", "y", stream="comm")]
    oracle = Oracle(graph([temp("x"), temp("y")], ops))
    assert oracle.finished_before == (0, 0)
    found = {finding.name for finding in check_graph(oracle.graph)}
    assert found == {"wait-not-issued", "wait-unknown"}


def test_live_at_an_op_is_what_was_touched_before_and_will_be_after():
    oracle = Oracle(sending())
    assert [[f.head for f in oracle.live_at(n)] for n in range(4)] == [
        ["a"],
        ["a", "sent"],
        ["sent", "b"],
        ["sent", "b"],
    ]


# Bytes that meet


def matrix(name: str, columns: int, offset: int) -> Tensor:
    return Tensor(name, "temp", "u8", (4, columns), (16, 1), "x", offset)


@pytest.mark.parametrize(
    ("columns", "offset", "meets"),
    [(8, 8, False), (8, 7, True), (9, 8, True), (4, 12, False), (8, 64, False), (1, 55, True)],
)
def test_column_slices_meet_only_where_columns_do(columns, offset, meets):
    tensors = [Tensor("x", "temp", "u8", (8, 16)), matrix("a", 8, 0), matrix("b", columns, offset)]
    g = graph(tensors, [op("one", "in", "a b")])
    family = Oracle(g).families["a"]
    assert bytes_meet(g, family, "a", "b") == meets
    assert bytes_meet(g, family, "b", "a") == meets


# Two ways to the same pairs


def test_three_on_one_place_are_three_pairs():
    spans = Spans([0, 0, 0], [8, 8, 8], [0, 1, 2], [5, 5, 5], [0, 1, 2])
    assert overlap_sweep(spans) == overlap_plain(spans) == [(0, 1), (0, 2), (1, 2)]


def test_half_open_bytes_that_touch_are_no_pair():
    spans = Spans([0, 8], [8, 16], [0, 0], [5, 5], [0, 1])
    assert overlap_sweep(spans) == overlap_plain(spans) == []


def test_lives_that_meet_in_one_op_are_a_pair():
    spans = Spans([0, 0], [8, 8], [0, 3], [3, 5], [0, 1])
    assert overlap_sweep(spans) == overlap_plain(spans) == [(0, 1)]


def test_a_buffer_behind_an_offending_one_is_found():
    # The third offends the second; behind that, the first offends too, as order is partial.
    spans = Spans([0, 0, 0], [8, 8, 8], [0, 1, 2], [0, 1, 2], [0, 1, 2])
    ordered = {(0, 1)}
    found = overlap_sweep(spans, lambda a, b: (a, b) in ordered)
    assert found == overlap_plain(spans, lambda a, b: (a, b) in ordered) == [(0, 2), (1, 2)]


def test_two_implementations_that_disagree_stop_the_run(monkeypatch):
    monkeypatch.setattr(map_checks, "overlap_sweep", lambda spans, precedes: [])
    with pytest.raises(
        AssertionError, match=r"the sweep finds \[\], the plain comparison \[\(0, 1\)\]"
    ):
        map_checks.both_ways(Spans([0, 0], [8, 8], [0, 0], [5, 5], [0, 1]))


def test_many_buffers_are_swept_quickly():
    lanes, count = 100, 30_000
    spans = Spans(
        [n % lanes * 256 for n in range(count)],
        [n % lanes * 256 + 256 for n in range(count)],
        [n // lanes for n in range(count)],
        [n // lanes for n in range(count)],
        range(count),
    )
    assert overlap_sweep(spans) == []


# Findings as data


def test_a_judgement_is_clean_without_errors_only():
    warning = Finding("overlap", "x", "y", severity="warning")
    error = Finding("overlap", "x", "y")
    assert Judgement((warning,)).is_clean
    assert not joined([Judgement((warning,)), Judgement((error,))]).is_clean
    assert Judgement((error, error)).names == ("overlap",)
    assert Judgement((error,)).to_json()["findings"][0]["name"] == "overlap"


def test_an_unknown_severity_is_refused():
    with pytest.raises(AssertionError, match="severity is 'fatal'"):
        Finding("overlap", "x", "y", severity="fatal")


def test_every_name_has_a_sentence_and_belongs_to_one_list():
    lists = (names.MAP, names.GRAPH, names.KV, names.LEDGER)
    assert len(names.ALL) == sum(map(len, lists))
    assert all(len(sentence) > 15 for sentence in names.ALL.values())
