"""The indexer: scores of compressed entries, and the best of them tile by tile of keys (spec 3).

Products of two FP4 round trips are exact, so a dot has no order; the heads of a score are added one
after the other, so that equal keys have equal scores wherever they stand in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import ROW_TILE, split_last, work_of
from engine.ops.reference.numbers import unpack_fp4_e8m0
from engine.tiling import INDEX_KEYS

_NONE = torch.iinfo(torch.int64).max


class Best:
    """The `most` best numbers of each row so far; ties go to the lower number.

    Numbers must be offered in ascending order: sorting is stable, so those kept come first.
    """

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self.most = most
        self.scores = torch.full((rows, 0), -torch.inf, device=device)
        self.numbers = torch.full((rows, 0), _NONE, device=device)

    def offer(self, scores: Tensor, numbers: Tensor, reached: Tensor) -> None:
        """fp32 scores [rows, n] of int64 numbers [n], of which a row may take those reached."""
        scores = torch.cat((self.scores, scores.masked_fill(~reached, -torch.inf)), 1)
        numbers = torch.where(reached, numbers, _NONE)
        numbers = torch.cat((self.numbers, numbers), 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.most]
        self.scores, self.numbers = scores.gather(1, order), numbers.gather(1, order)

    def write(self, out: Tensor) -> None:
        """Ascending numbers, -1 behind them."""
        kept = self.numbers.sort(dim=1).values
        out.fill_(-1)
        out[:, : kept.shape[1]] = torch.where(kept == _NONE, -1, kept)


@dataclass(frozen=True)
class Selection:
    """One select op; arrays of this rank's rows.

    candidates  int32 [rows, blocks] that a later source chooses from, or None: all entries
    blocks_out  int32 [rows, blocks] for the candidate source's own best blocks, or None
    """

    work: torch.dtype
    packed: Tensor
    weights: Tensor
    positions: Tensor
    pages: Tensor
    pool: Tensor
    candidates: Tensor | None
    blocks_out: Tensor | None
    out: Tensor
    p: dict = field(repr=False)

    def keys(self, seq: int, entries: Tensor) -> Tensor:
        """Index keys of some entries of a sequence, [entries, width]."""
        p, width = self.p, self.p["width"]
        page = self.pages[seq, entries // p["per_page"]].long()
        at = p["base"] + entries % p["per_page"] * p["record"] + p["key_at"]
        channels = torch.arange(width // 2 + width // 32, device=at.device)
        packed = self.pool[page[:, None], at[:, None] + channels]
        return unpack_fp4_e8m0(packed, width).to(self.work)

    def scores(self, rows: slice, keys: Tensor) -> Tensor:
        """fp32 sum over heads of w_h * relu(q_h . k)."""
        p = self.p
        queries = split_last(self.packed[rows], self.packed.shape[1] // p["heads"])
        queries = unpack_fp4_e8m0(queries, p["width"]).to(self.work)
        weights = self.weights[rows].to(self.work) * p["factor"]
        total = torch.zeros((len(queries), len(keys)), dtype=self.work, device=keys.device)
        for head in range(p["heads"]):
            total += weights[:, head, None] * torch.relu(queries[:, head] @ keys.T)
        return total.to(torch.float32)

    def run(self, seq: int, rows: slice) -> None:
        """Select for some rows of one sequence."""
        block, visible = self.p["block"], (self.positions[rows] + 1) // self.p["ratio"]
        count, device = len(visible), visible.device
        best = Best(count, self.out.shape[1], device)
        best_blocks = self.blocks_out is not None and Best(count, self.blocks_out.shape[1], device)
        step = max(1, INDEX_KEYS // block) * block
        for first in range(0, int(visible.max()), step):
            entries = torch.arange(first, min(first + step, int(visible.max())), device=device)
            scores = self.scores(rows, self.keys(seq, entries))
            reached = entries < visible[:, None]
            if best_blocks:
                offer_blocks(best_blocks, scores, reached, entries, visible, block)
            if self.candidates is not None:
                chosen = self.candidates[rows, None, :] == (entries // block)[:, None]
                reached = reached & chosen.any(-1)
            best.offer(scores, entries, reached)
        best.write(self.out[rows])
        if best_blocks:
            best_blocks.write(self.blocks_out[rows])


def offer_blocks(
    best: Best, scores: Tensor, reached: Tensor, entries: Tensor, visible: Tensor, block: int
) -> None:
    """Offer each block's highest reached score; the newest visible block outranks all others."""
    missing = -len(entries) % block
    scores = scores.masked_fill(~reached, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    numbers = entries[::block] // block
    newest = numbers == (visible[:, None] - 1) // block
    highest = split_last(scores, block).amax(-1).masked_fill(newest, torch.inf)
    best.offer(highest, numbers, numbers * block < visible[:, None])


def bind_select(b: Binding, op: Op) -> Run:
    """Top-k entries (and at the candidate source the best blocks) of this rank's rows."""
    first, past = b.rows_of(op)
    packed, weights, positions, seq_of, pages, pool, *candidates = b.arrays(op.inputs)
    out, *blocks_out = b.arrays(op.outputs)
    selection = Selection(
        work_of(b), packed, weights, positions[first:past], pages, pool,
        candidates[0] if candidates else None, blocks_out[0] if blocks_out else None, out,
        op.params,
    )

    def go() -> None:
        sequences, counts = seq_of[first:past].unique_consecutive(return_counts=True)
        row0 = 0
        for seq, count in zip(sequences.tolist(), counts.tolist(), strict=True):
            for row in range(row0, row0 + count, ROW_TILE):
                selection.run(seq, slice(row, min(row + ROW_TILE, row0 + count)))
            row0 += count

    return go
