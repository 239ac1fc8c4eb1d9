"""What all blocks of a graph share: declaring tensors, row-wise ops, sums and gathers of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engine.config import ModelConfig
from engine.ir import ITEM_BYTES, Dim
from engine.model.builder import IR_DTYPE, Builder
from engine.model.layout import KV_POOL, CacheLayout, packed_fp8
from engine.recipe import Recipe
from engine.shard import Deal, Weight
from engine.tiling import (
    GEMM_ROWS,
    GEMM_WEIGHT_ITEMS,
    INDEX_KEYS,
    INDEX_ROWS,
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
        """RMSNorm of bf16 rows."""
        out = self.b.temp(name, "bf16", rows, width)
        self.b.op(name, "norm", (x, self.weight(weight)), (out,), eps=self.c.rms_norm_eps)
        return out

    def pack(self, name: str, x: str, width: int, rows: Dim) -> str:
        """The FP8 activation of bf16 rows, packed."""
        out = self.b.temp(name, "u8", rows, packed_fp8(width))
        self.b.op(name, "pack_fp8", (x,), (out,))
        return out

    def rope(self, name: str, x: str, table: str, head_width: int, rows: str, inverse=False) -> str:
        """Rotate the tails of heads in place; `rows` says whose rows x holds (own or all)."""
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
        """A linear whose inputs are dealt to the ranks: float64 partials, added in rank order."""
        width = self.weights[f"{weight}.weight"].shape[0]
        if not self.shared:
            return self.linear(name, x, weight, dtype, "T")
        out = name
        for tile in self.tiles():
            rows, after = f"F{tile}", self.two_before(name, tile)
            part = self.linear(f"{name}.part{tile}", x, weight, "f64", rows, tile=tile, after=after)
            self.reduce(f"{name}.sum{tile}", part, dtype, width, tile=tile, out=out)
        return out


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

