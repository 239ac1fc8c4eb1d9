"""Binds matrix products: packed operands are decoded, multiplied in float64, rounded once.

Few rows take a weight row by row; many rows take decoded tiles of it, each thread its own rows.
"""

from __future__ import annotations

import numpy as np

from engine.ir import Op
from engine.ops import dense, experts, tiles
from engine.ops.bind import Binding, Run
from engine.ops.rows import Workers, least_rows
from engine.tiling import FEW_ROWS, FEW_SLOTS

_STORE = {"bf16": dense.store_bf16, "f32": dense.store_f32, "f64": dense.store_f64}
PRODUCTS_PER_ITEM = 40
"""Multiply-adds that take about as long as one item of element-wise work."""
_NO_SCALES = np.zeros((1, 1), np.uint8)


def _nothing() -> None:
    """An op without rows or columns on this rank."""


def worth_rows(outputs: int, width: int) -> int:
    """Rows of a product that are worth a thread of their own."""
    return max(FEW_ROWS, least_rows(outputs * width // PRODUCTS_PER_ITEM))


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
    rows, outputs = len(o.x), len(o.w)
    if rows == 0 or outputs == 0:
        return _nothing
    if rows <= FEW_ROWS:
        return _few_linear(o, rows, op.params["shift"])
    return _tiled_linear(o, b.workers, rows, op.params["shift"])


def _few_linear(o: _Operands, rows: int, shift: int) -> Run:
    outputs = len(o.w)
    x64, step = o.x64[:rows], max(1, o.y64.size // rows)
    run, few, store, x, out = o.run, o.few, o.store, o.x, o.out
    parts = []
    for n in range(0, outputs, step):
        count = min(step, outputs - n)
        # Rows of a weight start a scale block at multiples of 32 of `row + shift`.
        first_block = (n + shift) // 32
        piece = o.scales[first_block:] if o.fp8 else o.scales
        moved = (n + shift) % 32
        parts.append((n, count, o.w[n : n + count], piece, moved, o.view(o.y64, rows, count)))
    least = least_rows(o.w.shape[1])

    def go() -> None:
        tiles.unpack(x, 0, x64)
        for n, count, w_part, s_part, moved, y in parts:
            run(few, count, least, x64, moved, w_part, s_part, y)
            store(0, rows, y, out, n)

    return go


def _tiled_linear(o: _Operands, workers: Workers, rows: int, shift: int) -> Run:
    (outputs, width), tile_outputs = o.w.shape, len(o.w64)
    least = worth_rows(min(outputs, tile_outputs), width)
    tile = max(1, len(o.x64) // workers.threads)

    def go() -> None:
        for n in range(0, outputs, tile_outputs):
            count = min(tile_outputs, outputs - n)
            workers.run(o.decode, count, least_rows(width), n, shift, o.w, o.scales, o.w64)
            w64 = o.w64[:count]

            def part(index: int, first: int, past: int, n: int = n, w64=w64) -> None:
                here = slice(index * tile, (index + 1) * tile)
                y64 = o.view(o.y64.reshape(-1)[index * tile * len(w64) :], tile, len(w64))
                tiles.multiply_rows(first, past, o.x, 0, w64, o.x64[here], y64, o.out, n)

            workers.each(part, rows, least)

    return go


def bind_grouped_linear(b: Binding, op: Op) -> Run:
    """Each group's slice of bf16 x times its own rows of the weight."""
    o = _Operands(b, op)
    groups, shift, rows = op.params["groups"], op.params["shift"], len(o.x)
    if rows == 0 or groups == 0:
        return _nothing
    if rows <= FEW_ROWS:
        return _few_grouped(o, rows, groups, shift)
    outputs, width = len(o.w) // groups, o.w.shape[1]
    step = len(o.w64) // outputs
    workers, least = b.workers, worth_rows(outputs * min(step, groups), width)
    tile = max(1, min(len(o.x64), len(o.y64)) // workers.threads)

    def go() -> None:
        for g in range(0, groups, step):
            count, at = min(step, groups - g), g * outputs
            rows_of = o.w64[: count * outputs]
            workers.run(
                o.decode, count * outputs, least_rows(width), at, shift, o.w, o.scales, rows_of
            )

            def part(index: int, first: int, past: int, g=g, rows_of=rows_of) -> None:
                here = slice(index * tile, (index + 1) * tile)
                tiles.multiply_groups(
                    first, past, o.x, g, outputs, rows_of, o.x64[here], o.y64[here], o.out
                )

            workers.each(part, rows, least)

    return go


def _few_grouped(o: _Operands, rows: int, groups: int, shift: int) -> Run:
    outputs, width = len(o.w) // groups, o.w.shape[1]
    x64 = o.view(o.x64, rows * groups, width)
    x, y = o.x.reshape(rows * groups, width), o.view(o.y64, rows, outputs)

    def go() -> None:
        dense.unpack_bf16_rows(0, rows * groups, x, 0, x64)
        for g in range(groups):
            w = o.w[g * outputs : (g + 1) * outputs]
            block, moved = divmod(g * outputs + shift, 32)
            o.run(o.few, outputs, least_rows(width), x64[g::groups], moved, w, o.scales[block:], y)
            o.store(0, rows, y, o.out, g * outputs)

    return go


class _Experts:
    """The arrays of one expert op, and its three ways.

    few     row by row, for few slots
    side by side, two experts at a time, where whole decoded weights fit into the scratch
    tiled   weight tile by weight tile
    """

    def __init__(self, b: Binding, op: Op) -> None:
        first, past = b.tile_of(op)
        packed, choice, weight = b.arrays(op.inputs[:3])
        self.packed, self.choice = packed[first:past], choice[first:past]
        self.weight = weight[first:past]
        self.weights = b.arrays(op.inputs[3:])
        (self.out,) = b.arrays(op.outputs)
        names = "offsets slot_rows slot_weights x64 w64 g64 u64 act act_packed y64 second".split()
        for name, array in zip(names, b.arrays(op.scratch), strict=True):
            setattr(self, name, array)
        self.expert0, self.limit = op.params["expert0"], op.params["limit"]
        self.rows, self.width = self.out.shape
        self.inner = self.g64.shape[1]
        self.workers = b.workers

    def go(self) -> None:
        """Sort the slots by expert and take the way that suits their number."""
        experts.sort_slots(
            0, self.rows, self.choice, self.weight, self.expert0,
            self.offsets, self.slot_rows, self.slot_weights,
        )
        slots = int(self.offsets[-1])
        if slots <= FEW_SLOTS and self.rows <= len(self.x64):
            self.few(slots)
        elif self.w64.size >= 3 * self.inner * self.width:
            self.side_by_side(slots)
        else:
            self.tiled()

    def few(self, slots: int) -> None:
        x64, act, run = self.x64[: self.rows], self.act[:slots], self.workers.run
        w1, s1, w3, s3, w2, s2 = self.weights
        dense.unpack_fp8_rows(0, self.rows, self.packed, self.width, x64)
        run(
            experts.few_gates, self.inner, least_rows(self.width * 6), x64, self.slot_rows,
            self.slot_weights, self.offsets, w1, s1, w3, s3, self.limit, act,
        )
        dense.pack_fp8_rows(0, slots, act, self.act_packed)
        a64 = self.g64.reshape(-1)[: slots * self.inner].reshape(slots, self.inner)
        dense.unpack_fp8_rows(0, slots, self.act_packed, self.inner, a64)
        run(
            experts.few_downs, self.width, least_rows(self.inner * 3), a64, self.slot_rows,
            self.offsets, w2, s2, self.out,
        )

    def side_by_side(self, slots: int) -> None:
        """Threads take experts. Outputs are bf16 values added in float64, which is exact, so it
        does not matter that a second thread adds up its own and the halves are added at the end."""
        size, halves = 3 * self.inner * self.width, [self.out, self.second]
        room = self.w64.size // size, len(self.second) // self.rows + 1
        threads = min(self.workers.threads, 2, *room)
        cuts = np.searchsorted(self.offsets, np.linspace(0, slots, threads + 1)[1:-1])
        borders = [0, *cuts.tolist(), len(self.offsets) - 1]
        tile = len(self.g64) // threads

        def work(index: int, _first: int, _past: int) -> None:
            here = slice(index * tile, (index + 1) * tile)
            scratch = (self.x64, self.g64, self.u64, self.act, self.act_packed)
            y64 = self.y64.reshape(-1)[index * tile * self.width :]
            tiles.run_experts(
                borders[index], borders[index + 1], self.packed, self.slot_rows, self.slot_weights,
                self.offsets, *self.weights, self.limit,
                self.w64[index * size : (index + 1) * size],
                *(array[here] for array in scratch),
                y64[: tile * self.width].reshape(tile, self.width), halves[index][: self.rows],
            )

        self.workers.each(work, threads, 1)
        for half in halves[1:threads]:
            self.out += half[: self.rows]

    def tiled(self) -> None:
        self.out.fill(0)
        for e in range(len(self.offsets) - 1):
            for s in range(self.offsets[e], self.offsets[e + 1], len(self.g64)):
                self.tiled_expert(e, s, min(len(self.g64), self.offsets[e + 1] - s))

    def tiled_expert(self, e: int, s: int, count: int) -> None:
        """Slots s.. of an expert of whose weights only tiles fit into the scratch."""
        w1, s1, w3, s3, w2, s2 = self.weights
        x64, g64, u64 = self.x64[:count], self.g64[:count], self.u64[:count]
        experts.unpack_slots(0, count, self.packed, self.slot_rows, s, self.width, x64)
        self.product(x64, w1[e], s1[e], g64)
        self.product(x64, w3[e], s3[e], u64)
        act, act_packed = self.act, self.act_packed
        tiles.activate(count, self.slot_weights[s:], self.limit, g64, u64, act, act_packed)
        step = self.y64.shape[1]
        for n in range(0, self.width, step):
            n_count = min(step, self.width - n)
            y = self.y64.reshape(-1)[: count * n_count].reshape(count, n_count)
            self.product(g64, w2[e, n : n + n_count], s2[e, n : n + n_count], y)
            experts.add_rounded(0, count, y, self.slot_rows, s, self.out[:, n : n + n_count])

    def product(self, x64, codes, scales, out) -> None:
        """out = x64 . w^T, weight tile by weight tile."""
        outputs, width = len(codes), x64.shape[1]
        step = self.w64.size // width
        for n in range(0, outputs, step):
            count = min(step, outputs - n)
            w64 = self.w64[: count * width].reshape(count, width)
            part = codes[n : n + count], scales[n : n + count]
            self.workers.run(experts.decode_fp4_weight, count, least_rows(width), *part, w64)
            np.matmul(x64, w64.T, out=out[:, n : n + count])


def bind_experts(b: Binding, op: Op) -> Run:
    """This rank's routed experts on some rows, summed in float64."""
    e = _Experts(b, op)
    if e.rows == 0:
        return _nothing
    if len(e.offsets) == 1:
        return lambda: e.out.fill(0)
    return e.go
