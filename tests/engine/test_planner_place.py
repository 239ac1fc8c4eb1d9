"""Placement: greedy orders, their repair, and the bound they are measured against."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.ir import Graph, Op, Tensor
from engine.planner import plan_graphs
from engine.planner.lives import clocks_of, conflicts_of, groups_of, lower_bound_bytes
from engine.planner.place import Buffers, neighbours_of, orders_of, peak_of, place, place_among
from engine.planner.search import place_well
from engine.planner.split import components, separators


def buffers_of(rows: list[tuple[int, int, int]]) -> Buffers:
    """Buffers from (first, last, size) in one order of time."""
    first, last, sizes = zip(*rows, strict=True)
    a, b = np.array(first), np.array(last)
    conflicts = (a[:, None] <= b[None, :]) & (a[None, :] <= b[:, None])
    np.fill_diagonal(conflicts, False)
    return Buffers(sizes, first, last, neighbours_of(conflicts))


def bound_of(rows: list[tuple[int, int, int]]) -> int:
    end = max(last for _, last, _ in rows)
    return max(sum(s for a, b, s in rows if a <= t <= b) for t in range(end + 1))


def is_apart(buffers: Buffers, offsets: list[int]) -> bool:
    return all(
        offsets[n] + buffers.sizes[n] <= offsets[m] or offsets[m] + buffers.sizes[m] <= offsets[n]
        for n, row in enumerate(buffers.neighbours)
        for m in row
    )


def dissection(seed: int, cuts: int) -> list[tuple[int, int, int]]:
    """A rectangle of time and bytes cut into buffers: the bound is its height by construction."""
    source = random.Random(seed)
    pieces = [(0, 63, 64)]
    while len(pieces) < cuts:
        first, last, size = pieces.pop(source.randrange(len(pieces)))
        if source.random() < 0.5 and last > first:
            middle = source.randrange(first, last)
            pieces += [(first, middle, size), (middle + 1, last, size)]
        elif size > 1:
            part = source.randrange(1, size)
            pieces += [(first, last, part), (first, last, size - part)]
        else:
            pieces.append((first, last, size))
    return pieces


@pytest.mark.parametrize("cuts", [1, 12, 40, 90])
@pytest.mark.parametrize("seed", range(6))
def test_dissections_are_packed_into_their_bound(seed, cuts):
    rows = dissection(seed, cuts)
    buffers = buffers_of(rows)
    offsets = place_well(buffers, bound_of(rows))
    assert is_apart(buffers, offsets)
    assert bound_of(rows) == 64
    assert 64 <= peak_of(buffers, offsets) <= (64 if cuts <= 40 else 66)


def test_search_finds_layouts_that_no_greedy_order_has():
    better = 0
    for seed in range(12):
        buffers = buffers_of(dissection(seed, 90))
        orders = orders_of(buffers, range(len(buffers.sizes)))
        greedy = min(peak_of(buffers, place(buffers, order)) for order in orders)
        searched = peak_of(buffers, place_well(buffers, 64))
        assert searched <= greedy
        better += searched < greedy
    assert better >= 4


def test_a_bound_that_cannot_be_reached_gives_the_best_layout_found():
    # Neighbours in a ring of five conflict: any two fit into the bound, all five need three rows.
    ring = tuple(tuple(sorted(((n - 1) % 5, (n + 1) % 5))) for n in range(5))
    buffers = Buffers((4,) * 5, tuple(range(5)), tuple(range(5)), ring)
    offsets = place_well(buffers, 8)
    assert is_apart(buffers, offsets)
    assert peak_of(buffers, offsets) == 12


def test_placing_stops_at_the_first_buffer_over_the_limit_and_takes_back():
    buffers = buffers_of([(0, 1, 4), (0, 1, 4), (0, 1, 4)])
    offsets = [-1, -1, 0]
    assert place_among(buffers, offsets, [0, 1], limit=11) == 1
    assert offsets == [-1, -1, 0]
    assert place_among(buffers, offsets, [0, 1], limit=12) is None
    assert offsets == [4, 8, 0]
    assert place(buffers, [2, 0, 1]) == [4, 8, 0]


def test_the_lowest_hole_that_is_large_enough_is_taken():
    rows = [(0, 3, 2), (0, 1, 3), (0, 3, 2), (0, 1, 4), (2, 3, 4), (2, 3, 3)]
    assert place(buffers_of(rows), range(6)) == [0, 2, 5, 7, 7, 2]


# Cutting


def test_separators_let_the_rest_fall_apart_into_small_parts():
    rows = [(n, n + 2, 1) for n in range(200)] + [(0, 201, 1)]
    buffers = buffers_of(rows)
    taken = separators(buffers, 20)
    assert 200 in taken
    rest = [n for n in range(201) if n not in taken]
    parts = components(buffers, rest)
    assert sorted(n for part in parts for n in part) == rest
    assert max(map(len, parts)) <= 20
    assert len(taken) <= 60
    owner = {n: at for at, part in enumerate(parts) for n in part}
    assert all(owner.get(m, owner[n]) == owner[n] for n in rest for m in buffers.neighbours[n])


def test_buffers_that_are_few_enough_are_not_cut():
    assert separators(buffers_of([(0, 9, 1)] * 8), 8) == []


def test_the_same_buffers_have_the_same_layout_every_time():
    buffers = buffers_of(dissection(3, 60))
    assert place_well(buffers, 64) == place_well(buffers, 64)


# The bound


def clique_graph() -> Graph:
    """Three buffers of which every two may live together, though no schedule shows all three."""
    names = {n: Tensor(n, "temp", "u8", (1024,)) for n in "abc"}
    names["in"] = Tensor("in", "io", "u8", (8,))
    ops = (
        Op("a0", "any", ("in",), ("a",)),
        Op("b0", "any", ("in",), ("b",), stream="comm"),
        Op("c0", "any", ("in",), ("c",), stream="copy"),
    )
    return Graph("g", names, ops, {})


def bound(graph: Graph) -> int:
    groups, clocks = groups_of(graph, 256), clocks_of(graph)
    return lower_bound_bytes(groups, clocks, conflicts_of(groups, clocks), 256)


def test_buffers_of_unordered_ops_count_together():
    assert bound(clique_graph()) == 3 * 1024
    plan = plan_graphs([clique_graph()], "planned").graphs["g"]
    assert plan.peak_bytes == plan.lower_bound_bytes


def layered(layers: int) -> Graph:
    """A model in small: a residual stream, wide temporaries and sums on the comm stream."""
    tensors = {"in": Tensor("in", "io", "u8", (8,)), "x": Tensor("x", "temp", "bf16", (4096,))}
    ops = [Op("embed", "any", ("in",), ("x",), phase="embed")]

    def temp(name: str, size: int) -> str:
        tensors[name] = Tensor(name, "temp", "bf16", (size,))
        return name

    def op(name: str, reads: tuple[str, ...], writes: str, **more) -> None:
        ops.append(Op(name, "any", reads, (writes,), **more))

    for layer in range(layers):
        for phase, width in (("attention", 7000 + 300 * (layer % 3)), ("experts", 9500)):
            at = f"layers.{layer}.{phase}"
            op(f"{at}.norm", ("x",), temp(f"{at}.y", 1500), phase=phase)
            op(f"{at}.up", (f"{at}.y",), temp(f"{at}.up", width), phase=phase)
            op(f"{at}.act", (f"{at}.up",), temp(f"{at}.act", width // 2), phase=phase)
            op(f"{at}.down", (f"{at}.act",), temp(f"{at}.part", 3000), phase=phase)
            op(
                f"{at}.sum",
                (f"{at}.part",),
                temp(f"{at}.total", 3000),
                stream="comm",
                waits=(f"{at}.down",),
                phase=phase,
            )
            op(f"{at}.side", (f"{at}.y",), temp(f"{at}.side", 2500), phase=phase)
            ops.append(
                Op(
                    f"{at}.add",
                    "any",
                    ("x", f"{at}.total", f"{at}.side"),
                    ("x",),
                    waits=(f"{at}.sum",),
                    phase=phase,
                )
            )
    return Graph("layered", tensors, tuple(ops), {})


def test_a_layered_model_is_planned_at_its_bound():
    plan = plan_graphs([layered(40)], "planned").graphs["layered"]
    assert plan.peak_bytes == plan.lower_bound_bytes


def test_more_layers_need_no_more_bytes():
    sizes = {n: plan_graphs([layered(n)], "planned").size_bytes for n in (3, 12, 48)}
    assert len(set(sizes.values())) == 1


def test_strategies_differ_as_they_should():
    planned, pools, none = (
        plan_graphs([layered(20)], strategy).size_bytes for strategy in ("planned", "pools", "none")
    )
    assert planned < pools < none
    assert plan_graphs([layered(40)], "pools").size_bytes == pools
    assert plan_graphs([layered(40)], "none").size_bytes > 1.9 * none
