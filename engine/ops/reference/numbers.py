"""Storage formats in torch: bits decoded into values, values rounded into bits (spec 1).

Packed FP8 rows are `width` E4M3 bytes, then one E8M0 byte per 32 channels; packed FP4 records are
two E2M1 codes a byte, the even channel in the low half, then their scales. Quantisation is exact in
float64 and does not follow the accumulation dtype.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

WORK = {"float64": torch.float64, "float32": torch.float32}
"""The dtype inside an op by the recipe's `accumulation`."""
FP8_MAX, FP4_MAX = 448.0, 6.0
INVERSE_FP8_MAX = torch.tensor(1 / FP8_MAX, dtype=torch.float32).item()
INVERSE_FP4_MAX = torch.tensor(1 / FP4_MAX, dtype=torch.float32).item()
SCALE_CHANNELS = 32
KV_SCALE_CHANNELS = 16
FP8_FLOOR = 1e-4
FP4_FLOOR = FP4_MAX * 2.0**-126
FP4_KV_FLOOR = FP4_MAX * 2.0**-9


def round_bf16(x: Tensor) -> Tensor:
    """bf16 by way of float32, nearest even at both steps.

    NaN gets one pattern of bits: torch's vector code and its scalar code give different ones.
    """
    rounded = x.to(torch.float32).to(torch.bfloat16)
    return rounded.masked_fill(x.isnan(), torch.nan)


def store(out: Tensor, values: Tensor) -> None:
    """Round values once into an output of bf16, float32 or float64."""
    out.copy_(round_bf16(values) if out.dtype == torch.bfloat16 else values)


# Codes ------------------------------------------------------------------------------------------


def decode_e4m3(codes: Tensor) -> Tensor:
    """float64 values of E4M3 bytes."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32).to(torch.float64)


def encode_e4m3(values: Tensor) -> Tensor:
    """E4M3 bytes of values by way of float32, nearest even; sizes above 448 become 448."""
    limited = values.to(torch.float32).clamp(-FP8_MAX, FP8_MAX)
    return limited.to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """float64 values 2^(code - 127), made from the bits; NaN is refused at loading."""
    return ((codes.to(torch.int64) + (1023 - 127)) << 52).view(torch.float64)


def pow2_ceil(values: Tensor) -> Tensor:
    """E8M0 bytes of 2^ceil(log2(v)) of positive float32 values, from their bits."""
    bits = values.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


@lru_cache(maxsize=8)
def _e2m1_values(device: torch.device) -> Tensor:
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = sizes + [-size for size in sizes]
    return torch.tensor(values, dtype=torch.float64, device=device)


def decode_e2m1(packed: Tensor) -> Tensor:
    """float64 values of bytes of two E2M1 codes: twice as many along the last axis."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return _e2m1_values(packed.device)[codes.long()]


def encode_e2m1(values: Tensor) -> Tensor:
    """Bytes of two E2M1 codes: nearest, ties to the even code, saturating at 6, sign kept."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    code |= values.signbit().to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


# Rows -------------------------------------------------------------------------------------------


def groups_of(x: Tensor, channels: int) -> Tensor:
    """float64 [..., groups, channels] of the last axis; the last group is filled up with zeros."""
    missing = -x.shape[-1] % channels
    padded = torch.nn.functional.pad(x.to(torch.float64), (0, missing))
    return padded.unflatten(-1, (padded.shape[-1] // channels, channels))


def ungrouped(groups: Tensor, width: int) -> Tensor:
    """The first `width` channels of groups, side by side again."""
    return groups.flatten(-2)[..., :width]


def per_channel(scales: Tensor, channels: int, width: int) -> Tensor:
    """One scale per channel from one per `channels` channels."""
    return scales.repeat_interleave(channels, dim=-1)[..., :width]


def largest(groups: Tensor, least: float) -> Tensor:
    """float32 largest magnitude of each group, not below `least`."""
    return groups.abs().amax(-1).to(torch.float32).clamp(min=least)


def pack_fp8(x: Tensor) -> Tensor:
    """Packed FP8 rows of bf16 rows [..., width]."""
    groups = groups_of(x, SCALE_CHANNELS)
    scales = pow2_ceil(largest(groups, FP8_FLOOR) * INVERSE_FP8_MAX)
    codes = encode_e4m3(groups / decode_e8m0(scales)[..., None])
    return torch.cat((ungrouped(codes, x.shape[-1]), scales), dim=-1)


def unpack_fp8(packed: Tensor, width: int) -> Tensor:
    """float64 [..., width] of packed FP8 rows."""
    scales = decode_e8m0(packed[..., width:])
    return decode_e4m3(packed[..., :width]) * per_channel(scales, SCALE_CHANNELS, width)


def pack_fp4_e8m0(x: Tensor) -> Tensor:
    """Packed FP4 records of bf16 rows [..., width], a power-of-two scale per 32 channels."""
    groups = groups_of(x, SCALE_CHANNELS)
    scales = pow2_ceil(largest(groups, FP4_FLOOR) * INVERSE_FP4_MAX)
    codes = encode_e2m1(groups / decode_e8m0(scales)[..., None])
    return torch.cat((codes.flatten(-2), scales), dim=-1)


def unpack_fp4_e8m0(packed: Tensor, width: int) -> Tensor:
    """float64 [..., width] of packed FP4 records with power-of-two scales."""
    scales = decode_e8m0(packed[..., width // 2 :])
    return decode_e2m1(packed[..., : width // 2]) * per_channel(scales, SCALE_CHANNELS, width)


def pack_fp4_e4m3(x: Tensor) -> Tensor:
    """Packed FP4 latents of bf16 rows [..., width], an E4M3 scale per 16 channels."""
    groups = groups_of(x, KV_SCALE_CHANNELS)
    scales = encode_e4m3(largest(groups, FP4_KV_FLOOR).to(torch.float64) / FP4_MAX)
    codes = encode_e2m1(groups / decode_e4m3(scales)[..., None])
    return torch.cat((codes.flatten(-2), scales), dim=-1)


def unpack_fp4_e4m3(packed: Tensor, width: int) -> Tensor:
    """float64 [..., width] of packed FP4 latents."""
    scales = decode_e4m3(packed[..., width // 2 :])
    return decode_e2m1(packed[..., : width // 2]) * per_channel(scales, KV_SCALE_CHANNELS, width)


# Weights ----------------------------------------------------------------------------------------


def decode_weight(codes: Tensor, scales: Tensor | None, shift: int = 0) -> Tensor:
    """float64 of a bf16 weight, or of an FP8 weight [out, in] with scales of 32 x 32 blocks.

    shift: rows of the first scale block that belong to another rank.
    """
    if scales is None:
        return codes.to(torch.float64)
    rows = (torch.arange(len(codes), device=codes.device) + shift) // SCALE_CHANNELS
    grid = decode_e8m0(scales)[rows]
    return decode_e4m3(codes) * per_channel(grid, SCALE_CHANNELS, codes.shape[1])
