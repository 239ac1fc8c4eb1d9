"""Lowers attention: queries, window keys, compressed cache, selection, output (spec 3)."""

from __future__ import annotations

from engine.config import FP8_BLOCK
from engine.model.layout import packed_fp4
from engine.model.lowering import META, Lowering, index_scratch
from engine.tiling import FEW_ROWS, GEMM_ROWS, GEMM_WEIGHT_ITEMS


def attention(low: Lowering, prefix: str, x: str, layer: int | None) -> str:
    """The attention sublayer of a target layer, or of a draft block if `layer` is None."""
    name = f"{prefix}.attn"
    c = low.c
    ratio = 0 if layer is None else c.ratio(layer)
    table = "rope_compressed" if ratio else "rope_window"
    xq = low.pack(f"{name}.xq", x, c.hidden_size, low.own)
    query = low_rank_query(low, name, xq)
    window = window_rows(low, name, xq, table)
    query_all, window_all = low.gather_rows(f"{name}.gather", [query, window])
    if layer is not None and layer in c.kv_source_layer_ids:
        compress(low, name, x, layer, table)
    if layer is not None and layer in c.index_source_layer_ids:
        select(low, name, x, query, layer, table)
    q = heads(low, name, query_all, table)
    o = attend(low, name, q, window_all, layer)
    if layer is not None:
        keep_window(low, f"{prefix}.ring", f"{name}.keep", window_all)
    return project_out(low, name, o, table)


def low_rank_query(low: Lowering, name: str, xq: str) -> str:
    """The packed low-rank query of this rank's rows."""
    width = low.c.q_lora_rank
    qa = low.linear(f"{name}.qa", xq, f"{name}.wq_a", "bf16", low.own)
    qr = low.norm(f"{name}.qr", qa, f"{name}.q_norm.weight", width, low.own)
    return low.pack(f"{name}.qrq", qr, width, low.own)


def window_rows(low: Lowering, name: str, xq: str, table: str) -> str:
    """The packed window latents of this rank's rows."""
    width = low.c.head_dim
    kv = low.linear(f"{name}.kv", xq, f"{name}.wkv", "bf16", low.own)
    kv = low.norm(f"{name}.kv_normed", kv, f"{name}.kv_norm.weight", width, low.own)
    kv = low.rope(f"{name}.kv_rotated", kv, table, width, low.own_rows)
    return low.pack(f"{name}.window", kv, width, low.own)


def heads(low: Lowering, name: str, query: str, table: str) -> str:
    """Rotated queries of this rank's heads, all rows."""
    first = low.deal.heads(low.c)[0]
    shift = first * low.c.head_dim % FP8_BLOCK
    q = low.linear(f"{name}.q", query, f"{name}.wq_b", "bf16", "T", shift=shift)
    return low.rope(f"{name}.q_rotated", q, table, low.c.head_dim, "all")


def attend(low: Lowering, name: str, q: str, window: str, layer: int | None) -> str:
    """Attention of this rank's heads, in place of the queries."""
    c, b = low.c, low.b
    prefix = name.removesuffix(".attn")
    inputs = [q, window, low.ring(prefix), low.weight(f"{name}.attn_sink"), *low.meta(*META)]
    params: dict[str, object] = {"window": c.sliding_window, "whole": layer is None}
    if layer is not None and c.ratio(layer):
        source = c.kv_source(layer)
        inputs += [low.pool(), f"layers.{c.index_source(layer)}.selected"]
        params |= {
            "base": low.layout.base_bytes(source),
            "per_page": low.layout.entries_per_page(source),
            "record": low.layout.entry_bytes,
        }
    out = b.updated(f"{name}.o", q)
    # Every window row of the step is decoded once, not once for each row that sees it.
    decoded = b.temp(f"{name}.window64", "f64", "T", c.head_dim)
    more = {"scratch": (decoded,), "inplace": ((q, out),), **params}
    b.op(f"{name}.attend", "attend", inputs, (out,), **more)
    return out


def keep_window(low: Lowering, ring: str, name: str, window: str) -> None:
    """Write this step's newest window rows into the ring, after everyone has read it."""
    prefix = ring.removesuffix(".ring")
    low.ring(prefix)
    meta = low.meta("first_row", "start", "slots")
    low.b.op(name, "write_ring", (window, *meta, ring), (ring,))


def project_out(low: Lowering, name: str, o: str, table: str) -> str:
    """Inverse rotation, each group's low-rank product, then the output projection.

    It is a sum over the ranks' groups, or where a quantisation block spans two groups, dealt by
    outputs over the low-rank products of all ranks.
    """
    c, b = low.c, low.b
    groups = low.deal.count("groups")
    o = low.rope(f"{name}.o_unrotated", o, table, c.head_dim, "all", inverse=True)
    width = groups * c.o_lora_rank
    grouped = b.temp(f"{name}.oa", "bf16", "T", width)
    group_width = c.heads_per_group * c.head_dim
    tile_rows = min(GEMM_ROWS, low.rows_max)
    at_once = max(1, min(groups, GEMM_WEIGHT_ITEMS // (c.o_lora_rank * group_width)))
    scratch = [
        b.temp(f"{name}.oa.x64", "f64", max(tile_rows, FEW_ROWS * groups), group_width),
        b.temp(f"{name}.oa.w64", "f64", at_once * c.o_lora_rank, group_width),
        b.temp(f"{name}.oa.y64", "f64", tile_rows, c.o_lora_rank),
    ]
    weights = [low.weight(f"{name}.wo_a.{s}") for s in ("weight", "scale")]
    shift = low.deal.groups[0] * c.o_lora_rank % FP8_BLOCK
    params = {"groups": groups, "shift": shift}
    b.op(f"{name}.oa", "grouped_linear", (o, *weights), (grouped,), scratch=scratch, **params)
    dealt = low.shared and not c.groups_fill_blocks
    if dealt:
        widths = [deal.count("groups") * c.o_lora_rank for deal in low.deals]
        grouped, width = low.gather_columns(f"{name}.oa_all", grouped, widths, "T"), sum(widths)
    packed = low.pack(f"{name}.oaq", grouped, width, "T")
    if not dealt:
        return low.summed_linear(f"{name}.out", packed, f"{name}.wo_b", "bf16")
    part = low.linear(f"{name}.out_part", packed, f"{name}.wo_b", "bf16", "T")
    widths = [deal.count("out_rows") * FP8_BLOCK for deal in low.deals]
    return low.gather_columns(f"{name}.out", part, widths, low.own)


def compress(low: Lowering, name: str, x: str, layer: int, table: str) -> None:
    """Publish the latents and index keys of the groups that end in this step."""
    c = low.c
    low.b.phase = "compressor"
    if c.ratio(layer) == 1:
        latent = low.linear(
            f"{name}.pooled", x, f"{name}.compressor.wkv", "bf16", low.own, source="bf16"
        )
        rows, mode = low.own, low.own_rows
    else:
        latent = pooled(low, name, x, layer)
        rows, mode = "T", "all"
    entries = entry_rows(low, name, latent, layer, table, rows, mode)
    if rows == "O":
        (entries,) = low.gather_rows(f"{name}.gather_entries", [entries])
    b, layout = low.b, low.layout
    meta = low.meta("positions", "seq_of", "pages")
    pool = low.pool()
    b.op(
        f"{name}.publish",
        "write_entries",
        (entries, *meta, pool),
        (pool,),
        ratio=c.ratio(layer),
        base=layout.base_bytes(layer),
        per_page=layout.entries_per_page(layer),
    )
    b.phase = "attention"


def pooled(low: Lowering, name: str, x: str, layer: int) -> str:
    """Softmax-pooled groups in the rows of their last tokens, on all rows of the step."""
    c, b = low.c, low.b
    ratio = c.ratio(layer)
    weights = f"{name}.compressor"
    kv = low.linear(f"{name}.ckv", x, f"{weights}.wkv", "f32", low.own, source="bf16")
    score = low.linear(f"{name}.cscore", x, f"{weights}.wgate", "f32", low.own, source="bf16")
    kv, score = low.gather_rows(f"{name}.gather_groups", [kv, score])
    tail = low.state(
        f"layers.{layer}.tail", "f32", "slots_max", low.layout.tail_rows(ratio), 2 * c.head_dim
    )
    out = b.temp(f"{name}.pooled", "bf16", "T", c.head_dim)
    meta = low.meta("positions", "seq_of", "first_row", "start", "slots")
    b.op(f"{name}.pooled", "pool", (kv, score, tail, *meta), (out,), ratio=ratio)
    b.op(f"{name}.keep_tail", "write_tail", (kv, score, *meta[2:], tail), (tail,))
    return out


def entry_rows(low: Lowering, name: str, latent: str, layer: int, table: str, rows, mode) -> str:
    """Packed cache entries: normed, rotated at the group's first position, quantised."""
    c, b = low.c, low.b
    latent = low.norm(f"{name}.latent", latent, f"{name}.compressor.norm.weight", c.head_dim, rows)
    indexer = f"{name}.indexer"
    key = low.linear(f"{name}.key", latent, f"{indexer}.wk", "bf16", rows, source="bf16")
    key = low.norm(f"{name}.key_normed", key, f"{indexer}.k_norm.weight", c.index_head_dim, rows)
    if c.ratio(layer) > 1:
        table = f"{table}_ratio{c.ratio(layer)}"
    key = low.rope(f"{name}.key_rotated", key, table, c.index_head_dim, mode)
    latent = low.rope(f"{name}.latent_rotated", latent, table, c.head_dim, mode)
    out = b.temp(f"{name}.entries", "u8", rows, low.layout.entry_bytes)
    b.op(f"{name}.entries", "pack_entries", (latent, key), (out,))
    return out


def select(low: Lowering, name: str, x: str, query: str, layer: int, table: str) -> None:
    """The index source's selection, for it and the layers after it."""
    c, b, layout = low.c, low.b, low.layout
    b.phase = "indexer"
    prefix, source = f"{name}.indexer", c.kv_source(layer)
    n_heads, width = c.index_n_heads, c.index_head_dim
    q = low.linear(f"{prefix}.q", query, f"{prefix}.wq_b", "bf16", low.own)
    q = low.rope(f"{prefix}.q_rotated", q, table, width, low.own_rows)
    packed = b.temp(f"{prefix}.qp", "u8", low.own, n_heads * packed_fp4(width))
    b.op(f"{prefix}.qp", "pack_fp4", (q,), (packed,), width=width)
    weights = low.linear(
        f"{prefix}.weights", x, f"{prefix}.weights_proj", "bf16", low.own, source="bf16"
    )
    at_source = layer == c.candidate_source_layer_id
    blocks = c.candidate_topk_blocks if at_source else 0
    selected = b.temp(f"{prefix}.selected", "i32", low.own, c.index_topk)
    outputs = [selected]
    inputs = [packed, weights, *low.meta("positions", "seq_of", "pages"), low.pool()]
    if at_source:
        outputs.append(b.temp("candidates", "i32", low.own, c.candidate_topk_blocks))
    elif layer > c.candidate_source_layer_id:
        inputs.append("candidates")
    b.op(
        f"{prefix}.select",
        "select",
        inputs,
        outputs,
        scratch=index_scratch(low, prefix, n_heads, width, blocks),
        heads=n_heads,
        width=width,
        ratio=c.ratio(layer),
        block=c.candidate_block_size,
        factor=width**-0.5 * n_heads**-0.5,
        base=layout.base_bytes(source),
        per_page=layout.entries_per_page(source),
        record=layout.entry_bytes,
        key_at=layout.key_offset_bytes,
        rows=low.own_rows,
    )
    publish_selection(low, prefix, selected, layer)
    b.phase = "attention"


def publish_selection(low: Lowering, prefix: str, selected: str, layer: int) -> None:
    """Give the selection of all rows the name under which the following layers read it."""
    name, b = f"layers.{layer}.selected", low.b
    if low.split:
        b.temp(name, "i32", "T", low.c.index_topk)
        low.gather_rows_into(f"{prefix}.gather", [selected], [name])
    else:
        b.updated(name, selected)
