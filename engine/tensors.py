"""The tensors of a release checkpoint: what a configuration calls for, and what becomes of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.config import FP8_BLOCK, ModelConfig
from engine.errors import CheckpointError
from engine.tensorfile import listed

TEXT_ONLY = "not needed for text"
IMAGE_BIAS = "replaces the router's bias inside image spans, not needed for text"
NO_DRAFTS = "the recipe has no draft tokens"

_IMAGE_PREFIXES = ("vision.", "aligner.", "image_")


class TensorSpec(NamedTuple):
    """Stored dtype (safetensors name) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]


Named = Iterator[tuple[str, TensorSpec]]


@dataclass(frozen=True)
class Ledger:
    """Every name of a checkpoint: `used`, or `left_out` with the reason."""

    used: frozenset[str]
    left_out: Mapping[str, str]

    @property
    def summary(self) -> list[dict]:
        """What is left out, by reason and name pattern (numbers as `*`), with counts."""
        counts = Counter((why, re.sub(r"\d+", "*", name)) for name, why in self.left_out.items())
        return [
            {"reason": why, "names": pattern, "count": count}
            for (why, pattern), count in sorted(counts.items())
        ]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that the text model needs, draft blocks included (spec section 7)."""
    found = dict(_model_level(config))
    for layer in range(config.num_hidden_layers):
        found.update(_target_layer(config, layer))
    for block in range(config.num_nextn_predict_layers):
        found.update(_draft_block(config, block))
    return found


def optional_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Tensors that a checkpoint may hold beside the expected ones, all left out."""
    layers = {f"layers.{i}": config.n_routed_experts for i in range(config.num_hidden_layers)}
    drafts = {
        f"mtp.{i}": config.dspark_n_routed_experts for i in range(config.num_nextn_predict_layers)
    }
    return {
        f"{prefix}.ffn.gate.bias_vl": TensorSpec("F32", (experts,))
        for prefix, experts in {**layers, **drafts}.items()
    }


def account_for(names: Iterable[str], config: ModelConfig, draft_tokens: int) -> Ledger:
    """Sort the names of a checkpoint into used and left out.

    Raises CheckpointError for names that the format does not know and for needed ones that lack.
    """
    expected, optional = expected_tensors(config), optional_tensors(config)
    used, left_out, unknown = set(), {}, []
    for name in names:
        if name in expected:
            if name.startswith("mtp.") and not draft_tokens:
                left_out[name] = NO_DRAFTS
            else:
                used.add(name)
        elif name in optional:
            left_out[name] = IMAGE_BIAS
        elif name.startswith(_IMAGE_PREFIXES):
            left_out[name] = TEXT_ONLY
        else:
            unknown.append(name)
    missing = [name for name in expected if name not in used and name not in left_out]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(expected)} tensors: {listed(missing)}"
        )
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds {len(unknown)} tensors that this configuration has no use "
            f"for: {listed(unknown)}; accepted besides the text model's: "
            f"{', '.join(prefix + '*' for prefix in _IMAGE_PREFIXES)}, layers.*.ffn.gate.bias_vl"
        )
    return Ledger(frozenset(used), left_out)


def _bf16(name: str, *shape: int) -> Named:
    yield f"{name}.weight", TensorSpec("BF16", shape)


def _fp8(name: str, rows: int, columns: int) -> Named:
    """An FP8 weight with one scale per 32 x 32 block, the last ones partial."""
    yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns))
    grid = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    yield f"{name}.scale", TensorSpec("F8_E8M0", grid)


def _fp4(name: str, rows: int, columns: int) -> Named:
    """An FP4 weight, two to a byte, with one scale per row and 32 columns."""
    yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, columns // FP8_BLOCK))


def _model_level(c: ModelConfig) -> Named:
    yield from _bf16("embed", c.vocab_size, c.hidden_size)
    yield from _bf16("head", c.vocab_size, c.hidden_size)
    yield from _bf16("norm", c.hidden_size)


def _target_layer(c: ModelConfig, layer: int) -> Named:
    prefix = f"layers.{layer}"
    yield from _layer(c, prefix, c.n_routed_experts)
    if layer in c.kv_source_layer_ids:
        yield from _bf16(f"{prefix}.attn.compressor.wkv", c.head_dim, c.hidden_size)
        yield from _bf16(f"{prefix}.attn.compressor.norm", c.head_dim)
        if c.ratio(layer) > 1:
            yield from _bf16(f"{prefix}.attn.compressor.wgate", c.head_dim, c.hidden_size)
        yield from _bf16(f"{prefix}.attn.indexer.wk", c.index_head_dim, c.head_dim)
        yield from _bf16(f"{prefix}.attn.indexer.k_norm", c.index_head_dim)
    if layer in c.index_source_layer_ids:
        rows = c.index_n_heads * c.index_head_dim
        yield from _fp8(f"{prefix}.attn.indexer.wq_b", rows, c.q_lora_rank)
        yield from _bf16(f"{prefix}.attn.indexer.weights_proj", c.index_n_heads, c.hidden_size)
    if layer in c.engram_layer_ids:
        yield from _engram(c, f"{prefix}.engram", layer)


def _layer(c: ModelConfig, prefix: str, experts: int) -> Named:
    """What target layers and draft blocks have in common."""
    streams_width = c.hc_mult * c.hidden_size
    for part in ("attn", "ffn"):
        yield from _bf16(f"{prefix}.{part}_norm", c.hidden_size)
        yield f"{prefix}.hc_{part}_fn", TensorSpec("F32", (c.mix_width, streams_width))
        yield f"{prefix}.hc_{part}_base", TensorSpec("F32", (c.mix_width,))
        yield f"{prefix}.hc_{part}_scale", TensorSpec("F32", (3,))
    yield from _attention(c, f"{prefix}.attn")
    yield from _experts(c, f"{prefix}.ffn", experts)


def _attention(c: ModelConfig, prefix: str) -> Named:
    yield from _fp8(f"{prefix}.wq_a", c.q_lora_rank, c.hidden_size)
    yield from _bf16(f"{prefix}.q_norm", c.q_lora_rank)
    yield from _fp8(f"{prefix}.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
    yield from _fp8(f"{prefix}.wkv", c.head_dim, c.hidden_size)
    yield from _bf16(f"{prefix}.kv_norm", c.head_dim)
    yield f"{prefix}.attn_sink", TensorSpec("F32", (c.num_attention_heads,))
    group_rows = c.o_groups * c.o_lora_rank
    yield from _fp8(f"{prefix}.wo_a", group_rows, c.heads_per_group * c.head_dim)
    yield from _fp8(f"{prefix}.wo_b", c.hidden_size, group_rows)


def _experts(c: ModelConfig, prefix: str, experts: int) -> Named:
    width, inner = c.hidden_size, c.moe_intermediate_size
    yield from _bf16(f"{prefix}.gate", experts, width)
    yield f"{prefix}.gate.bias", TensorSpec("F32", (experts,))
    shapes = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
    for part, shape in shapes.items():
        yield from _fp8(f"{prefix}.shared_experts.{part}", *shape)
        for expert in range(experts):
            yield from _fp4(f"{prefix}.experts.{expert}.{part}", *shape)


def _engram(c: ModelConfig, prefix: str, layer: int) -> Named:
    rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
    yield f"{prefix}.embed.weight", TensorSpec("F8_E4M3", (rows, c.engram_head_dim))
    row_scales = -(-c.engram_head_dim // FP8_BLOCK)
    yield f"{prefix}.embed.scale", TensorSpec("F8_E8M0", (rows, row_scales))
    table_width = c.engram_buckets * c.engram_head_dim
    yield from _fp8(f"{prefix}.wkv", (c.hc_mult + 1) * c.hidden_size, table_width)
    for name in ("q_weight", "k_weight"):
        yield f"{prefix}.{name}", TensorSpec("BF16", (c.hc_mult, c.hidden_size))


def _draft_block(c: ModelConfig, block: int) -> Named:
    prefix = f"mtp.{block}"
    yield from _layer(c, prefix, c.dspark_n_routed_experts)
    if block == 0:
        width = len(c.dspark_target_layer_ids) * c.hidden_size
        yield from _fp8(f"{prefix}.main_proj", c.hidden_size, width)
        yield from _bf16(f"{prefix}.main_norm", c.hidden_size)
    if block == c.num_nextn_predict_layers - 1:
        yield from _bf16(f"{prefix}.norm", c.hidden_size)
        yield from _bf16(f"{prefix}.markov_head.embed", c.vocab_size, c.dspark_markov_rank)
        yield from _bf16(f"{prefix}.markov_head.head", c.vocab_size, c.dspark_markov_rank)
        width = c.hidden_size + c.dspark_markov_rank
        yield from _bf16(f"{prefix}.confidence_head.proj", 1, width)
