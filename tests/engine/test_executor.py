"""Programs keep the graph's order and waits, use planned bytes, and refuse counts over limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from engine import executor as executor_module
from engine.config import parse_config
from engine.exchange import Transfer
from engine.executor import NATIVE, Executor, NativeBackend
from engine.ir import Graph, Op, Tensor
from engine.mapping import plan_model
from engine.ops.rows import Workers
from engine.recipe import Recipe
from engine.shard import Deal
from fixtures.checkpoints.mini_configs import mini_config
from fixtures.local_ranks import LocalRanks
from tests.engine.runs import MINI, assert_same_bits, in_pieces, some_ids

IDS = some_ids(1, 40)
COUNTS = {"T": 4}


class Notes(NativeBackend):
    """Kernels that only note that they ran."""

    def __init__(self, seen: list[str]) -> None:
        self.binders = _AnyKind(lambda binding, op: lambda: seen.append(op.name))


class _AnyKind(dict):
    """One binder for every kind of op."""

    def __init__(self, binder) -> None:
        super().__init__()
        self._binder = binder

    def __missing__(self, kind):
        return self._binder


@dataclass(frozen=True)
class Lone:
    """A communicator of one rank, never used."""

    rank: int = 0
    ranks: int = 1


@pytest.fixture
def noted(monkeypatch):
    """Transfers that only note their start and finish, and the notes."""
    seen: list[str] = []

    def bind(binding, op, comm) -> Transfer:
        return Transfer(
            lambda: seen.append(f"start {op.name}"), lambda: seen.append(f"finish {op.name}")
        )

    monkeypatch.setattr(
        executor_module, "TRANSFERS", dict.fromkeys(executor_module.TRANSFERS, bind)
    )
    return seen


def executor_of(graph: Graph, backend, **more) -> Executor:
    config = parse_config(mini_config())
    arena = np.zeros(4096, np.uint8)
    values = {"persistent": {}, "offsets": {graph.name: {}}, "observer": None, **more}
    return Executor(
        [graph],
        values["persistent"],
        {graph.name: values.get("arena", arena)},
        values["offsets"],
        config,
        (Deal(),),
        Lone(),
        Workers(1),
        values["observer"],
        backend,
    )


def comm(name: str, *waits: str) -> Op:
    return Op(name, "reduce", (), (), stream="comm", waits=waits)


def compute(name: str, *waits: str) -> Op:
    return Op(name, "norm", (), (), waits=waits)


def order_of(ops: tuple[Op, ...], seen: list[str]) -> list[str]:
    executor_of(Graph("g", {}, ops, COUNTS), Notes(seen)).run("g", COUNTS)
    return seen


def test_a_transfer_runs_beside_compute_until_it_is_awaited(noted):
    ops = (compute("a"), comm("x", "a"), compute("b"), compute("c", "x"), compute("d"))
    assert order_of(ops, noted) == ["a", "start x", "b", "finish x", "c", "d"]


def test_a_transfer_nobody_awaits_is_finished_at_the_end(noted):
    assert order_of((comm("x"), compute("a")), noted) == ["start x", "a", "finish x"]


def test_a_second_transfer_starts_when_the_first_is_finished(noted):
    ops = (comm("x"), compute("a"), comm("y"), compute("b", "x"), compute("c", "y"))
    expected = ["start x", "a", "finish x", "start y", "b", "finish y", "c"]
    assert order_of(ops, noted) == expected


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_op_of_real_graphs_starts_after_all_that_it_waits_for(noted, ranks):
    config = parse_config(mini_config())
    recipe = Recipe(ranks=ranks, max_concurrency=2, prefill_chunk=64)
    graphs = plan_model(config, recipe).ranks[-1].graphs
    assert {graph.name for graph in graphs} == {"prefill", "decode", "head", "draft"}
    overlapped = 0
    for graph in graphs:
        noted.clear()
        executor_of(graph, Notes(noted)).run(graph.name, dict(graph.limits))
        at = {event.removeprefix("finish "): i for i, event in enumerate(noted)}
        for op in graph.ops:
            begins = at[f"start {op.name}" if op.stream == "comm" else op.name]
            assert all(at[name] < begins for name in op.waits), op.name
            overlapped += op.stream == "comm" and at[op.name] > begins + 1
        assert len(at) == len(graph.ops) + sum(op.stream == "comm" for op in graph.ops)
    assert (overlapped > 0) == (ranks > 1)


# Counts and programs ------------------------------------------------------------------------------


def graph_of_two(limits) -> Graph:
    return Graph("g", {}, (compute("a"),), limits)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"T": 5, "S": 1, "P": 9}, r"g: counts \{'T': 5\} over the limits"),
        ({"T": 4, "S": 3, "P": 9}, r"g: counts \{'S': 3\} over the limits"),
        ({"T": 4, "P": 9}, r"g: counts \['P', 'T'\], not \['P', 'S', 'T'\]"),
        ({"T": 4, "S": 1, "P": 0, "X": 1}, r"not \['P', 'S', 'T'\]"),
    ],
)
def test_counts_beyond_the_plan_are_refused(counts, message):
    executor = executor_of(graph_of_two({"T": 4, "S": 2, "P": 0}), Notes([]))
    with pytest.raises(AssertionError, match=message):
        executor.run("g", counts)


def test_pages_may_be_more_than_planned_since_the_pool_is_sized_at_start():
    seen: list[str] = []
    executor = executor_of(graph_of_two({"T": 4, "P": 0}), Notes(seen))
    executor.run("g", {"T": 4, "P": 1000})
    assert seen == ["a"]


def binder_calls(monkeypatch, programs_max: int) -> tuple[Executor, list[int]]:
    bound: list[int] = []

    class Counting(NativeBackend):
        binders = _AnyKind(lambda b, op: (bound.append(b.counts["T"]), lambda: None)[1])

    monkeypatch.setattr(executor_module, "PROGRAMS_MAX", programs_max)
    return executor_of(graph_of_two({"T": 9}), Counting()), bound


def test_equal_counts_run_the_same_program(monkeypatch):
    executor, bound = binder_calls(monkeypatch, 2)
    for rows in (3, 4, 3, 4, 3):
        executor.run("g", {"T": rows})
    assert bound == [3, 4]


def test_the_program_used_longest_ago_gives_way(monkeypatch):
    executor, bound = binder_calls(monkeypatch, 2)
    for rows in (3, 4, 3, 5, 3, 4):
        executor.run("g", {"T": rows})
    assert bound == [3, 4, 5, 4]


def test_programs_that_come_and_go_leave_the_bits_alone(monkeypatch):
    monkeypatch.setattr(executor_module, "PROGRAMS_MAX", 1)
    recipe = Recipe(ranks=1, max_concurrency=2, mtp_draft_tokens=0, prefill_chunk=64)
    with LocalRanks(MINI, recipe) as ranks:
        whole = in_pieces(ranks, IDS, [40])
        assert_same_bits(in_pieces(ranks, IDS, [13, 13, 1, 13]), whole)
        assert len(ranks.models[0].executor._programs) == 1


# Bytes --------------------------------------------------------------------------------------------


def memory_graph() -> Graph:
    tensors = [
        Tensor("x", "temp", "f32", ("T", 2)),
        Tensor("y", "temp", "bf16", ("T",), alias_of="x", alias_offset_bytes=4),
        Tensor("w", "weight", "u8", (6,)),
    ]
    return Graph("g", {t.name: t for t in tensors}, (compute("a"),), COUNTS)


def memory_executor(arena: np.ndarray, held: int = 6) -> Executor:
    weight = np.arange(held, dtype=np.uint8)
    return executor_of(
        memory_graph(), NATIVE, arena=arena, offsets={"g": {"x": 64}}, persistent={"w": weight}
    )


def test_tensors_are_views_at_their_planned_offsets():
    arena = np.zeros(128, np.uint8)
    binding = memory_executor(arena).binding("g", {"T": 3})
    binding.array("x")[...] = 1.0
    assert arena.nonzero()[0].min() == 64 + 2 and arena.nonzero()[0].max() == 64 + 4 * 6 - 1
    binding.array("y")[...] = 0xFFFF
    assert arena[64 + 4 : 64 + 4 + 6].tolist() == [255] * 6
    assert binding.array("w").tolist() == [0, 1, 2, 3, 4, 5]
    assert binding.array("x") is binding.array("x")


def test_a_tensor_larger_than_planned_is_our_own_mistake():
    executor = memory_executor(np.zeros(128, np.uint8))
    with pytest.raises(AssertionError, match="x is over its planned size"):
        executor.binding("g", {"T": 5}).array("x")


def test_a_weight_with_too_few_bytes_is_our_own_mistake():
    executor = memory_executor(np.zeros(128, np.uint8), held=5)
    with pytest.raises(AssertionError, match="w has 5 bytes, 6 are needed"):
        executor.binding("g", COUNTS).array("w")


# Observers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_observer_sees_every_op_of_a_step_once(ranks):
    seen: list[list[str]] = [[] for _ in range(ranks)]
    observers = [lambda op, binding, names=names: names.append(op.name) for names in seen]
    recipe = Recipe(ranks=ranks, max_concurrency=1, mtp_draft_tokens=0, prefill_chunk=64)
    with LocalRanks(MINI, recipe, observers=observers) as model:
        model.prefill(IDS)
        graphs = {g.name: g for g in model.models[0].graphs.values()}
    expected = [op.name for name in ("prefill", "head") for op in graphs[name].ops]
    for names in seen:
        assert sorted(names) == sorted(expected)


def test_a_broken_op_order_is_seen(noted):
    """The check of waits is not vacuous: a program that finishes too late breaks it."""
    ops = (comm("x"), compute("a", "x"))
    late = Graph("g", {}, (comm("x"), compute("a")), COUNTS)
    executor_of(late, Notes(noted)).run("g", COUNTS)
    at = {event.removeprefix("finish "): i for i, event in enumerate(noted)}
    assert not all(at[name] < at[ops[1].name] for name in ops[1].waits)
