"""Hyper-connections: coefficients, collapse and update of the streams (spec 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import split_last, work_of
from engine.ops.reference.numbers import store


def bind_spread(b: Binding, op: Op) -> Run:
    """Every copy is x; the mix is one-hot on copy 0."""
    (x,), (h, mix) = b.arrays(op.inputs), b.arrays(op.outputs)

    def go() -> None:
        h.copy_(x[:, None].expand_as(h))
        mix.zero_()
        mix[:, 0] = 1

    return go


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), spelt out: library versions may round differently."""
    return 1 / (1 + torch.exp(-x))


def sinkhorn(comb: Tensor, rounds: int, hc_eps: float) -> Tensor:
    """Columns, then rounds - 1 times rows and columns, divided by their sum + hc_eps."""
    for turn in range(rounds):
        if turn > 0:
            comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return comb


def mixes(
    work: torch.dtype,
    h: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    eps: float,
    hc_eps: float,
    rounds: int,
) -> Tensor:
    """pre, post and comb side by side [rows, (2 + hc) hc]; nothing is rounded on the way."""
    copies, flat = h.shape[1], h.flatten(1).to(work)
    m = flat @ fn.to(work).T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    scale, base = scale.to(work), base.to(work)
    first, second = slice(copies), slice(copies, 2 * copies)
    pre = sigmoid(m[:, first] * scale[0] + base[first]) + hc_eps
    post = 2 * sigmoid(m[:, second] * scale[1] + base[second])
    logits = m[:, 2 * copies :] * scale[2] + base[2 * copies :]
    comb = torch.softmax(split_last(logits, copies), dim=-1) + hc_eps
    return torch.cat((pre, post, sinkhorn(comb, rounds, hc_eps).flatten(1)), dim=1)


def collapse(work: torch.dtype, h: Tensor, mix: Tensor) -> Tensor:
    """sum over copies of mix_c * h_c; mix may be wider than the copies."""
    shares = mix[:, : h.shape[1], None].to(work)
    return (shares * h.to(work)).sum(1)


def update(work: torch.dtype, h: Tensor, y: Tensor, coefficients: Tensor) -> Tensor:
    """h'_j = post_j * y + sum_i comb[i, j] * h_i."""
    copies, coefficients = h.shape[1], coefficients.to(work)
    post = coefficients[:, copies : 2 * copies, None]
    comb = split_last(coefficients[:, 2 * copies :], copies)
    return post * y[:, None].to(work) + torch.einsum("tij,tiw->tjw", comb, h.to(work))


def bind_stream_mean(b: Binding, op: Op) -> Run:
    """The mean over the copies, into some columns of the output."""
    h, out = b.array(op.inputs[0]), b.array(op.outputs[0])
    work, column = work_of(b), op.params["column"]
    part = out[:, column : column + h.shape[2]]
    return lambda: store(part, h.to(work).mean(1))
