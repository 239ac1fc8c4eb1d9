"""Engram: hashes of n-grams, table rows of the host, the gate that adds their value (spec 5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.engram import bucket_primes, multipliers
from engine.ir import Op
from engine.ops.bind import Binding, Run
from engine.ops.reference.binding import split_last
from engine.ops.reference.hyper import sigmoid
from engine.ops.reference.numbers import (
    SCALE_CHANNELS,
    decode_e4m3,
    decode_e8m0,
    per_channel,
    store,
)


def bind_engram_hash(b: Binding, op: Op) -> Run:
    """XOR of token_{p-k} * multiplier_k, modulo each bucket's prime, plus the bucket's offset."""
    (ngrams,), (out,) = b.arrays(op.inputs), b.arrays(op.outputs)
    c, layer = b.config, op.params["layer"]
    factors = torch.tensor(multipliers(c, layer), device=out.device)
    primes = bucket_primes(c)[c.engram_layer_ids.index(layer)]

    def go() -> None:
        products = ngrams * factors
        mixed, column, offset = products[:, 0], 0, 0
        for size in range(2, c.engram_max_ngram_size + 1):
            mixed = mixed ^ products[:, size - 1]
            for _ in range(c.engram_n_heads):
                out[:, column] = mixed % primes[column] + offset
                column, offset = column + 1, offset + primes[column]

    return go


def bind_engram_lookup(b: Binding, op: Op) -> Run:
    """Dequantised rows of this rank's buckets; the tables are arrays of the host, maybe files."""
    hashes, codes, scales = b.arrays(op.inputs)
    (out,), bucket0 = b.arrays(op.outputs), op.params["bucket0"]
    primes = bucket_primes(b.config)[b.config.engram_layer_ids.index(op.params["layer"])]
    row0, width = sum(primes[:bucket0]), codes.shape[1]
    own = hashes[:, bucket0 : bucket0 + out.shape[1] // width]

    def go() -> None:
        rows = (own - row0).cpu().numpy()
        found = (torch.from_numpy(table[rows]).to(out.device) for table in (codes, scales))
        values, grid = decode_e4m3(next(found)), decode_e8m0(next(found))
        store(out, (values * per_channel(grid, SCALE_CHANNELS, width)).flatten(1))

    return go


def apply(
    work: torch.dtype, h: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> Tensor:
    """h_c + gate_c * value; kv [rows, (hc + 1) d] holds a key per copy, then the value."""
    copies, width = h.shape[1:]
    h, parts = h.to(work), split_last(kv, width).to(work)
    keys, value = parts[:, :copies], parts[:, copies:]
    z = (h * q_weight.to(work) * k_weight.to(work) * keys).sum(-1)
    for rows in (h, keys):
        z = z * torch.rsqrt(rows.square().mean(-1) + eps)
    z = z / math.sqrt(width)
    gate = sigmoid(z.sign() * z.abs().clamp(min=1e-6).sqrt()).to(torch.float32)
    return h + gate[..., None].to(work) * value
