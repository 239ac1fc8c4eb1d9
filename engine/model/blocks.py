"""Lowers one block: hyper-connections around attention and experts (spec 2)."""

from __future__ import annotations

from engine.model.experts import experts
from engine.model.lowering import Lowering
from engine.tiling import MIX_ROWS


def mixes(low: Lowering, prefix: str, part: str, h: str) -> str:
    """The hyper-connection coefficients of a sublayer (`part`: attn or ffn), fp32."""
    name = f"{prefix}.{part}.mixes"
    out = low.b.temp(name, "f32", low.own, low.c.mix_width)
    width, tile = low.c.hc_mult * low.c.hidden_size, MIX_ROWS
    scratch = [
        low.b.temp(f"{name}.fn64", "f64", low.c.mix_width, width),
        low.b.temp(f"{name}.flat", "f64", tile, width),
        low.b.temp(f"{name}.products", "f64", tile, low.c.mix_width),
        low.b.temp(f"{name}.factors", "f64", tile),
    ]
    weights = [low.weight(f"{prefix}.hc_{part}_{w}") for w in ("fn", "scale", "base")]
    low.b.op(
        name,
        "mixes",
        (h, *weights),
        (out,),
        scratch=scratch,
        eps=low.c.rms_norm_eps,
        hc_eps=low.c.hc_eps,
        rounds=low.c.hc_sinkhorn_iters,
    )
    return out


def collapsed(low: Lowering, name: str, h: str, mix: str) -> str:
    """The streams collapsed into one by a mix, bf16."""
    out = low.b.temp(name, "bf16", low.own, low.c.hidden_size)
    low.b.op(name, "collapse", (h, mix), (out,))
    return out


def sublayer_input(low: Lowering, prefix: str, part: str, h: str, mix: str) -> str:
    """What a sublayer reads: collapsed, then normed."""
    x = collapsed(low, f"{prefix}.{part}.collapsed", h, mix)
    weight = f"{prefix}.{part}_norm.weight"
    return low.norm(f"{prefix}.{part}.x", x, weight, low.c.hidden_size, low.own)


def update(low: Lowering, name: str, h: str, y: str, mixes: str) -> str:
    """The streams with a sublayer's output mixed in, in place."""
    out = low.b.updated(name, h)
    low.b.op(name, "update", (h, y, mixes), (out,), inplace=((h, out),))
    return out


def block(low: Lowering, prefix: str, h: str, mix: str, attention, total: int, active: int):
    """One block with `total` routed experts; `attention(prefix, x)` gives the sublayer output.

    Returns the streams and the mix handed to the next block.
    """
    low.b.phase = "attention"
    attn_mixes = mixes(low, prefix, "attn", h)
    x = sublayer_input(low, prefix, "attn", h, mix)
    y = attention(prefix, x)
    h = update(low, f"{prefix}.attn.h", h, y, attn_mixes)
    low.b.phase = "experts"
    ffn_mixes = mixes(low, prefix, "ffn", h)
    x = sublayer_input(low, prefix, "ffn", h, attn_mixes)
    y = experts(low, f"{prefix}.ffn", x, total, active)
    h = update(low, f"{prefix}.h", h, y, ffn_mixes)
    return h, ffn_mixes
