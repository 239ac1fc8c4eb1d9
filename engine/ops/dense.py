"""Embedding, norms, rotations, quantisation round trips and matrix products.

FP8 activation rows are packed: `width` E4M3 bytes, then one E8M0 byte per 32 channels.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from engine.ops.numeric import (
    E4M3,
    FP8_FLOOR,
    FP8_LARGEST,
    INVERSE_448,
    bits_f32,
    from_bf16,
    from_e8m0,
    kernel,
    scale_code,
    to_bf16,
    to_e4m3,
)


@kernel
def embed_rows(first, past, ids, table, start, out):
    """out[t] = table[ids[t] - start], zeros where the row belongs to another rank."""
    for t in range(first, past):
        row = ids[t] - start
        if 0 <= row < table.shape[0]:
            out[t] = table[row]
        else:
            out[t] = 0


@kernel
def norm_rows(first, past, x, weight, eps, out):
    """RMSNorm: x * rsqrt(mean(x^2) + eps) * weight, bf16 in and out."""
    width = x.shape[1]
    for t in range(first, past):
        squares = 0.0
        for i in range(width):
            value = from_bf16(x[t, i])
            squares += value * value
        factor = 1.0 / math.sqrt(squares / width + eps)
        for i in range(width):
            out[t, i] = to_bf16(from_bf16(x[t, i]) * factor * from_bf16(weight[i]))


@njit(cache=True)
def rope_angles(first, past, positions, back, frequencies, out):
    """cos and sin, fp32 [rows, 2 x pairs], of the fp32 product (position - back) * frequency."""
    pairs = frequencies.shape[0]
    for t in range(first, past):
        position = np.float32(positions[t] - back)
        for i in range(pairs):
            angle = np.float64(np.float32(position * frequencies[i]))
            out[t, i] = np.float32(math.cos(angle))
            out[t, pairs + i] = np.float32(math.sin(angle))


@kernel
def rope_rows(first, past, x, table, table_first, width, inverse, out):
    """Rotate the last channels of each `width`-wide head by adjacent pairs; bf16, may be in place.

    Row t uses row `table_first + t` of the table.
    """
    pairs = table.shape[1] // 2
    heads = x.shape[1] // width
    sign = -1.0 if inverse else 1.0
    for t in range(first, past):
        row = table[table_first + t]
        for head in range(heads):
            start = head * width
            tail = start + width - 2 * pairs
            for i in range(start, tail):
                out[t, i] = x[t, i]
            for i in range(pairs):
                cosine, sine = np.float64(row[i]), sign * np.float64(row[pairs + i])
                a, b = from_bf16(x[t, tail + 2 * i]), from_bf16(x[t, tail + 2 * i + 1])
                out[t, tail + 2 * i] = to_bf16(a * cosine - b * sine)
                out[t, tail + 2 * i + 1] = to_bf16(a * sine + b * cosine)


@njit(inline="always", cache=True)
def pack_block(x, t, start, count, out, code_at, scale_at):
    """FP8 round trip of up to 32 bf16 channels: codes and the E8M0 scale."""
    # Magnitudes of bf16 order as their bits do.
    bits = np.uint32(0)
    for i in range(count):
        bits = max(bits, np.uint32(x[t, start + i]) & np.uint32(0x7FFF))
    largest = max(FP8_FLOOR, bits_f32(bits << np.uint32(16)))
    code = scale_code(np.float32(largest * INVERSE_448))
    inverse = np.float32(from_e8m0(np.int64(254) - np.int64(code)))
    for i in range(count):
        value = bits_f32(np.uint32(x[t, start + i]) << np.uint32(16)) * inverse
        value = FP8_LARGEST if value > FP8_LARGEST else value
        value = -FP8_LARGEST if value < -FP8_LARGEST else value
        out[t, code_at + i] = to_e4m3(value)
    out[t, scale_at] = np.uint8(code)


@kernel
def pack_fp8_rows(first, past, x, out):
    """FP8 activation of bf16 rows into packed rows (spec 1)."""
    width = x.shape[1]
    for t in range(first, past):
        for block in range((width + 31) // 32):
            start = block * 32
            pack_block(x, t, start, min(32, width - start), out, start, width + block)


@kernel
def unpack_fp8_rows(first, past, packed, width, out):
    """Packed FP8 rows as float64."""
    for t in range(first, past):
        for block in range((width + 31) // 32):
            scale = from_e8m0(packed[t, width + block])
            for i in range(block * 32, min(width, block * 32 + 32)):
                out[t, i] = E4M3[packed[t, i]] * scale


@kernel
def unpack_bf16_rows(first, past, x, column, out):
    """Columns `column`.. of bf16 rows as float64."""
    for t in range(first, past):
        for i in range(out.shape[1]):
            out[t, i] = from_bf16(x[t, column + i])


@kernel
def decode_fp8_weight(first, past, row0, shift, codes, scales, out):
    """FP8 weight rows row0 + first.. with 32x32 block scales as float64 [rows, width].

    shift: rows of the first scale block that belong to another rank.
    """
    width = codes.shape[1]
    for n in range(first, past):
        for block in range(scales.shape[1]):
            scale = from_e8m0(scales[(row0 + n + shift) // 32, block])
            for i in range(block * 32, min(width, block * 32 + 32)):
                out[n, i] = E4M3[codes[row0 + n, i]] * scale


@kernel
def decode_bf16_weight(first, past, row0, shift, codes, scales, out):
    """As decode_fp8_weight for a bf16 weight, without shift and scales."""
    for n in range(first, past):
        for i in range(codes.shape[1]):
            out[n, i] = from_bf16(codes[row0 + n, i])


@kernel
def store_bf16(first, past, x, out, column):
    """Round float64 rows to bf16 into columns `column`.. of out."""
    for t in range(first, past):
        for i in range(x.shape[1]):
            out[t, column + i] = to_bf16(x[t, i])


@kernel
def store_f32(first, past, x, out, column):
    """Round float64 rows to float32 into columns `column`.. of out."""
    for t in range(first, past):
        for i in range(x.shape[1]):
            out[t, column + i] = np.float32(x[t, i])


@kernel
def store_f64(first, past, x, out, column):
    """Copy float64 rows into columns `column`.. of out."""
    for t in range(first, past):
        for i in range(x.shape[1]):
            out[t, column + i] = x[t, i]


@njit(inline="always", cache=True)
def dot(x, w):
    """Sum of products of two float64 vectors."""
    total = 0.0
    for i in range(w.shape[0]):
        total += x[i] * w[i]
    return total


@kernel
def few_rows_fp8(first, past, x, shift, codes, scales, out):
    """out[t, n] = x[t] . w[n] in float64 for weight rows first..past and every one of few rows."""
    width = codes.shape[1]
    row = np.empty(width, dtype=np.float64)
    for n in range(first, past):
        for block in range(scales.shape[1]):
            scale = from_e8m0(scales[(n + shift) // 32, block])
            for i in range(block * 32, min(width, block * 32 + 32)):
                row[i] = E4M3[codes[n, i]] * scale
        for t in range(x.shape[0]):
            out[t, n] = dot(x[t], row)


@kernel
def few_rows_bf16(first, past, x, shift, codes, scales, out):
    """As few_rows_fp8 for a bf16 weight."""
    width = codes.shape[1]
    row = np.empty(width, dtype=np.float64)
    for n in range(first, past):
        for i in range(width):
            row[i] = from_bf16(codes[n, i])
        for t in range(x.shape[0]):
            out[t, n] = dot(x[t], row)
