"""Layer mathematics of the oracle outside attention: norms, rotation, streams, experts, Engram.

Straight-line float64; every call of `bf16` or `f32` is one rounding point of the specification.
It does not know how the engine orders, tiles or shards any of this.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from suites.numerics.oracle_formats import bf16, f32, fp8_round_trip
from suites.numerics.oracle_weights import Weights


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 output of a linear whose input is used as stored."""
    return bf16(x @ weight.T)


def linear_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 output of a linear whose input takes the FP8 activation round trip."""
    return bf16(fp8_round_trip(x) @ weight.T)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return bf16(x * inverse_rms(x, eps) * weight)


# Rotation -----------------------------------------------------------------------------------------


def rope_frequencies(c: SimpleNamespace, ratio: int) -> Tensor:
    """fp32 frequencies [dim/2]: plain for ratio 0, YaRN with the compressed theta otherwise."""
    dim = c.qk_rope_head_dim
    theta = c.compress_rope_theta if ratio else c.rope_theta
    index = torch.arange(dim // 2, dtype=torch.float64)
    frequency = theta ** (-2 * index / dim)
    if ratio and c.rope_scaling:
        s = c.rope_scaling

        def corrected(turns: float) -> float:
            turn_length = s["original_max_position_embeddings"] / (2 * math.pi * turns)
            return dim * math.log(turn_length) / (2 * math.log(theta))

        low = max(math.floor(corrected(s["beta_fast"])), 0)
        high = min(math.ceil(corrected(s["beta_slow"])), dim - 1)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency / s["factor"] * ramp + frequency * (1 - ramp)
    return f32(frequency)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last channels of x [n, ..., d] by pairs; positions [n], frequencies [dim/2]."""
    angle = f32(positions.double()[:, None] * frequencies)  # the fp32 product, as trained
    cos, sin = f32(angle.cos()), f32(angle.sin())
    shape = (len(positions), *[1] * (x.dim() - 2), len(frequencies))
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    rest, tail = x[..., : -2 * len(frequencies)], x[..., -2 * len(frequencies) :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((rest, bf16(turned)), -1)


# Hyper-connections --------------------------------------------------------------------------------


def first_streams(embedded: Tensor, hc: int) -> tuple[Tensor, Tensor]:
    """hc copies of the embedding [n, hc, d] and the one-hot mix [n, hc]."""
    mix = torch.zeros(len(embedded), hc, dtype=torch.float64)
    mix[:, 0] = 1
    return embedded[:, None, :].expand(-1, hc, -1).clone(), mix


def collapse(mix: Tensor, streams: Tensor) -> Tensor:
    """sum_c mix_c h_c: mix [n, hc], streams [n, hc, d] to [n, d]."""
    return bf16(torch.einsum("nc,ncd->nd", mix, streams))


def update_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """h'_j = post_j y + sum_i comb[i, j] h_i."""
    mixed = torch.einsum("nij,nid->njd", comb, streams)
    return bf16(post[:, :, None] * y[:, None, :] + mixed)


def coefficients(w: Weights, name: str, streams: Tensor, c: SimpleNamespace):
    """pre [n, hc], post [n, hc], comb [n, hc, hc] of one sublayer from the streams [n, hc, d]."""
    hc = c.hc_mult
    flat = streams.flatten(1)
    base, scale = w.plain(f"{name}_base"), w.plain(f"{name}_scale")
    m = (flat @ w.plain(f"{name}_fn").T) * inverse_rms(flat, c.rms_norm_eps)
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + c.hc_eps
    post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(1, (hc, hc))
    comb = comb.softmax(-1) + c.hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
    for _ in range(c.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
    return f32(pre), f32(post), f32(comb)


# Experts ------------------------------------------------------------------------------------------


def gated_product(gate: Tensor, up: Tensor, weight: Tensor, limit: float) -> Tensor:
    """silu(min(gate, L)) * clamp(up, +-L) * routing weight, one rounding."""
    g = gate.clamp(max=limit)
    return bf16(g * torch.sigmoid(g) * up.clamp(-limit, limit) * weight[:, None])


def expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, weight: Tensor, limit: float) -> Tensor:
    gate, up = linear_fp8(x, w1), linear_fp8(x, w3)
    return linear_fp8(gated_product(gate, up, weight, limit), w2)


def route(w: Weights, prefix: str, x: Tensor, active: int, scaling: float):
    """Chosen expert ids and routing weights, both [n, active]; ties go to the lower id."""
    scores = f32(torch.nn.functional.softplus(x @ w.plain(f"{prefix}.gate.weight").T).sqrt())
    biased = scores + w.plain(f"{prefix}.gate.bias")
    chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, :active]
    picked = scores.gather(1, chosen)
    return chosen, f32(picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling)


def mixture(w: Weights, prefix: str, x: Tensor, active: int, c: SimpleNamespace) -> Tensor:
    """Sum of the chosen experts and the shared one, x [n, d]; the sum is rounded once."""
    chosen, weights = route(w, prefix, x, active, c.routed_scaling_factor)
    shared = [w.fp8(f"{prefix}.shared_experts.{part}") for part in ("w1", "w3", "w2")]
    total = expert(x, *shared, torch.ones(len(x), dtype=torch.float64), c.swiglu_limit)
    for number in chosen.unique().tolist():
        rows, slot = (chosen == number).nonzero(as_tuple=True)
        parts = [w.fp4(f"{prefix}.experts.{number}.{part}") for part in ("w1", "w3", "w2")]
        total[rows] += expert(x[rows], *parts, weights[rows, slot], c.swiglu_limit)
    return bf16(total)


# Engram -------------------------------------------------------------------------------------------


def is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def engram_primes(c: SimpleNamespace) -> dict[int, list[int]]:
    """Bucket sizes per Engram layer, (n-gram size, head) in order, no prime used twice."""
    used: set[int] = set()
    primes: dict[int, list[int]] = {}
    for layer in c.engram_layer_ids:
        primes[layer] = []
        for _ in range(2, c.engram_max_ngram_size + 1):
            candidate = c.engram_vocab_size - 1
            for _ in range(c.engram_n_heads):
                candidate += 1
                while candidate in used or not is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes[layer].append(candidate)
    totals = [sum(primes[layer]) for layer in c.engram_layer_ids]
    if totals != list(c.engram_num_embeddings):
        raise ValueError(f"engram_num_embeddings {c.engram_num_embeddings}, primes give {totals}")
    return primes


def engram_hashes(folded: list[int], start: int, c: SimpleNamespace) -> Tensor:
    """Table rows [n, engram layers, columns] of positions start.. of the folded tokens."""
    history = np.array([c.engram_pad_token_id] * (c.engram_max_ngram_size - 1) + folded, np.int64)
    primes = engram_primes(c)
    layers = []
    for layer in c.engram_layer_ids:
        bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
        draw = np.random.default_rng(10007 * layer)
        odd = 2 * draw.integers(0, bound, size=c.engram_max_ngram_size, dtype=np.int64) + 1
        first = c.engram_max_ngram_size - 1
        mixed = history[first:] * odd[0]
        columns, offset = [], 0
        sizes = iter(primes[layer])
        for back in range(1, c.engram_max_ngram_size):
            mixed = mixed ^ (history[first - back : len(history) - back] * odd[back])
            for _ in range(c.engram_n_heads):
                size = next(sizes)
                columns.append(mixed % size + offset)
                offset += size
        layers.append(np.stack(columns, -1)[start:])
    return torch.from_numpy(np.stack(layers, 1))


def engram(w: Weights, layer: int, streams: Tensor, rows: Tensor, c: SimpleNamespace) -> Tensor:
    """streams [n, hc, d] after the lookup of table rows [n, columns]."""
    prefix, hc = f"layers.{layer}.engram", c.hc_mult
    looked_up = w.fp8_rows(f"{prefix}.embed", rows).flatten(1)
    kv = linear_fp8(looked_up, w.fp8(f"{prefix}.wkv")).unflatten(1, (hc + 1, -1))
    keys, value = kv[:, :hc], kv[:, hc:]
    weight = w.plain(f"{prefix}.q_weight") * w.plain(f"{prefix}.k_weight")
    z = (streams * weight * keys).sum(-1, keepdim=True) * c.hidden_size**-0.5
    z = z * inverse_rms(streams, c.rms_norm_eps) * inverse_rms(keys, c.rms_norm_eps)
    gate = f32(torch.sigmoid(z.sign() * z.abs().clamp(min=1e-6).sqrt()))
    return bf16(streams + gate * value)
