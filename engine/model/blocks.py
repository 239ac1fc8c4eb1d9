"""Lowers one block: hyper-connections around attention and experts (spec 2 to 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engine.config import FP8_BLOCK, ModelConfig
from engine.ir import ITEM_BYTES, Dim
from engine.model.builder import IR_DTYPE, Builder
from engine.model.layout import KV_POOL, CacheLayout, packed_fp8
from engine.recipe import Recipe
from engine.shard import Deal, Weight
from engine.tiling import (
    FEW_SLOTS,
    GEMM_ROWS,
    GEMM_WEIGHT_ITEMS,
    INDEX_KEYS,
    INDEX_ROWS,
    MIX_ROWS,
    REDUCE_ROWS,
)

META = ("positions", "seq_of", "first_row", "start", "slots", "pages")


class Lowering:
    """What all blocks of one graph share.

    split_rows: the residual stream and all that is computed row by row is dealt to the ranks by
    rows; otherwise every rank holds all rows and partial sums are added on every rank.
    """

    def __init__(
        self,
        name: str,
        limits: Mapping[str, int],
        config: ModelConfig,
        recipe: Recipe,
        deals: Sequence[Deal],
        rank: int,
        weights: Mapping[str, Weight],
        split_rows: bool,
    ) -> None:
        self.b = Builder(name, limits)
        self.c = config
        self.recipe = recipe
        self.deals = deals
        self.deal = deals[rank]
        self.weights = weights
        self.split = split_rows
        self.shared = recipe.ranks > 1
        self.layout = CacheLayout(config, recipe)
        self.own: Dim = "O" if split_rows else "T"
        self.rows_max = limits["T"]
        self.own_rows = "own" if split_rows else "all"

    # Tensors -------------------------------------------------------------------------------

    def weight(self, name: str) -> str:
        """Declare a weight of this rank."""
        w = self.weights[name]
        kind = "weight" if w.resident else "io"
        return self.b.tensor(name, kind, IR_DTYPE[w.dtype], w.shape)

    def meta(self, *names: str) -> list[str]:
        """Declare the inputs that describe the step."""
        shapes: Mapping[str, tuple[str, tuple[Dim, ...]]] = {
            "ids": ("i64", ("T",)),
            "positions": ("i64", ("T",)),
            "seq_of": ("i32", ("T",)),
            "ngrams": ("i64", ("T", self.c.engram_max_ngram_size)),
            "first_row": ("i32", ("S1",)),
            "start": ("i64", ("S",)),
            "slots": ("i32", ("S",)),
            "pages": ("i32", ("S", self.layout.pages_per_sequence_max)),
        }
        return [self.b.tensor(n, "io", *shapes[n]) for n in names]

    def state(self, name: str, dtype: str, *shape: Dim) -> str:
        """Declare a state."""
        return self.b.tensor(name, "state", dtype, shape)

    def pool(self) -> str:
        """Declare the paged cache."""
        return self.state(KV_POOL, "u8", "P", self.layout.page_bytes)

    def ring(self, prefix: str) -> str:
        """Declare the window ring of a block."""
        width = packed_fp8(self.c.head_dim)
        return self.state(f"{prefix}.ring", "u8", "slots_max", self.layout.ring_rows, width)

    # Row-wise pieces -----------------------------------------------------------------------

    def norm(self, name: str, x: str, weight: str, width: int, rows: Dim) -> str:
        out = self.b.temp(name, "bf16", rows, width)
        self.b.op(name, "norm", (x, self.weight(weight)), (out,), eps=self.c.rms_norm_eps)
        return out

    def pack(self, name: str, x: str, width: int, rows: Dim) -> str:
        out = self.b.temp(name, "u8", rows, packed_fp8(width))
        self.b.op(name, "pack_fp8", (x,), (out,))
        return out

    def rope(self, name: str, x: str, table: str, head_width: int, rows: str, inverse=False) -> str:
        out = self.b.updated(name, x)
        self.b.op(
            name,
            "rope",
            (x, table),
            (out,),
            inplace=((x, out),),
            width=head_width,
            inverse=inverse,
            rows=rows,
        )
        return out

    def linear(
        self,
        name: str,
        x: str,
        weight: str,
        dtype: str,
        rows: Dim,
        *,
        source: str = "packed",
        shift: int = 0,
        tile: int | None = None,
        after: str | None = None,
        kind: str = "temp",
    ) -> str:
        """x . w^T with one rounding to `dtype`; `source` tells how x is stored (packed or bf16).

        tile: only the rows of that tile of REDUCE_ROWS; after: an op on another stream to wait for.
        """
        fp8 = weight + ".scale" in self.weights
        names = [f"{weight}.weight", f"{weight}.scale"] if fp8 else [f"{weight}.weight"]
        out_width, width = self.weights[names[0]].shape
        out = self.b.tensor(name, kind, dtype, (rows, out_width))
        tile_rows = min(GEMM_ROWS, self.rows_max)
        weight_rows = max(1, min(out_width, GEMM_WEIGHT_ITEMS // max(1, width)))
        scratch = [
            self.b.temp(f"{name}.x64", "f64", tile_rows, width),
            self.b.temp(f"{name}.w64", "f64", weight_rows, width),
            self.b.temp(f"{name}.y64", "f64", tile_rows, weight_rows),
        ]
        params: dict[str, object] = {"source": source, "shift": shift}
        if tile is not None:
            params |= {"tile": tile, "tile_rows": REDUCE_ROWS}
        inputs = (x, *(self.weight(n) for n in names))
        self.b.op(name, "linear", inputs, (out,), scratch=scratch, after=after, **params)
        return out

    # Between ranks -------------------------------------------------------------------------

    def gather_rows(self, name: str, tensors: list[str]) -> list[str]:
        """Every rank's rows of some tensors, on every rank; nothing to do unless rows are split."""
        if not self.split:
            return tensors
        outs = []
        for x in tensors:
            t = self.b.declared(x)
            outs.append(self.b.temp(f"{x}.all", t.dtype, "T", *t.shape[1:]))
        self.gather_rows_into(name, tensors, outs)
        return outs

    def gather_rows_into(self, name: str, tensors: list[str], outs: list[str]) -> None:
        """As gather_rows, into declared tensors; all of them travel as one message."""
        declared = [self.b.declared(x) for x in tensors]
        row_bytes = sum(math.prod(t.shape[1:]) * ITEM_BYTES[t.dtype] for t in declared)
        send = self.b.temp(f"{name}.send", "u8", "H", row_bytes)
        staging = self.b.temp(f"{name}.staging", "u8", self.recipe.ranks, "H", row_bytes)
        self.b.op(name, "gather_rows", tensors, outs, scratch=(send, staging), stream="comm")

    def reduce(
        self, name: str, part: str, dtype: str, width: int, *, tile: int = 0, out=None, rows=None
    ) -> str:
        """Sum the partials of all ranks in rank order, one rounding; on the rows of this rank."""
        result = self.b.temp(out or name, dtype, rows or self.own, width)
        declared = self.b.declared(part)
        rows_max = min(self.b.limits[declared.shape[0]], self.b.limits[rows or self.own])
        staging = self.b.temp(
            f"{name}.staging", declared.dtype, self.recipe.ranks, rows_max, width
        )
        inputs = (part, result) if tile else (part,)
        params = {"row0": tile * REDUCE_ROWS, "rows": self.own_rows}
        self.b.op(name, "reduce", inputs, (result,), scratch=(staging,), stream="comm", **params)
        return result

    def gather_columns(
        self, name: str, x: str, widths: Sequence[int], rows: Dim, out: str | None = None
    ) -> str:
        """Concatenate the ranks' columns, `widths` of them, on all rows or those of this rank."""
        declared = self.b.declared(x)
        total, widest = sum(widths), max(widths)
        out = out or self.b.temp(name, declared.dtype, rows, total)
        all_rows = declared.shape[0]
        if rows == "O":
            send = self.b.temp(f"{name}.send", declared.dtype, 0)
            staging = self.b.temp(f"{name}.staging", declared.dtype, rows, total)
        else:
            send = self.b.temp(f"{name}.send", declared.dtype, all_rows, widest)
            staging = self.b.temp(
                f"{name}.staging", declared.dtype, self.recipe.ranks, all_rows, widest
            )
        params = {"rows": "own" if rows == "O" else "all", "widths": list(widths)}
        self.b.op(
            name, "gather_columns", (x,), (out,), scratch=(send, staging), stream="comm", **params
        )
        return out

    def tiles(self) -> range:
        """Tiles of rows whose partial sums travel one by one."""
        return range(-(-self.rows_max // REDUCE_ROWS))

    @staticmethod
    def two_before(name: str, tile: int) -> str | None:
        """The sum that must be done before the partial of a tile is begun.

        Two partials are enough to compute one while another travels; without a bound, compute
        could run ahead by all tiles, and each would need bytes of its own.
        """
        return f"{name}.sum{tile - 2}" if tile >= 2 else None

    def summed_linear(self, name: str, x: str, weight: str, dtype: str) -> str:
        """A linear whose inputs are dealt to the ranks: partials in float64, added in rank order."""
        width = self.weights[f"{weight}.weight"].shape[0]
        if not self.shared:
            return self.linear(name, x, weight, dtype, "T")
        out = name
        for tile in self.tiles():
            rows, after = f"F{tile}", self.two_before(name, tile)
            part = self.linear(f"{name}.part{tile}", x, weight, "f64", rows, tile=tile, after=after)
            self.reduce(f"{name}.sum{tile}", part, dtype, width, tile=tile, out=out)
        return out

    # Hyper-connections ---------------------------------------------------------------------

    def mixes(self, prefix: str, part: str, h: str) -> str:
        name = f"{prefix}.{part}.mixes"
        out = self.b.temp(name, "f32", self.own, self.c.mix_width)
        width, tile = self.c.hc_mult * self.c.hidden_size, MIX_ROWS
        scratch = [
            self.b.temp(f"{name}.fn64", "f64", self.c.mix_width, width),
            self.b.temp(f"{name}.flat", "f64", tile, width),
            self.b.temp(f"{name}.products", "f64", tile, self.c.mix_width),
            self.b.temp(f"{name}.factors", "f64", tile),
        ]
        weights = [self.weight(f"{prefix}.hc_{part}_{w}") for w in ("fn", "scale", "base")]
        self.b.op(
            name,
            "mixes",
            (h, *weights),
            (out,),
            scratch=scratch,
            eps=self.c.rms_norm_eps,
            hc_eps=self.c.hc_eps,
            rounds=self.c.hc_sinkhorn_iters,
        )
        return out

    def collapsed(self, name: str, h: str, mix: str) -> str:
        out = self.b.temp(name, "bf16", self.own, self.c.hidden_size)
        self.b.op(name, "collapse", (h, mix), (out,))
        return out

    def sublayer_input(self, prefix: str, part: str, h: str, mix: str) -> str:
        x = self.collapsed(f"{prefix}.{part}.collapsed", h, mix)
        weight = f"{prefix}.{part}_norm.weight"
        return self.norm(f"{prefix}.{part}.x", x, weight, self.c.hidden_size, self.own)

    def update(self, name: str, h: str, y: str, mixes: str) -> str:
        out = self.b.updated(name, h)
        self.b.op(name, "update", (h, y, mixes), (out,), inplace=((h, out),))
        return out

    def block(self, prefix: str, h: str, mix: str, attention, experts: int, active: int):
        """One block; `attention(prefix, x)` gives the sublayer output. Returns streams and mix."""
        self.b.phase = "attention"
        attn_mixes = self.mixes(prefix, "attn", h)
        x = self.sublayer_input(prefix, "attn", h, mix)
        y = attention(prefix, x)
        h = self.update(f"{prefix}.attn.h", h, y, attn_mixes)
        self.b.phase = "experts"
        ffn_mixes = self.mixes(prefix, "ffn", h)
        x = self.sublayer_input(prefix, "ffn", h, attn_mixes)
        y = self.experts(f"{prefix}.ffn", x, experts, active)
        h = self.update(f"{prefix}.h", h, y, ffn_mixes)
        return h, ffn_mixes

    # Experts -------------------------------------------------------------------------------

    def experts(self, prefix: str, x: str, total: int, active: int) -> str:
        c = self.c
        logits = self.linear(f"{prefix}.gate", x, f"{prefix}.gate", "f64", self.own, source="bf16")
        choice = self.b.temp(f"{prefix}.choice", "i32", self.own, active)
        weight = self.b.temp(f"{prefix}.weight", "f32", self.own, active)
        bias = self.weight(f"{prefix}.gate.bias")
        scaling = c.routed_scaling_factor
        self.b.op(f"{prefix}.route", "route", (logits, bias), (choice, weight), scaling=scaling)
        packed = self.pack(f"{prefix}.xq", x, c.hidden_size, self.own)
        packed, choice, weight = self.gather_rows(f"{prefix}.dispatch", [packed, choice, weight])
        dispatched = packed, choice, weight, active
        if self.shared and not self.split and len(self.tiles()) == 1:
            routed, shared = self.summed_together(prefix, *dispatched)
        else:
            routed = self.routed(prefix, *dispatched)
            shared = self.shared_expert(f"{prefix}.shared_experts", packed)
        out = self.b.temp(f"{prefix}.out", "bf16", self.own, c.hidden_size)
        self.b.op(f"{prefix}.out", "moe_sum", (routed, shared), (out,))
        return out

    def routed(self, prefix: str, packed: str, choice: str, weight: str, active: int) -> str:
        c, name = self.c, f"{prefix}.routed"
        if not self.shared:
            out = self.b.temp(name, "f64", "T", c.hidden_size)
            self.expert_op(name, prefix, packed, choice, weight, active, out, None)
            return out
        for tile in self.tiles():
            part = self.b.temp(f"{name}.part{tile}", "f64", f"F{tile}", c.hidden_size)
            inputs = (prefix, packed, choice, weight, active, part, tile)
            self.expert_op(f"{name}.part{tile}", *inputs, after=self.two_before(name, tile))
            self.reduce(f"{name}.sum{tile}", part, "f64", c.hidden_size, tile=tile, out=name)
        return name

    def summed_together(self, prefix: str, packed: str, choice: str, weight: str, active: int):
        """Routed and shared partials of few rows travel in one message.

        A message of a decode step costs more than what it carries: one exchange beats two that
        overlap with compute.
        """
        width, shared = self.c.hidden_size, f"{prefix}.shared_experts"
        routed_part = self.b.temp(f"{prefix}.routed.part0", "f64", "F0", width)
        inputs = (prefix, packed, choice, weight, active, routed_part, 0)
        self.expert_op(routed_part, *inputs)
        act = self.shared_activation(shared, packed)
        shared_part = self.linear(f"{shared}.out.part0", act, f"{shared}.w2", "f64", "F0", tile=0)
        outs = [
            self.b.temp(f"{prefix}.routed", "f64", "T", width),
            self.b.temp(f"{shared}.out", "bf16", "T", width),
        ]
        parts = [routed_part, shared_part]
        send = self.b.temp(f"{prefix}.sums.send", "f64", 2, "F0", width)
        staging = self.b.temp(f"{prefix}.sums.staging", "f64", self.recipe.ranks, 2, "F0", width)
        scratch = (send, staging)
        self.b.op(f"{prefix}.sums", "reduce_pair", parts, outs, scratch=scratch, stream="comm")
        return outs

    def expert_op(
        self, name, prefix, packed, choice, weight, active, out, tile, after=None
    ) -> None:
        c = self.c
        owned = self.deal.draft_experts if prefix.startswith("mtp") else self.deal.experts
        rows = self.rows_max if tile is None else min(REDUCE_ROWS, self.rows_max)
        slots = rows * min(active, max(1, owned[1] - owned[0]))
        tile_rows = min(GEMM_ROWS, max(slots, 1))
        inner, width = c.moe_intermediate_size, c.hidden_size
        few_slots = min(slots, FEW_SLOTS)
        inner_tile = max(1, min(inner, GEMM_WEIGHT_ITEMS // width))
        down_tile = max(1, min(width, GEMM_WEIGHT_ITEMS // inner))
        weight_items = max(inner_tile * width, down_tile * inner)
        whole = 3 * inner * width
        # Two whole experts side by side, where they are small.
        weight_items = max(weight_items, min(2, GEMM_WEIGHT_ITEMS // whole) * whole)
        scratch = [
            self.b.temp(f"{name}.offsets", "i32", owned[1] - owned[0] + 1),
            self.b.temp(f"{name}.slot_rows", "i32", slots),
            self.b.temp(f"{name}.slot_weights", "f32", slots),
            self.b.temp(f"{name}.x64", "f64", max(tile_rows, few_slots), width),
            self.b.temp(f"{name}.w64", "f64", weight_items),
            self.b.temp(f"{name}.g64", "f64", tile_rows, inner),
            self.b.temp(f"{name}.u64", "f64", tile_rows, inner),
            self.b.temp(f"{name}.act", "bf16", max(tile_rows, few_slots), inner),
            self.b.temp(f"{name}.act_packed", "u8", max(tile_rows, few_slots), packed_fp8(inner)),
            self.b.temp(f"{name}.y64", "f64", tile_rows, down_tile),
            # Where experts run side by side, the second one adds up here.
            self.b.temp(f"{name}.second", "f64", rows if weight_items >= 2 * whole else 0, width),
        ]
        names = [f"{prefix}.experts.{p}.{s}" for p in ("w1", "w3", "w2") for s in ("weight", "scale")]
        params: dict[str, object] = {"expert0": owned[0], "limit": c.swiglu_limit}
        if tile is not None:
            params |= {"tile": tile, "tile_rows": REDUCE_ROWS}
        inputs = (packed, choice, weight, *(self.weight(n) for n in names))
        self.b.op(name, "experts", inputs, (out,), scratch=scratch, after=after, **params)

    def shared_expert(self, prefix: str, packed: str) -> str:
        """Its channels are dealt to the ranks; the output is rounded to bf16 before the sum."""
        packed_act = self.shared_activation(prefix, packed)
        return self.summed_linear(f"{prefix}.out", packed_act, f"{prefix}.w2", "bf16")

    def shared_activation(self, prefix: str, packed: str) -> str:
        """The quantised gated product of this rank's channels."""
        channels = self.deal.count("shared") * FP8_BLOCK
        gate = self.linear(f"{prefix}.gate", packed, f"{prefix}.w1", "bf16", "T")
        up = self.linear(f"{prefix}.up", packed, f"{prefix}.w3", "bf16", "T")
        act = self.b.temp(f"{prefix}.act", "bf16", "T", channels)
        self.b.op(f"{prefix}.act", "gate", (gate, up), (act,), limit=self.c.swiglu_limit)
        return self.pack(f"{prefix}.actq", act, channels, "T")


def index_scratch(low: Lowering, name: str, heads: int, width: int, blocks: int) -> list[str]:
    """Tiles and heaps of the indexer; none of them grows with the context."""
    c, rows = low.c, min(INDEX_ROWS, low.rows_max)
    sizes = {
        "q32": ("f32", (rows, heads, width)),
        "k32": ("f32", (INDEX_KEYS, width)),
        "dots": ("f32", (rows, heads, INDEX_KEYS)),
        "best": ("f32", (rows, c.index_topk)),
        "kept": ("i32", (rows, c.index_topk)),
        "counts": ("i32", (rows,)),
        "tops": ("f32", (rows, blocks)),
        "top_blocks": ("i32", (rows, blocks)),
        "block_counts": ("i32", (rows,)),
    }
    return [low.b.temp(f"{name}.{part}", dtype, *shape) for part, (dtype, shape) in sizes.items()]

