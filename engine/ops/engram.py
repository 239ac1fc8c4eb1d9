"""Engram: table rows of hashed n-grams and the gate that adds their value to the streams."""

from __future__ import annotations

import math

import numpy as np

from engine.ops.numeric import E4M3, exp, from_bf16, from_e8m0, kernel, to_bf16


@kernel
def lookup_rows(first, past, hashes, column0, row0, codes, scales, out):
    """Dequantised bf16 rows of this rank's buckets: hashes[:, column0..] minus the first row0.

    codes uint8 [rows, width] and scales [rows, width / 32] may be memory mapped.
    """
    width = codes.shape[1]
    for t in range(first, past):
        for bucket in range(out.shape[1] // width):
            row = hashes[t, column0 + bucket] - row0
            for i in range(width):
                value = E4M3[codes[row, i]] * from_e8m0(scales[row, i // 32])
                out[t, bucket * width + i] = to_bf16(value)


@kernel
def apply_rows(first, past, h, kv, q_weight, k_weight, eps, out):
    """h_c + gate_c * value (spec 5); kv bf16 [rows, (hc + 1) d]: a key per copy, then the value."""
    copies, width = h.shape[1], h.shape[2]
    for t in range(first, past):
        for c in range(copies):
            z, h_squares, key_squares = 0.0, 0.0, 0.0
            for i in range(width):
                stream, key = from_bf16(h[t, c, i]), from_bf16(kv[t, c * width + i])
                h_squares += stream * stream
                key_squares += key * key
                z += stream * from_bf16(q_weight[c, i]) * from_bf16(k_weight[c, i]) * key
            z *= 1.0 / math.sqrt(h_squares / width + eps)
            z *= 1.0 / math.sqrt(key_squares / width + eps)
            z /= math.sqrt(width)
            root = math.copysign(math.sqrt(max(abs(z), 1e-6)), z) if z != 0.0 else 0.0
            gate = np.float64(np.float32(1.0 / (1.0 + exp(-root))))
            for i in range(width):
                value = from_bf16(kv[t, copies * width + i])
                out[t, c, i] = to_bf16(from_bf16(h[t, c, i]) + gate * value)
