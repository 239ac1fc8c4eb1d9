"""Kernel table for the CPU: binds each kind of op to its arrays and returns what runs it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.engram import bucket_primes, hash_ngrams
from engine.ir import Op
from engine.ops import attention, dense, engram, experts, hyper, tiles
from engine.ops.bind import Binding, Run, rope_frequencies
from engine.ops.gemm import bind_experts, bind_grouped_linear, bind_linear
from engine.ops.rows import least_rows
from engine.ops.select import bind_select

Binder = Callable[[Binding, Op], Run]


def _rows_kernel(kernel, extra: tuple[str, ...] = ()) -> Binder:
    """A binder for kernel(first, past, *inputs, *extra parameters, *outputs)."""

    def bind(b: Binding, op: Op) -> Run:
        inputs, outputs = b.arrays(op.inputs), b.arrays(op.outputs)
        args = (*inputs, *(op.params[name] for name in extra), *outputs)
        rows, run = len(outputs[0]), b.workers.run
        least = least_rows(_items(inputs[0]))
        return lambda: run(kernel, rows, least, *args)

    return bind


def _items(array: np.ndarray) -> int:
    """Items of a row."""
    return int(np.prod(array.shape[1:]))


def _bind_embed(b: Binding, op: Op) -> Run:
    ids, table = b.arrays(op.inputs)
    (out,) = b.arrays(op.outputs)
    row0, start = op.params["row0"], op.params["start"]
    mine = ids[row0 : row0 + len(out)]
    return lambda: dense.embed_rows(0, len(out), mine, table, start, out)


def _bind_embed_column(b: Binding, op: Op) -> Run:
    ids, table = b.arrays(op.inputs)
    (out,) = b.arrays(op.outputs)
    column, start = ids[:, op.params["column"]], op.params["start"]
    return lambda: dense.embed_rows(0, len(out), column, table, start, out)


def _bind_rope_table(b: Binding, op: Op) -> Run:
    (positions,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    frequencies = rope_frequencies(b.config, op.params["compressed"])
    back = op.params["back"]
    return lambda: dense.rope_angles(0, len(out), positions, back, frequencies, out)


def _bind_rope(b: Binding, op: Op) -> Run:
    (x, table), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    table_first = b.rows_of(op)[0]
    args = (x, table, table_first, op.params["width"], op.params["inverse"], out)
    rows, run = len(x), b.workers.run
    least = least_rows(_items(x))
    return lambda: run(dense.rope_rows, rows, least, *args)


def _bind_mixes(b: Binding, op: Op) -> Run:
    h, fn, scale, base = b.arrays(op.inputs)
    (out,) = b.arrays(op.outputs)
    fn64, flat, products, factors = b.arrays(op.scratch)
    p, workers, copies = op.params, b.workers, h.shape[1]
    combs = np.empty((workers.threads, copies, copies))
    tile = len(flat) // workers.threads

    def part(index: int, first: int, past: int) -> None:
        here = slice(index * tile, (index + 1) * tile)
        tiles.mix_tiles(
            first, past, h, fn64, scale, base, p["eps"], p["hc_eps"], p["rounds"],
            flat[here], products[here], factors[here], combs[index], out,
        )

    def go() -> None:
        fn64[...] = fn
        workers.each(part, len(h), 32)

    return go


def _bind_spread(b: Binding, op: Op) -> Run:
    (x,), (h, mix) = b.arrays(op.inputs), b.arrays(op.outputs)
    return lambda: hyper.spread_rows(0, len(h), x, h, mix)


def _bind_stream_mean(b: Binding, op: Op) -> Run:
    h, out = b.array(op.inputs[0]), b.array(op.outputs[0])
    column = op.params["column"]
    return lambda: hyper.mean_rows(0, len(h), h, out, column)


def _bind_gate(b: Binding, op: Op) -> Run:
    (gate, up), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    limit, run = op.params["limit"], b.workers.run
    least = least_rows(8 * _items(out))
    return lambda: run(experts.gate_rows, len(out), least, gate, up, limit, out)


def _bind_route(b: Binding, op: Op) -> Run:
    (logits, bias), (choice, weight) = b.arrays(op.inputs), b.arrays(op.outputs)
    scaling, run = op.params["scaling"], b.workers.run
    args = (logits, bias, scaling, choice, weight)
    return lambda: run(experts.route_rows, len(logits), 512, *args)


def _bind_attend(b: Binding, op: Op) -> Run:
    arrays = b.arrays(op.inputs)
    q, fresh, ring, sink, positions, seq_of, first_row, start, slots, pages = arrays[:10]
    (out,) = b.arrays(op.outputs)
    p = op.params
    if len(arrays) > 10:
        pool, selected = arrays[10:]
        place = (p["base"], p["per_page"], p["record"])
    else:
        pool, selected = np.zeros((1, 1), np.uint8), np.zeros((len(q), 0), np.int32)
        place = (0, 1, 1)
    (decoded,) = b.arrays(op.scratch)
    args = (q, decoded, ring, selected, pages, pool, sink, positions, seq_of, first_row, start)
    args += (slots, p["window"], p["whole"], *place, out)
    run, (rows, width) = b.workers.run, decoded.shape
    if sink.size == 0:
        return lambda: None
    least = least_rows(q.shape[1] * (p["window"] + selected.shape[1]) // 4)

    def go() -> None:
        dense.unpack_fp8_rows(0, rows, fresh, width, decoded)
        run(attention.attend_rows, rows, least, *args)

    return go


def _bind_pack_fp4(b: Binding, op: Op) -> Run:
    (x,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    width, run = op.params["width"], b.workers.run
    return lambda: run(attention.pack_fp4_heads, len(x), 128, x, width, out)


def _bind_write_entries(b: Binding, op: Op) -> Run:
    entries, positions, seq_of, pages, pool = b.arrays(op.inputs)
    p = op.params
    args = (entries, positions, seq_of, pages, p["ratio"], p["base"], p["per_page"], pool)
    return lambda: attention.write_entries(0, len(entries), *args)


def _bind_pool(b: Binding, op: Op) -> Run:
    kv, score, tail, positions, seq_of, first_row, start, slots = b.arrays(op.inputs)
    (out,) = b.arrays(op.outputs)
    ratio, run = op.params["ratio"], b.workers.run
    args = (kv, score, positions, seq_of, first_row, start, slots, ratio, tail, out)
    least = least_rows(8 * _items(out))
    return lambda: run(attention.pool_groups, len(out), least, *args)


def _bind_write_tail(b: Binding, op: Op) -> Run:
    kv, score, first_row, start, slots, tail = b.arrays(op.inputs)
    return lambda: attention.write_tail(0, len(start), kv, score, first_row, start, slots, tail)


def _bind_write_ring(b: Binding, op: Op) -> Run:
    packed, first_row, start, slots, ring = b.arrays(op.inputs)
    return lambda: attention.write_ring(0, len(start), packed, first_row, start, slots, ring)


def _bind_engram_hash(b: Binding, op: Op) -> Run:
    (ngrams,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    config, layer = b.config, op.params["layer"]

    def go() -> None:
        out[...] = hash_ngrams(ngrams, config, layer)

    return go


def _bind_engram_lookup(b: Binding, op: Op) -> Run:
    hashes, codes, scales = b.arrays(op.inputs)
    (out,) = b.arrays(op.outputs)
    bucket0 = op.params["bucket0"]
    primes = bucket_primes(b.config)[b.config.engram_layer_ids.index(op.params["layer"])]
    args = (hashes, bucket0, sum(primes[:bucket0]), codes, scales, out)
    return lambda: engram.lookup_rows(0, len(hashes), *args)


def _bind_take_rows(b: Binding, op: Op) -> Run:
    (x, rows), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    return lambda: experts.gather_rows(0, len(out), x, rows, 0, out)


def _bind_add_base(b: Binding, op: Op) -> Run:
    (own, base), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    mine = base[op.params["index"] :: op.params["block"]]

    def go() -> None:
        np.add(own, mine, out=out)

    return go


def _bind_draft_pick(b: Binding, op: Op) -> Run:
    everyone, collapsed, embedded, proj, ids, logits, confidence = b.arrays(op.inputs)
    index, block = op.params["index"], op.params["block"]
    mine = collapsed[index::block]

    def go() -> None:
        logits[:, index] = everyone
        ids[:, index + 1] = np.argmax(everyone, axis=1)
        seen = np.concatenate((mine, embedded), axis=1).astype(np.uint32) << np.uint32(16)
        weight = (proj[0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        products = seen.view(np.float32).astype(np.float64) * weight.astype(np.float64)
        confidence[:, index] = products.sum(axis=1)

    return go


BINDERS: dict[str, Binder] = {
    "embed": _bind_embed,
    "embed_column": _bind_embed_column,
    "rope_table": _bind_rope_table,
    "rope": _bind_rope,
    "norm": _rows_kernel(dense.norm_rows, extra=("eps",)),
    "pack_fp8": _rows_kernel(dense.pack_fp8_rows),
    "linear": bind_linear,
    "grouped_linear": bind_grouped_linear,
    "spread": _bind_spread,
    "mixes": _bind_mixes,
    "collapse": _rows_kernel(hyper.collapse_rows),
    "update": _rows_kernel(hyper.update_rows),
    "stream_mean": _bind_stream_mean,
    "attend": _bind_attend,
    "write_ring": _bind_write_ring,
    "pool": _bind_pool,
    "write_tail": _bind_write_tail,
    "pack_entries": _rows_kernel(attention.pack_entry_rows),
    "write_entries": _bind_write_entries,
    "pack_fp4": _bind_pack_fp4,
    "select": bind_select,
    "route": _bind_route,
    "experts": bind_experts,
    "gate": _bind_gate,
    "moe_sum": _rows_kernel(experts.sum_rows),
    "engram_hash": _bind_engram_hash,
    "engram_lookup": _bind_engram_lookup,
    "engram_apply": _rows_kernel(engram.apply_rows, extra=("eps",)),
    "take_rows": _bind_take_rows,
    "add_base": _bind_add_base,
    "draft_pick": _bind_draft_pick,
}
