"""Attention over the window and the selected compressed entries, and the caches it reads.

A cache page holds, per KV source, records of one entry each:
[latent E2M1 | latent scales E4M3 | index key E2M1 | key scales E8M0].
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from engine.ops.numeric import (
    E2M1_PAIRS,
    E4M3,
    FP4_FLOOR,
    FP4_KV_FLOOR,
    INVERSE_6,
    exp,
    from_bf16,
    from_e4m3,
    from_e8m0,
    kernel,
    scale_code,
    to_bf16,
    to_e2m1,
    to_e4m3,
)


@njit(inline="always", cache=True)
def pack_fp4_block(x, t, start, count, scale, out, at):
    """E2M1 codes of `count` bf16 channels under one scale, two per byte, even one low."""
    for i in range(0, count, 2):
        low = to_e2m1(from_bf16(x[t, start + i]) / scale)
        high = to_e2m1(from_bf16(x[t, start + i + 1]) / scale)
        out[t, at + i // 2] = np.uint8(low | (high << np.uint32(4)))


@njit(inline="always", cache=True)
def largest_of(x, t, start, count, floor):
    """Largest magnitude of `count` bf16 channels, not below `floor`, as float32."""
    largest = floor
    for i in range(count):
        largest = max(largest, np.float32(abs(from_bf16(x[t, start + i]))))
    return largest


@njit(inline="always", cache=True)
def pack_fp4_e8m0(x, t, start, width, out, at):
    """FP4 activation with a power-of-two scale per 32: codes, then scales, from out[t, at]."""
    for block in range(width // 32):
        first = start + block * 32
        code = scale_code(np.float32(largest_of(x, t, first, 32, FP4_FLOOR) * INVERSE_6))
        pack_fp4_block(x, t, first, 32, from_e8m0(code), out, at + block * 16)
        out[t, at + width // 2 + block] = np.uint8(code)


@kernel
def pack_fp4_heads(first, past, x, width, out):
    """FP4 records of every `width`-wide head of bf16 rows (index queries)."""
    record = width // 2 + width // 32
    for t in range(first, past):
        for head in range(x.shape[1] // width):
            pack_fp4_e8m0(x, t, head * width, width, out, head * record)


@kernel
def pack_entry_rows(first, past, latent, key, out):
    """Cache records of rotated latents (FP4, E4M3 scale per 16) and index keys (FP4, E8M0)."""
    width = latent.shape[1]
    for t in range(first, past):
        for block in range(width // 16):
            start = block * 16
            largest = np.float64(largest_of(latent, t, start, 16, FP4_KV_FLOOR))
            code = to_e4m3(np.float32(min(largest / 6.0, 448.0)))
            pack_fp4_block(latent, t, start, 16, np.float64(from_e4m3(code)), out, start // 2)
            out[t, width // 2 + block] = code
        pack_fp4_e8m0(key, t, 0, key.shape[1], out, width // 2 + width // 16)


@kernel
def write_entries(first, past, entries, positions, seq_of, pages, ratio, base, per_page, pool):
    """Publish the records of completed groups; row t holds the group that ends at its position."""
    record = entries.shape[1]
    for t in range(first, past):
        if (positions[t] + 1) % ratio != 0:
            continue
        entry = positions[t] // ratio
        page = np.int64(pages[seq_of[t], entry // per_page])
        at = base + (entry % per_page) * record
        for i in range(record):
            pool[page, at + i] = entries[t, i]


@kernel
def pool_groups(first, past, kv, score, positions, seq_of, first_row, start, slots, ratio, tail,
                out):
    """Softmax-pool each group of `ratio` tokens into the row of its last token; other rows are 0.

    kv, score fp32 [rows, width]; tail fp32 [slots, ring, 2 width] holds earlier tokens.
    """
    width = kv.shape[1]
    ring = tail.shape[1]
    for t in range(first, past):
        if (positions[t] + 1) % ratio != 0:
            out[t] = 0
            continue
        seq = seq_of[t]
        for i in range(width):
            largest = -np.inf
            for back in range(ratio):
                largest = max(largest, group_value(score, t, i, back, seq, positions, first_row,
                                                   start, slots, tail, ring, width))
            total, weighted = 0.0, 0.0
            for back in range(ratio - 1, -1, -1):
                s = group_value(score, t, i, back, seq, positions, first_row, start, slots, tail,
                                ring, width)
                v = group_value(kv, t, i, back, seq, positions, first_row, start, slots, tail,
                                ring, 0)
                share = exp(s - largest)
                total += share
                weighted += share * v
            out[t, i] = to_bf16(weighted / total)


@njit(inline="always", cache=True)
def group_value(fresh, t, i, back, seq, positions, first_row, start, slots, tail, ring, at):
    """Channel i of the token `back` positions before row t, from this step or from the tail."""
    position = positions[t] - back
    if position >= start[seq]:
        return np.float64(fresh[t - back, i])
    return np.float64(tail[slots[seq], position % ring, at + i])


@kernel
def write_tail(first, past, kv, score, first_row, start, slots, tail):
    """Keep the newest tokens of sequences first..past in the tail ring."""
    ring, width = tail.shape[1], kv.shape[1]
    for seq in range(first, past):
        count = first_row[seq + 1] - first_row[seq]
        for k in range(max(0, count - ring), count):
            row, position = first_row[seq] + k, start[seq] + k
            for i in range(width):
                tail[slots[seq], position % ring, i] = kv[row, i]
                tail[slots[seq], position % ring, width + i] = score[row, i]


@kernel
def write_ring(first, past, packed, first_row, start, slots, ring):
    """Keep the newest packed window rows of sequences first..past; slot = position mod ring."""
    size = ring.shape[1]
    for seq in range(first, past):
        count = first_row[seq + 1] - first_row[seq]
        for k in range(max(0, count - size), count):
            row, position = first_row[seq] + k, start[seq] + k
            for i in range(packed.shape[1]):
                ring[slots[seq], position % size, i] = packed[row, i]


@njit(inline="always", cache=True)
def decode_packed(row, width, out):
    """One packed FP8 row as float64."""
    for block in range((width + 31) // 32):
        scale = from_e8m0(row[width + block])
        for i in range(block * 32, min(width, block * 32 + 32)):
            out[i] = E4M3[row[i]] * scale


@njit(inline="always", cache=True)
def decode_latent(pool, page, at, width, out):
    """One cached latent as float64."""
    for block in range(width // 16):
        scale = E4M3[pool[page, at + width // 2 + block]]
        for i in range(8):
            byte = pool[page, at + block * 8 + i]
            out[block * 16 + 2 * i] = E2M1_PAIRS[byte, 0] * scale
            out[block * 16 + 2 * i + 1] = E2M1_PAIRS[byte, 1] * scale


@njit(nogil=True, cache=True)
def gather_window(t, seq, position, fresh, first_row, start, slot, ring, window, whole, keys):
    """Window keys of row t into `keys`; returns their number.

    whole: every row of the step is seen (draft blocks) behind the `window` positions before it.
    """
    width, size, count = keys.shape[1], ring.shape[1], 0
    oldest = max(0, start - window if whole else position - window + 1)
    for p in range(oldest, min(start, position + 1)):
        decode_packed(ring[slot, p % size], width, keys[count])
        count += 1
    first = first_row[seq]
    if whole:
        rows = range(first, first_row[seq + 1])
    else:
        rows = range(first + max(0, oldest - start), t + 1)
    for row in rows:
        keys[count] = fresh[row]
        count += 1
    return count


@njit(nogil=True, cache=True)
def gather_selected(t, seq, selected, pages, pool, base, per_page, record, keys, count):
    """Append the selected compressed entries of row t to `keys`; returns the new number."""
    width = keys.shape[1]
    for j in range(selected.shape[1]):
        entry = selected[t, j]
        if entry < 0:
            break
        at = base + (entry % per_page) * record
        decode_latent(pool, pages[seq, entry // per_page], at, width, keys[count])
        count += 1
    return count


@kernel
def softmax_rows(sink, count, scale, logits, totals):
    """logits [heads, >= count] become exp(scale * logits - largest), totals sums with the sink."""
    for head in range(logits.shape[0]):
        largest = np.float64(sink[head])
        for j in range(count):
            logits[head, j] *= scale
            largest = max(largest, logits[head, j])
        total = exp(np.float64(sink[head]) - largest)
        for j in range(count):
            logits[head, j] = exp(logits[head, j] - largest)
            total += logits[head, j]
        totals[head] = total


@kernel
def attend_rows(first, past, q, fresh, ring, selected, pages, pool, sink, positions, seq_of,
                first_row, start, slots, window, whole, base, per_page, record, out):
    """Attention of this rank's heads; q and out bf16 [rows, heads x width].

    fresh   window rows of this step as float64; ring [slots, size, packed] those before it
    selected int32 [rows, k] entries of the compressed cache, -1 ends a row
    """
    heads = sink.shape[0]
    width = q.shape[1] // heads
    most = window + selected.shape[1] + (fresh.shape[0] if whole else 0)
    keys = np.empty((most, width), dtype=np.float64)
    space = np.empty(heads * most, dtype=np.float64)
    query = np.empty((heads, width), dtype=np.float64)
    result = np.empty((heads, width), dtype=np.float64)
    totals = np.empty(heads, dtype=np.float64)
    scale = 1.0 / math.sqrt(width)
    for t in range(first, past):
        seq = seq_of[t]
        count = gather_window(t, seq, positions[t], fresh, first_row, start[seq], slots[seq],
                              ring, window, whole, keys)
        count = gather_selected(t, seq, selected, pages, pool, base, per_page, record, keys, count)
        for i in range(heads * width):
            query[i // width, i % width] = from_bf16(q[t, i])
        logits = space[: heads * count].reshape(heads, count)
        np.dot(query, keys[:count].T, logits)
        softmax_rows(sink, count, scale, logits, totals)
        np.dot(logits, keys[:count], result)
        for head in range(heads):
            for i in range(width):
                out[t, head * width + i] = to_bf16(result[head, i] / totals[head])
