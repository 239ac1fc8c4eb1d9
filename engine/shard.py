"""Who owns what at N ranks: uneven where the model does not divide, balanced in bytes, no padding.

A `Deal` holds one rank's half-open ranges; `rank_weights` turns it into the list of arrays of the
rank's package, each with the slices of checkpoint tensors that fill it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.config import FP8_BLOCK, ModelConfig
from engine.engram import bucket_primes
from engine.recipe import Recipe

Range = tuple[int, int]

ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class Deal:
    """One rank's share, as half-open ranges.

    groups        output groups with all their heads
    out_rows      rows of the output projection, in blocks of 32; empty where it is dealt by groups
    experts       routed experts of the target layers
    draft_experts routed experts of the draft blocks
    shared        intermediate channels of the shared experts, in blocks of 32
    engram_rows   output rows of the Engram projection, in blocks of 32
    buckets       Engram hash buckets
    vocab         vocabulary rows
    """

    groups: Range = (0, 0)
    out_rows: Range = (0, 0)
    experts: Range = (0, 0)
    draft_experts: Range = (0, 0)
    shared: Range = (0, 0)
    engram_rows: Range = (0, 0)
    buckets: Range = (0, 0)
    vocab: Range = (0, 0)

    def heads(self, config: ModelConfig) -> Range:
        """The attention heads of the rank's groups."""
        per_group = config.heads_per_group
        return self.groups[0] * per_group, self.groups[1] * per_group

    def count(self, part: str) -> int:
        """How many units of a part the rank owns."""
        first, past = getattr(self, part)
        return past - first


@dataclass(frozen=True)
class Piece:
    """`source[rows, columns]` of the checkpoint, at `index` of a stacked array (or all of it)."""

    source: str
    rows: Range | None = None
    columns: Range | None = None
    index: int | None = None


@dataclass(frozen=True)
class Weight:
    """One array of a rank's package; `resident` ones go to the device, others stay on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    resident: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def deal_ranks(
    config: ModelConfig, recipe: Recipe, other_bytes: Sequence[int] | None = None
) -> tuple[Deal, ...]:
    """Deal the model to `recipe.ranks` ranks so that their bytes come out level.

    other_bytes: bytes of each rank that are no weights (arena, states), to be levelled as well.
    Whole units are dealt evenly with the remainder going to the lightest ranks; draft experts,
    then single vocabulary rows, fill up what is still uneven.
    """
    ranks = recipe.ranks
    loads = [0] * ranks
    counts: dict[str, list[int]] = {}
    for part, units in _parts(config):
        unit_bytes = _unit_bytes(config, recipe, part)
        if part == "draft_experts":
            # Not earlier: the other bytes follow from the groups, which must stay where they are.
            loads = [a + b for a, b in zip(loads, other_bytes or [0] * ranks, strict=True)]
        if part in ("draft_experts", "vocab"):
            counts[part] = _level(units, unit_bytes, loads)
        else:
            counts[part] = _even(units, loads)
        loads = [a + unit_bytes * n for a, n in zip(loads, counts[part], strict=True)]
    ranges = {part: _ranges(numbers) for part, numbers in counts.items()}
    return tuple(Deal(**{p: ranges[p][rank] for p in ranges}) for rank in range(ranks))


def _parts(config: ModelConfig) -> list[tuple[str, int]]:
    engram = bool(config.engram_layer_ids)
    return [
        ("groups", config.o_groups),
        ("out_rows", 0 if config.groups_fill_blocks else config.hidden_size // FP8_BLOCK),
        ("experts", config.n_routed_experts),
        ("shared", config.moe_intermediate_size // FP8_BLOCK),
        ("engram_rows", engram * (config.hc_mult + 1) * config.hidden_size // FP8_BLOCK),
        ("buckets", engram * config.engram_buckets),
        ("draft_experts", config.dspark_n_routed_experts),
        ("vocab", config.vocab_size),
    ]


def _unit_bytes(config: ModelConfig, recipe: Recipe, part: str) -> int:
    """Resident bytes that one more unit of a part costs."""
    nothing = Deal()
    one = replace(nothing, **{part: (0, 1)})
    return resident_bytes(config, recipe, one) - resident_bytes(config, recipe, nothing)


def resident_bytes(config: ModelConfig, recipe: Recipe, deal: Deal) -> int:
    """Bytes of weights that a rank keeps on its device."""
    return sum(w.nbytes for w in rank_weights(config, recipe, deal) if w.resident)


def _even(units: int, loads: Sequence[int]) -> list[int]:
    ranks = len(loads)
    counts = [units // ranks] * ranks
    lightest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
    for rank in lightest_first[: units % ranks]:
        counts[rank] += 1
    return counts


def _level(units: int, unit_bytes: int, loads: Sequence[int]) -> list[int]:
    """Deal units so that load + units is as level as whole units allow (water filling)."""
    ranks = len(loads)
    if unit_bytes == 0:
        return _even(units, loads)
    counts = [0] * ranks
    by_load = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
    for filled in range(ranks, 0, -1):
        lowest = by_load[:filled]
        level = (sum(loads[r] for r in lowest) + units * unit_bytes) / filled
        if level >= loads[lowest[-1]]:
            for rank in lowest:
                counts[rank] = int((level - loads[rank]) // unit_bytes)
            break
    for _ in range(units - sum(counts)):
        rank = min(range(ranks), key=lambda r: (loads[r] + counts[r] * unit_bytes, r))
        counts[rank] += 1
    return counts


def _ranges(counts: Sequence[int]) -> list[Range]:
    ranges, first = [], 0
    for count in counts:
        ranges.append((first, first + count))
        first += count
    return ranges


def rank_weights(config: ModelConfig, recipe: Recipe, deal: Deal) -> list[Weight]:
    """Every array of one rank's package, in the order of the layers."""
    build = _Weights(config, deal)
    found = list(build.model_level())
    for layer in range(config.num_hidden_layers):
        found.extend(build.block(f"layers.{layer}", layer))
    if recipe.mtp_draft_tokens:
        for block in range(config.num_nextn_predict_layers):
            found.extend(build.draft_block(block))
    return found


class _Weights:
    """Names, shapes and slices of one rank's arrays (spec section 7)."""

    def __init__(self, config: ModelConfig, deal: Deal) -> None:
        self.config = config
        self.deal = deal

    def model_level(self) -> Iterator[Weight]:
        width = self.config.hidden_size
        for name in ("embed.weight", "head.weight"):
            yield self.rows(name, "BF16", self.deal.vocab, width)
        yield self.whole("norm.weight", "BF16", (width,))

    def whole(self, name: str, dtype: str, shape: tuple[int, ...]) -> Weight:
        return Weight(name, dtype, shape, (Piece(name),))

    def rows(self, name: str, dtype: str, rows: Range, *rest: int) -> Weight:
        return Weight(name, dtype, (rows[1] - rows[0], *rest), (Piece(name, rows),))

    def fp8(
        self, name: str, rows: Range, width: int, columns: Range | None = None
    ) -> Iterator[Weight]:
        """A slice of an FP8 weight and of the scale blocks it touches; ranges in items."""
        first, past = columns or (0, width)
        for suffix, dtype, unit in (("weight", "F8_E4M3", 1), ("scale", "F8_E8M0", FP8_BLOCK)):
            row_range = rows[0] // unit, -(-rows[1] // unit)
            column_range = first // unit, -(-past // unit)
            shape = (row_range[1] - row_range[0], column_range[1] - column_range[0])
            source = f"{name}.{suffix}"
            piece = Piece(source, row_range, column_range if columns else None)
            yield Weight(source, dtype, shape, (piece,))

    def block(self, prefix: str, layer: int) -> Iterator[Weight]:
        c = self.config
        yield from self.norms_and_mixes(prefix)
        if layer in c.engram_layer_ids:
            yield from self.engram(f"{prefix}.engram", layer)
        yield from self.attention(f"{prefix}.attn")
        if layer in c.kv_source_layer_ids:
            yield from self.compressor(f"{prefix}.attn", c.ratio(layer))
        if layer in c.index_source_layer_ids:
            yield from self.index_queries(f"{prefix}.attn.indexer")
        yield from self.experts(f"{prefix}.ffn", c.n_routed_experts, self.deal.experts)

    def norms_and_mixes(self, prefix: str) -> Iterator[Weight]:
        c = self.config
        for part in ("attn", "ffn"):
            yield self.whole(f"{prefix}.{part}_norm.weight", "BF16", (c.hidden_size,))
            yield self.whole(
                f"{prefix}.hc_{part}_fn", "F32", (c.mix_width, c.hc_mult * c.hidden_size)
            )
            yield self.whole(f"{prefix}.hc_{part}_base", "F32", (c.mix_width,))
            yield self.whole(f"{prefix}.hc_{part}_scale", "F32", (3,))

    def attention(self, prefix: str) -> Iterator[Weight]:
        c = self.config
        heads, groups = self.deal.heads(c), self.deal.groups
        group_rows = groups[0] * c.o_lora_rank, groups[1] * c.o_lora_rank
        group_width = c.heads_per_group * c.head_dim
        yield from self.fp8(f"{prefix}.wq_a", (0, c.q_lora_rank), c.hidden_size)
        yield self.whole(f"{prefix}.q_norm.weight", "BF16", (c.q_lora_rank,))
        head_rows = heads[0] * c.head_dim, heads[1] * c.head_dim
        yield from self.fp8(f"{prefix}.wq_b", head_rows, c.q_lora_rank)
        yield from self.fp8(f"{prefix}.wkv", (0, c.head_dim), c.hidden_size)
        yield self.whole(f"{prefix}.kv_norm.weight", "BF16", (c.head_dim,))
        yield self.rows(f"{prefix}.attn_sink", "F32", heads)
        yield from self.fp8(f"{prefix}.wo_a", group_rows, group_width)
        rows, columns = (0, c.hidden_size), group_rows
        if not c.groups_fill_blocks:
            # A block of 32 inputs that spans two groups needs both: whole inputs, dealt outputs.
            rows, columns = tuple(FP8_BLOCK * block for block in self.deal.out_rows), None
        yield from self.fp8(f"{prefix}.wo_b", rows, c.o_groups * c.o_lora_rank, columns)

    def compressor(self, prefix: str, ratio: int) -> Iterator[Weight]:
        c = self.config
        shape = (c.head_dim, c.hidden_size)
        yield self.whole(f"{prefix}.compressor.wkv.weight", "BF16", shape)
        if ratio > 1:
            yield self.whole(f"{prefix}.compressor.wgate.weight", "BF16", shape)
        yield self.whole(f"{prefix}.compressor.norm.weight", "BF16", (c.head_dim,))
        yield self.whole(f"{prefix}.indexer.wk.weight", "BF16", (c.index_head_dim, c.head_dim))
        yield self.whole(f"{prefix}.indexer.k_norm.weight", "BF16", (c.index_head_dim,))

    def index_queries(self, prefix: str) -> Iterator[Weight]:
        c = self.config
        rows = 0, c.index_n_heads * c.index_head_dim
        yield from self.fp8(f"{prefix}.wq_b", rows, c.q_lora_rank)
        yield self.whole(f"{prefix}.weights_proj.weight", "BF16", (c.index_n_heads, c.hidden_size))

    def experts(self, prefix: str, total: int, owned: Range) -> Iterator[Weight]:
        c = self.config
        yield self.whole(f"{prefix}.gate.weight", "BF16", (total, c.hidden_size))
        yield self.whole(f"{prefix}.gate.bias", "F32", (total,))
        inner, width = c.moe_intermediate_size, c.hidden_size
        shapes = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
        for part, (rows, columns) in shapes.items():
            for suffix, dtype, packing in (("weight", "I8", 2), ("scale", "F8_E8M0", FP8_BLOCK)):
                pieces = tuple(
                    Piece(f"{prefix}.experts.{expert}.{part}.{suffix}", index=slot)
                    for slot, expert in enumerate(range(*owned))
                )
                shape = (len(pieces), rows, columns // packing)
                yield Weight(f"{prefix}.experts.{part}.{suffix}", dtype, shape, pieces)
        channels = self.deal.shared[0] * FP8_BLOCK, self.deal.shared[1] * FP8_BLOCK
        yield from self.fp8(f"{prefix}.shared_experts.w1", channels, width)
        yield from self.fp8(f"{prefix}.shared_experts.w3", channels, width)
        yield from self.fp8(f"{prefix}.shared_experts.w2", (0, width), inner, channels)

    def engram(self, prefix: str, layer: int) -> Iterator[Weight]:
        c = self.config
        primes = bucket_primes(c)[c.engram_layer_ids.index(layer)]
        first, past = self.deal.buckets
        rows = sum(primes[:first]), sum(primes[:past])
        for suffix, dtype, unit in (("weight", "F8_E4M3", 1), ("scale", "F8_E8M0", FP8_BLOCK)):
            source = f"{prefix}.embed.{suffix}"
            shape = (rows[1] - rows[0], -(-c.engram_head_dim // unit))
            yield Weight(source, dtype, shape, (Piece(source, rows),), resident=False)
        out = self.deal.engram_rows[0] * FP8_BLOCK, self.deal.engram_rows[1] * FP8_BLOCK
        yield from self.fp8(f"{prefix}.wkv", out, c.engram_buckets * c.engram_head_dim)
        for name in ("q_weight", "k_weight"):
            yield self.whole(f"{prefix}.{name}", "BF16", (c.hc_mult, c.hidden_size))

    def draft_block(self, block: int) -> Iterator[Weight]:
        c = self.config
        prefix = f"mtp.{block}"
        if block == 0:
            width = len(c.dspark_target_layer_ids) * c.hidden_size
            yield from self.fp8(f"{prefix}.main_proj", (0, c.hidden_size), width)
            yield self.whole(f"{prefix}.main_norm.weight", "BF16", (c.hidden_size,))
        yield from self.norms_and_mixes(prefix)
        yield from self.attention(f"{prefix}.attn")
        owned = self.deal.draft_experts
        yield from self.experts(f"{prefix}.ffn", c.dspark_n_routed_experts, owned)
        if block == c.num_nextn_predict_layers - 1:
            yield self.whole(f"{prefix}.norm.weight", "BF16", (c.hidden_size,))
            for name in ("markov_head.embed.weight", "markov_head.head.weight"):
                yield self.rows(f"{prefix}.{name}", "BF16", self.deal.vocab, c.dspark_markov_rank)
            width = c.hidden_size + c.dspark_markov_rank
            yield self.whole(f"{prefix}.confidence_head.proj.weight", "BF16", (1, width))
