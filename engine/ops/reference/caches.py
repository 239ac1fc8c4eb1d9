"""What a step leaves behind: window rings, open groups, entries of the paged cache (spec 3).

A cache page holds, per KV source, records of one entry each:
[latent E2M1 | latent scales E4M3 | index key E2M1 | key scales E8M0].
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import split_last, work_of
from engine.ops.reference.numbers import pack_fp4_e4m3, pack_fp4_e8m0, store


def keep_newest(
    rows: Tensor, first_row: Tensor, start: Tensor, slots: Tensor, ring: Tensor
) -> None:
    """The newest rows of every sequence go to ring[slot, position mod size]."""
    size, borders = ring.shape[1], first_row.tolist()
    for seq, (begin, slot) in enumerate(zip(start.tolist(), slots.tolist(), strict=True)):
        first, past = borders[seq], borders[seq + 1]
        oldest = max(first, past - size)
        positions = begin + torch.arange(oldest - first, past - first, device=ring.device)
        ring[slot, positions % size] = rows[oldest:past]


def bind_write_ring(b: Binding, op: Op) -> Run:
    """Packed window rows."""
    packed, first_row, start, slots, ring = b.arrays(op.inputs)
    return lambda: keep_newest(packed, first_row, start, slots, ring)


def bind_write_tail(b: Binding, op: Op) -> Run:
    """kv and score of the newest tokens, side by side."""
    kv, score, first_row, start, slots, tail = b.arrays(op.inputs)
    return lambda: keep_newest(torch.cat((kv, score), 1), first_row, start, slots, tail)


def bind_pool(b: Binding, op: Op) -> Run:
    """Softmax-pool each group of `ratio` tokens into the row of its last token; other rows are 0.

    Tokens before this step come from the tail, which holds kv and score side by side.
    """
    kv, score, tail, positions, seq_of, first_row, start, slots = b.arrays(op.inputs)
    (out,), work, ratio = b.arrays(op.outputs), work_of(b), op.params["ratio"]
    width = kv.shape[1]

    def token(back: int, seq: Tensor) -> Tensor:
        """kv and score of the token `back` positions before each row."""
        at, row = positions - back, torch.arange(len(kv), device=kv.device) - back
        fresh = torch.cat((kv, score), 1)[row.clamp(min=0)]
        kept = tail[slots[seq].long(), at % tail.shape[1]]
        return torch.where((at >= start[seq])[:, None], fresh, kept).to(work)

    def go() -> None:
        seq = seq_of.long()
        group = torch.stack([token(back, seq) for back in range(ratio - 1, -1, -1)])
        shares = torch.softmax(group[..., width:], dim=0)
        pooled = (shares * group[..., :width]).sum(0)
        ends = (positions + 1) % ratio == 0
        store(out, torch.where(ends[:, None], pooled, 0))

    return go


def entries(work: torch.dtype, latent: Tensor, key: Tensor) -> Tensor:
    """Cache records of rotated latents and index keys."""
    return torch.cat((pack_fp4_e4m3(latent), pack_fp4_e8m0(key)), dim=1)


def bind_pack_fp4(b: Binding, op: Op) -> Run:
    """FP4 records of every head of the index queries."""
    (x,), (out,), width = b.arrays(op.inputs), b.arrays(op.outputs), op.params["width"]
    return lambda: store(out, pack_fp4_e8m0(split_last(x, width)).flatten(1))


def bind_write_entries(b: Binding, op: Op) -> Run:
    """Publish the records of completed groups; a row holds the group that ends at its position."""
    records, positions, seq_of, pages, pool = b.arrays(op.inputs)
    ratio, base, per_page = (op.params[name] for name in ("ratio", "base", "per_page"))
    record = records.shape[1]

    def go() -> None:
        done = ((positions + 1) % ratio == 0).nonzero()[:, 0]
        entry = positions[done] // ratio
        page = pages[seq_of[done].long(), entry // per_page].long()
        at = base + entry % per_page * record
        channels = torch.arange(record, device=at.device)
        pool[page[:, None], at[:, None] + channels] = records[done]

    return go
