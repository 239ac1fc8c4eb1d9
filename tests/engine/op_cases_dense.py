"""Inputs for embedding, norms, rotations, products and hyper-connections: shapes and corners."""

from __future__ import annotations

import numpy as np

from engine.formats import bf16_bits
from engine.model.blocks import mixes
from engine.tiling import REDUCE_ROWS
from tests.engine.op_bench import CONFIG, Bench, Cases, with_config

CASES = Cases()

# Dense ------------------------------------------------------------------------------------------


@CASES.of("embed", ((0,), (1,), (9,)))
def dealt_table(rows: int) -> Bench:
    bench = Bench(1, 16)
    ids = bench.given("ids", bench.rng.integers(0, 60, 16))
    inputs = ids, bench.given("table", bench.normal(20, 24))
    return bench.op("embed", inputs, (bench.out("out", "bf16", rows, 24),), start=30, row0=7)


@CASES.of("embed_column")
def column_of_ids() -> Bench:
    bench = Bench(2, 5)
    ids = bench.given("ids", bench.rng.integers(0, 40, (5, 4)))
    inputs = ids, bench.given("table", bench.normal(20, 24))
    return bench.op("embed_column", inputs, (bench.out("out", "bf16", 5, 24),), start=9, column=2)


@CASES.of("rope_table", ((0, False), (0, True), (1, True)))
def near_and_far_positions(back: int, compressed: bool) -> Bench:
    bench = Bench(3, 400)
    positions = bench.given("p", np.concatenate((np.arange(200), 118_000 + np.arange(200))))
    out = bench.out("out", "f32", 400, CONFIG.qk_rope_head_dim)
    return bench.op("rope_table", (positions,), (out,), back=back, compressed=compressed)


@CASES.of("rope", ((3, 0, False), (3, 0, True), (2, 1, False), (0, 0, False)))
def last_channels_of_heads(heads: int, rank: int, inverse: bool) -> Bench:
    bench = Bench(4, 13, ranks=2, rank=rank)
    x = bench.given("x", bench.normal(6 if rank else 7, heads * 40))
    angles, out = bench.given("angles", bench.f32(13, 16)), bench.low.b.updated("out", x)
    params = {"width": 40, "inverse": inverse, "rows": "own"}
    return bench.op("rope", (x, angles), (out,), inplace=((x, out),), **params)


@CASES.of("norm", ((5, 256), (3, 7), (0, 32)))
def rows_with_a_zero_row(rows: int, width: int) -> Bench:
    bench = Bench(5, max(1, rows))
    values = bench.normal(rows, width)
    values[:1] = 0
    inputs = bench.given("x", values), bench.given("weight", bench.normal(width))
    return bench.op("norm", inputs, (bench.out("out", "bf16", rows, width),), eps=1e-20)


@CASES.of("pack_fp8", ((32, 5), (40, 5), (1, 5), (0, 5), (64, 0)))
def whole_and_partial_blocks(width: int, rows: int) -> Bench:
    bench = Bench(6, max(1, rows))
    values = bench.normal(rows, width, size=1e-3)
    values[:1] = 0
    out = bench.out("out", "u8", rows, width + -(-width // 32))
    return bench.op("pack_fp8", (bench.given("x", values),), (out,))


@CASES.of("pack_fp8")
def every_bf16_value() -> Bench:
    codes = np.arange(0x7F80, dtype=np.uint16)
    rows = np.pad(np.stack((codes, codes | 0x8000), axis=1), ((0, 0), (0, 31)))
    # Another channel of the row sets the scale, so that codes of all sizes occur.
    rows[:, 2] = np.resize(bf16_bits(2.0 ** np.arange(-20, 15, 5)), len(rows))
    bench = Bench(7, 1)
    out = bench.out("out", "u8", len(rows), 35)
    return bench.op("pack_fp8", (bench.given("x", rows),), (out,))


SHAPES = ((0, 8, 32, 0), (1, 70, 40, 16), (16, 33, 64, 31), (17, 70, 40, 16), (70, 64, 96, 0),
          (5, 0, 32, 0), (5, 8, 0, 0), (20, 150, 64, 5))


@CASES.of("linear", ((*shape, dtype) for shape in SHAPES for dtype in ("bf16", "f32", "f64")))
def packed_rows_and_fp8_weight(
    rows: int, outputs: int, width: int, shift: int, dtype: str
) -> Bench:
    bench = Bench(8, max(rows, 1))
    bench.fp8_weight("w", outputs, width, shift)
    x = bench.given("x", bench.packed(rows, width))
    bench.low.linear("op", x, "w", dtype, rows, shift=shift)
    return bench


@CASES.of("linear", ((3,), (40,)))
def bf16_rows_and_bf16_weight(rows: int) -> Bench:
    bench = Bench(10, rows)
    bench.weight("w.weight", bench.normal(50, 72))
    x = bench.given("x", bench.normal(rows, 72))
    bench.low.linear("op", x, "w", "f32", rows, source="bf16")
    return bench


@CASES.of("linear", ((0, 9), (1, 6), (1, 0)))
def one_tile_of_rows(tile: int, beyond: int) -> Bench:
    bench = Bench(11, REDUCE_ROWS + beyond, limit=2 * REDUCE_ROWS)
    bench.fp8_weight("w", 8, 32)
    x = bench.given("x", bench.packed(REDUCE_ROWS + beyond, 32))
    bench.low.linear("op", x, "w", "f64", beyond if tile else REDUCE_ROWS, tile=tile)
    return bench


@CASES.of("grouped_linear", ((1, 3, 0), (30, 3, 16), (9, 3, 8), (30, 0, 0), (0, 2, 0)))
def groups_of_heads(rows: int, groups: int, shift: int) -> Bench:
    bench, scratch = Bench(12, max(rows, 1)), []
    for name, count, width in (("x64", 48, 96), ("w64", 64, 96), ("y64", 48, 32)):
        scratch.append(bench.out(name, "f64", count, width))
    x = bench.given("x", bench.normal(rows, groups * 96))
    codes, scales = bench.e4m3(groups * 32, 96), bench.e8m0(groups + (shift > 0), 3)
    w = bench.given("w", codes), bench.given("s", scales)
    out = bench.out("out", "bf16", rows, groups * 32)
    params = {"groups": groups, "shift": shift}
    return bench.op("grouped_linear", (x, *w), (out,), scratch=scratch, **params)


@CASES.of("take_rows")
def rows_by_number() -> Bench:
    bench = Bench(13, 9)
    rows = bench.given("rows", np.array([8, 0, 0, 5], np.int32))
    inputs = bench.given("x", bench.normal(9, 20)), rows
    return bench.op("take_rows", inputs, (bench.out("out", "bf16", 4, 20),))


# Streams ----------------------------------------------------------------------------------------


@CASES.of("spread", ((4,), (0,)))
def one_hot(rows: int) -> Bench:
    bench = Bench(20, max(rows, 1))
    outs = bench.out("h", "bf16", rows, 4, 24), bench.out("mix", "f32", rows, 4)
    return bench.op("spread", (bench.given("x", bench.normal(rows, 24)),), outs)


@CASES.of("mixes", ((1, 1.0), (70, 1.0), (9, 40.0), (0, 1.0)))
def coefficients(rows: int, size: float) -> Bench:
    """Large weights saturate the sigmoids and the softmax."""
    bench = Bench(21, max(rows, 1), config=with_config(hidden_size=48))
    for part, shape in (("fn", (24, 192)), ("scale", (3,)), ("base", (24,))):
        bench.weight(f"p.hc_attn_{part}", bench.f32(*shape, size=size))
    values = bench.normal(rows, 4, 48)
    values[:1] = 0
    h, bench.low.own = bench.given("h", values), rows
    mixes(bench.low, "p", "attn", h)
    return bench


@CASES.of("collapse", ((7, 24), (7, 4), (0, 4)))
def wide_and_narrow_mix(rows: int, mix_width: int) -> Bench:
    bench = Bench(22, max(rows, 1))
    h, mix = bench.normal(rows, 4, 40), bench.f32(rows, mix_width)
    inputs = bench.given("h", h), bench.given("mix", mix)
    return bench.op("collapse", inputs, (bench.out("out", "bf16", rows, 40),))


@CASES.of("update", ((7,), (0,)))
def streams_in_place(rows: int) -> Bench:
    bench = Bench(23, max(rows, 1))
    h, y = bench.given("h", bench.normal(rows, 4, 40)), bench.given("y", bench.normal(rows, 40))
    given, out = bench.given("mixes", bench.f32(rows, 24)), bench.low.b.updated("out", h)
    return bench.op("update", (h, y, given), (out,), inplace=((h, out),))


@CASES.of("stream_mean", ((7,), (0,)))
def some_columns(rows: int) -> Bench:
    bench = Bench(24, max(rows, 1))
    h, out = bench.given("h", bench.normal(rows, 4, 40)), bench.out("out", "bf16", rows, 120)
    return bench.op("stream_mean", (h,), (out,), column=40)
