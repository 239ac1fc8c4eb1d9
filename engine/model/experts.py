"""Lowers the mixture of experts: router, routed experts, the shared expert, their sum (spec 4)."""

from __future__ import annotations

from engine.config import FP8_BLOCK
from engine.model.layout import packed_fp8
from engine.model.lowering import Lowering
from engine.tiling import FEW_SLOTS, GEMM_ROWS, GEMM_WEIGHT_ITEMS, REDUCE_ROWS


def experts(low: Lowering, prefix: str, x: str, total: int, active: int) -> str:
    """The mixture of a block on this rank's rows: `active` of `total` experts, and the shared."""
    c = low.c
    logits = low.linear(f"{prefix}.gate", x, f"{prefix}.gate", "f64", low.own, source="bf16")
    choice = low.b.temp(f"{prefix}.choice", "i32", low.own, active)
    weight = low.b.temp(f"{prefix}.weight", "f32", low.own, active)
    bias = low.weight(f"{prefix}.gate.bias")
    scaling = c.routed_scaling_factor
    low.b.op(f"{prefix}.route", "route", (logits, bias), (choice, weight), scaling=scaling)
    packed = low.pack(f"{prefix}.xq", x, c.hidden_size, low.own)
    packed, choice, weight = low.gather_rows(f"{prefix}.dispatch", [packed, choice, weight])
    dispatched = packed, choice, weight, active
    if low.shared and not low.split and len(low.tiles()) == 1:
        routed, shared = summed_together(low, prefix, *dispatched)
    else:
        routed = routed_sum(low, prefix, *dispatched)
        shared = shared_expert(low, f"{prefix}.shared_experts", packed)
    out = low.b.temp(f"{prefix}.out", "bf16", low.own, c.hidden_size)
    low.b.op(f"{prefix}.out", "moe_sum", (routed, shared), (out,))
    return out


def routed_sum(low: Lowering, prefix: str, packed: str, choice: str, weight: str, active: int):
    """The routed experts of all ranks, summed in float64; tiles of rows travel one by one."""
    c, name = low.c, f"{prefix}.routed"
    if not low.shared:
        out = low.b.temp(name, "f64", "T", c.hidden_size)
        expert_op(low, name, prefix, packed, choice, weight, active, out, None)
        return out
    for tile in low.tiles():
        part = low.b.temp(f"{name}.part{tile}", "f64", f"F{tile}", c.hidden_size)
        inputs = (prefix, packed, choice, weight, active, part, tile)
        expert_op(low, f"{name}.part{tile}", *inputs, after=low.two_before(name, tile))
        low.reduce(f"{name}.sum{tile}", part, "f64", c.hidden_size, tile=tile, out=name)
    return name


def summed_together(low: Lowering, prefix: str, packed: str, choice: str, weight: str, active: int):
    """Routed and shared partials of few rows travel in one message.

    A message of a decode step costs more than what it carries: one exchange beats two that
    overlap with compute.
    """
    width, shared = low.c.hidden_size, f"{prefix}.shared_experts"
    routed_part = low.b.temp(f"{prefix}.routed.part0", "f64", "F0", width)
    inputs = (prefix, packed, choice, weight, active, routed_part, 0)
    expert_op(low, routed_part, *inputs)
    act = shared_activation(low, shared, packed)
    shared_part = low.linear(f"{shared}.out.part0", act, f"{shared}.w2", "f64", "F0", tile=0)
    outs = [
        low.b.temp(f"{prefix}.routed", "f64", "T", width),
        low.b.temp(f"{shared}.out", "bf16", "T", width),
    ]
    parts = [routed_part, shared_part]
    send = low.b.temp(f"{prefix}.sums.send", "f64", 2, "F0", width)
    staging = low.b.temp(f"{prefix}.sums.staging", "f64", low.recipe.ranks, 2, "F0", width)
    scratch = (send, staging)
    low.b.op(f"{prefix}.sums", "reduce_pair", parts, outs, scratch=scratch, stream="comm")
    return outs


def expert_op(
    low: Lowering, name, prefix, packed, choice, weight, active, out, tile, after=None
) -> None:
    """This rank's experts on all rows, or on those of one tile, into `out` (float64)."""
    c = low.c
    owned = low.deal.draft_experts if prefix.startswith("mtp") else low.deal.experts
    rows = low.rows_max if tile is None else min(REDUCE_ROWS, low.rows_max)
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
        low.b.temp(f"{name}.offsets", "i32", owned[1] - owned[0] + 1),
        low.b.temp(f"{name}.slot_rows", "i32", slots),
        low.b.temp(f"{name}.slot_weights", "f32", slots),
        low.b.temp(f"{name}.x64", "f64", max(tile_rows, few_slots), width),
        low.b.temp(f"{name}.w64", "f64", weight_items),
        low.b.temp(f"{name}.g64", "f64", tile_rows, inner),
        low.b.temp(f"{name}.u64", "f64", tile_rows, inner),
        low.b.temp(f"{name}.act", "bf16", max(tile_rows, few_slots), inner),
        low.b.temp(f"{name}.act_packed", "u8", max(tile_rows, few_slots), packed_fp8(inner)),
        low.b.temp(f"{name}.y64", "f64", tile_rows, down_tile),
        # Where experts run side by side, the second one adds up here.
        low.b.temp(f"{name}.second", "f64", rows if weight_items >= 2 * whole else 0, width),
    ]
    names = [f"{prefix}.experts.{p}.{s}" for p in ("w1", "w3", "w2") for s in ("weight", "scale")]
    params: dict[str, object] = {"expert0": owned[0], "limit": c.swiglu_limit}
    if tile is not None:
        params |= {"tile": tile, "tile_rows": REDUCE_ROWS}
    inputs = (packed, choice, weight, *(low.weight(n) for n in names))
    low.b.op(name, "experts", inputs, (out,), scratch=scratch, after=after, **params)


def shared_expert(low: Lowering, prefix: str, packed: str) -> str:
    """Its channels are dealt to the ranks; the output is rounded to bf16 before the sum."""
    packed_act = shared_activation(low, prefix, packed)
    return low.summed_linear(f"{prefix}.out", packed_act, f"{prefix}.w2", "bf16")


def shared_activation(low: Lowering, prefix: str, packed: str) -> str:
    """The quantised gated product of this rank's channels."""
    channels = low.deal.count("shared") * FP8_BLOCK
    gate = low.linear(f"{prefix}.gate", packed, f"{prefix}.w1", "bf16", "T")
    up = low.linear(f"{prefix}.up", packed, f"{prefix}.w3", "bf16", "T")
    act = low.b.temp(f"{prefix}.act", "bf16", "T", channels)
    low.b.op(f"{prefix}.act", "gate", (gate, up), (act,), limit=low.c.swiglu_limit)
    return low.pack(f"{prefix}.actq", act, channels, "T")
