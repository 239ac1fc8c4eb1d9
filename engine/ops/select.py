"""Runs the indexer: row by row for few rows or candidates, over tiles of dot products otherwise."""

from __future__ import annotations

import numpy as np
import torch

from engine.ir import Op
from engine.ops import indexer
from engine.ops.bind import Binding, Run, as_torch

FEW_ROWS = 8


class _Select:
    """The arrays of one selection."""

    def __init__(self, b: Binding, op: Op) -> None:
        first, past = b.rows_of(op)
        self.rows = past - first
        self.packed, self.weights, positions, seq_of, self.pages, self.pool = b.arrays(op.inputs[:6])
        self.positions, self.seq_of = positions[first:past], seq_of[first:past]
        self.selected = b.array(op.outputs[0])
        none = np.zeros((self.rows, 0), np.int32)
        self.candidates = b.array(op.inputs[6]) if len(op.inputs) > 6 else none
        self.blocks = b.array(op.outputs[1]) if len(op.outputs) > 1 else none
        self.scratch = b.arrays(op.scratch)
        self.p = op.params
        self.run = b.workers.run

    def by_row(self) -> None:
        p = self.p
        args = (
            self.packed, p["heads"], p["width"], self.weights, p["factor"], self.positions,
            self.seq_of, p["ratio"], self.candidates, p["block"], self.pages, self.pool,
            p["base"], p["per_page"], p["record"], p["key_at"], self.blocks, self.selected,
        )
        self.run(indexer.select_rows, self.rows, 1, *args)

    def by_tiles(self) -> None:
        borders = np.flatnonzero(np.diff(self.seq_of)) + 1
        tile = len(self.scratch[0])
        for first, past in zip([0, *borders], [*borders, self.rows], strict=True):
            for row0 in range(first, past, tile):
                self.tile(int(row0), int(min(tile, past - row0)))

    def tile(self, row0: int, rows: int) -> None:
        p, run = self.p, self.run
        q32, k32, dots, best, kept, counts, tops, top_blocks, block_counts = self.scratch
        heads, width = p["heads"], p["width"]
        packed = self.packed[row0 : row0 + rows]
        run(indexer.decode_queries, rows, 8, packed, width, q32)
        counts.fill(0)
        block_counts.fill(0)
        pages = self.pages[self.seq_of[row0]]
        visible = (int(self.positions[row0 + rows - 1]) + 1) // p["ratio"]
        queries = as_torch(q32)[:rows].reshape(rows * heads, width)
        step = len(k32) // p["block"] * p["block"]
        for entry0 in range(0, visible, step):
            entries = min(step, visible - entry0)
            place = (p["base"], p["per_page"], p["record"], p["key_at"])
            run(indexer.decode_keys, entries, 256, entry0, pages, self.pool, *place, k32[:entries])
            part = dots.reshape(-1)[: rows * heads * entries]
            torch.mm(
                queries, as_torch(k32)[:entries].T,
                out=as_torch(part.reshape(rows * heads, entries)),
            )
            run(
                indexer.scan_tile, rows, 8, part.reshape(rows, heads, entries), self.weights, row0,
                p["factor"], self.positions, p["ratio"], entry0, entries, p["block"], best, kept,
                counts, tops, top_blocks, block_counts,
            )
        run(indexer.finish_rows, rows, 8, kept, counts, row0, self.selected)
        if self.blocks.shape[1]:
            run(indexer.finish_rows, rows, 8, top_blocks, block_counts, row0, self.blocks)


def bind_select(b: Binding, op: Op) -> Run:
    """Top-k entries (and at the candidate source the best blocks) of this rank's rows."""
    s = _Select(b, op)
    if s.rows == 0:
        return lambda: None
    if s.rows <= FEW_ROWS or s.candidates.shape[1]:
        return s.by_row
    return s.by_tiles
