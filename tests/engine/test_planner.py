"""The planner: what shares bytes under each strategy, and what never does."""

from __future__ import annotations

import pytest

from engine.errors import UsageError
from engine.ir import Graph, Op, Tensor
from engine.planner import ARENA, STRATEGIES, plan_graphs, to_allocations, to_temporaries

KIB = 1024


def temp(name: str, size: int, **more) -> Tensor:
    return Tensor(name, "temp", more.pop("dtype", "u8"), (size,), **more)


def op(name: str, reads: str, writes: str, **more) -> Op:
    return Op(name, "any", tuple(reads.split()), tuple(writes.split()), **more)


def graph(tensors: list[Tensor], ops: list[Op], name: str = "g") -> Graph:
    held = {t.name: t for t in tensors}
    held["in"] = Tensor("in", "io", "u8", (8,))
    held["out"] = Tensor("out", "io", "u8", (8,))
    return Graph(name, held, tuple(ops), {})


def chain(count: int, size: int = KIB, name: str = "g", phase: str = "p") -> Graph:
    """A line of ops, each reading the temporary that the one before wrote."""
    names = ["in", *(f"t{n}" for n in range(count)), "out"]
    ops = [op(f"op{n}", names[n], names[n + 1], phase=f"{phase}{n % 2}") for n in range(count + 1)]
    return graph([temp(f"t{n}", size) for n in range(count)], ops, name)


def overlap(plan, name: str, first: str, second: str) -> bool:
    at, size = plan.graphs[name].offsets, plan.graphs[name].sizes
    return at[first] < at[second] + size[second] and at[second] < at[first] + size[first]


def peaks(plan, name: str = "g") -> tuple[int, int]:
    return plan.graphs[name].peak_bytes, plan.graphs[name].lower_bound_bytes


def test_a_chain_needs_two_buffers():
    plan = plan_graphs([chain(9)], "planned")
    assert peaks(plan) == (2 * KIB, 2 * KIB)
    assert plan.size_bytes == 2 * KIB


def test_none_gives_every_temporary_of_every_graph_its_own_bytes():
    plan = plan_graphs([chain(4, name="a"), chain(3, name="b")], "none")
    offsets = [*plan.graphs["a"].offsets.values(), *plan.graphs["b"].offsets.values()]
    assert sorted(offsets) == [n * KIB for n in range(7)]
    assert plan.size_bytes == 7 * KIB


def test_graphs_share_one_arena_of_the_larger_peak():
    plan = plan_graphs([chain(4, 3 * KIB, "a"), chain(4, KIB, "b")], "planned")
    assert plan.size_bytes == 6 * KIB
    assert [arena.name for arena in plan.arenas.values()] == [ARENA]


def test_an_input_and_an_output_of_one_op_never_share():
    plan = plan_graphs([chain(2)], "planned")
    assert not overlap(plan, "g", "t0", "t1")


def test_a_buffer_read_by_an_asynchronous_op_is_kept_until_something_waits_for_it():
    def case(waits: tuple[str, ...]) -> Graph:
        tensors = [temp("a", KIB), temp("sent", 8), temp("b", KIB), temp("c", 8)]
        ops = [
            op("make", "in", "a"),
            op("send", "a", "sent", stream="comm", waits=("make",)),
            op("next", "in", "b", waits=waits),
            op("use", "b", "c"),
            op("end", "c sent", "out", waits=("send",)),
        ]
        return graph(tensors, ops)

    assert not overlap(plan_graphs([case(())], "planned"), "g", "a", "b")
    assert overlap(plan_graphs([case(("send",))], "planned"), "g", "a", "b")


def test_waits_count_through_other_streams():
    tensors = [temp("a", KIB), temp("b", 8), temp("c", 8), temp("d", KIB)]
    ops = [
        op("make", "in", "a"),
        op("send", "a", "b", stream="comm", waits=("make",)),
        op("stage", "b", "c", stream="copy", waits=("send",)),
        op("last", "c", "d", waits=("stage",)),
        op("end", "d", "out"),
    ]
    assert overlap(plan_graphs([graph(tensors, ops)], "planned"), "g", "a", "d")


def test_a_wait_for_an_op_issued_later_is_refused():
    ops = [op("first", "in", "a", waits=("second",)), op("second", "a", "out", stream="comm")]
    with pytest.raises(AssertionError, match="first waits for second, which is issued later"):
        plan_graphs([graph([temp("a", 8)], ops)], "planned")


def test_a_view_of_a_view_keeps_its_root_alive():
    tensors = [
        temp("a", KIB),
        temp("view", KIB, alias_of="a"),
        temp("slice", 8, alias_of="view", alias_offset_bytes=64),
        temp("b", KIB),
    ]
    ops = [op("make", "in", "a"), op("other", "in", "b"), op("end", "slice b", "out")]
    plan = plan_graphs([graph(tensors, ops)], "planned")
    assert not overlap(plan, "g", "a", "b")
    life = {t.name: t for t in to_temporaries(plan, graph(tensors, ops))}
    assert life["slice"].offset == life["a"].offset + 64
    assert (life["slice"].first_write, life["slice"].last_read) == (0, 2)
    assert (life["view"].alias_of, life["slice"].alias_of) == ("a", "view")


def test_an_in_place_chain_of_roots_has_one_place_and_one_life():
    tensors = [temp("a", KIB), temp("b", KIB), temp("c", 512), temp("d", KIB)]
    ops = [
        op("make", "in", "a"),
        op("add", "a", "b", inplace=(("a", "b"),)),
        op("narrow", "b", "c", inplace=(("b", "c"),)),
        op("side", "in", "d"),
        op("end", "c d", "out"),
    ]
    g = graph(tensors, ops)
    for strategy in STRATEGIES:
        plan = plan_graphs([g], strategy)
        found = {t.name: t for t in to_temporaries(plan, g)}
        assert len({found[n].offset for n in "abc"}) == 1
        assert {(found[n].first_write, found[n].last_read) for n in "abc"} == {(0, 4)}
        assert [found[n].alias_of for n in "abc"] == [None, "a", "a"]
        assert not overlap(plan, "g", "c", "d")


def test_an_output_that_takes_over_an_input_that_is_no_temporary_is_refused():
    ops = [op("add", "in", "a", inplace=(("in", "a"),)), op("end", "a", "out")]
    with pytest.raises(AssertionError, match="declare the output as an alias instead"):
        plan_graphs([graph([temp("a", 8)], ops)], "planned")


def test_scratch_lives_during_its_op_alone():
    tensors = [temp("a", 8), temp("s", KIB), temp("z", KIB), temp("b", 8)]
    ops = [
        op("one", "in", "a", scratch=("s",)),
        op("two", "a", "b", scratch=("z",)),
        op("end", "b", "out"),
    ]
    plan = plan_graphs([graph(tensors, ops)], "planned")
    assert overlap(plan, "g", "s", "z")
    assert not overlap(plan, "g", "s", "a")
    assert (
        plan_graphs([graph(tensors, ops)], "pools").arenas["pool.operator_scratch"].size_bytes
        == KIB
    )


def test_two_scratches_of_one_op_never_share():
    tensors = [temp("s", KIB), temp("z", KIB)]
    plan = plan_graphs([graph(tensors, [op("one", "in", "out", scratch=("s", "z"))])], "planned")
    assert not overlap(plan, "g", "s", "z")


def test_an_empty_tensor_gets_the_place_past_all_others():
    tensors = [temp("a", KIB), temp("none", 0), temp("b", KIB)]
    ops = [op("make", "in", "a none"), op("use", "a none", "b"), op("end", "b", "out")]
    for strategy in STRATEGIES:
        plan = plan_graphs([graph(tensors, ops)], strategy).graphs["g"]
        assert plan.offsets["none"] == max(plan.offsets["a"], plan.offsets["b"]) + KIB


def test_offsets_are_multiples_of_the_alignment():
    tensors = [temp("a", 1), temp("b", 257), temp("c", 3)]
    ops = [op("one", "in", "a b c"), op("end", "a b c", "out")]
    for strategy in STRATEGIES:
        plan = plan_graphs([graph(tensors, ops)], strategy, alignment=128)
        assert all(offset % 128 == 0 for offset in plan.graphs["g"].offsets.values())
        assert plan.size_bytes == 128 + 384 + 128


def test_size_counts_the_gaps_of_strides():
    tensors = [Tensor("a", "temp", "bf16", (3, 4), strides=(10, 1)), temp("b", 8)]
    ops = [op("one", "in", "a b"), op("end", "a b", "out")]
    assert plan_graphs([graph(tensors, ops)], "planned").graphs["g"].sizes["a"] == 2 * 24


def test_views_of_weights_are_not_planned():
    g = chain(1)
    held = {**g.tensors, "w": Tensor("w", "weight", "u8", (8,)), "v": temp("v", 8, alias_of="w")}
    g = Graph("g", held, (op("zero", "v", "t0"), op("end", "t0", "out")), {})
    plan = plan_graphs([g], "planned")
    assert list(plan.graphs["g"].offsets) == ["t0"]
    assert [t.name for t in to_temporaries(plan, g)] == ["t0"]


def test_a_handed_out_tensor_inside_a_temporary_is_refused():
    tensors = [temp("a", 8), Tensor("kept", "state", "u8", (8,), alias_of="a")]
    with pytest.raises(AssertionError, match="kept of kind state lies in temporary a"):
        plan_graphs([graph(tensors, [op("one", "in", "a")])], "planned")


def test_an_alias_past_the_end_of_its_root_is_refused():
    tensors = [temp("a", 8), temp("v", 8, alias_of="a", alias_offset_bytes=1)]
    with pytest.raises(AssertionError, match="v covers bytes 1..9 of a, which has 8"):
        plan_graphs([graph(tensors, [op("one", "in", "v")])], "planned")


def test_a_temporary_that_no_op_touches_is_refused():
    with pytest.raises(AssertionError, match="no op touches temporary a"):
        plan_graphs([graph([temp("a", 8)], [op("one", "in", "out")])], "planned")


def test_a_plan_serves_no_other_graph():
    plan = plan_graphs([chain(3)], "planned")
    with pytest.raises(AssertionError, match="was made for another graph"):
        to_temporaries(plan, chain(4))


def test_pools_keep_the_temporaries_of_one_phase_apart_and_are_reused_by_the_next_layer():
    tensors, ops, reads = [], [], "in"
    for layer in range(3):
        names = [f"l{layer}.{n}" for n in range(4)]
        tensors += [temp(name, KIB) for name in names]
        for name in names:
            ops.append(op(f"op.{name}", reads, name, phase="mlp"))
            reads = name
        tensors.append(temp(f"l{layer}.x", 2 * KIB))
        ops.append(op(f"l{layer}.sum", reads, f"l{layer}.x", phase="sum"))
        reads = f"l{layer}.x"
    ops.append(op("end", reads, "out", phase="end"))
    plan = plan_graphs([graph(tensors, ops)], "pools")
    sizes = {name: arena.size_bytes for name, arena in plan.arenas.items()}
    # Three temporaries of a layer stay inside the phase, the fourth and x are handed on.
    assert sizes == {"pool.carry": 3 * KIB, "pool.phase.mlp": 3 * KIB}
    assert overlap(plan, "g", "l0.0", "l1.0")
    assert not overlap(plan, "g", "l0.0", "l0.2")
    assert {arena.category for arena in plan.arenas.values()} == {"graph_scratch_pools"}


def test_pools_need_more_than_the_plan_and_less_than_none():
    sizes = [plan_graphs([chain(40)], strategy).size_bytes for strategy in STRATEGIES]
    assert sizes == sorted(sizes)


def test_allocations_cover_the_address_space_without_gaps():
    for strategy in STRATEGIES:
        plan = plan_graphs([chain(12)], strategy)
        end = 0
        for allocation in to_allocations(plan):
            assert (allocation.arena, allocation.offset) == (ARENA, end)
            end += allocation.nbytes
        assert end == plan.size_bytes


def test_the_same_graph_has_the_same_layout_every_time():
    plans = [plan_graphs([chain(30)], strategy) for strategy in STRATEGIES]
    assert plans == [plan_graphs([chain(30)], strategy) for strategy in STRATEGIES]


def test_an_unknown_strategy_is_refused_with_the_choices():
    with pytest.raises(UsageError, match="'best'; accepted: planned, pools, none"):
        plan_graphs([chain(1)], "best")


def test_a_graph_without_temporaries_needs_no_bytes():
    plan = plan_graphs([graph([], [op("one", "in", "out")])], "planned")
    assert peaks(plan) == (0, 0)
    assert to_allocations(plan) == ()


def test_the_lower_bound_counts_what_another_stream_may_hold_back():
    tensors = [temp(f"a{n}", KIB) for n in range(4)] + [temp(f"b{n}", 8) for n in range(4)]
    ops = []
    for n in range(4):
        ops.append(op(f"make{n}", "in", f"a{n}"))
        ops.append(op(f"send{n}", f"a{n}", f"b{n}", stream="comm", waits=(f"make{n}",)))
    ops.append(op("end", "b0 b1 b2 b3", "out", waits=("send3",)))
    peak, bound = peaks(plan_graphs([graph(tensors, ops)], "planned"))
    assert bound >= 4 * KIB
    assert peak <= bound + 4 * 256
