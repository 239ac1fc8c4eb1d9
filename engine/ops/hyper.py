"""Hyper-connections: the coefficient set, the collapse into one stream and the stream update."""

from __future__ import annotations

import math

import numpy as np

from engine.ops.numeric import exp, from_bf16, kernel, to_bf16


@kernel
def spread_rows(first, past, x, h, mix):
    """Start the streams: every copy is x, the mix is one-hot on copy 0."""
    for t in range(first, past):
        for copy in range(h.shape[1]):
            h[t, copy] = x[t]
            mix[t, copy] = np.float32(copy == 0)


@kernel
def stream_rows(first, past, h, eps, flat, factors):
    """bf16 streams [rows, hc, d] as float64 rows [rows, hc d], and rsqrt of their mean square."""
    copies, width = h.shape[1], h.shape[2]
    for t in range(first, past):
        squares = 0.0
        for copy in range(copies):
            for i in range(width):
                value = from_bf16(h[t, copy, i])
                flat[t, copy * width + i] = value
                squares += value * value
        factors[t] = 1.0 / math.sqrt(squares / (copies * width) + eps)


@kernel
def mix_rows(first, past, products, factors, scale, base, hc_eps, rounds, comb, out):
    """Coefficients pre, post and comb of a sublayer, fp32 [rows, (2 + hc) hc] (spec 2).

    products float64 [rows, (2 + hc) hc] are flatten(h) . fn^T; nothing is rounded before the end.
    """
    copies = comb.shape[0]
    for t in range(first, past):
        for n in range(copies):
            z = products[t, n] * factors[t] * scale[0] + base[n]
            out[t, n] = np.float32(1.0 / (1.0 + exp(-z)) + hc_eps)
            z = products[t, copies + n] * factors[t] * scale[1] + base[copies + n]
            out[t, copies + n] = np.float32(2.0 / (1.0 + exp(-z)))
        for i in range(copies):
            largest = -np.inf
            for j in range(copies):
                k = 2 * copies + i * copies + j
                comb[i, j] = products[t, k] * factors[t] * scale[2] + base[k]
                largest = max(largest, comb[i, j])
            s = 0.0
            for j in range(copies):
                comb[i, j] = exp(comb[i, j] - largest)
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
    """out = sum over copies of mix[t, copy] * h[t, copy], bf16; mix may have more columns."""
    copies, width = h.shape[1], h.shape[2]
    total = np.empty(width, dtype=np.float64)
    for t in range(first, past):
        total[:] = 0.0
        for copy in range(copies):
            share = np.float64(mix[t, copy])
            for i in range(width):
                total[i] += share * from_bf16(h[t, copy, i])
        for i in range(width):
            out[t, i] = to_bf16(total[i])


@kernel
def update_rows(first, past, h, y, mixes, out):
    """out_j = post_j * y + sum_i comb[i, j] * h_i, bf16; out may be h itself."""
    copies, width = h.shape[1], h.shape[2]
    old = np.empty((copies, width), dtype=np.float64)
    new = np.empty(width, dtype=np.float64)
    for t in range(first, past):
        for copy in range(copies):
            for i in range(width):
                old[copy, i] = from_bf16(h[t, copy, i])
        for j in range(copies):
            post = np.float64(mixes[t, copies + j])
            for i in range(width):
                new[i] = post * from_bf16(y[t, i])
            for copy in range(copies):
                share = np.float64(mixes[t, 2 * copies + copy * copies + j])
                for i in range(width):
                    new[i] += share * old[copy, i]
            for i in range(width):
                out[t, j, i] = to_bf16(new[i])


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
