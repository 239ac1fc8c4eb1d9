"""Compiled tile loops around matrix products: one call per thread, without the interpreter lock.

Short interpreted stretches between kernels would make threads wait for each other's lock.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from engine.ops.dense import (
    pack_fp8_rows,
    store_bf16,
    store_f32,
    store_f64,
    unpack_bf16_rows,
    unpack_fp8_rows,
)
from engine.ops.experts import add_rounded, decode_fp4_weight, gate_products, unpack_slots
from engine.ops.hyper import mix_rows, stream_rows
from engine.ops.indexer import decode_keys, decode_queries, finish_rows, scan_tile
from engine.ops.numeric import kernel


def _store(y, out, column):
    """Round float64 rows to out's dtype, chosen when compiled."""
    raise NotImplementedError


@overload(_store, jit_options={"cache": True})
def _store_overload(y, out, column):
    store = {types.uint16: store_bf16, types.float32: store_f32}.get(out.dtype, store_f64)

    def run(y, out, column):
        store(0, y.shape[0], y, out, column)

    return run


def _unpack(x, column, x64):
    """Rows as float64, from packed FP8 (bytes) or bf16 (columns from `column`)."""
    raise NotImplementedError


@overload(_unpack, jit_options={"cache": True})
def _unpack_overload(x, column, x64):
    if x.dtype == types.uint8:

        def run(x, column, x64):
            unpack_fp8_rows(0, x.shape[0], x, x64.shape[1], x64)
    else:

        def run(x, column, x64):
            unpack_bf16_rows(0, x.shape[0], x, column, x64)

    return run


@kernel
def unpack(x, column, x64):
    """All rows of x as float64."""
    _unpack(x, column, x64)


@kernel
def multiply_rows(first, past, x, x_column, w64, x64, y64, out, out_column):
    """out[t, out_column..] = x[t, x_column..] . w64^T for rows first..past, tile by tile.

    x packed FP8 or bf16; x64 and y64 hold one tile.
    """
    for r in range(first, past, x64.shape[0]):
        count = min(x64.shape[0], past - r)
        _unpack(x[r : r + count], x_column, x64[:count])
        np.dot(x64[:count], w64.T, y64[:count])
        _store(y64[:count], out[r : r + count], out_column)


@kernel
def multiply_groups(first, past, x, group0, outputs, w64, x64, y64, out):
    """multiply_rows for consecutive groups: group g reads and writes its own columns only."""
    width = w64.shape[1]
    for k in range(w64.shape[0] // outputs):
        group = group0 + k
        w = w64[k * outputs : (k + 1) * outputs]
        multiply_rows(first, past, x, group * width, w, x64, y64, out, group * outputs)


@kernel
def activate(count, weights, limit, g64, u64, act, packed):
    """g64 becomes the quantised gated product of g64 and u64."""
    gate_products(0, count, g64, u64, weights, limit, act)
    pack_fp8_rows(0, count, act, packed)
    unpack_fp8_rows(0, count, packed, g64.shape[1], g64)


@kernel
def run_experts(first, past, x, slot_rows, slot_weights, offsets, w1, s1, w3, s3, w2, s2, limit,
                w64, x64, g64, u64, act, packed, y64, out):
    """Experts first..past on their slots, each with its three weights decoded whole.

    out float64 [rows, d] is zeroed, then the bf16 outputs are added.
    """
    inner, width = w1.shape[1], w2.shape[1]
    size = inner * width
    gate = w64[:size].reshape(inner, width)
    up = w64[size : 2 * size].reshape(inner, width)
    down = w64[2 * size : 3 * size].reshape(width, inner)
    out[:] = 0.0
    for e in range(first, past):
        if offsets[e] == offsets[e + 1]:
            continue
        decode_fp4_weight(0, inner, w1[e], s1[e], gate)
        decode_fp4_weight(0, inner, w3[e], s3[e], up)
        decode_fp4_weight(0, width, w2[e], s2[e], down)
        for s in range(offsets[e], offsets[e + 1], x64.shape[0]):
            count = min(x64.shape[0], offsets[e + 1] - s)
            unpack_slots(0, count, x, slot_rows, s, width, x64)
            np.dot(x64[:count], gate.T, g64[:count])
            np.dot(x64[:count], up.T, u64[:count])
            activate(count, slot_weights[s:], limit, g64, u64, act, packed)
            np.dot(g64[:count], down.T, y64[:count])
            add_rounded(0, count, y64, slot_rows, s, out)


@kernel
def mix_tiles(first, past, h, fn64, scale, base, eps, hc_eps, rounds, flat, products, factors, comb,
              out):
    """Hyper-connection coefficients of rows first..past, tile by tile."""
    for r in range(first, past, flat.shape[0]):
        count = min(flat.shape[0], past - r)
        stream_rows(0, count, h[r : r + count], eps, flat, factors)
        np.dot(flat[:count], fn64.T, products[:count])
        mix_rows(0, count, products, factors, scale, base, hc_eps, rounds, comb, out[r : r + count])


@kernel
def select_tile(row0, rows, packed, heads, width, weights, factor, positions, ratio, block, pages,
                pool, base, per_page, record, key_at, q32, k32, dots, best, kept, counts, tops,
                top_blocks, block_counts, blocks_out, out):
    """Top-k entries of rows row0.. of one sequence: key tile by key tile into the rows' heaps."""
    decode_queries(0, rows, packed[row0 : row0 + rows], width, q32)
    counts[:] = 0
    block_counts[:] = 0
    visible = (positions[row0 + rows - 1] + 1) // ratio
    queries = q32[:rows].reshape(rows * heads, width)
    step = k32.shape[0] // block * block
    flat = dots.reshape(dots.size)
    for entry0 in range(0, visible, step):
        entries = min(step, visible - entry0)
        decode_keys(0, entries, entry0, pages, pool, base, per_page, record, key_at, k32)
        part = flat[: rows * heads * entries]
        np.dot(queries, k32[:entries].T, part.reshape(rows * heads, entries))
        scan_tile(0, rows, part.reshape(rows, heads, entries), weights, row0, factor, positions,
                  ratio, entry0, entries, block, best, kept, counts, tops, top_blocks, block_counts)
    finish_rows(0, rows, kept, counts, row0, out)
    if blocks_out.shape[1] > 0:
        finish_rows(0, rows, top_blocks, block_counts, row0, blocks_out)


@njit(nogil=True, cache=True)
def select_tiles(turn, turns, first, past, tile, *args):
    """Every `turns`-th row tile of first..past: later rows see more keys, so threads take turns."""
    for row0 in range(first + turn * tile, past, turns * tile):
        select_tile(row0, min(tile, past - row0), *args)
