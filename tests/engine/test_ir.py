"""Graphs are plain data: sizes follow from counts, aliases end in roots, JSON gives them back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.config import parse_config
from engine.ir import Graph, Op, Tensor, graph_from_json, resolve
from engine.model import build_graphs
from engine.recipe import Recipe
from engine.shard import deal_ranks
from fixtures.checkpoints.mini_configs import mini_config, other_config

COUNTS = {"T": 3, "S": 2, "Z": 0}


def tensor(name: str = "x", shape=("T", 4), dtype: str = "f32", **more) -> Tensor:
    return Tensor(name, "temp", dtype, shape, **more)


@pytest.mark.parametrize(
    ("made", "size_bytes"),
    [
        (tensor(), 48),
        (tensor(dtype="bf16"), 24),
        (tensor(dtype="f64", shape=(5,)), 40),
        (tensor(shape=()), 4),
        (tensor(shape=("Z", 4)), 0),
        (tensor(shape=("T", 0), strides=(9, 1)), 0),
        # From the first to past the last item: two gaps of 6 lie inside, none behind.
        (tensor(strides=(10, 1)), 4 * (1 + 2 * 10 + 3)),
        (tensor(shape=("T", "S"), strides=(1, 3)), 4 * 6),
    ],
)
def test_bytes_follow_from_counts_and_strides(made, size_bytes):
    assert made.size_bytes(COUNTS) == size_bytes


def test_dimensions_are_numbers_or_names_of_counts():
    assert resolve(7, COUNTS) == 7
    assert resolve("S", COUNTS) == 2
    assert tensor(shape=("T", 4, "S")).dims(COUNTS) == (3, 4, 2)
    with pytest.raises(KeyError, match="U"):
        tensor(shape=("U",)).dims(COUNTS)


def small_graph() -> Graph:
    tensors = [
        tensor("a"),
        tensor("b", alias_of="a", alias_offset_bytes=16, shape=(2, 4)),
        tensor("c", alias_of="b", alias_offset_bytes=4, shape=(3,)),
        Tensor("w", "weight", "u8", (8,)),
        tensor("d", strides=(8, 1)),
    ]
    ops = (
        Op("first", "make", ("w",), ("a",), phase="embedding"),
        Op(
            "second",
            "change",
            ("a", "w"),
            ("b",),
            inplace=(("a", "b"),),
            scratch=("d",),
            stream="comm",
            waits=("first",),
            params={"eps": 1e-20, "widths": [1, 2], "rows": "own"},
        ),
    )
    return Graph("small", {t.name: t for t in tensors}, ops, {"T": 3})


def test_an_alias_chain_ends_in_its_root_with_all_offsets_added():
    graph = small_graph()
    assert [graph.root(name) for name in "abcd"] == ["a", "a", "a", "d"]
    assert [graph.root_offset_bytes(name) for name in "abcd"] == [0, 16, 20, 0]
    assert [t.name for t in graph.of_kind("temp")] == ["a", "d"]
    assert [t.name for t in graph.of_kind("weight")] == ["w"]


def test_an_op_knows_its_place_and_everything_it_touches():
    graph = small_graph()
    assert graph.op_index == {"first": 0, "second": 1}
    assert graph.ops[1].touched == ("a", "w", "b", "d")


def real_graphs(document: dict, ranks: int) -> list[Graph]:
    config, recipe = parse_config(document), Recipe(ranks=ranks, prefill_chunk=64)
    deals = deal_ranks(config, recipe)
    return [g for rank in range(ranks) for g in build_graphs(config, recipe, deals, rank)]


GRAPHS = [small_graph(), *real_graphs(mini_config(), 1), *real_graphs(other_config(), 3)]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: g.name)
def test_a_graph_survives_json(graph):
    back = graph_from_json(json.loads(json.dumps(graph.to_json())))
    assert list(back.tensors.values()) == list(graph.tensors.values())
    assert back.ops == graph.ops
    assert back.limits == graph.limits
    assert back.digest == graph.digest


def test_what_is_not_said_is_the_default():
    document = small_graph().to_json()
    assert set(document["tensors"][0]) == {"name", "kind", "dtype", "shape"}
    assert set(document["ops"][0]) == {"name", "kind", "inputs", "outputs", "phase"}


def test_any_change_changes_the_digest():
    graph = small_graph()
    first, second = graph.ops
    others = [
        replace(graph, name="other"),
        replace(graph, limits={"T": 4}),
        replace(graph, ops=(first, replace(second, waits=()))),
        replace(graph, ops=(first, replace(second, params={**second.params, "eps": 1e-6}))),
        replace(graph, ops=(first, replace(second, inplace=()))),
        replace(graph, tensors={**graph.tensors, "a": tensor("a", dtype="bf16")}),
        replace(graph, tensors={**graph.tensors, "b": replace(graph.tensors["b"], alias_of="d")}),
    ]
    assert len({graph.digest, *(other.digest for other in others)}) == len(others) + 1
    assert small_graph().digest == graph.digest
