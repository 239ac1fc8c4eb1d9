"""The graphs of one rank: prefill, decode, head and draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import FP8_BLOCK, ModelConfig
from engine.ir import Graph
from engine.model.attention import attention, keep_window, window_rows
from engine.model.blocks import block as lower_block
from engine.model.blocks import collapsed as collapsed_rows
from engine.model.lowering import Lowering
from engine.recipe import Recipe
from engine.shard import Deal, rank_weights
from engine.tiling import REDUCE_ROWS

HEAD_ROWS = 64
"""Rows of logits of one run of the head."""


def draft_block_size(config: ModelConfig, recipe: Recipe) -> int:
    """Ids of one draft input: the trained block, or more if more drafts are asked for."""
    return max(config.dspark_block_size, recipe.mtp_draft_tokens)


def decode_rows_max(recipe: Recipe) -> int:
    """Rows of a decode step: one id and its drafts for every sequence."""
    return recipe.max_concurrency * (1 + recipe.mtp_draft_tokens)


def build_graphs(
    config: ModelConfig, recipe: Recipe, deals: Sequence[Deal], rank: int
) -> tuple[Graph, ...]:
    """Every graph a rank runs; ranks differ in their shares only, ops have the same names."""
    assert len(deals) == recipe.ranks, f"{len(deals)} deals for {recipe.ranks} ranks"
    weights = {w.name: w for w in rank_weights(config, recipe, deals[rank])}

    def lowering(name: str, rows: int, split: bool) -> Lowering:
        limits = step_limits(recipe, rows, split)
        return Lowering(name, limits, config, recipe, deals, rank, weights, split)

    shared = recipe.ranks > 1
    graphs = [
        target_graph(lowering("prefill", recipe.prefill_chunk, shared)),
        target_graph(lowering("decode", decode_rows_max(recipe), False)),
        head_graph(lowering("head", max(recipe.prefill_chunk, decode_rows_max(recipe)), False)),
    ]
    if recipe.mtp_draft_tokens and config.num_nextn_predict_layers:
        rows = recipe.max_concurrency * draft_block_size(config, recipe)
        graphs.append(draft_graph(lowering("draft", rows, False)))
    return tuple(graphs)


def step_limits(recipe: Recipe, rows: int, split: bool) -> Mapping[str, int]:
    """The largest counts of a step.

    T rows, O rows of this rank, H the largest share of a rank, S sequences, S1 = S + 1, L rows of
    logits, P cache pages (sized at
    start), F0.. rows of each tile of partial sums, slots_max sequences with state.
    """
    own = -(-rows // recipe.ranks) if split else rows
    limits = {
        "T": rows,
        "O": own,
        "H": own,
        "S": recipe.max_concurrency,
        "S1": recipe.max_concurrency + 1,
        "L": HEAD_ROWS,
        "P": 0,
        "slots_max": recipe.max_concurrency,
    }
    return limits | tile_counts(rows, rows)


def tile_counts(rows: int, rows_max: int) -> dict[str, int]:
    """Rows of each tile of partial sums when a step has `rows` of at most `rows_max`."""
    tiles = -(-rows_max // REDUCE_ROWS)
    return {f"F{i}": min(max(rows - i * REDUCE_ROWS, 0), REDUCE_ROWS) for i in range(tiles)}


def rope_tables(low: Lowering) -> None:
    """cos and sin of every row's position, once per step."""
    c, b = low.c, low.b
    (positions,) = low.meta("positions")
    ratios = {c.ratio(i) for i in range(c.num_hidden_layers)} - {0}
    tables = [("rope_window", 0, False)]
    if ratios:
        tables.append(("rope_compressed", 0, True))
    tables += [(f"rope_compressed_ratio{r}", r - 1, True) for r in sorted(ratios) if r > 1]
    for name, back, compressed in tables:
        out = b.temp(name, "f32", "T", c.qk_rope_head_dim)
        b.op(name, "rope_table", (positions,), (out,), back=back, compressed=compressed)


def embedded(low: Lowering) -> tuple[str, str]:
    """The streams and the one-hot mix of the step's ids, on the rows of this rank."""
    c, b = low.c, low.b
    (ids,) = low.meta("ids")
    first = low.deal.vocab[0]
    table = low.weight("embed.weight")
    if low.shared:
        out = "embedded"
        for tile in low.tiles():
            part = b.temp(f"embed.part{tile}", "bf16", f"F{tile}", c.hidden_size)
            params = {"start": first, "row0": tile * REDUCE_ROWS}
            after = low.two_before("embed", tile)
            b.op(f"embed.part{tile}", "embed", (ids, table), (part,), after=after, **params)
            low.reduce(f"embed.sum{tile}", part, "bf16", c.hidden_size, tile=tile, out=out)
    else:
        out = b.temp("embedded", "bf16", "T", c.hidden_size)
        b.op("embed", "embed", (ids, table), (out,), start=first, row0=0)
    h = b.temp("streams", "bf16", low.own, c.hc_mult, c.hidden_size)
    mix = b.temp("first_mix", "f32", low.own, c.hc_mult)
    b.op("streams", "spread", (out,), (h, mix))
    return h, mix


def engram(low: Lowering, layer: int, h: str) -> str:
    """Adds the Engram value of every row's n-grams to the streams."""
    c, b = low.c, low.b
    prefix, low.b.phase = f"layers.{layer}.engram", "engram"
    width = c.engram_buckets * c.engram_head_dim
    (ngrams,) = low.meta("ngrams")
    hashes = b.temp(f"{prefix}.hashes", "i64", "T", c.engram_buckets)
    b.op(f"{prefix}.hashes", "engram_hash", (ngrams,), (hashes,), layer=layer)
    rows = b.temp(f"{prefix}.rows", "bf16", "T", low.deal.count("buckets") * c.engram_head_dim)
    table = [low.weight(f"{prefix}.embed.{s}") for s in ("weight", "scale")]
    params = {"layer": layer, "bucket0": low.deal.buckets[0]}
    b.op(f"{prefix}.rows", "engram_lookup", (hashes, *table), (rows,), **params)
    if low.shared:
        widths = [d.count("buckets") * c.engram_head_dim for d in low.deals]
        rows = low.gather_columns(f"{prefix}.rows_all", rows, widths, "T")
    packed = low.pack(f"{prefix}.packed", rows, width, "T")
    kv = low.linear(f"{prefix}.kv", packed, f"{prefix}.wkv", "bf16", "T")
    if low.shared:
        widths = [d.count("engram_rows") * FP8_BLOCK for d in low.deals]
        kv = low.gather_columns(f"{prefix}.kv_all", kv, widths, low.own)
    weights = [low.weight(f"{prefix}.{n}") for n in ("q_weight", "k_weight")]
    out = b.updated(f"{prefix}.h", h)
    b.op(
        f"{prefix}.apply",
        "engram_apply",
        (h, kv, *weights),
        (out,),
        inplace=((h, out),),
        eps=c.rms_norm_eps,
    )
    return out


def target_graph(low: Lowering) -> Graph:
    """All layers for one step of any mixture of sequences; leaves the normed hidden rows."""
    c, b = low.c, low.b
    drafts = low.recipe.mtp_draft_tokens > 0 and c.num_nextn_predict_layers > 0
    b.phase = "embedding"
    rope_tables(low)
    h, mix = embedded(low)
    hidden_of = dict.fromkeys(c.dspark_target_layer_ids) if drafts else {}
    for layer in range(c.num_hidden_layers):
        if layer in c.engram_layer_ids:
            h = engram(low, layer, h)
        if layer in hidden_of:
            stream_mean(low, layer, h)

        def sublayer(prefix: str, x: str, layer: int = layer) -> str:
            return attention(low, prefix, x, layer)

        h, mix = lower_block(low,
            f"layers.{layer}", h, mix, sublayer, c.n_routed_experts, c.num_experts_per_tok
        )
    b.phase = "output"
    final_hidden(low, h, mix)
    if drafts:
        fill_draft_rings(low)
    return b.graph()


def stream_mean(low: Lowering, layer: int, h: str) -> None:
    """The mean over the copies of the stream that enters a draft target layer."""
    c, b = low.c, low.b
    targets = c.dspark_target_layer_ids
    index = targets.index(layer)
    width = len(targets) * c.hidden_size
    out = b.temp("main_hidden", "bf16", low.own, width)
    started = index != targets.index(min(targets))
    b.op(
        f"main_hidden.{layer}",
        "stream_mean",
        (h, out) if started else (h,),
        (out,),
        column=index * c.hidden_size,
    )


def final_hidden(low: Lowering, h: str, mix: str) -> None:
    """Collapse, norm, and leave the rows of all ranks in `hidden`."""
    c, b = low.c, low.b
    collapsed = collapsed_rows(low, "output.collapsed", h, mix)
    hidden = b.tensor("hidden", "io", "bf16", ("T", c.hidden_size))
    own = b.temp("output.normed", "bf16", "O", c.hidden_size) if low.split else hidden
    params = {"eps": c.rms_norm_eps}
    b.op("output.norm", "norm", (collapsed, low.weight("norm.weight")), (own,), **params)
    if low.split:
        low.gather_rows_into("output.gather", [own], [hidden])


def fill_draft_rings(low: Lowering) -> None:
    """Window rows of the target's hidden states for every draft block (spec 6)."""
    c, b = low.c, low.b
    b.phase = "draft_rings"
    width = len(c.dspark_target_layer_ids) * c.hidden_size
    packed = low.pack("main_hidden.packed", "main_hidden", width, low.own)
    main = low.linear("main_proj", packed, "mtp.0.main_proj", "bf16", low.own)
    main = low.norm("main_x", main, "mtp.0.main_norm.weight", c.hidden_size, low.own)
    packed = low.pack("main_xq", main, c.hidden_size, low.own)
    for block in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{block}"
        rows = window_rows(low, f"{prefix}.attn", packed, "rope_window")
        (rows,) = low.gather_rows(f"{prefix}.gather_window", [rows])
        keep_window(low, f"{prefix}.ring", f"{prefix}.keep", rows)


def head_graph(low: Lowering) -> Graph:
    """Logits fp32 [L, vocabulary] of chosen rows of `hidden`."""
    c, b = low.c, low.b
    b.phase = "head"
    hidden = b.tensor("hidden", "io", "bf16", ("T", c.hidden_size))
    rows = b.tensor("logit_rows", "io", "i32", ("L",))
    low.rows_max = HEAD_ROWS
    x = b.temp("head.x", "bf16", "L", c.hidden_size)
    b.op("head.x", "take_rows", (hidden, rows), (x,))
    all_logits = b.tensor("logits", "io", "f32", ("L", c.vocab_size))
    if not low.shared:
        low.linear("logits", x, "head", "f32", "L", source="bf16", kind="io")
        return b.graph()
    own = low.linear("head.own", x, "head", "f32", "L", source="bf16")
    gather_vocabulary(low, "head.gather", own, all_logits)
    return b.graph()


def gather_vocabulary(low: Lowering, name: str, own: str, out: str | None = None) -> str:
    """All ranks' columns of logits."""
    rows = low.b.declared(own).shape[0]
    return low.gather_columns(name, own, [d.count("vocab") for d in low.deals], rows, out)


def draft_graph(low: Lowering) -> Graph:
    """The draft blocks on [next id, noise, ...] of every sequence, then the Markov head."""
    c, b = low.c, low.b
    b.phase = "embedding"
    rope_tables(low)
    h, mix = embedded(low)
    for block in range(c.num_nextn_predict_layers):

        def sublayer(prefix: str, x: str) -> str:
            return attention(low, prefix, x, None)

        active = c.dspark_num_experts_per_tok
        total = c.dspark_n_routed_experts
        h, mix = lower_block(low, f"mtp.{block}", h, mix, sublayer, total, active)
    b.phase = "head"
    last = f"mtp.{c.num_nextn_predict_layers - 1}"
    collapsed = collapsed_rows(low, "draft.collapsed", h, mix)
    normed = low.norm("draft.normed", collapsed, f"{last}.norm.weight", c.hidden_size, "T")
    base = low.linear("draft.base", normed, "head", "f32", "T", source="bf16")
    for index in range(draft_block_size(c, low.recipe)):
        markov_step(low, last, index, base, collapsed)
    return b.graph()


def markov_step(low: Lowering, last: str, index: int, base: str, collapsed: str) -> None:
    """Logits, pick and confidence of one draft position, left to right."""
    c, b = low.c, low.b
    block = draft_block_size(c, low.recipe)
    name, rank = f"draft.{index}", c.dspark_markov_rank
    ids = b.tensor("draft_ids", "io", "i64", ("S", block + 1))
    part = b.temp(f"{name}.embed", "bf16", "S", rank)
    table = low.weight(f"{last}.markov_head.embed.weight")
    params = {"column": index, "start": low.deal.vocab[0]}
    b.op(f"{name}.embed", "embed_column", (ids, table), (part,), **params)
    if low.shared:
        part = low.reduce(f"{name}.embed_sum", part, "bf16", rank, rows="S")
    own = low.linear(f"{name}.markov", part, f"{last}.markov_head.head", "f32", "S", source="bf16")
    summed = b.updated(f"{name}.own", own)
    b.op(
        f"{name}.own",
        "add_base",
        (own, base),
        (summed,),
        inplace=((own, summed),),
        index=index,
        block=block,
    )
    everyone = gather_vocabulary(low, f"{name}.logits", summed) if low.shared else summed
    logits = b.tensor("draft_logits", "io", "f32", ("S", block, c.vocab_size))
    confidence = b.tensor("confidence", "io", "f32", ("S", block))
    proj = low.weight(f"{last}.confidence_head.proj.weight")
    b.op(
        f"{name}.pick",
        "draft_pick",
        (everyone, collapsed, part, proj, ids, logits, confidence),
        (ids, logits, confidence),
        index=index,
        block=block,
    )
