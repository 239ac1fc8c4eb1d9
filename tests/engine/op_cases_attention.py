"""Inputs for attention, its caches and the indexer: several sequences, rings, selections."""

from __future__ import annotations

import numpy as np

from engine.model.lowering import index_scratch
from engine.tiling import INDEX_KEYS
from tests.engine.op_bench import CONFIG, Bench, Cases

CASES = Cases()

# Attention and its caches -----------------------------------------------------------------------

PREFILLS = ((0, 0, 70), (2, 5, 3), (1, 30, 20))
DECODES = ((0, 0, 1), (3, 9, 1), (1, 37, 1), (2, 200, 1))
STEPS = {"prefills": PREFILLS, "decodes": DECODES}


def _attend(bench: Bench, steps, whole: bool, heads: int, selected: np.ndarray | None) -> Bench:
    width, window, rows = 48, 16, bench.counts["T"]
    q = bench.given("q", bench.normal(rows, heads * width))
    # What no row reaches holds NaN codes: nobody may read it.
    ring = np.full((4, 21, width + 2), 0x7F, np.uint8)
    for slot, start, _ in steps:
        reached = np.arange(max(0, start - window), start) % 21
        ring[slot, reached] = bench.packed(len(reached), width, least=-14)
    # Keys are small, so that no share of a softmax is too small for the compiled exponential.
    fresh = bench.given("fresh", bench.packed(rows, width, least=-14))
    inputs = [q, fresh, bench.given("ring", ring, "state"),
              bench.given("sink", bench.f32(heads, size=3.0)), *bench.step(*steps)]
    inputs.append(bench.pages(len(steps), 30))
    params: dict[str, object] = {"window": window, "whole": whole}
    if selected is not None:
        records = bench.entries(len(steps) * 30 * 10, width, 32).reshape(len(steps) * 30, -1)
        inputs += [bench.given("pool", np.pad(records, ((0, 0), (24, 9))), "state"),
                   bench.given("selected", selected.astype(np.int32))]
        params |= {"base": 24, "per_page": 10, "record": records.shape[1] // 10}
    out = bench.low.b.updated("out", q)
    scratch = (bench.out("window64", "f64", rows, width),)
    return bench.op("attend", inputs, (out,), scratch=scratch, inplace=((q, out),), **params)


@CASES.of("attend", ((name, heads) for name in STEPS for heads in (3, 0)))
def window_that_wraps_the_ring(name: str, heads: int) -> Bench:
    bench = Bench(30, sum(rows for _, _, rows in STEPS[name]))
    return _attend(bench, STEPS[name], False, heads, None)


@CASES.of("attend", ((name,) for name in STEPS))
def selected_entries_and_none(name: str) -> Bench:
    rows = sum(count for _, _, count in STEPS[name])
    bench = Bench(31, rows)
    selected = np.sort(bench.rng.integers(0, 300, (rows, 12)), axis=1)
    selected[np.arange(12) >= bench.rng.integers(0, 13, (rows, 1))] = -1
    return _attend(bench, STEPS[name], False, 2, selected)


@CASES.of("attend")
def draft_rows_that_all_see_each_other() -> Bench:
    return _attend(Bench(32, 15), ((0, 3, 5), (1, 16, 5), (2, 333, 5)), True, 2, None)


RINGS = (((0, 0, 70), (2, 5, 3), (1, 30, 20)), ((3, 20, 1), (0, 0, 22)))


@CASES.of("write_ring", ((steps,) for steps in RINGS))
def more_rows_than_the_ring(steps) -> Bench:
    rows = sum(count for _, _, count in steps)
    bench = Bench(33, rows)
    packed, meta = bench.given("packed", bench.packed(rows, 40)), bench.step(*steps)[2:]
    ring = bench.given("ring", bench.packed(4 * 21, 40).reshape(4, 21, -1), "state")
    return bench.op("write_ring", (packed, *meta, ring), (ring,))


@CASES.of("write_tail", ((steps,) for steps in RINGS))
def newest_tokens(steps) -> Bench:
    rows = sum(count for _, _, count in steps)
    bench = Bench(34, rows)
    pair, meta = [bench.given(n, bench.f32(rows, 24)) for n in ("kv", "score")], bench.step(*steps)
    tail = bench.given("tail", bench.f32(4, 7, 48), "state")
    return bench.op("write_tail", (*pair, *meta[2:], tail), (tail,))


@CASES.of("pool", ((name, size) for name in STEPS for size in (1.0, 1000.0)))
def groups_across_steps(name: str, size: float) -> Bench:
    rows = sum(count for _, _, count in STEPS[name])
    bench = Bench(35, rows)
    kv = bench.given("kv", bench.f32(rows, 24))
    score = bench.given("score", bench.f32(rows, 24, size=size))
    tail = bench.given("tail", bench.f32(4, 7, 48, size=size), "state")
    out = bench.out("out", "bf16", rows, 24)
    inputs = (kv, score, tail, *bench.step(*STEPS[name]))
    return bench.op("pool", inputs, (out,), ratio=2)


@CASES.of("pack_entries", ((9,), (0,)))
def latents_and_keys(rows: int) -> Bench:
    bench = Bench(36, max(rows, 1))
    latent, key = bench.normal(rows, 64, size=8.0), bench.normal(rows, 32)
    latent[:1], key[:1] = 0, 0
    out = bench.out("out", "u8", rows, 32 + 4 + 16 + 1)
    return bench.op("pack_entries", (bench.given("l", latent), bench.given("k", key)), (out,))


@CASES.of("write_entries", ((name, ratio) for name in STEPS for ratio in (1, 2)))
def completed_groups(name: str, ratio: int) -> Bench:
    rows = sum(count for _, _, count in STEPS[name])
    bench = Bench(37, rows)
    records, meta = bench.given("records", bench.e4m3(rows, 53)), bench.step(*STEPS[name])[:2]
    pages = bench.pages(len(STEPS[name]), 51)
    pool = bench.given("pool", bench.e4m3(len(STEPS[name]) * 51, 300), "state")
    params = {"ratio": ratio, "base": 30, "per_page": 4}
    return bench.op("write_entries", (records, *meta, pages, pool), (pool,), **params)


@CASES.of("pack_fp4", ((9, 3), (0, 3)))
def index_queries(rows: int, heads: int) -> Bench:
    bench = Bench(38, max(rows, 1))
    values = bench.normal(rows, heads * 64, size=1e-3)
    values[:1] = 0
    out = bench.out("out", "u8", rows, heads * 34)
    return bench.op("pack_fp4", (bench.given("x", values),), (out,), width=64)


# Indexer ----------------------------------------------------------------------------------------


def _select(
    bench: Bench, steps, *, source=False, candidates=None, ties=False, ratio=1, rank=0, pages=30
) -> Bench:
    heads, width, block = 4, 32, CONFIG.candidate_block_size
    rows, sequences = bench.counts["T"], len(steps)
    first, past = rank * -(-rows // len(bench.deals)), (rank + 1) * -(-rows // len(bench.deals))
    own = min(rows, past) - first
    queries = bench.rng.integers(0, 256, (own, heads, 16), dtype=np.uint8)
    packed = np.concatenate((queries, bench.e8m0(own, heads, 1)), axis=2).reshape(own, -1)
    weights = bench.normal(own, heads)
    records = bench.entries(sequences * pages * 10, 48, width)
    if ties:
        # Few different keys and some rows without any score.
        records[:, 27:] = records[bench.rng.integers(0, 3, len(records)), 27:]
        weights[::3] = 0
    pool = np.pad(records.reshape(sequences * pages, -1), ((0, 0), (7, 0)))
    inputs = [bench.given("packed", packed), bench.given("weights", weights),
              *bench.step(*steps)[:2], bench.pages(sequences, pages)]
    inputs.append(bench.given("pool", pool, "state"))
    blocks = CONFIG.candidate_topk_blocks
    outputs = [bench.out("selected", "i32", own, CONFIG.index_topk)]
    if source:
        outputs.append(bench.out("blocks", "i32", own, blocks))
    if candidates is not None:
        inputs.append(bench.given("candidates", candidates.astype(np.int32)))
    params = {
        "heads": heads, "width": width, "ratio": ratio, "block": block, "factor": width**-0.5 / 2,
        "base": 7, "per_page": 10, "record": records.shape[1], "key_at": 27, "rows": "own",
    }
    scratch = index_scratch(bench.low, "s", heads, width, blocks if source else 0)
    return bench.op("select", inputs, outputs, scratch=scratch, **params)


@CASES.of("select", ((n, s, t) for n in STEPS for s in (False, True) for t in (False, True)))
def best_visible_entries(name: str, source: bool, ties: bool) -> Bench:
    bench = Bench(40, sum(count for _, _, count in STEPS[name]))
    return _select(bench, STEPS[name], source=source, ties=ties)


@CASES.of("select", ((name, ties) for name in STEPS for ties in (False, True)))
def entries_inside_the_candidates(name: str, ties: bool) -> Bench:
    rows = sum(count for _, _, count in STEPS[name])
    bench = Bench(41, rows)
    picks = [np.sort(bench.rng.permutation(52)[:8]) for _ in range(rows)]
    candidates = np.stack(picks)
    candidates[np.arange(8) >= bench.rng.integers(0, 9, (rows, 1))] = -1
    return _select(bench, STEPS[name], candidates=candidates, ties=ties)


@CASES.of("select", ((0,), (1,), (2,)))
def own_rows_at_ratio_2(rank: int) -> Bench:
    bench = Bench(42, 94, ranks=3, rank=rank)
    return _select(bench, ((0, 0, 71), (1, 45, 23)), ratio=2, source=True, rank=rank)


@CASES.of("select", ((4,), (12,)))
def keys_of_several_tiles(rows: int) -> Bench:
    steps = ((0, 2 * INDEX_KEYS + 300, rows),)
    return _select(Bench(43, rows), steps, source=True, ties=True, pages=240)
