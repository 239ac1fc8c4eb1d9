"""Embedding, norms, rotations and matrix products (spec 1 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ir import Op
from engine.ops.bind import Binding, Run, rope_frequencies
from engine.ops.reference.binding import split_last, work_of
from engine.ops.reference.numbers import decode_weight, pack_fp8, round_bf16, store, unpack_fp8

WEIGHT_ITEMS = 2**24
"""Items of a weight that are decoded at once."""


def embed(ids: Tensor, table: Tensor, start: int) -> Tensor:
    """table[ids - start], zeros where the row belongs to another rank."""
    rows = ids - start
    mine = (rows >= 0) & (rows < len(table))
    found = table.new_zeros((len(ids), table.shape[1]))
    found[mine] = table[rows[mine]]
    return found


def bind_embed(b: Binding, op: Op) -> Run:
    """Rows row0.. of the step's ids."""
    (ids, table), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    row0, start = op.params["row0"], op.params["start"]
    return lambda: store(out, embed(ids[row0 : row0 + len(out)], table, start))


def bind_embed_column(b: Binding, op: Op) -> Run:
    """One column of a table of ids."""
    (ids, table), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    column, start = op.params["column"], op.params["start"]
    return lambda: store(out, embed(ids[:, column], table, start))


def norm(work: torch.dtype, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: x * rsqrt(mean(x^2) + eps) * weight."""
    x = x.to(work)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(work)


def packed(work: torch.dtype, x: Tensor) -> Tensor:
    """FP8 activation."""
    return pack_fp8(x)


def bind_rope_table(b: Binding, op: Op) -> Run:
    """cos and sin, fp32 [rows, 2 x pairs], of the fp32 product (position - back) * frequency.

    In float64 whatever the accumulation dtype: a table costs nothing, and angles grow large.
    """
    (positions,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    plain = torch.from_numpy(rope_frequencies(b.config, op.params["compressed"]))
    frequencies, back = plain.to(out.device), op.params["back"]

    def go() -> None:
        angle = (positions - back).to(torch.float32)[:, None] * frequencies
        angle = angle.to(torch.float64)
        store(out, torch.cat((angle.cos(), angle.sin()), dim=1))

    return go


def rotated(pairs: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Channels [..., 2 x pairs] with adjacent ones turned by their angle."""
    first, second = pairs[..., ::2], pairs[..., 1::2]
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(turned, dim=-1).flatten(-2)


def bind_rope(b: Binding, op: Op) -> Run:
    """Rotate the last channels of each head; the others pass unchanged."""
    (x, table), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    work, width, inverse = work_of(b), op.params["width"], op.params["inverse"]
    first = b.rows_of(op)[0]

    def go() -> None:
        cosine, sine = table[first : first + len(x), None].to(work).chunk(2, dim=-1)
        tail = split_last(x, width)[..., -table.shape[1] :].to(work)
        turned = round_bf16(rotated(tail, cosine, -sine if inverse else sine))
        out.copy_(x)
        split_last(out, width)[..., -table.shape[1] :] = turned

    return go


def product(
    work: torch.dtype, x: Tensor, w: Tensor, scales: Tensor | None, shift: int, out: Tensor
) -> None:
    """out = x . w^T, one rounding; x in the dtype inside the op, w decoded tile by tile."""
    step = max(1, WEIGHT_ITEMS // max(1, w.shape[1]))
    # A tile begins with a scale block, so that its shift stays the weight's own.
    step = -(-step // 32) * 32
    first = 0
    while first < len(w):
        past = min(len(w), (first + shift) // 32 * 32 + step - shift)
        grid = None if scales is None else scales[(first + shift) // 32 :]
        tile = decode_weight(w[first:past], grid, (first + shift) % 32)
        store(out[:, first:past], x @ tile.to(work).T)
        first = past


def bind_linear(b: Binding, op: Op) -> Run:
    """x . w^T; x packed FP8 or bf16 rows (of one tile), w FP8 with its scales or bf16."""
    first, past = b.tile_of(op)
    x, w, *scales = b.arrays(op.inputs)
    x = x[first:past] if "tile" in op.params else x
    (out,) = b.arrays(op.outputs)
    work, shift = work_of(b), op.params["shift"]

    def go() -> None:
        values = unpack_fp8(x, w.shape[1]) if op.params["source"] == "packed" else x
        product(work, values.to(work), w, scales[0] if scales else None, shift, out)

    return go


def bind_grouped_linear(b: Binding, op: Op) -> Run:
    """Each group's slice of bf16 x times its own rows of the weight, dequantised."""
    (x, w, scales), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    work, groups = work_of(b), op.params["groups"]

    def go() -> None:
        decoded = decode_weight(w, scales, op.params["shift"])
        weight = decoded.to(work).unflatten(0, (groups, len(w) // groups))
        values = split_last(x, w.shape[1]).to(work)
        store(out, torch.einsum("tgi,goi->tgo", values, weight).flatten(1))

    return go if groups else lambda: None


def bind_take_rows(b: Binding, op: Op) -> Run:
    """out[i] = x[rows[i]]."""
    (x, rows), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    return lambda: store(out, x[rows.long()])
