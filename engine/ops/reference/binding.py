"""Makes binders out of functions from tensors to values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.numbers import WORK, store

ROW_TILE = 64
"""Rows that are worked on at once where each row brings many keys along."""


def work_of(b: Binding) -> torch.dtype:
    """The dtype inside an op."""
    return WORK[b.backend.accumulation]


def computes(function: Callable[..., Tensor], *params: str):
    """A binder for the one output `function(work, *inputs, **params)`, rounded once."""

    def bind(b: Binding, op: Op) -> Run:
        inputs, (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
        work, extra = work_of(b), {name: op.params[name] for name in params}
        return lambda: store(out, function(work, *inputs, **extra))

    return bind


def split_last(x: Tensor, size: int) -> Tensor:
    """The last axis in pieces of `size`; there may be none."""
    return x.unflatten(-1, (x.shape[-1] // size, size))
