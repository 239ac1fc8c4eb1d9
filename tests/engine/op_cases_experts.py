"""Inputs for the router, the experts, Engram and the draft heads: ties, tiles, dealt shares."""

from __future__ import annotations

import numpy as np

from engine.engram import bucket_primes
from engine.formats import bf16_bits
from engine.model.experts import expert_op
from engine.shard import Deal
from engine.tiling import REDUCE_ROWS
from tests.engine.op_bench import CONFIG, Bench, Cases, with_config

CASES = Cases()

# Experts ----------------------------------------------------------------------------------------


@CASES.of("route", ((9, 12, 3, False), (9, 12, 3, True), (600, 5, 5, False), (0, 4, 2, False)))
def experts_by_score(rows: int, experts: int, active: int, ties: bool) -> Bench:
    bench = Bench(50, max(rows, 1))
    logits = bench.rng.standard_normal((rows, experts)) * np.resize((1, 30, 900), (rows, 1))
    bias = bench.f32(experts)
    if ties:
        logits, bias = np.round(logits / 40), np.zeros_like(bias)
    outs = bench.out("choice", "i32", rows, active), bench.out("weight", "f32", rows, active)
    inputs = bench.given("logits", logits), bench.given("bias", bias)
    return bench.op("route", inputs, outs, scaling=1.5)


@CASES.of("experts", ((1, 0, None), (9, 2, None), (80, 0, None), (80, 3, None), (80, 12, None),
                   (6, 0, 1), (0, 0, 1)))
def routed_experts(rows: int, first: int, tile: int | None) -> Bench:
    """Experts first.. of 12; with a tile the rows are the step's last ones."""
    total = rows if tile is None else REDUCE_ROWS + rows
    config = with_config(hidden_size=64, moe_intermediate_size=96)
    deal, limit = Deal(experts=(first, 12)), 2 * REDUCE_ROWS
    bench = Bench(51, max(total, 1), config=config, deal=deal, limit=limit)
    count = 12 - first
    for part, out, into in (("w1", 96, 64), ("w3", 96, 64), ("w2", 64, 96)):
        codes = bench.rng.integers(0, 256, (count, out, into // 2), dtype=np.uint8)
        bench.weight(f"p.experts.{part}.weight", codes)
        bench.weight(f"p.experts.{part}.scale", bench.e8m0(count, out, into // 32))
    choice = np.argsort(bench.rng.random((total, 12)), axis=1)[:, :3].astype(np.int32)
    weight = bench.given("weight", np.abs(bench.f32(total, 3)))
    inputs = bench.given("packed", bench.packed(total, 64)), bench.given("choice", choice), weight
    out = bench.out("out", "f64", rows, 64)
    expert_op(bench.low, "op", "p", *inputs, 3, out, tile)
    return bench


@CASES.of("gate", ((9, 40), (3, 0)))
def gated_product_with_clamps(rows: int, width: int) -> Bench:
    bench = Bench(52, rows)
    inputs = [bench.given(n, bench.normal(rows, width, size=20.0)) for n in ("gate", "up")]
    return bench.op("gate", inputs, (bench.out("out", "bf16", rows, width),), limit=10.0)


@CASES.of("gate")
def gates_far_below_zero() -> Bench:
    bench = Bench(53, 1)
    gate = bf16_bits(-np.array([[50.0, 300, 700, 708, 709, 710, 800, 1e30, 3e38]]))
    up = bf16_bits(np.full((1, 9), 3.0))
    inputs = bench.given("gate", gate), bench.given("up", up)
    return bench.op("gate", inputs, (bench.out("out", "bf16", 1, 9),), limit=10.0)


@CASES.of("moe_sum", ((9,), (0,)))
def routed_and_shared(rows: int) -> Bench:
    bench = Bench(54, max(rows, 1))
    routed = bench.given("routed", bench.rng.standard_normal((rows, 40)))
    inputs = routed, bench.given("shared", bench.normal(rows, 40))
    return bench.op("moe_sum", inputs, (bench.out("out", "bf16", rows, 40),))


@CASES.of("moe_sum")
def sums_that_round_twice() -> Bench:
    """Next to a tie of bf16: float32 rounds onto it, and from there to even."""
    bench = Bench(55, 1)
    ties = 1 + np.arange(1, 17, 2) * 2.0**-8
    routed = np.concatenate((ties + 2.0**-40, ties - 2.0**-40, -ties - 2.0**-40))[None]
    inputs = bench.given("routed", routed), bench.given("shared", np.zeros((1, 24), np.uint16))
    return bench.op("moe_sum", inputs, (bench.out("out", "bf16", 1, 24),))


# Engram and drafts ------------------------------------------------------------------------------


@CASES.of("engram_hash", ((1,), (3,)))
def hashes_of_n_grams(layer: int) -> Bench:
    bench = Bench(60, 50)
    ngrams = bench.rng.integers(0, CONFIG.engram_compressed_vocab_size, (50, 4))
    out = bench.out("out", "i64", 50, CONFIG.engram_buckets)
    return bench.op("engram_hash", (bench.given("ngrams", ngrams),), (out,), layer=layer)


@CASES.of("engram_lookup", ((0, 6), (2, 3), (1, 0)))
def rows_of_own_buckets(bucket0: int, buckets: int) -> Bench:
    bench = Bench(61, 50)
    primes = bucket_primes(CONFIG)[0]
    starts = np.concatenate(([0], np.cumsum(primes)))
    offsets = bench.rng.integers(0, primes, (50, len(primes)))
    size = starts[bucket0 + buckets] - starts[bucket0]
    table = [bench.given("codes", bench.e4m3(size, 32), "io"),
             bench.given("scales", bench.e8m0(size, 1), "io")]
    inputs = bench.given("hashes", offsets + starts[:-1]), *table
    out = bench.out("out", "bf16", 50, buckets * 32)
    return bench.op("engram_lookup", inputs, (out,), layer=1, bucket0=bucket0)


@CASES.of("engram_apply", ((9,), (0,)))
def gates_of_the_value(rows: int) -> Bench:
    bench = Bench(62, max(rows, 1))
    kv = bench.normal(rows, 5 * 40)
    kv[:1, :40] = 0
    h, weights = bench.given("h", bench.normal(rows, 4, 40)), (bench.normal(4, 40) for _ in "qk")
    names = [bench.given(f"w{i}", values) for i, values in enumerate(weights)]
    inputs, out = (h, bench.given("kv", kv), *names), bench.low.b.updated("out", h)
    return bench.op("engram_apply", inputs, (out,), inplace=((h, out),), eps=1e-20)


@CASES.of("add_base")
def own_position() -> Bench:
    bench = Bench(63, 15)
    own, base = bench.given("own", bench.f32(3, 40)), bench.given("base", bench.f32(15, 40))
    out = bench.low.b.updated("out", own)
    return bench.op("add_base", (own, base), (out,), inplace=((own, out),), index=2, block=5)


@CASES.of("draft_pick", ((0,), (4,)))
def picks_with_ties(index: int) -> Bench:
    bench = Bench(64, 15)
    everyone = bench.f32(3, 40)
    everyone[1, [7, 21, 39]] = 9
    everyone[2] = 0
    contents = {
        "everyone": everyone, "collapsed": bench.normal(15, 24), "embedded": bench.normal(3, 8),
        "proj": bench.normal(1, 32), "ids": bench.rng.integers(0, 40, (3, 6)),
        "logits": bench.f32(3, 5, 40), "confidence": bench.f32(3, 5),
    }
    inputs = [bench.given(name, values, "io") for name, values in contents.items()]
    return bench.op("draft_pick", inputs, inputs[4:], index=index, block=5)
