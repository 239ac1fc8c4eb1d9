"""Attention over the window and the selected compressed entries, with sinks (spec 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import ROW_TILE, split_last, work_of
from engine.ops.reference.numbers import store, unpack_fp4_e4m3, unpack_fp8

Keys = tuple[Tensor, Tensor]
"""Decoded keys [rows, keys, width] and which of them a row reaches, bool [rows, keys]."""


@dataclass(frozen=True)
class Step:
    """The window rows of a step and where its rows stand.

    fresh, ring  packed FP8 rows of this step [T, bytes], and those before it [slots, size, bytes]
    window       positions that a row sees; with `whole` (draft blocks) so many before the step's
                 first, and every row of the step
    """

    fresh: Tensor
    ring: Tensor
    positions: Tensor
    seq_of: Tensor
    first_row: Tensor
    start: Tensor
    slots: Tensor
    window: int
    whole: bool

    def window_keys(self, rows: slice, width: int) -> Keys:
        """The window part of some rows."""
        seq = self.seq_of[rows].long()
        begin, first = self.start[seq, None], self.first_row[seq, None].long()
        newest = begin - 1 if self.whole else self.positions[rows, None]
        p = newest - torch.arange(self.window - 1, -1, -1, device=seq.device)
        old = self.ring[self.slots[seq, None].long(), p % self.ring.shape[1]]
        new = self.fresh[(first + p - begin).clamp(0, len(self.fresh) - 1)]
        packed, reached = torch.where((p >= begin)[..., None], new, old), p >= 0
        if self.whole:
            past = self.first_row[seq + 1, None].long()
            most = int(self.first_row.diff().max())
            own = first + torch.arange(most, device=seq.device)
            packed = torch.cat((packed, self.fresh[own.clamp(max=len(self.fresh) - 1)]), dim=1)
            reached = torch.cat((reached, own < past), dim=1)
        return unpack_fp8(packed, width), reached


@dataclass(frozen=True)
class Compressed:
    """The paged cache of a source and the entries that each row selected, -1 for none."""

    pool: Tensor
    pages: Tensor
    selected: Tensor
    base: int
    per_page: int
    record: int

    def keys(self, rows: slice, seq: Tensor, width: int) -> Keys:
        """The compressed part of some rows."""
        entries = self.selected[rows].long()
        reached, entries = entries >= 0, entries.clamp(min=0)
        page = self.pages[seq[:, None], entries // self.per_page].long()
        at = self.base + entries % self.per_page * self.record
        channels = torch.arange(width // 2 + width // 16, device=at.device)
        packed = self.pool[page[..., None], at[..., None] + channels]
        return unpack_fp4_e4m3(packed, width), reached


def attention(
    work: torch.dtype, query: Tensor, keys: Tensor, reached: Tensor, sink: Tensor
) -> Tensor:
    """softmax(query . keys / sqrt(width)) . keys with a sink in the denominator.

    query [rows, heads, width]; a row that reaches nothing gives zeros. Keys that are not reached
    may hold anything, also NaN.
    """
    keys = keys.masked_fill(~reached[..., None], 0).to(work)
    logits = torch.einsum("thw,tkw->thk", query, keys) * (1 / math.sqrt(query.shape[-1]))
    logits = logits.masked_fill(~reached[:, None], -torch.inf)
    sink = sink.to(work)[None, :, None]
    highest = torch.maximum(logits.amax(-1, keepdim=True), sink)
    shares = torch.exp(logits - highest)
    total = shares.sum(-1, keepdim=True) + torch.exp(sink - highest)
    return torch.einsum("thk,tkw->thw", shares, keys) / total


def bind_attend(b: Binding, op: Op) -> Run:
    """Attention of this rank's heads, tile by tile of rows; the output may be the query."""
    q, fresh, ring, sink, *meta = b.arrays(op.inputs)
    positions, seq_of, first_row, start, slots, pages = meta[:6]
    (out,), p, work = b.arrays(op.outputs), op.params, work_of(b)
    step = Step(fresh, ring, *meta[:5], p["window"], p["whole"])
    cache = None
    if len(meta) > 6:
        cache = Compressed(meta[6], pages, meta[7], p["base"], p["per_page"], p["record"])

    def go() -> None:
        width = q.shape[1] // len(sink)
        for row0 in range(0, len(q), ROW_TILE):
            rows = slice(row0, row0 + ROW_TILE)
            keys, reached = step.window_keys(rows, width)
            if cache is not None:
                more, also = cache.keys(rows, seq_of[rows].long(), width)
                keys, reached = torch.cat((keys, more), 1), torch.cat((reached, also), 1)
            result = attention(work, split_last(q[rows], width).to(work), keys, reached, sink)
            store(out[rows], result.flatten(1))

    return go if len(sink) else lambda: None
