"""Matrix products in float64 over tiles: packed operands are decoded, multiplied, rounded once."""

from __future__ import annotations

import numpy as np
import torch

from engine.ir import Op
from engine.ops import dense, experts
from engine.ops.bind import Binding, Run, as_torch
from engine.ops.rows import Workers
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
    shift = op.params["shift"]

    if op.params["source"] == "packed":

        def unpack(x: np.ndarray, x64: np.ndarray) -> None:
            dense.unpack_fp8_rows(0, len(x), x, width, x64)
    else:

        def unpack(x: np.ndarray, x64: np.ndarray) -> None:
            dense.unpack_bf16_rows(0, len(x), x, 0, x64)

    if rows <= FEW_ROWS:
        return _few_linear(o, rows, shift, unpack)
    return _tiled_linear(o, b.workers, rows, shift, unpack)


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
        unpack(o.x, x64)
        for n, count, w_part, s_part, moved, y in parts:
            run(few, count, 256, x64, moved, w_part, s_part, y)
            store(0, rows, y, out, n)

    return go


def _tiled_linear(o: _Operands, workers: Workers, rows: int, shift: int, unpack) -> Run:
    outputs, tile_outputs = len(o.w), len(o.w64)
    tile = len(o.x64) // workers.threads
    single = tile >= -(-rows // workers.threads)

    def go() -> None:
        for n in range(0, outputs, tile_outputs):
            count = min(tile_outputs, outputs - n)
            workers.run(o.decode, count, 64, n, shift, o.w, o.scales, o.w64)

            def part(index: int, first: int, past: int, n: int = n, count: int = count) -> None:
                x64 = o.x64[index * tile : (index + 1) * tile]
                y64 = o.y64.reshape(-1)[index * tile * count : (index + 1) * tile * count]
                for r in range(first, past, tile):
                    r_count = min(tile, past - r)
                    if n == 0 or not single:
                        unpack(o.x[r : r + r_count], x64[:r_count])
                    y = y64[: r_count * count].reshape(r_count, count)
                    multiply(x64[:r_count], o.w64[:count], y)
                    o.store(0, r_count, y, o.out[r : r + r_count], n)

            workers.each(part, rows, FEW_ROWS)

    return go


def multiply(x: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    """out = x . w^T in float64, on this thread."""
    torch.mm(as_torch(x), as_torch(w).T, out=as_torch(out))


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
    workers = b.workers
    tile = min(len(o.x64), len(o.y64)) // workers.threads

    def go() -> None:
        for g in range(groups):
            workers.run(o.decode, outputs, 64, g * outputs, 0, o.w, o.scales, o.w64)

            def part(index: int, first: int, past: int, g: int = g) -> None:
                here = slice(index * tile, (index + 1) * tile)
                x64, y64 = o.x64[here], o.y64[here]
                for r in range(first, past, tile):
                    count = min(tile, past - r)
                    x = o.x[r : r + count]
                    dense.unpack_bf16_rows(0, count, x, g * width, x64[:count])
                    multiply(x64[:count], o.w64, y64[:count])
                    o.store(0, count, y64[:count], o.out[r : r + count], g * outputs)

            workers.each(part, rows, FEW_ROWS)

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
        self.workers, self.run = b.workers, b.workers.run

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
        """One expert's slots as GEMM tiles."""
        if first == past:
            return
        size = self.inner * self.width
        if self.w64.size >= 3 * size:
            self.whole_expert(e, first, past, size)
            return
        tile = len(self.g64)
        for s in range(first, past, tile):
            self.tiled_expert(e, s, min(tile, past - s))

    def whole_expert(self, e: int, first: int, past: int, size: int) -> None:
        """All three weights are decoded at once, then threads take rows through all steps."""
        w1 = self.w64[:size].reshape(self.inner, self.width)
        w3 = self.w64[size : 2 * size].reshape(self.inner, self.width)
        w2 = self.w64[2 * size : 3 * size].reshape(self.width, self.inner)

        def decode(_: int, n: int, n_past: int) -> None:
            experts.decode_fp4_weight(n, n_past, self.w1[e], self.s1[e], w1)
            experts.decode_fp4_weight(n, n_past, self.w3[e], self.s3[e], w3)
            share = self.width // self.inner + 1
            down = n * share, min(n_past * share, self.width)
            if down[0] < down[1]:
                experts.decode_fp4_weight(*down, self.w2[e], self.s2[e], w2)

        self.workers.each(decode, self.inner, 32)
        tile = len(self.g64) // self.workers.threads

        def part(index: int, start: int, stop: int) -> None:
            for s in range(first + start, first + stop, tile):
                self.slots(index * tile, s, min(tile, first + stop - s), w1, w3, w2)

        self.workers.each(part, past - first, FEW_ROWS)

    def slots(self, at: int, s: int, count: int, w1, w3, w2) -> None:
        """Slots s.. through one expert, in the scratch rows from `at`."""
        here = slice(at, at + count)
        x64, g64, u64 = self.x64[here], self.g64[here], self.u64[here]
        experts.unpack_slots(0, count, self.packed, self.slot_rows, s, self.width, x64)
        multiply(x64, w1, g64)
        multiply(x64, w3, u64)
        self.activate(here, s, count)
        y = self.y64.reshape(-1)[at * self.width : (at + count) * self.width]
        y = y.reshape(count, self.width)
        multiply(g64, w2, y)
        experts.add_rounded(0, count, y, self.slot_rows, s, self.out)

    def activate(self, here: slice, s: int, count: int) -> None:
        """g64 becomes the quantised gated product of g64 and u64."""
        g64, act, packed = self.g64[here], self.act[here], self.act_packed[here]
        weights = self.slot_weights[s : s + count]
        experts.gate_products(0, count, g64, self.u64[here], weights, self.limit, act)
        dense.pack_fp8_rows(0, count, act, packed)
        dense.unpack_fp8_rows(0, count, packed, self.inner, g64)

    def tiled_expert(self, e: int, s: int, count: int) -> None:
        """For weights of which only a tile fits into the scratch."""
        here = slice(0, count)
        x64 = self.x64[here]
        experts.unpack_slots(0, count, self.packed, self.slot_rows, s, self.width, x64)
        self.product(x64, self.w1[e], self.s1[e], self.g64[here])
        self.product(x64, self.w3[e], self.s3[e], self.u64[here])
        self.activate(here, s, count)
        step = self.y64.shape[1]
        for n in range(0, self.width, step):
            n_count = min(step, self.width - n)
            y = self.y64.reshape(-1)[: count * n_count].reshape(count, n_count)
            self.product(
                self.g64[here], self.w2[e, n : n + n_count], self.s2[e, n : n + n_count], y
            )
            experts.add_rounded(0, count, y, self.slot_rows, s, self.out[:, n : n + n_count])

    def product(self, x64, codes, scales, out) -> None:
        """out = x64 . w^T, weight tile by weight tile."""
        outputs, width = len(codes), x64.shape[1]
        step = self.w64.size // width
        for n in range(0, outputs, step):
            count = min(step, outputs - n)
            w64 = self.w64[: count * width].reshape(count, width)
            part = codes[n : n + count], scales[n : n + count]
            self.run(experts.decode_fp4_weight, count, 64, *part, w64)
            torch.mm(as_torch(x64), as_torch(w64).T, out=as_torch(out)[:, n : n + count])


def bind_experts(b: Binding, op: Op) -> Run:
    """This rank's routed experts on some rows, summed in float64."""
    e = _Experts(b, op)
    if e.rows == 0:
        return _nothing
    if len(e.w1) == 0:
        return lambda: e.out.fill(0)
    return e.go
