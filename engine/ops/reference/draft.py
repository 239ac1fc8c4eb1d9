"""Draft heads: the Markov logits on top of the base, the pick and its confidence (spec 6)."""

from __future__ import annotations

import torch

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import work_of
from engine.ops.reference.numbers import store


def bind_add_base(b: Binding, op: Op) -> Run:
    """The fp32 sum of Markov and base logits of one draft position."""
    (own, base), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    mine = base[op.params["index"] :: op.params["block"]]
    return lambda: store(out, own + mine)


def bind_draft_pick(b: Binding, op: Op) -> Run:
    """Keep a position's logits, the id of the highest (the lower on a tie) and its confidence."""
    everyone, collapsed, embedded, proj, ids, logits, confidence = b.arrays(op.inputs)
    index, block, work = op.params["index"], op.params["block"], work_of(b)
    mine = collapsed[index::block]

    def go() -> None:
        logits[:, index] = everyone
        ids[:, index + 1] = everyone.argmax(1)
        seen = torch.cat((mine, embedded), 1).to(work)
        store(confidence[:, index], (seen * proj[0].to(work)).sum(1))

    return go
