"""Runs the indexer: row by row for few rows or candidates, over tiles of dot products otherwise."""

from __future__ import annotations

import numpy as np

from engine.ir import Op
from engine.ops import indexer
from engine.ops.bind import Binding, Run
from engine.ops.tiles import select_tiles

FEW_ROWS = 8


class _Select:
    """The arrays of one selection."""

    def __init__(self, b: Binding, op: Op) -> None:
        first, past = b.rows_of(op)
        self.rows = past - first
        self.packed, self.weights, positions, seq_of = b.arrays(op.inputs[:4])
        self.pages, self.pool = b.arrays(op.inputs[4:6])
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
        # Every thread needs a row and a whole block of keys in its share of the scratch.
        rows, keys = len(self.scratch[0]), len(self.scratch[1])
        threads = min(self.workers.threads, rows, keys // self.p["block"])
        tile = rows // threads
        turns = threads if past - first > tile else 1
        p = self.p
        fixed = (
            self.packed, p["heads"], p["width"], self.weights, p["factor"], self.positions,
            p["ratio"], p["block"], self.pages[self.seq_of[first]], self.pool, p["base"],
            p["per_page"], p["record"], p["key_at"],
        )

        def part(turn: int, _first: int, _past: int) -> None:
            scratch = [_share(array, turn, threads) for array in self.scratch]
            outs = self.blocks, self.selected
            select_tiles(turn, turns, first, past, tile, *fixed, *scratch, *outs)

        self.workers.each(part, turns, 1)


def _share(array: np.ndarray, index: int, threads: int) -> np.ndarray:
    """One thread's part of a scratch array, along its first axis."""
    size = len(array) // threads
    return array[index * size : (index + 1) * size]


def bind_select(b: Binding, op: Op) -> Run:
    """Top-k entries (and at the candidate source the best blocks) of this rank's rows."""
    s = _Select(b, op)
    if s.rows == 0:
        return lambda: None
    if s.rows <= FEW_ROWS or s.candidates.shape[1] or s.p["block"] > len(s.scratch[1]):
        return s.by_row
    return s.by_tiles
