"""Independent float64 oracle: the specification's forward in canonical numerics, bit for bit.

Every op reads stored values, computes in float64 and rounds once. It shares no code with `engine/`
and does not know how an engine plans, shards, batches or caches; it is slow on purpose.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from suites.numerics import oracle_attention as attention_part
from suites.numerics.oracle_attention import History
from suites.numerics.oracle_draft import Draft, draft, extend_rings, lowest_argmax
from suites.numerics.oracle_formats import bf16, f32
from suites.numerics.oracle_layers import (
    coefficients,
    collapse,
    engram,
    engram_hashes,
    first_streams,
    mixture,
    rms_norm,
    update_streams,
)
from suites.numerics.oracle_weights import Weights, read_config


def block(w: Weights, c: SimpleNamespace, prefix: str, streams: Tensor, mix: Tensor, attention):
    """One block with hyper-connections; `attention` maps the normed input to the sublayer output.

    Returns the streams [n, hc, d], the mix [n, hc] handed to the next block, and what the goldens
    keep of the block under their names without the layer number.
    """
    draft = prefix.startswith("mtp.")
    active = c.dspark_num_experts_per_tok if draft else c.num_experts_per_tok
    attn_pre, post, comb = coefficients(w, f"{prefix}.hc_attn", streams, c)
    x = rms_norm(collapse(mix, streams), w.plain(f"{prefix}.attn_norm.weight"), c.rms_norm_eps)
    attn_out = attention(x)
    streams = update_streams(streams, attn_out, post, comb)
    ffn_pre, post, comb = coefficients(w, f"{prefix}.hc_ffn", streams, c)
    x = rms_norm(collapse(attn_pre, streams), w.plain(f"{prefix}.ffn_norm.weight"), c.rms_norm_eps)
    ffn_out = mixture(w, f"{prefix}.ffn", x, active, c)
    streams = update_streams(streams, ffn_out, post, comb)
    kept = {"attn_out": attn_out, "ffn_out": ffn_out, "resid": streams, "pre_mix": ffn_pre}
    return streams, ffn_pre, kept


def target_forward(w: Weights, c: SimpleNamespace, h: History, ids: list[int], fold) -> dict:
    """Run new tokens through the target model; returns the trace, float64 carriers."""
    start = len(h.tokens)
    h.tokens += ids
    positions = torch.arange(start, start + len(ids))
    trace: dict[str, Tensor] = {"input_ids": torch.tensor(ids)}
    if c.engram_layer_ids:
        trace["engram_hash_ids"] = engram_hashes([fold(token) for token in h.tokens], start, c)
    streams, mix = first_streams(w.plain("embed.weight")[ids], c.hc_mult)
    shared: dict[str, Tensor] = {}
    entering: dict[int, Tensor] = {}
    for layer in range(c.num_hidden_layers):
        if layer in c.engram_layer_ids:
            rows = trace["engram_hash_ids"][:, c.engram_layer_ids.index(layer)]
            streams = trace[f"engram_out.{layer}"] = engram(w, layer, streams, rows, c)
        entering[layer] = streams

        def attention(x: Tensor, layer: int = layer) -> Tensor:
            return attention_part.attention(w, layer, h, x, positions, shared, c, trace)

        streams, mix, kept = block(w, c, f"layers.{layer}", streams, mix, attention)
        trace.update({f"{name}.{layer}": value for name, value in kept.items()})
    if c.num_nextn_predict_layers:
        means = [bf16(entering[layer].mean(1)) for layer in c.dspark_target_layer_ids]
        trace["main_hidden"] = torch.cat(means, 1)
    x = rms_norm(collapse(mix, streams), w.plain("norm.weight"), c.rms_norm_eps)
    trace["logits_all"] = f32(x @ w.plain("head.weight").T)
    trace["logits"] = trace["logits_all"][-1]
    return trace


class Oracle:
    """One checkpoint, ready to run; `fold` maps a token id to its Engram id (default: identity)."""

    def __init__(self, directory: Path | str, fold=None) -> None:
        self.weights = Weights(Path(directory))
        self.config = read_config(Path(directory))
        c = self.config
        folded = c.engram_compressed_vocab_size
        if fold is None and c.engram_layer_ids and folded < c.vocab_size:
            raise ValueError(
                f"engram_compressed_vocab_size {folded} is below vocab_size {c.vocab_size}: pass "
                "fold, since the identity is right only where nothing is folded"
            )
        self.fold = fold or (lambda token: token)

    def extend(self, h: History, ids: list[int]) -> dict[str, Tensor]:
        """Run `ids` after what `h` has seen (any chunking gives the same bits); returns the trace.

        Keys and shapes are those of the goldens, n = len(ids); values are float64 carriers.
        """
        if not ids or not all(0 <= token < self.config.vocab_size for token in ids):
            raise ValueError(f"token ids {ids}: expected some, each below {self.config.vocab_size}")
        trace = target_forward(self.weights, self.config, h, ids, self.fold)
        if self.config.num_nextn_predict_layers:
            extend_rings(self.weights, self.config, h, trace["main_hidden"])
        return trace

    def prefill(self, ids: list[int]) -> dict[str, Tensor]:
        return self.extend(History(), ids)

    def draft(self, h: History, token: int) -> Draft:
        return draft(self.weights, self.config, h, token, block)

    def greedy(self, ids: list[int], steps: int) -> dict[str, Tensor]:
        """Greedy continuation as the goldens hold it: tokens [steps + 1], logits [steps, vocab].

        With draft blocks also draft_ids, draft_logits and confidence, one row per step.
        """
        h = History()
        tokens = [lowest_argmax(self.extend(h, ids)["logits"])]
        logits, drafts = [], []
        for _ in range(steps):
            logits.append(self.extend(h, tokens[-1:])["logits"])
            tokens.append(lowest_argmax(logits[-1]))
            if self.config.num_nextn_predict_layers:
                drafts.append(self.draft(h, tokens[-1]))
        out = {"tokens": torch.tensor(tokens), "logits": torch.stack(logits)}
        if drafts:
            out["draft_ids"] = torch.tensor([d.ids for d in drafts])
            out["draft_logits"] = torch.stack([d.logits for d in drafts])
            out["confidence"] = torch.stack([d.confidence for d in drafts])
        return out
