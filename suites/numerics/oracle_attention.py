"""Attention of the oracle: window, compressed latents, indexer, two-level selection, softmax.

Every cache is a full append-only history, so there is no ring, page or chunk to get wrong. It does
not know about any of those, nor about ranks.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from suites.numerics.oracle_formats import (
    bf16,
    f32,
    fp4_round_trip_e4m3,
    fp4_round_trip_e8m0,
    fp8_round_trip,
)
from suites.numerics.oracle_layers import linear, linear_fp8, rms_norm, rope_frequencies, rotate
from suites.numerics.oracle_weights import Weights


class History:
    """What a sequence has seen so far: token ids and, per name, all rows ever appended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: dict[str, Tensor] = {}

    def append(self, name: str, new: Tensor) -> Tensor:
        """Add rows at the end of `name` and return all of them."""
        old = self.rows.get(name)
        self.rows[name] = new if old is None else torch.cat((old, new))
        return self.rows[name]

    def count(self, name: str) -> int:
        return len(self.rows[name]) if name in self.rows else 0


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Mask [n, m] of the `count` best finite scores of a row; ties go to the lower index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    best = torch.zeros(scores.shape, dtype=torch.bool).scatter(1, order, True)
    return best & (scores > -torch.inf)


def listed(mask: Tensor, width: int) -> Tensor:
    """Selected indices of a mask [n, m] in ascending order, padded with -1 to [n, width]."""
    index = torch.arange(mask.shape[1]).expand(mask.shape)
    ordered = torch.where(mask, index, mask.shape[1]).sort(-1).values[:, :width]
    return torch.where(ordered < mask.shape[1], ordered, -1).to(torch.int32)


def newest_source(sources: list[int], layer: int) -> int:
    """The source that serves `layer`: the last one at or before it."""
    earlier = [source for source in sources if source <= layer]
    assert earlier, f"layer {layer} is compressed but no source of {sources} comes before it"
    return max(earlier)


def new_latents(w: Weights, prefix: str, h: History, x: Tensor, ratio: int, eps: float) -> Tensor:
    """Latents [groups, head_dim] before rotation that the tokens x [n, d] complete."""
    kv = x @ w.plain(f"{prefix}.wkv.weight").T
    norm = w.plain(f"{prefix}.norm.weight")
    if ratio == 1:
        return rms_norm(bf16(kv), norm, eps)
    done = h.count(f"{prefix}.latent")
    kv = h.append(f"{prefix}.kv", f32(kv))
    score = h.append(f"{prefix}.score", f32(x @ w.plain(f"{prefix}.wgate.weight").T))
    whole = slice(done * ratio, len(kv) // ratio * ratio)
    share = score[whole].unflatten(0, (-1, ratio)).softmax(1)
    pooled = bf16((share * kv[whole].unflatten(0, (-1, ratio))).sum(1))
    return rms_norm(pooled, norm, eps)


def extend_compressed(w: Weights, layer: int, h: History, x: Tensor, c: SimpleNamespace) -> None:
    """Append the latents and index keys that a KV source owns."""
    ratio, prefix = c.compress_ratios[layer], f"layers.{layer}.attn"
    first = h.count(f"{prefix}.compressor.latent")
    latent = new_latents(w, f"{prefix}.compressor", h, x, ratio, c.rms_norm_eps)
    h.append(f"{prefix}.compressor.latent", latent)
    positions = torch.arange(first, first + len(latent)) * ratio
    frequencies = rope_frequencies(c, ratio)
    cached = fp4_round_trip_e4m3(rotate(latent, positions, frequencies))
    h.append(f"kv_of_source.{layer}", cached)
    key = linear(latent, w.plain(f"{prefix}.indexer.wk.weight"))
    key = rms_norm(key, w.plain(f"{prefix}.indexer.k_norm.weight"), c.rms_norm_eps)
    h.append(f"keys_of_source.{layer}", fp4_round_trip_e8m0(rotate(key, positions, frequencies)))


def index_scores(
    w: Weights, layer: int, keys: Tensor, x: Tensor, qr: Tensor, positions: Tensor, c
) -> Tensor:
    """score[i, t] = sum_h w_h relu(q_h . k_t), fp32, [n, compressed positions]."""
    prefix = f"layers.{layer}.attn.indexer"
    heads = linear_fp8(qr, w.fp8(f"{prefix}.wq_b")).unflatten(1, (c.index_n_heads, -1))
    q = fp4_round_trip_e8m0(rotate(heads, positions, rope_frequencies(c, c.compress_ratios[layer])))
    weight = linear(x, w.plain(f"{prefix}.weights_proj.weight"))
    weight = weight * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    dots = torch.einsum("nhd,td->nht", q, keys).relu()
    return f32(torch.einsum("nh,nht->nt", weight, dots))


def candidate_positions(scores: Tensor, visible: Tensor, c: SimpleNamespace) -> Tensor:
    """Mask [n, t] of whole candidate blocks; the newest visible position's block always stays."""
    n, total = scores.shape
    size = c.candidate_block_size
    missing = -total % size
    pad = torch.nn.functional.pad
    reachable = scores.masked_fill(~visible, -torch.inf)
    blocks = pad(reachable, (0, missing), value=-torch.inf).unflatten(1, (-1, size)).amax(-1)
    seen = visible.sum(-1)
    rows = (seen > 0).nonzero().flatten()
    blocks[rows, (seen[rows] - 1) // size] = torch.inf
    kept = top_indices(blocks, c.candidate_topk_blocks)
    return kept.repeat_interleave(size, 1)[:, :total]


def select(w, layer: int, h: History, x, qr, positions: Tensor, shared: dict, c, trace: dict):
    """Selected compressed positions of an index source as a mask, kept in `shared` for others."""
    ratio = c.compress_ratios[layer]
    keys = h.rows[f"keys_of_source.{newest_source(c.kv_source_layer_ids, layer)}"]
    scores = index_scores(w, layer, keys, x, qr, positions, c)
    visible = torch.arange(len(keys)) < ((positions + 1) // ratio)[:, None]
    allowed = visible
    if layer == c.candidate_source_layer_id:
        shared["candidates"] = candidate_positions(scores, visible, c)
        trace[f"candidates.{layer}"] = shared["candidates"]
    elif "candidates" in shared:
        allowed = visible & shared["candidates"]
    shared["selected"] = top_indices(scores.masked_fill(~allowed, -torch.inf), c.index_topk)
    trace[f"topk.{layer}"] = listed(shared["selected"], min(c.index_topk, len(keys)))


def attend(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """q [n, heads, dim] over shared keys-and-values kv [m, dim]; visible [n, m]; sink [heads].

    The sink logit joins the denominator only; a row that sees nothing gives zeros.
    """
    scores = torch.einsum("nhd,md->nhm", q, kv) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    largest = torch.maximum(scores.amax(-1), sink)[..., None]
    raised = (scores - largest).exp()
    total = raised.sum(-1, keepdim=True) + (sink[:, None] - largest).exp()
    return bf16(torch.einsum("nhm,md->nhd", raised, kv) / total)


def queries(w: Weights, prefix: str, x: Tensor, positions: Tensor, freq: Tensor, c):
    """Low-rank query [n, rank] and rotated heads [n, heads, head_dim]."""
    qr = linear_fp8(x, w.fp8(f"{prefix}.wq_a"))
    qr = rms_norm(qr, w.plain(f"{prefix}.q_norm.weight"), c.rms_norm_eps)
    heads = linear_fp8(qr, w.fp8(f"{prefix}.wq_b")).unflatten(1, (c.num_attention_heads, -1))
    return qr, rotate(heads, positions, freq)


def window_kv(w: Weights, prefix: str, x: Tensor, positions: Tensor, freq: Tensor, c) -> Tensor:
    """Window latent of x [n, d] as cached: normed, rotated, FP8 round trip, [n, head_dim]."""
    kv = linear_fp8(x, w.fp8(f"{prefix}.wkv"))
    kv = rms_norm(kv, w.plain(f"{prefix}.kv_norm.weight"), c.rms_norm_eps)
    return fp8_round_trip(rotate(kv, positions, freq))


def project_out(w: Weights, prefix: str, heads: Tensor, positions, freq: Tensor, c) -> Tensor:
    """Inverse rotation, grouped wo_a, wo_b: heads [n, heads, head_dim] to [n, d]."""
    groups = rotate(heads, positions, freq, inverse=True).flatten(1).unflatten(1, (c.o_groups, -1))
    wo_a = bf16(w.fp8(f"{prefix}.wo_a")).unflatten(0, (c.o_groups, -1))
    low = bf16(torch.einsum("ngk,grk->ngr", groups, wo_a)).flatten(1)
    return linear_fp8(low, w.fp8(f"{prefix}.wo_b"))


def attention(w, layer: int, h: History, x: Tensor, positions, shared: dict, c, trace: dict):
    """Attention sublayer of target layer `layer` on new tokens x [n, d]; returns [n, d]."""
    prefix, ratio = f"layers.{layer}.attn", c.compress_ratios[layer]
    freq = rope_frequencies(c, ratio)
    qr, q = queries(w, prefix, x, positions, freq, c)
    kv = h.append(f"{prefix}.window", window_kv(w, prefix, x, positions, freq, c))
    behind = positions[:, None] - torch.arange(len(kv))
    visible = (behind >= 0) & (behind < c.sliding_window)
    if ratio:
        source = newest_source(c.kv_source_layer_ids, layer)
        assert ratio == c.compress_ratios[source], f"layer {layer} reads source {source}"
        if layer == source:
            extend_compressed(w, layer, h, x, c)
        if layer in c.index_source_layer_ids:
            select(w, layer, h, x, qr, positions, shared, c, trace)
        kv = torch.cat((kv, h.rows[f"kv_of_source.{source}"]))
        visible = torch.cat((visible, shared["selected"]), 1)
    heads = attend(q, kv, visible, w.plain(f"{prefix}.attn_sink"))
    return project_out(w, prefix, heads, positions, freq, c)
