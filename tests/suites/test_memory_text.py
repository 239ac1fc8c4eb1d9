"""The two texts of the memory suite: a map to read and keep, and the difference of two maps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.ir import Graph, Op, Tensor
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from suites.memory.diff import diff_maps, diff_text, signed_mib
from suites.memory.draw_text import SHADES, draw_map
from suites.memory.folding import folded, pattern_of
from suites.memory.lifetimes import Oracle
from suites.memory.peak import busiest_moment
from suites.memory.render_text import layout_digest, live_at_peak, render_map

MIB = 1024**2


def weight(name: str, size: int, offset: int = 0) -> Allocation:
    return Allocation(name, "weights", size, "weights", offset, 256, "u8", (size,))


def arena(size: int) -> Allocation:
    return Allocation("temporaries", "temporaries", size, "temporaries", 0, 256, "u8", (size,))


def temporary(name: str, size: int, offset: int, first: int, last: int, **more) -> Temporary:
    return Temporary("step", name, size, offset, first, last, "compute", **more)


def example(rank: int = 0) -> RankMap:
    layers = [weight(f"layers.{n}.w", MIB, n * MIB) for n in range(3)]
    temporaries = (
        temporary("a", MIB, 0, 0, 1),
        temporary("b", 2 * MIB, MIB, 1, 2),
        temporary("b.view", MIB, MIB, 1, 2, alias_of="b"),
        temporary("c", MIB, 0, 2, 3),
    )
    return RankMap(rank, (*layers, weight("head", 4 * MIB, 3 * MIB), arena(3 * MIB)), temporaries)


KV = {"bytes_per_token": 890, "page_tokens": 128, "fixed_bytes": 1000}


def whole(*ranks: RankMap, **more) -> MemoryMap:
    return MemoryMap({"ranks": len(ranks)}, {"name": "mini"}, ranks, more.get("kv", KV))


def graph() -> Graph:
    names = {n: Tensor(n, "temp", "u8", (MIB,)) for n in ("a", "b", "s")}
    names["in"] = Tensor("in", "io", "u8", (8,))
    ops = (
        Op("make", "any", ("in",), ("a",)),
        Op("send", "any", ("a",), ("s",), stream="comm", waits=("make",)),
        Op("next", "any", ("in",), ("b",)),
        Op("end", "any", ("b", "s"), ("in",), waits=("send",)),
    )
    return Graph("step", names, ops, {})


def lines_of(text: str) -> list[str]:
    return text.splitlines()


def test_a_rendered_map_shows_every_section():
    text = render_map(whole(example()))
    for line in (
        "model.name = mini",
        "recipe.ranks = 1",
        "bytes_per_token = 890",
        "core_fixed_mappings                     10.000",
        "weights_and_numeric_constants            7.000",
        "other_owned_tensors                      3.000",
        "weights: 7,340,032 bytes in 4 mappings, ends at 7,340,032",
        "     1,048,576  layers.*.w x3  weights  u8 [1048576]",
        "     4,194,304  head  weights  u8 [4194304]",
        "temporaries: 3, and 1 aliases",
        "bytes without reuse: 4,194,304",
        "highest byte: 3,145,728",
        "live at the peak: 3,145,728 bytes in 2 buffers",
        "the peak is at: op 1",
        "     2,097,152  b  written by op 1 on compute",
    ):
        assert line in lines_of(text)


def test_writers_have_names_where_the_graph_is_known():
    rank = replace(
        example(), temporaries=(temporary("a", MIB, 0, 0, 1), temporary("b", MIB, MIB, 2, 3))
    )
    text = render_map(whole(rank), {0: [graph()]})
    assert "     1,048,576  a  written by make on compute" in lines_of(text)


def test_later_ranks_show_only_what_differs():
    other = replace(example(1), allocations=(*example(1).allocations[:-2], arena(3 * MIB)))
    text = render_map(whole(example(), example(1), replace(other, rank=2)))
    after = text.split("# rank 1\n")[1]
    assert after.startswith("as the first rank\n")
    assert "## arenas, unlike the first rank" in after
    assert "weights: 3,145,728 bytes in 3 mappings, ends at 3,145,728" in after
    assert "layers.*.w" not in after


def test_a_small_change_gives_a_small_difference():
    changed = replace(example().temporaries[0], offset=3 * MIB)
    rank = replace(example(), temporaries=(changed, *example().temporaries[1:]))
    before, after = (lines_of(render_map(whole(r))) for r in (example(), rank))
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 2


def test_the_layout_digest_sees_every_byte():
    rank = example()
    moved = replace(rank.temporaries[3], last_read=4)
    other = replace(rank, temporaries=(*rank.temporaries[:3], moved))
    assert layout_digest(rank) != layout_digest(other)
    assert layout_digest(rank) == layout_digest(example())


def test_the_peak_by_the_map_alone_leaves_out_aliases():
    at, live = live_at_peak(example().temporaries)
    assert (at, [t.name for t in live]) == (1, ["a", "b"])


def test_the_busiest_moment_may_need_a_late_stream():
    moment = busiest_moment(Oracle(graph()))
    assert [family.head for family in moment.live] == ["a", "b", "s"]
    assert (moment.late, moment.live_bytes) == ("comm", 3 * MIB)


def test_a_graph_without_temporaries_has_no_busiest_moment():
    empty = Graph("g", {"in": Tensor("in", "io", "u8", (8,))}, (Op("o", "any", ("in",), ()),), {})
    assert busiest_moment(Oracle(empty)) is None


def test_numbers_between_dots_fold():
    names = ["layers.0.w", "layers.12.w", "layers.3.w", "head", "w1.x"]
    assert pattern_of("layers.12.ffn.3") == "layers.*.ffn.*"
    assert [f.title for f in folded(names, str)] == ["layers.*.w x3", "head", "w1.x"]
    assert [f.title for f in folded(names, str, len)] == [
        "layers.*.w x2",
        "layers.12.w",
        "head",
        "w1.x",
    ]


def test_equal_maps_have_no_difference():
    diff = diff_maps(whole(example()), whole(example()))
    assert diff.is_empty
    assert diff_text(diff, ("A", "B")) == "A and B are the same\n"


def test_a_difference_tells_rows_buffers_and_tokens():
    rank = example()
    bigger = replace(rank.temporaries[1], nbytes=3 * MIB)
    moved = replace(rank.temporaries[3], offset=4 * MIB)
    new = replace(
        rank,
        allocations=(*rank.allocations[:3], arena(4 * MIB), weight("norm", 512, 0)),
        temporaries=(bigger, rank.temporaries[2], moved, temporary("d", 64, 0, 3, 3)),
    )
    text = diff_text(diff_maps(whole(rank, example(1)), whole(new, replace(new, rank=1))))
    for line in (
        "core_fixed_mappings                     -3.000        -3.000",
        "weights_and_numeric_constants           -4.000        -4.000",
        "other_owned_tensors                     +1.000        +1.000",
        "ranks 0, 1",
        "    + norm  +512 B at 0",
        "    - head  -4.000 MiB",
        "    ~ temporaries  +1.000 MiB (3145728 to 4194304 bytes)",
        "  graph step: 1 appeared, 1 vanished, 1 grew, 1 moved",
        "    ~ b  +1.000 MiB (2097152 to 3145728 bytes)",
        "    > c  0 to 4194304",
    ):
        assert line in lines_of(text)
    saved = 3 * MIB - 512
    assert f"KV tokens at an equal budget: +{saved // 890 // 128 * 128:,}" in lines_of(text)


def test_the_seeds_saving_is_worth_the_seeds_tokens():
    main, prototype = (
        RankMap(0, (weight("all", round(gib * 1024**3)),), ()) for gib in (96.71, 96.25)
    )
    tokens = diff_maps(whole(main), whole(prototype)).tokens
    assert tokens % 128 == 0
    assert tokens == pytest.approx(555_000, rel=0.001)


def test_the_heaviest_rank_decides_the_tokens():
    old = [RankMap(n, (weight("w", size),), ()) for n, size in enumerate((10 * MIB, 8 * MIB))]
    new = [old[0], RankMap(1, (weight("w", 6 * MIB),), ())]
    assert diff_maps(whole(*old), whole(*new)).tokens == 0


def test_tokens_are_not_told_when_the_cache_format_differs():
    diff = diff_maps(
        whole(example()),
        whole(replace(example(), allocations=()), kv={**KV, "bytes_per_token": 900}),
    )
    assert diff.tokens is None
    assert "not comparable, KV bytes per token differ" in diff_text(diff)
    assert "kv.bytes_per_token: 890 -> 900" in diff_text(diff)


def test_other_attributes_and_lives_are_told():
    rank = example()
    longer = replace(rank.temporaries[0], last_read=3)
    other = replace(rank.allocations[3], dtype="bf16")
    new = replace(
        rank,
        allocations=(*rank.allocations[:3], other, rank.allocations[4]),
        temporaries=(longer, *rank.temporaries[1:]),
    )
    text = diff_text(diff_maps(whole(rank), whole(new)))
    assert "    ! head  dtype u8 to bf16" in lines_of(text)
    assert "    ! a  life of 2 ops, now 4" in lines_of(text)


def test_ranks_that_come_and_go_are_told():
    diff = diff_maps(whole(example(0), example(1)), whole(example(0), example(2)))
    assert (diff.missing_ranks, diff.new_ranks) == ((1,), (2,))
    assert "rank 1: only in the old map" in diff_text(diff)


def test_long_lists_are_counted_not_cut_silently():
    named = [chr(97 + n % 26) * (n // 26 + 1) for n in range(60)]
    rank = RankMap(0, tuple(weight(name, 512) for name in named), ())
    text = diff_text(diff_maps(whole(RankMap(0, (), ())), whole(rank)))
    assert "  allocations: 60 appeared" in lines_of(text)
    assert "    and 40 more" in lines_of(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "+0.000 MiB"), (100, "+100 B"), (-100, "-100 B"), (MIB, "+1.000 MiB")]
)
def test_small_sizes_are_not_rounded_away(size, text):
    assert signed_mib(size) == text


# The drawing for terminals


def drawn(*temporaries: Temporary, rows: int = 4) -> list[str]:
    rank = RankMap(0, (arena(4 * MIB),), temporaries)
    text = draw_map(whole(rank), rows=rows, columns=8)
    return [line.split("|")[1] for line in text.splitlines() if "|" in line]


def test_a_drawing_has_addresses_upwards_and_ops_to_the_right():
    assert drawn(
        temporary("a", MIB, 0, 0, 1),
        temporary("b", 2 * MIB, MIB, 1, 2),
        temporary("c", MIB, 3 * MIB, 3, 3),
    ) == ["      @@", "  @@@@  ", "  @@@@  ", "@@@@    "]


def test_half_a_cell_is_shaded_half():
    (row,) = drawn(temporary("a", MIB, 0, 0, 3), temporary("b", MIB, MIB, 0, 0), rows=1)
    assert row == "@@++++++".replace("+", SHADES[4])


def test_bytes_claimed_twice_are_drawn_as_such():
    assert drawn(temporary("a", MIB, 0, 0, 1), temporary("b", MIB, 0, 1, 2), rows=1) == ["@@!!@@"]


def test_aliases_are_not_drawn_twice():
    rows = drawn(temporary("a", MIB, 0, 0, 1), temporary("v", MIB, 0, 0, 1, alias_of="a"), rows=1)
    assert rows == ["@@@@"]


def test_a_long_graph_fits_the_columns():
    rank = RankMap(0, (), tuple(temporary(str(n), MIB, 0, n, n) for n in range(0, 9000, 2)))
    lines = draw_map(whole(rank), rows=2, columns=40).splitlines()
    assert {len(line) for line in lines if "|" in line} == {14 + 40}


def test_a_graph_without_bytes_is_said_to_have_none():
    assert "  no bytes" in draw_map(whole(RankMap(0, (), (temporary("e", 0, 0, 0, 1),))))
