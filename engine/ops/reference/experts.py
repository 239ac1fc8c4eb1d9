"""Mixture of experts: the router, the gated product and the sums over experts (spec 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import work_of
from engine.ops.reference.numbers import pack_fp8, round_bf16, store, unpack_fp4_e8m0, unpack_fp8


def bind_route(b: Binding, op: Op) -> Run:
    """Pick experts by sqrt(softplus(x)) + bias, ties to the lower id; weights without the bias."""
    (logits, bias), (choice, weight) = b.arrays(op.inputs), b.arrays(op.outputs)
    work, scaling = work_of(b), op.params["scaling"]

    def go() -> None:
        x = logits.to(work)
        softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
        scores = softplus.sqrt().to(torch.float32).to(work)
        ranked = (scores + bias.to(work)).sort(dim=1, descending=True, stable=True).indices
        chosen = ranked[:, : choice.shape[1]]
        shares = scores.gather(1, chosen)
        choice.copy_(chosen)
        store(weight, shares / (shares.sum(1, keepdim=True) + 1e-20) * scaling)

    return go


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, +-limit)."""
    gate = gate.clamp(max=limit)
    return gate / (1 + torch.exp(-gate)) * up.clamp(-limit, limit)


def shared_gate(work: torch.dtype, gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The shared expert's gated product: weight 1."""
    return gated(gate.to(work), up.to(work), limit)


def expert(
    x: Tensor, weight: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """bf16 outputs of one expert for some rows; all that comes in is in the dtype inside the op."""
    work = x.dtype
    gate, up = round_bf16(x @ w1.T).to(work), round_bf16(x @ w3.T).to(work)
    act = round_bf16(gated(gate, up, limit) * weight[:, None])
    return round_bf16(unpack_fp8(pack_fp8(act), act.shape[1]).to(work) @ w2.T)


def bind_experts(b: Binding, op: Op) -> Run:
    """This rank's routed experts on some rows, their bf16 outputs added in float64."""
    first, past = b.tile_of(op)
    packed, choice, weight = (array[first:past] for array in b.arrays(op.inputs[:3]))
    arrays, (out,) = b.arrays(op.inputs[3:]), b.arrays(op.outputs)
    work, expert0, limit = work_of(b), op.params["expert0"], op.params["limit"]
    packings = list(zip(arrays[::2], arrays[1::2], strict=True))

    def decoded(e: int) -> list[Tensor]:
        rows = [torch.cat((codes[e], scales[e]), 1) for codes, scales in packings]
        return [unpack_fp4_e8m0(row, 2 * codes.shape[2]).to(work)
                for row, (codes, _) in zip(rows, packings, strict=True)]

    def go() -> None:
        out.zero_()
        for e in (choice.unique() - expert0).tolist():
            if not 0 <= e < len(arrays[0]):
                continue
            rows, slots = (choice == expert0 + e).nonzero(as_tuple=True)
            x = unpack_fp8(packed[rows], out.shape[1]).to(work)
            w1, w3, w2 = decoded(e)
            y = expert(x, weight[rows, slots].to(work), w1, w3, w2, limit)
            out[rows] += y.to(out.dtype)

    return go


def moe_sum(work: torch.dtype, routed: Tensor, shared: Tensor) -> Tensor:
    """Routed sum plus the shared expert; rounded once."""
    return routed.to(work) + shared.to(work)
