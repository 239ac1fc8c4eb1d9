"""Kernel table in plain torch: the op kinds and the binder protocol of `engine.ops.table`."""

from __future__ import annotations

from engine.ops.reference import (
    attention,
    caches,
    dense,
    draft,
    engram,
    experts,
    hyper,
    indexer,
)
from engine.ops.reference.binding import computes
from engine.ops.table import Binder

BINDERS: dict[str, Binder] = {
    "embed": dense.bind_embed,
    "embed_column": dense.bind_embed_column,
    "rope_table": dense.bind_rope_table,
    "rope": dense.bind_rope,
    "norm": computes(dense.norm, "eps"),
    "pack_fp8": computes(dense.packed),
    "linear": dense.bind_linear,
    "grouped_linear": dense.bind_grouped_linear,
    "spread": hyper.bind_spread,
    "mixes": computes(hyper.mixes, "eps", "hc_eps", "rounds"),
    "collapse": computes(hyper.collapse),
    "update": computes(hyper.update),
    "stream_mean": hyper.bind_stream_mean,
    "attend": attention.bind_attend,
    "write_ring": caches.bind_write_ring,
    "pool": caches.bind_pool,
    "write_tail": caches.bind_write_tail,
    "pack_entries": computes(caches.entries),
    "write_entries": caches.bind_write_entries,
    "pack_fp4": caches.bind_pack_fp4,
    "select": indexer.bind_select,
    "route": experts.bind_route,
    "experts": experts.bind_experts,
    "gate": computes(experts.shared_gate, "limit"),
    "moe_sum": computes(experts.moe_sum),
    "engram_hash": engram.bind_engram_hash,
    "engram_lookup": engram.bind_engram_lookup,
    "engram_apply": computes(engram.apply, "eps"),
    "take_rows": dense.bind_take_rows,
    "add_base": draft.bind_add_base,
    "draft_pick": draft.bind_draft_pick,
}
