"""Draft blocks of the oracle: ring of the target's hidden states, Markov head, confidence.

The ring is a full history of which the last window is read. Acceptance and rollback are unknown
here: the caller appends main hidden rows of accepted positions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from suites.numerics.oracle_attention import History, attend, project_out, queries, window_kv
from suites.numerics.oracle_formats import f32
from suites.numerics.oracle_layers import (
    collapse,
    first_streams,
    linear_fp8,
    rms_norm,
    rope_frequencies,
)
from suites.numerics.oracle_weights import Weights


@dataclass(frozen=True)
class Draft:
    """ids [1 + block] (column 0 is the token just chosen), logits [block, vocab], confidence."""

    ids: list[int]
    logits: Tensor
    confidence: Tensor


def extend_rings(w: Weights, c: SimpleNamespace, h: History, main_hidden: Tensor) -> None:
    """Write the window KV of newly accepted positions (main_hidden [n, k d]) for every block."""
    start = h.count("mtp.0.ring")
    positions = torch.arange(start, start + len(main_hidden))
    main_x = linear_fp8(main_hidden, w.fp8("mtp.0.main_proj"))
    main_x = rms_norm(main_x, w.plain("mtp.0.main_norm.weight"), c.rms_norm_eps)
    freq = rope_frequencies(c, 0)
    for m in range(c.num_nextn_predict_layers):
        kv = window_kv(w, f"mtp.{m}.attn", main_x, positions, freq, c)
        h.append(f"mtp.{m}.ring", kv)


def draft_attention(w: Weights, m: int, h: History, x: Tensor, positions: Tensor, c) -> Tensor:
    """Every query sees the ring's last window and all keys of the draft input itself."""
    prefix, freq = f"mtp.{m}.attn", rope_frequencies(c, 0)
    _, q = queries(w, prefix, x, positions, freq, c)
    own = window_kv(w, prefix, x, positions, freq, c)
    kv = torch.cat((h.rows[f"mtp.{m}.ring"][-c.sliding_window :], own))
    seen = torch.ones(len(x), len(kv), dtype=torch.bool)
    heads = attend(q, kv, seen, w.plain(f"{prefix}.attn_sink"))
    return project_out(w, prefix, heads, positions, freq, c)


def lowest_argmax(logits: Tensor) -> int:
    """Index of the largest logit; a tie goes to the lower index."""
    return int((logits == logits.max()).nonzero()[0])


def draft(w: Weights, c: SimpleNamespace, h: History, token: int, block) -> Draft:
    """Draft after the target has run all of `h` and chosen `token` for the next position.

    `block` is the block function of the target model.
    """
    size, last = c.dspark_block_size, c.num_nextn_predict_layers - 1
    ring = h.count("mtp.0.ring")
    positions = torch.arange(ring, ring + size)
    ids = [token] + [c.dspark_noise_token_id] * (size - 1)
    streams, mix = first_streams(w.plain("embed.weight")[ids], c.hc_mult)
    for m in range(c.num_nextn_predict_layers):

        def attention(x: Tensor, m: int = m) -> Tensor:
            return draft_attention(w, m, h, x, positions, c)

        streams, mix, _ = block(w, c, f"mtp.{m}", streams, mix, attention)
    collapsed = collapse(mix, streams)
    normed = rms_norm(collapsed, w.plain(f"mtp.{last}.norm.weight"), c.rms_norm_eps)
    return markov_head(w, c, f"mtp.{last}", collapsed, normed, token)


def markov_head(w: Weights, c, prefix: str, collapsed: Tensor, normed: Tensor, token: int) -> Draft:
    """Left to right: add the Markov product of the previous id, pick, go on."""
    ids, logits, confidence = [token], [], []
    base = f32(normed @ w.plain("head.weight").T)
    for i in range(c.dspark_block_size):
        previous = w.plain(f"{prefix}.markov_head.embed.weight")[ids[-1]]
        markov = f32(w.plain(f"{prefix}.markov_head.head.weight") @ previous)
        logits.append(f32(base[i] + markov))
        seen = torch.cat((collapsed[i], previous))
        confidence.append(f32(w.plain(f"{prefix}.confidence_head.proj.weight") @ seen))
        ids.append(lowest_argmax(logits[-1]))
    return Draft(ids, torch.stack(logits), torch.cat(confidence))
