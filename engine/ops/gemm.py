"""Matrix products in float64 over tiles: packed operands are decoded, multiplied, rounded once."""

from __future__ import annotations

import numpy as np
import torch

from engine.ir import Op
from engine.ops import dense, experts
from engine.ops.bind import Binding, Run, as_torch
from engine.tiling import FEW_ROWS, FEW_SLOTS

_STORE = {"bf16": dense.store_bf16, "f32": dense.store_f32, "f64": dense.store_f64}
_NO_SCALES = np.zeros((1, 1), np.uint8)


def _nothing() -> None:
    """An op without rows or columns on this rank."""


class _Operands:
    """A linear's arrays: rows of x, the weight with its scales, the output, and the tiles."""

    def __init__(self, b: Binding, op: Op) -> None:
        first, past = b.tile_of(op)
        x = b.array(op.inputs[0])
        self.x = x[first:past] if "tile" in op.params else x
        self.w = b.array(op.inputs[1])
        self.fp8 = len(op.inputs) > 2
        self.scales = b.array(op.inputs[2]) if self.fp8 else _NO_SCALES
        self.out = b.array(op.outputs[0])
        self.x64, self.w64, self.y64 = b.arrays(op.scratch)
        self.store = _STORE[b.tensor(op.outputs[0]).dtype]
        self.decode = dense.decode_fp8_weight if self.fp8 else dense.decode_bf16_weight
        self.few = dense.few_rows_fp8 if self.fp8 else dense.few_rows_bf16
        self.run = b.workers.run

    def view(self, scratch: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """A contiguous [rows, columns] piece of a scratch array."""
        return scratch.reshape(-1)[: rows * columns].reshape(rows, columns)


def bind_linear(b: Binding, op: Op) -> Run:
    """out = x . w^T; x packed FP8 or bf16 rows, w FP8 or bf16."""
    o = _Operands(b, op)
    rows, (outputs, width) = len(o.x), o.w.shape
    if rows == 0 or outputs == 0:
        return _nothing
    packed, shift = op.params["source"] == "packed", op.params["shift"]

    def unpack(first: int, count: int, x64: np.ndarray) -> None:
        x = o.x[first : first + count]
        if packed:
            o.run(dense.unpack_fp8_rows, count, 64, x, width, x64)
        else:
            o.run(dense.unpack_bf16_rows, count, 64, x, 0, x64)

    if rows <= FEW_ROWS:
        return _few_linear(o, rows, shift, unpack)
    return _tiled_linear(o, rows, shift, unpack)


def _few_linear(o: _Operands, rows: int, shift: int, unpack) -> Run:
    outputs, width = o.w.shape
    x64, step = o.x64[:rows], max(1, o.y64.size // rows)
    run, few, store, w, scales, out = o.run, o.few, o.store, o.w, o.scales, o.out
    parts = []
    for n in range(0, outputs, step):
        count = min(step, outputs - n)
        # Rows of a weight start a scale block at multiples of 32 of `row + shift`.
        first_block = (n + shift) // 32
        piece = scales[first_block:] if o.fp8 else scales
        moved = (n + shift) % 32
        parts.append((n, count, w[n : n + count], piece, moved, o.view(o.y64, rows, count)))

    def go() -> None:
        unpack(0, rows, x64)
        for n, count, w_part, s_part, moved, y in parts:
            run(few, count, 256, x64, moved, w_part, s_part, y)
            store(0, rows, y, out, n)

    return go


def _tiled_linear(o: _Operands, rows: int, shift: int, unpack) -> Run:
    outputs, width = o.w.shape
    tile_rows, tile_outputs = len(o.x64), len(o.w64)
    w_torch, x_torch = as_torch(o.w64), as_torch(o.x64)

    def go() -> None:
        for n in range(0, outputs, tile_outputs):
            n_count = min(tile_outputs, outputs - n)
            o.run(o.decode, n_count, 64, n, shift, o.w, o.scales, o.w64)
            for r in range(0, rows, tile_rows):
                r_count = min(tile_rows, rows - r)
                if rows > tile_rows or n == 0:
                    unpack(r, r_count, o.x64[:r_count])
                y = o.view(o.y64, r_count, n_count)
                torch.mm(x_torch[:r_count], w_torch[:n_count].T, out=as_torch(y))
                o.run(o.store, r_count, 64, y, o.out[r : r + r_count], n)

    return go


def bind_grouped_linear(b: Binding, op: Op) -> Run:
    """Each group's slice of bf16 x times its own rows of the weight."""
    o = _Operands(b, op)
    groups, rows = op.params["groups"], len(o.x)
    if rows == 0 or groups == 0:
        return _nothing
    outputs, width = len(o.w) // groups, o.w.shape[1]
    if rows <= FEW_ROWS:
        x64 = o.view(o.x64, rows * groups, width)
        x = o.x.reshape(rows * groups, width)
        y = [o.view(o.y64, rows, outputs)] * groups

        def few() -> None:
            dense.unpack_bf16_rows(0, rows * groups, x, 0, x64)
            for g in range(groups):
                w = o.w[g * outputs : (g + 1) * outputs]
                scales = o.scales[g * outputs // 32 :]
                o.run(o.few, outputs, 256, x64[g::groups], 0, w, scales, y[g])
                o.store(0, rows, y[g], o.out, g * outputs)

        return few
    tile_rows = min(len(o.x64), len(o.y64))

    def go() -> None:
        for g in range(groups):
            o.run(o.decode, outputs, 64, g * outputs, 0, o.w, o.scales, o.w64)
            for r in range(0, rows, tile_rows):
                count = min(tile_rows, rows - r)
                x64 = o.x64[:count]
                o.run(dense.unpack_bf16_rows, count, 64, o.x[r : r + count], g * width, x64)
                y = o.view(o.y64, count, outputs)
                torch.mm(as_torch(x64), as_torch(o.w64).T, out=as_torch(y))
                o.run(o.store, count, 64, y, o.out[r : r + count], g * outputs)

    return go


class _Experts:
    """The arrays of one expert op, and its two ways: few slots row by row, or GEMM tiles."""

    def __init__(self, b: Binding, op: Op) -> None:
        first, past = b.tile_of(op)
        packed, choice, weight = b.arrays(op.inputs[:3])
        self.packed, self.choice = packed[first:past], choice[first:past]
        self.weight = weight[first:past]
        self.w1, self.s1, self.w3, self.s3, self.w2, self.s2 = b.arrays(op.inputs[3:])
        (self.out,) = b.arrays(op.outputs)
        names = "offsets slot_rows slot_weights x64 w64 g64 u64 act act_packed y64".split()
        scratch = dict(zip(names, b.arrays(op.scratch), strict=True))
        self.offsets, self.slot_rows = scratch["offsets"], scratch["slot_rows"]
        self.slot_weights, self.x64, self.w64 = (
            scratch["slot_weights"], scratch["x64"], scratch["w64"]
        )
        self.g64, self.u64, self.act = scratch["g64"], scratch["u64"], scratch["act"]
        self.act_packed, self.y64 = scratch["act_packed"], scratch["y64"]
        self.expert0, self.limit = op.params["expert0"], op.params["limit"]
        self.rows, self.width = self.out.shape
        self.inner = self.g64.shape[1]
        self.run = b.workers.run

    def go(self) -> None:
        """Sort the slots by expert and take the way that suits their number."""
        experts.sort_slots(
            0, self.rows, self.choice, self.weight, self.expert0,
            self.offsets, self.slot_rows, self.slot_weights,
        )
        slots = int(self.offsets[-1])
        if slots <= FEW_SLOTS and self.rows <= len(self.x64):
            self.few(slots)
        else:
            self.out.fill(0)
            for e in range(len(self.offsets) - 1):
                self.many(e, int(self.offsets[e]), int(self.offsets[e + 1]))

    def few(self, slots: int) -> None:
        x64, act = self.x64[: self.rows], self.act[:slots]
        dense.unpack_fp8_rows(0, self.rows, self.packed, self.width, x64)
        self.run(
            experts.few_gates, self.inner, 64, x64, self.slot_rows, self.slot_weights, self.offsets,
            self.w1, self.s1, self.w3, self.s3, self.limit, act,
        )
        dense.pack_fp8_rows(0, slots, act, self.act_packed)
        a64 = self.g64.reshape(-1)[: slots * self.inner].reshape(slots, self.inner)
        dense.unpack_fp8_rows(0, slots, self.act_packed, self.inner, a64)
        self.run(
            experts.few_downs, self.width, 64, a64, self.slot_rows, self.offsets, self.w2, self.s2,
            self.out,
        )

    def many(self, e: int, first: int, past: int) -> None:
        tile = len(self.g64)
        for s in range(first, past, tile):
            count = min(tile, past - s)
            x64, rows = self.x64[:count], self.slot_rows
            self.run(experts.unpack_slots, count, 64, self.packed, rows, s, self.width, x64)
            g64, u64 = self.g64[:count], self.u64[:count]
            self.product(x64, self.w1[e], self.s1[e], g64)
            self.product(x64, self.w3[e], self.s3[e], u64)
            act, packed = self.act[:count], self.act_packed[:count]
            weights = self.slot_weights[s : s + count]
            self.run(experts.gate_products, count, 64, g64, u64, weights, self.limit, act)
            self.run(dense.pack_fp8_rows, count, 64, act, packed)
            self.run(dense.unpack_fp8_rows, count, 64, packed, self.inner, g64)
            self.down(e, g64, s, count)

    def product(self, x64, codes, scales, out) -> None:
        step = self.w64.size // self.width
        for n in range(0, self.inner, step):
            n_count = min(step, self.inner - n)
            w64 = self.w64[: n_count * self.width].reshape(n_count, self.width)
            part = codes[n : n + n_count], scales[n : n + n_count]
            self.run(experts.decode_fp4_weight, n_count, 64, *part, w64)
            torch.mm(as_torch(x64), as_torch(w64).T, out=as_torch(out)[:, n : n + n_count])

    def down(self, e: int, a64, s: int, count: int) -> None:
        step = self.y64.shape[1]
        for n in range(0, self.width, step):
            n_count = min(step, self.width - n)
            w64 = self.w64[: n_count * self.inner].reshape(n_count, self.inner)
            part = self.w2[e, n : n + n_count], self.s2[e, n : n + n_count]
            self.run(experts.decode_fp4_weight, n_count, 64, *part, w64)
            y = self.y64.reshape(-1)[: count * n_count].reshape(count, n_count)
            torch.mm(as_torch(a64), as_torch(w64).T, out=as_torch(y))
            out = self.out[:, n : n + n_count]
            self.run(experts.add_rounded, count, 64, y, self.slot_rows, s, out)


def bind_experts(b: Binding, op: Op) -> Run:
    """This rank's routed experts on some rows, summed in float64."""
    e = _Experts(b, op)
    if e.rows == 0:
        return _nothing
    if len(e.w1) == 0:
        return lambda: e.out.fill(0)
    return e.go
