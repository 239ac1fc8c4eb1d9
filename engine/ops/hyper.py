"""Hyper-connections: the coefficient set, the collapse into one stream and the stream update."""

from __future__ import annotations

import math

import numpy as np

from engine.ops.numeric import from_bf16, kernel, to_bf16


@kernel
def spread_rows(first, past, x, h, mix):
    """Start the streams: every copy is x, the mix is one-hot on copy 0."""
    for t in range(first, past):
        for copy in range(h.shape[1]):
            h[t, copy] = x[t]
            mix[t, copy] = np.float32(copy == 0)


@kernel
def mix_rows(first, past, h, fn, scale, base, eps, hc_eps, rounds, out):
    """Coefficients pre, post and comb of a sublayer, fp32 [rows, (2 + hc) hc] (spec 2).

    h bf16 [rows, hc, d]; fn float64 [(2 + hc) hc, hc d]; nothing is rounded before the end.
    """
    copies, width = h.shape[1], h.shape[2]
    total = copies * width
    outputs = fn.shape[0]
    flat = np.empty(total, dtype=np.float64)
    m = np.empty(outputs, dtype=np.float64)
    comb = np.empty((copies, copies), dtype=np.float64)
    for t in range(first, past):
        squares = 0.0
        for copy in range(copies):
            for i in range(width):
                value = from_bf16(h[t, copy, i])
                flat[copy * width + i] = value
                squares += value * value
        factor = 1.0 / math.sqrt(squares / total + eps)
        for n in range(outputs):
            s = 0.0
            for i in range(total):
                s += flat[i] * fn[n, i]
            m[n] = s * factor
        for n in range(copies):
            z = m[n] * scale[0] + base[n]
            out[t, n] = np.float32(1.0 / (1.0 + math.exp(-z)) + hc_eps)
            z = m[copies + n] * scale[1] + base[copies + n]
            out[t, copies + n] = np.float32(2.0 / (1.0 + math.exp(-z)))
        for i in range(copies):
            largest = -np.inf
            for j in range(copies):
                k = 2 * copies + i * copies + j
                comb[i, j] = m[k] * scale[2] + base[k]
                largest = max(largest, comb[i, j])
            s = 0.0
            for j in range(copies):
                comb[i, j] = math.exp(comb[i, j] - largest)
                s += comb[i, j]
            for j in range(copies):
                comb[i, j] = comb[i, j] / s + hc_eps
        sinkhorn(comb, rounds, hc_eps)
        for i in range(copies):
            for j in range(copies):
                out[t, 2 * copies + i * copies + j] = np.float32(comb[i, j])


@kernel
def sinkhorn(comb, rounds, hc_eps):
    """Columns, then rounds - 1 times rows and columns, divided by their sum + hc_eps; in place."""
    copies = comb.shape[0]
    for turn in range(rounds):
        if turn > 0:
            for i in range(copies):
                s = hc_eps
                for j in range(copies):
                    s += comb[i, j]
                for j in range(copies):
                    comb[i, j] /= s
        for j in range(copies):
            s = hc_eps
            for i in range(copies):
                s += comb[i, j]
            for i in range(copies):
                comb[i, j] /= s


@kernel
def collapse_rows(first, past, h, mix, out):
    """out = sum over copies of mix[t, copy] * h[t, copy], bf16; mix may be wider than the copies."""
    copies = h.shape[1]
    for t in range(first, past):
        for i in range(h.shape[2]):
            s = 0.0
            for copy in range(copies):
                s += np.float64(mix[t, copy]) * from_bf16(h[t, copy, i])
            out[t, i] = to_bf16(s)


@kernel
def update_rows(first, past, h, y, mixes, out):
    """out_j = post_j * y + sum_i comb[i, j] * h_i, bf16; out may be h itself."""
    copies = h.shape[1]
    old = np.empty(copies, dtype=np.float64)
    for t in range(first, past):
        for i in range(h.shape[2]):
            sublayer = from_bf16(y[t, i])
            for copy in range(copies):
                old[copy] = from_bf16(h[t, copy, i])
            for j in range(copies):
                s = np.float64(mixes[t, copies + j]) * sublayer
                for copy in range(copies):
                    s += np.float64(mixes[t, 2 * copies + copy * copies + j]) * old[copy]
                out[t, j, i] = to_bf16(s)


@kernel
def mean_rows(first, past, h, out, column):
    """Mean over the copies into columns `column`.. of out, bf16."""
    copies = h.shape[1]
    for t in range(first, past):
        for i in range(h.shape[2]):
            s = 0.0
            for copy in range(copies):
                s += from_bf16(h[t, copy, i])
            out[t, column + i] = to_bf16(s / copies)
