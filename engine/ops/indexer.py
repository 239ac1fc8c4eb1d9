"""The indexer: scores of compressed entries and the running top-k that needs no more than tiles.

Products of two FP4 round trips are exact in fp32, so the dots may be summed in any order; a score
sums its heads in float64 and is rounded once to fp32. Ties go to the lower position.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.ops.numeric import E2M1_PAIRS_F32, from_bf16, from_e8m0, kernel


@njit(inline="always", cache=True)
def decode_record(source, row, at, width, out):
    """One FP4/E8M0 record as float32."""
    for block in range(width // 32):
        scale = np.float32(from_e8m0(source[row, at + width // 2 + block]))
        for i in range(16):
            byte = source[row, at + block * 16 + i]
            out[block * 32 + 2 * i] = E2M1_PAIRS_F32[byte, 0] * scale
            out[block * 32 + 2 * i + 1] = E2M1_PAIRS_F32[byte, 1] * scale


@kernel
def decode_queries(first, past, packed, width, out):
    """Packed index queries as float32 [rows, heads, width]."""
    record = width // 2 + width // 32
    for t in range(first, past):
        for head in range(out.shape[1]):
            decode_record(packed, t, head * record, width, out[t, head])


@kernel
def decode_keys(first, past, entry0, pages, pool, base, per_page, record, key_at, out):
    """Index keys of entries entry0 + first.. of one sequence as float32 rows."""
    width = out.shape[1]
    for k in range(first, past):
        entry = entry0 + k
        at = base + (entry % per_page) * record + key_at
        decode_record(pool, pages[entry // per_page], at, width, out[k])


@njit(inline="always", cache=True)
def worse(score_a, index_a, score_b, index_b):
    """Whether a ranks below b: a smaller score, or the same at a higher index."""
    return score_a < score_b or (score_a == score_b and index_a > index_b)


@njit(nogil=True, cache=True)
def offer(scores, indices, count, score, index):
    """Put (score, index) into a heap of the best, worst on top; returns the new count.

    Indices must be offered in ascending order, so an equal score never displaces one inside.
    """
    if count < scores.shape[0]:
        child = count
        while child > 0:
            parent = (child - 1) // 2
            if not worse(score, index, scores[parent], indices[parent]):
                break
            scores[child], indices[child] = scores[parent], indices[parent]
            child = parent
        scores[child], indices[child] = score, index
        return count + 1
    if score <= scores[0]:
        return count
    sift_down(scores, indices, count, score, index)
    return count


@njit(nogil=True, cache=True)
def sift_down(scores, indices, count, score, index):
    """Replace the top of the heap."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and worse(scores[child + 1], indices[child + 1], scores[child],
                                       indices[child]):
            child += 1
        if not worse(scores[child], indices[child], score, index):
            break
        scores[at], indices[at] = scores[child], indices[child]
        at = child
    scores[at], indices[at] = score, index


@njit(nogil=True, cache=True)
def finish(indices, count, out):
    """Write the kept indices in ascending order, -1 behind them."""
    kept = np.sort(indices[:count])
    for i in range(count):
        out[i] = kept[i]
    for i in range(count, out.shape[0]):
        out[i] = -1


@kernel
def score_key(query, weight, key):
    """sum over heads of weight * relu(q . k): float64 sum of exact fp32 dots, rounded to fp32."""
    total = 0.0
    for head in range(query.shape[0]):
        s = np.float32(0.0)
        for i in range(key.shape[0]):
            s += query[head, i] * key[i]
        total += weight[head] * np.float64(max(s, np.float32(0.0)))
    return np.float32(total)


@kernel
def select_rows(first, past, packed, heads, width, weights, factor, positions, seq_of, ratio,
                candidates, block, pages, pool, base, per_page, record, key_at, blocks_out, out):
    """Top-k entries of each row, one row at a time.

    candidates int32 [rows, blocks]: blocks a later index source chooses from (no column: all).
    blocks_out int32 [rows, blocks]: the candidate source's own best blocks (no column: not one).
    """
    query = np.empty((heads, width), dtype=np.float32)
    weight = np.empty(heads, dtype=np.float64)
    key = np.empty(width, dtype=np.float32)
    best, kept = np.empty(out.shape[1], np.float32), np.empty(out.shape[1], np.int32)
    tops, top_blocks = np.empty(blocks_out.shape[1], np.float32), np.empty(blocks_out.shape[1],
                                                                          np.int32)
    for t in range(first, past):
        for head in range(heads):
            decode_record(packed, t, head * (width // 2 + width // 32), width, query[head])
            weight[head] = from_bf16(weights[t, head]) * factor
        visible = (positions[t] + 1) // ratio
        ranges = candidates.shape[1] if candidates.shape[1] > 0 else (visible + block - 1) // block
        count, block_count = 0, 0
        for r in range(ranges):
            number = candidates[t, r] if candidates.shape[1] > 0 else r
            if number < 0:
                break
            highest = np.float32(-np.inf)
            for entry in range(number * block, min(visible, (number + 1) * block)):
                at = base + (entry % per_page) * record + key_at
                decode_record(pool, pages[seq_of[t], entry // per_page], at, width, key)
                score = score_key(query, weight, key)
                highest = max(highest, score)
                count = offer(best, kept, count, score, np.int32(entry))
            if blocks_out.shape[1] > 0:
                newest = number == (visible - 1) // block
                value = np.float32(np.inf) if newest else highest
                block_count = offer(tops, top_blocks, block_count, value, np.int32(number))
        finish(kept, count, out[t])
        if blocks_out.shape[1] > 0:
            finish(top_blocks, block_count, blocks_out[t])


@kernel
def scan_tile(first, past, dots, weights, row0, factor, positions, ratio, entry0, entries, block,
              best, kept, counts, tops, top_blocks, block_counts):
    """Offer a tile of entries to the heaps of rows row0 + first..

    dots fp32 [rows, heads, entries] of this tile; entry0 is a multiple of `block`.
    """
    heads = weights.shape[1]
    line = np.empty(entries, dtype=np.float64)
    for t in range(first, past):
        visible = (positions[row0 + t] + 1) // ratio
        width = min(entries, visible - entry0)
        if width <= 0:
            continue
        for k in range(width):
            line[k] = 0.0
        for head in range(heads):
            w = from_bf16(weights[row0 + t, head]) * factor
            for k in range(width):
                line[k] += w * np.float64(max(dots[t, head, k], np.float32(0.0)))
        count = counts[t]
        for k in range(width):
            score = np.float32(line[k])
            if count < best.shape[1] or score > best[t, 0]:
                count = offer(best[t], kept[t], count, score, np.int32(entry0 + k))
        counts[t] = count
        if tops.shape[1] > 0:
            scan_blocks(t, line, width, entry0, visible, block, tops, top_blocks, block_counts)


@njit(nogil=True, cache=True)
def scan_blocks(t, line, width, entry0, visible, block, tops, top_blocks, block_counts):
    """Offer the block maxima of one row's tile; the newest visible block outranks all."""
    newest = (visible - 1) // block
    count = block_counts[t]
    for k0 in range(0, width, block):
        number = (entry0 + k0) // block
        highest = np.float32(-np.inf)
        for k in range(k0, min(width, k0 + block)):
            highest = max(highest, np.float32(line[k]))
        if number == newest:
            highest = np.float32(np.inf)
        count = offer(tops[t], top_blocks[t], count, highest, np.int32(number))
    block_counts[t] = count


@kernel
def finish_rows(first, past, kept, counts, row0, out):
    """Write the heaps of a row tile as ascending indices."""
    for t in range(first, past):
        finish(kept[t], counts[t], out[row0 + t])
