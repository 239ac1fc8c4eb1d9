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
        self.workers, self.run = b.workers, b.workers.run

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
        for first, past in zip([0, *borders], [*borders, self.rows], strict=True):
            self.sequence(int(first), int(past))

    def sequence(self, first: int, past: int) -> None:
        """Row tiles of one sequence; later rows see more keys, so threads take turns."""
        threads = self.workers.threads
        tile = len(self.scratch[0]) // threads
        starts = list(range(first, past, tile))

        def part(index: int, _first: int, _past: int) -> None:
            scratch = [_share(array, index, threads) for array in self.scratch]
            for row0 in starts[index::threads]:
                self.tile(scratch, row0, min(tile, past - row0))

        if len(starts) < threads:
            for row0 in starts:
                self.tile(self.scratch, row0, min(tile, past - row0))
        else:
            self.workers.each(part, threads, 1)

    def tile(self, scratch: list[np.ndarray], row0: int, rows: int) -> None:
        p = self.p
        q32, k32, dots, best, kept, counts, tops, top_blocks, block_counts = scratch
        heads, width = p["heads"], p["width"]
        indexer.decode_queries(0, rows, self.packed[row0 : row0 + rows], width, q32)
        counts.fill(0)
        block_counts.fill(0)
        pages = self.pages[self.seq_of[row0]]
        visible = (int(self.positions[row0 + rows - 1]) + 1) // p["ratio"]
        queries = as_torch(q32)[:rows].reshape(rows * heads, width)
        step = len(k32) // p["block"] * p["block"]
        for entry0 in range(0, visible, step):
            entries = min(step, visible - entry0)
            place = (p["base"], p["per_page"], p["record"], p["key_at"])
            indexer.decode_keys(0, entries, entry0, pages, self.pool, *place, k32)
            part = dots.reshape(-1)[: rows * heads * entries]
            products = as_torch(part.reshape(rows * heads, entries))
            torch.mm(queries, as_torch(k32)[:entries].T, out=products)
            indexer.scan_tile(
                0, rows, part.reshape(rows, heads, entries), self.weights, row0, p["factor"],
                self.positions, p["ratio"], entry0, entries, p["block"], best, kept, counts, tops,
                top_blocks, block_counts,
            )
        indexer.finish_rows(0, rows, kept, counts, row0, self.selected)
        if self.blocks.shape[1]:
            indexer.finish_rows(0, rows, top_blocks, block_counts, row0, self.blocks)


def _share(array: np.ndarray, index: int, threads: int) -> np.ndarray:
    """One thread's part of a scratch array, along its first axis."""
    size = len(array) // threads
    return array[index * size : (index + 1) * size]


def bind_select(b: Binding, op: Op) -> Run:
    """Top-k entries (and at the candidate source the best blocks) of this rank's rows."""
    s = _Select(b, op)
    if s.rows == 0:
        return lambda: None
    if s.rows <= FEW_ROWS or s.candidates.shape[1]:
        return s.by_row
    return s.by_tiles
