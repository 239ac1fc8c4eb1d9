"""The page: what is in it, that it stands alone, and that no name can break out of its data."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from engine.ir import Graph, Op, Tensor
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from suites.findings import Finding, Judgement
from suites.memory.checks import check_map
from suites.memory.html import COLOURS, render_html, template

KIB = 1024


def arena(size: int) -> Allocation:
    return Allocation("temporaries", "temporaries", size, "temporaries", 0, 256, "u8", (size,))


def weight(name: str, offset: int) -> Allocation:
    return Allocation(name, "weights", KIB, "weights", offset, 256, "u8", (KIB,))


def temporary(name: str, offset: int, first: int, last: int, **more) -> Temporary:
    stream = more.pop("stream", "compute")
    return Temporary("step", name, KIB, offset, first, last, stream, **more)


def graph() -> Graph:
    names = {n: Tensor(n, "temp", "u8", (KIB,)) for n in "abs"}
    names["v"] = Tensor("v", "temp", "u8", (KIB,), alias_of="a")
    names["in"] = Tensor("in", "io", "u8", (8,))
    ops = (
        Op("make", "any", ("in",), ("a",)),
        Op("send", "any", ("v",), ("s",), stream="comm", waits=("make",)),
        Op("next", "any", ("in",), ("b",)),
        Op("end", "any", ("b", "s"), ("in",), waits=("send",)),
    )
    return Graph("step", names, ops, {})


def example(b_offset: int = 2 * KIB, rank: int = 0) -> RankMap:
    temporaries = (
        temporary("a", 0, 0, 1),
        temporary("v", 0, 0, 1, alias_of="a"),
        temporary("s", KIB, 1, 3, stream="comm"),
        temporary("b", b_offset, 2, 3),
    )
    return RankMap(
        rank, (weight("layers.0.w", 0), weight("layers.1.w", KIB), arena(4 * KIB)), temporaries
    )


def whole(*ranks: RankMap) -> MemoryMap:
    return MemoryMap({"ranks": len(ranks)}, {"name": "mini"}, ranks, {"bytes_per_token": 890})


def data_of(page: str) -> dict:
    text = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(text)


def column(scene: dict, name: str) -> list:
    kinds = {"offset": "<f8", "size": "<f8", "first": "<i4", "last": "<i4", "alias": "<i4"}
    raw = base64.b64decode(scene["columns"][name])
    return np.frombuffer(raw, dtype=kinds.get(name, "u1")).tolist()


def test_a_graph_is_a_scene_of_addresses_over_ops():
    scenes = data_of(render_html(whole(example()), {0: [graph()]}))["scenes"]
    assert [s["title"] for s in scenes] == ["rank 0, graph step", "rank 0, arena weights"]
    scene = scenes[0]
    assert scene["names"] == "a\nv\ns\nb"
    assert scene["ops"] == ["make", "send", "next", "end"]
    assert (scene["height"], scene["width"]) == (4 * KIB, 4)
    assert column(scene, "offset") == [0, 0, KIB, 2 * KIB]
    assert column(scene, "first") == [0, 0, 1, 2]
    assert column(scene, "last") == [1, 1, 3, 3]
    assert column(scene, "alias") == [-1, 0, -1, -1]
    assert [scene["streams"][n] for n in column(scene, "stream")] == ["compute"] * 2 + [
        "comm",
        "compute",
    ]
    assert scene["pools"] == [["temporaries", 0, 4 * KIB]]


def test_the_peak_may_need_a_late_stream():
    scene = data_of(render_html(whole(example()), {0: [graph()]}))["scenes"][0]
    assert sorted(scene["peakLive"]) == [0, 2, 3]
    assert scene["peakNote"] == "with stream comm as late as the waits allow"


def test_mappings_that_stay_are_a_scene_per_arena():
    scene = data_of(render_html(whole(example())))["scenes"][1]
    assert (scene["width"], scene["height"]) == (1, 2 * KIB)
    assert scene["streams"] == ["weights"]


def test_large_offsets_survive():
    far = Allocation("w", "weights", 2**40 + 1, "weights", 2**50 + 256, 256, "u8", (2**40 + 1,))
    scene = data_of(render_html(whole(RankMap(0, (far,), ()))))["scenes"][0]
    assert column(scene, "offset") == [2**50 + 256]
    assert column(scene, "size") == [2**40 + 1]


def test_conflicts_are_marked_with_what_the_finding_says():
    memory_map = whole(example(b_offset=KIB), example(rank=1))
    graphs = {0: [graph()], 1: [graph()]}
    data = data_of(render_html(memory_map, graphs, check_map(memory_map, graphs)))
    scene = data["scenes"][0]
    assert column(scene, "bad") == [0, 0, 1, 1]
    assert scene["offences"] == 2
    assert all(text.startswith("overlap: ") for text in scene["conflicts"]["2"])
    assert [s["offences"] for s in data["scenes"]] == [2, 0, 0, 0]
    assert data["findings"][0].startswith("overlap: rank 0 / graph step: ")
    assert "not checked: budget: no budget was given" in data["notChecked"]


@pytest.mark.parametrize(
    ("where", "marked"),
    [
        ("rank 0 / graph step / b", [0, 0, 0, 1]),
        ("graph step / b", [0, 0, 0, 1]),
        ("rank 1 / graph step / b", [0, 0, 0, 0]),
        ("rank 0 / graph other / b", [0, 0, 0, 0]),
        ("rank 0 / b", [0, 0, 0, 0]),
    ],
)
def test_a_finding_marks_only_its_own_place(where, marked):
    judged = Judgement((Finding("size-too-small", where, "x"),))
    scene = data_of(render_html(whole(example()), None, judged))["scenes"][0]
    assert column(scene, "bad") == marked


def test_overlapping_mappings_are_marked():
    rank = replace(example(), allocations=(weight("x", 0), weight("y", 512), arena(4 * KIB)))
    memory_map = whole(rank)
    data = data_of(render_html(memory_map, None, check_map(memory_map)))
    assert column(data["scenes"][1], "bad") == [1, 1]


def test_layers_share_a_colour():
    scene = data_of(render_html(whole(example())))["scenes"][1]
    first, second = column(scene, "colour")
    assert first == second < COLOURS


def test_a_name_cannot_break_out_of_the_data():
    evil = "</script><script>alert(1)</script><!--"
    rank = RankMap(0, (weight(evil, 0), weight("a\nb", KIB)), ())
    page = render_html(whole(rank))
    assert "alert(1)</script>" not in page
    assert data_of(page)["scenes"][0]["names"].split("\n") == [evil, "a b"]


def test_the_page_asks_for_nothing_outside_itself():
    page = render_html(whole(example()))
    assert not re.search(r"(src|href)\s*=|https?:|url\(|@import|fetch\(|import\s*\(", page)


def test_the_template_has_one_place_for_its_data():
    assert template().count("/*DATA*/") == 1
    assert "/*DATA*/" not in render_html(whole(example()))


def test_the_same_map_gives_the_same_page():
    assert render_html(whole(example())) == render_html(whole(example()))


def test_a_map_without_ranks_is_still_a_page():
    assert data_of(render_html(whole()))["scenes"] == []


def test_facts_show_inventory_and_layout():
    facts = dict(data_of(render_html(whole(example())))["facts"])
    assert facts["model.name"] == "mini"
    assert facts["kv.bytes_per_token"] == "890"
    assert facts["rank 0 other_owned_tensors"] == "0.004 MiB"
    assert len(facts["rank 0 layout"]) == 16


def test_a_page_of_many_buffers_stays_small():
    rows = tuple(temporary(f"layers.{n}.x", 0, n, n) for n in range(20_000))
    page = render_html(whole(RankMap(0, (arena(KIB),), rows)))
    assert len(page) / len(rows) < 100
