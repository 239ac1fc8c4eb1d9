"""Storage formats of the oracle: every rounding and every dequantisation, on float64 carriers.

A "stored" value is a float64 tensor whose elements are representable in the storage type, so a
rounding point is visible in the code as one call (`bf16(...)`, `f32(...)`, `fp8_round_trip(...)`).
What this file does not know: which op rounds to what (that is the model's business), and how the
engine rounds (nothing here comes from `engine/`).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
FP4_MIDPOINTS = (FP4_MAGNITUDES[1:] + FP4_MAGNITUDES[:-1]) / 2
FP4_TIE_GOES_UP = torch.arange(7) % 2 == 1  # the even code of (i, i + 1) is i + 1 when i is odd
SCALE_BLOCK = 32


def f32(x: Tensor) -> Tensor:
    """Round float64 to fp32, nearest even."""
    return x.to(torch.float32).double()


def bf16(x: Tensor) -> Tensor:
    """Round float64 to bf16 by way of fp32, nearest even at both steps.

    The goldens hold the two-step result: where fp32 lands on a bf16 tie, a direct rounding would
    differ (about once in 2^17 generic values).
    """
    return x.to(torch.float32).to(torch.bfloat16).double()


def power_of_two_at_least(v: Tensor) -> Tensor:
    """2^ceil(log2(v)) read from the fp32 bit pattern of `v` (fp32, positive, normal)."""
    bits = v.view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()
    return torch.ldexp(torch.ones(v.shape, dtype=torch.float64), exponent)


def grouped(x: Tensor, size: int) -> Tensor:
    """Split the last axis into groups of `size` channels; the last group is padded with zeros."""
    missing = -x.shape[-1] % size
    return torch.nn.functional.pad(x, (0, missing)).unflatten(-1, (-1, size))


def ungrouped(groups: Tensor, channels: int) -> Tensor:
    return groups.flatten(-2)[..., :channels]


def nearest_e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float8_e4m3fn).double()


def nearest_e2m1(x: Tensor) -> Tensor:
    """Nearest of +-{0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even code, sign kept, saturating."""
    size = x.abs().unsqueeze(-1)
    above = (size > FP4_MIDPOINTS) | ((size == FP4_MIDPOINTS) & FP4_TIE_GOES_UP)
    return torch.copysign(FP4_MAGNITUDES[above.sum(-1)], x)


def e8m0_scale(groups: Tensor, floor: float, largest: float) -> Tensor:
    """Power-of-two scale per group: amax times fp32(1/largest) in fp32, rounded up."""
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=floor).to(torch.float32)
    return power_of_two_at_least(amax * torch.tensor(1.0 / largest, dtype=torch.float32))


def fp8_round_trip(x: Tensor) -> Tensor:
    """FP8 activation: E4M3 with one power-of-two scale per row and 32 channels."""
    groups = grouped(x, SCALE_BLOCK)
    scale = e8m0_scale(groups, 1e-4, FP8_MAX)
    return ungrouped(nearest_e4m3((groups / scale).clamp(-FP8_MAX, FP8_MAX)) * scale, x.shape[-1])


def fp4_round_trip_e8m0(x: Tensor) -> Tensor:
    """FP4 activation of indexer queries and keys: E2M1, power-of-two scale per 32 channels."""
    groups = grouped(x, 32)
    scale = e8m0_scale(groups, FP4_MAX * 2.0**-126, FP4_MAX)
    return ungrouped(nearest_e2m1(groups / scale) * scale, x.shape[-1])


def fp4_round_trip_e4m3(x: Tensor) -> Tensor:
    """FP4 of compressed KV: E2M1, one E4M3 scale per 16 channels."""
    groups = grouped(x, 16)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=FP4_MAX * 2.0**-9)
    scale = nearest_e4m3(amax / FP4_MAX)
    return ungrouped(nearest_e2m1(groups / scale) * scale, x.shape[-1])


def dequantise_fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 matrix [out, in] with one E8M0 scale per 32x32 block (grid sizes are ceilings)."""
    rows, columns = weight.shape
    want = (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
    assert tuple(scale.shape) == want, f"scale grid {tuple(scale.shape)}, expected {want}"
    spread = scale.double().repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return weight.double() * spread[:rows, :columns]


def dequantise_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8 table rows [rows, width] with one E8M0 scale per row and 32 channels."""
    return weight.double() * scale.double().repeat_interleave(32, 1)[:, : weight.shape[1]]


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """FP4 matrix stored I8 [out, in/2], even element in the low nibble, scale per row and 32."""
    codes = packed.view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    magnitude = FP4_MAGNITUDES[nibbles & 7]
    values = torch.where(nibbles >= 8, -magnitude, magnitude)
    return values * scale.double().repeat_interleave(32, 1)[:, : values.shape[1]]
