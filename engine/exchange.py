"""Comm ops: each is started, runs beside compute, and is finished where its result is awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.comm import Communicator
from engine.ir import Op
from engine.ops.bind import Add, Array, Binding, Run, as_bytes, as_torch
from engine.ops.numeric import from_bf16, kernel, to_bf16


@dataclass(frozen=True)
class Transfer:
    """The two halves of a comm op."""

    start: Run
    finish: Run


@kernel
def sum_f64_to_bf16(first, past, parts, out):
    """Parts [ranks, rows, width] summed in rank order, rounded once."""
    for t in range(first, past):
        for i in range(parts.shape[2]):
            s = 0.0
            for r in range(parts.shape[0]):
                s += parts[r, t, i]
            out[t, i] = to_bf16(s)


@kernel
def sum_f64(first, past, parts, out):
    """As sum_f64_to_bf16, kept in float64."""
    for t in range(first, past):
        for i in range(parts.shape[2]):
            s = 0.0
            for r in range(parts.shape[0]):
                s += parts[r, t, i]
            out[t, i] = s


@kernel
def sum_bf16(first, past, parts, out):
    """bf16 parts of which all but one are zero (rows of a dealt table)."""
    for t in range(first, past):
        for i in range(parts.shape[2]):
            s = 0.0
            for r in range(parts.shape[0]):
                s += from_bf16(parts[r, t, i])
            out[t, i] = to_bf16(s)


_SUM = {("f64", "bf16"): sum_f64_to_bf16, ("f64", "f64"): sum_f64, ("bf16", "bf16"): sum_bf16}


def bind_add(b: Binding, op: Op, pair: int = 0) -> Add:
    """Compiled sums over numpy arrays, rows shared among the workers."""
    add = _SUM[b.tensor(op.inputs[pair]).dtype, b.tensor(op.outputs[pair]).dtype]
    run = b.workers.run
    return lambda parts, out: run(add, len(out), 64, parts, out)


class _Pending:
    """Holds the exchange between start and finish."""

    def __init__(self, begin: Callable[[], object], end: Run) -> None:
        self.begin, self.end, self.exchange = begin, end, None

    def start(self) -> None:
        assert self.exchange is None, "an exchange was started twice"
        self.exchange = self.begin()

    def finish(self) -> None:
        self.exchange.wait()
        self.exchange = None
        self.end()


def _transfer(begin: Callable[[], object], end: Run) -> Transfer:
    pending = _Pending(begin, end)
    return Transfer(pending.start, pending.finish)


def _bytes(array: Array):
    return as_torch(as_bytes(array))


def bind_reduce(b: Binding, op: Op, comm: Communicator) -> Transfer:
    """Gather the partials of some rows and add them in rank order."""
    part, (out,) = b.array(op.inputs[0]), b.arrays(op.outputs)
    staging = b.array(op.scratch[0]).reshape(-1)
    row0, width, ranks = op.params["row0"], part.shape[1], b.ranks
    add = b.backend.bind_add(b, op)
    row_bytes = width * part.itemsize
    if op.params["rows"] == "all":
        rows, at = len(part), row0
        parts = staging[: ranks * rows * width].reshape(ranks, rows, width)

        def begin():
            return comm.all_gather(_bytes(parts), _bytes(part))
    else:
        owned = [_overlap(b.own_rows(q), (row0, row0 + len(part))) for q in range(ranks)]
        rows = owned[b.rank][1] - owned[b.rank][0]
        at = owned[b.rank][0] - b.own_rows()[0] if rows else 0
        parts = staging[: ranks * rows * width].reshape(ranks, rows, width)
        sent_sizes = [(past - first) * row_bytes for first, past in owned]

        def begin():
            return comm.all_to_all(
                _bytes(parts), _bytes(part), [rows * row_bytes] * ranks, sent_sizes
            )

    result = out[at : at + rows]
    return _transfer(begin, lambda: add(parts, result))


def bind_reduce_pair(b: Binding, op: Op, comm: Communicator) -> Transfer:
    """Two partials of the same rows in one message, each added in rank order."""
    parts, outs = b.arrays(op.inputs), b.arrays(op.outputs)
    send, staging = b.arrays(op.scratch)
    sums = [(b.backend.bind_add(b, op, i), staging[:, i], out) for i, out in enumerate(outs)]

    def begin():
        for i, part in enumerate(parts):
            send[i] = part
        return comm.all_gather(_bytes(staging), _bytes(send))

    def end() -> None:
        for add, gathered, out in sums:
            add(gathered, out)

    return _transfer(begin, end)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


def bind_gather_rows(b: Binding, op: Op, comm: Communicator) -> Transfer:
    """Every rank's rows of some tensors, packed side by side into one message."""
    inputs, outputs = b.arrays(op.inputs), b.arrays(op.outputs)
    send, staging = b.arrays(op.scratch)
    received = staging.reshape(-1, send.shape[1])
    columns, at = [], 0
    for array in inputs:
        size = array.itemsize * int(np.prod(array.shape[1:]))
        columns.append((at, at + size))
        at += size
    rows = len(inputs[0])
    flat_in = [_rows_of_bytes(array) for array in inputs]
    flat_out = [_rows_of_bytes(array) for array in outputs]
    total = b.counts["T"]

    def begin():
        for array, (first, past) in zip(flat_in, columns, strict=True):
            send[:rows, first:past] = array
        return comm.all_gather(_bytes(received), _bytes(send))

    def end() -> None:
        for array, (first, past) in zip(flat_out, columns, strict=True):
            array[...] = received[:total, first:past]

    return _transfer(begin, end)


def _rows_of_bytes(array: Array) -> Array:
    size = array.itemsize * int(np.prod(array.shape[1:]))
    return as_bytes(array).reshape(len(array), size)


def bind_gather_columns(b: Binding, op: Op, comm: Communicator) -> Transfer:
    """Concatenate the ranks' columns of all rows, or of this rank's rows."""
    (x,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    send, staging = b.arrays(op.scratch)
    widths, rows = op.params["widths"], len(x)
    starts = np.concatenate(([0], np.cumsum(widths)))
    if op.params["rows"] == "all":
        widest = max(widths)
        sent = send.reshape(-1)[: rows * widest].reshape(rows, widest)
        received = staging.reshape(-1)[: b.ranks * rows * widest].reshape(b.ranks, rows, widest)
        pieces = [received[q, :, : widths[q]] for q in range(b.ranks)]

        def begin():
            sent[:, : x.shape[1]] = x
            return comm.all_gather(_bytes(received), _bytes(sent))
    else:
        flat, item = staging.reshape(-1), x.itemsize
        mine = len(out)
        owned = [b.own_rows(q) for q in range(b.ranks)]
        sent_sizes = [(past - first) * x.shape[1] * item for first, past in owned]
        received_sizes = [mine * w * item for w in widths]
        pieces = [
            flat[mine * starts[q] : mine * starts[q + 1]].reshape(mine, widths[q])
            for q in range(b.ranks)
        ]

        def begin():
            whole = flat[: mine * starts[-1]]
            return comm.all_to_all(_bytes(whole), _bytes(x), received_sizes, sent_sizes)

    def end() -> None:
        for q, piece in enumerate(pieces):
            out[:, starts[q] : starts[q + 1]] = piece

    return _transfer(begin, end)


TRANSFERS = {
    "reduce": bind_reduce,
    "reduce_pair": bind_reduce_pair,
    "gather_rows": bind_gather_rows,
    "gather_columns": bind_gather_columns,
}
