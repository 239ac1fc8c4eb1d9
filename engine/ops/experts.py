"""Mixture of experts: the router, the gated product and the sums over experts (spec 4)."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from engine.ops.numeric import (
    E2M1_PAIRS,
    E4M3,
    exp,
    from_bf16,
    from_e8m0,
    kernel,
    round_bf16,
    to_bf16,
)


@kernel
def route_rows(first, past, logits, bias, scaling, choice, weight):
    """Pick experts by sqrt(softplus(x)) + bias, ties to the lower id; weights without the bias.

    logits float64 [rows, experts]; choice int32, weight fp32 [rows, k].
    """
    experts, k = logits.shape[1], choice.shape[1]
    scores = np.empty(experts, dtype=np.float32)
    taken = np.empty(experts, dtype=np.bool_)
    for t in range(first, past):
        for e in range(experts):
            x = logits[t, e]
            scores[e] = np.float32(math.sqrt(max(x, 0.0) + math.log1p(exp(-abs(x)))))
            taken[e] = False
        total = 0.0
        for j in range(k):
            best, best_value = -1, -np.inf
            for e in range(experts):
                value = np.float64(scores[e]) + np.float64(bias[e])
                if not taken[e] and (best < 0 or value > best_value):
                    best, best_value = e, value
            taken[best] = True
            choice[t, j] = best
            total += np.float64(scores[best])
        for j in range(k):
            share = np.float64(scores[choice[t, j]]) / (total + 1e-20)
            weight[t, j] = np.float32(share * scaling)


@njit(inline="always", cache=True)
def gated(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, +-limit) in float64."""
    g = min(gate, limit)
    return g / (1.0 + exp(-g)) * min(max(up, -limit), limit)


@kernel
def gate_rows(first, past, gate, up, limit, out):
    """Gated product of bf16 rows, weight 1, to bf16 (shared expert)."""
    for t in range(first, past):
        for i in range(gate.shape[1]):
            out[t, i] = to_bf16(gated(from_bf16(gate[t, i]), from_bf16(up[t, i]), limit))


@kernel
def gate_products(first, past, gate, up, weights, limit, out):
    """Gated product of float64 GEMM results rounded to bf16, times the routing weight, to bf16."""
    for s in range(first, past):
        w = np.float64(weights[s])
        for i in range(gate.shape[1]):
            value = gated(round_bf16(gate[s, i]), round_bf16(up[s, i]), limit)
            out[s, i] = to_bf16(value * w)


@kernel
def sort_slots(first, past, choice, weight, expert0, offsets, rows, weights):
    """List (row, weight) of this rank's slots by expert: expert e has offsets[e]..offsets[e + 1].

    Rows of one expert ascend. first, past cover the rows of the step.
    """
    experts = offsets.shape[0] - 1
    for e in range(experts + 1):
        offsets[e] = 0
    for t in range(first, past):
        for j in range(choice.shape[1]):
            e = choice[t, j] - expert0
            if 0 <= e < experts:
                offsets[e + 1] += 1
    for e in range(experts):
        offsets[e + 1] += offsets[e]
    filled = np.zeros(experts, dtype=np.int32)
    for t in range(first, past):
        for j in range(choice.shape[1]):
            e = choice[t, j] - expert0
            if 0 <= e < experts:
                at = offsets[e] + filled[e]
                filled[e] += 1
                rows[at] = t
                weights[at] = weight[t, j]


@njit(inline="always", cache=True)
def decode_fp4_row(codes, scales, row):
    """One packed FP4 weight row with a scale per 32 inputs as float64."""
    for block in range(scales.shape[0]):
        scale = from_e8m0(scales[block])
        for i in range(16):
            byte = codes[block * 16 + i]
            row[block * 32 + 2 * i] = E2M1_PAIRS[byte, 0] * scale
            row[block * 32 + 2 * i + 1] = E2M1_PAIRS[byte, 1] * scale


@kernel
def decode_fp4_weight(first, past, codes, scales, out):
    """Packed FP4 weight rows as float64."""
    for n in range(first, past):
        decode_fp4_row(codes[n], scales[n], out[n])


@kernel
def few_gates(first, past, x, rows, weights, offsets, w1, s1, w3, s3, limit, out):
    """Gated products of few slots: inner channels first..past of every expert that has slots."""
    width = x.shape[1]
    gate_row, up_row = np.empty(width, np.float64), np.empty(width, np.float64)
    for e in range(offsets.shape[0] - 1):
        if offsets[e] == offsets[e + 1]:
            continue
        for n in range(first, past):
            decode_fp4_row(w1[e, n], s1[e, n], gate_row)
            decode_fp4_row(w3[e, n], s3[e, n], up_row)
            for s in range(offsets[e], offsets[e + 1]):
                g, u = 0.0, 0.0
                for i in range(width):
                    g += x[rows[s], i] * gate_row[i]
                    u += x[rows[s], i] * up_row[i]
                value = gated(round_bf16(g), round_bf16(u), limit)
                out[s, n] = to_bf16(value * np.float64(weights[s]))


@kernel
def few_downs(first, past, a, rows, offsets, w2, s2, out):
    """Add the bf16 outputs of few slots to out float64 [rows, d], channels first..past."""
    width = a.shape[1]
    row = np.empty(width, np.float64)
    for t in range(out.shape[0]):
        for n in range(first, past):
            out[t, n] = 0.0
    for e in range(offsets.shape[0] - 1):
        if offsets[e] == offsets[e + 1]:
            continue
        for n in range(first, past):
            decode_fp4_row(w2[e, n], s2[e, n], row)
            for s in range(offsets[e], offsets[e + 1]):
                total = 0.0
                for i in range(width):
                    total += a[s, i] * row[i]
                out[rows[s], n] += round_bf16(total)


@kernel
def gather_rows(first, past, x, rows, slot0, out):
    """out[s] = x[rows[slot0 + s]]."""
    for s in range(first, past):
        out[s] = x[rows[slot0 + s]]


@kernel
def unpack_slots(first, past, packed, rows, slot0, width, out):
    """Packed FP8 rows of slots slot0 + first.. as float64."""
    for s in range(first, past):
        t = rows[slot0 + s]
        for block in range((width + 31) // 32):
            scale = from_e8m0(packed[t, width + block])
            for i in range(block * 32, min(width, block * 32 + 32)):
                out[s, i] = E4M3[packed[t, i]] * scale


@kernel
def add_rounded(first, past, y, rows, slot0, out):
    """out[rows[slot0 + s]] += bf16(y[s]); an expert's rows differ, so parts do not collide."""
    for s in range(first, past):
        for i in range(y.shape[1]):
            out[rows[slot0 + s], i] += round_bf16(y[s, i])


@kernel
def sum_rows(first, past, routed, shared, out):
    """Routed sum (float64) plus the shared expert (bf16), rounded once to bf16."""
    for t in range(first, past):
        for i in range(routed.shape[1]):
            out[t, i] = to_bf16(routed[t, i] + from_bf16(shared[t, i]))
