"""Numeric formats of the checkpoint and the caches, defined in numpy (spec section 1).

These are the plain definitions; the kernels in `ops/` compute the same bits faster. Stored codes
are uint8 (E4M3, E8M0, packed E2M1) or uint16 (bf16); decoded values are float32 where every code
has an exact one, float64 where a scale is multiplied in, which is then exact as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FP8_MAX = 448.0
FP4_MAX = 6.0
SCALE_CHANNELS = 32
"""Channels per scale of FP8 and FP4/E8M0 activations, FP4 weights and table rows."""
KV_SCALE_CHANNELS = 16
"""Channels per scale of the compressed latent (FP4/E4M3)."""
E8M0_BIAS = 127
E8M0_NAN = 0xFF
E4M3_NAN = 0x7F

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def _e4m3_table() -> F32:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float64), -9),
        np.ldexp(8.0 + mantissa, exponent - 10),
    )
    size[(codes & 0x7F) == E4M3_NAN] = np.nan
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def _e8m0_table() -> F32:
    table = np.ldexp(1.0, np.arange(256) - E8M0_BIAS)
    table[E8M0_NAN] = np.nan
    return table.astype(np.float32)


E4M3_VALUES = _e4m3_table()
"""Value of each E4M3 code."""
E8M0_VALUES = _e8m0_table()
"""Value of each E8M0 code; 2**-127 is subnormal in float32, 0xFF is NaN."""
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32)
"""Value of each E2M1 code; codes 8..15 are negative, 8 is minus zero."""
E2M1_VALUES[8:] *= -1


def _float64(values: ArrayLike) -> F64:
    # Signalling NaN would warn on the way.
    with np.errstate(invalid="ignore"):
        return np.asarray(values, np.float64)


def _midpoints(values: F32) -> F64:
    exact = values.astype(np.float64)
    return (exact[1:] + exact[:-1]) / 2


_E4M3_MIDPOINTS = _midpoints(E4M3_VALUES[:E4M3_NAN])
_E2M1_MIDPOINTS = _midpoints(E2M1_VALUES[:8])


def _nearest_code(size: F64, midpoints: F64) -> U8:
    """Code of the nearest value, ties to the even code, for sizes without a sign."""
    code = np.searchsorted(midpoints, size, side="left")
    tie = size == midpoints[np.minimum(code, len(midpoints) - 1)]
    return (code + (tie & (code % 2 == 1))).astype(np.uint8)


def decode_e4m3(codes: U8) -> F32:
    """Values of E4M3 codes; 0x7F and 0xFF are NaN."""
    return E4M3_VALUES[codes]


def encode_e4m3(values: ArrayLike) -> U8:
    """Nearest E4M3 codes, ties to even; sizes above 448 become 448, NaN stays NaN."""
    values = _float64(values)
    code = _nearest_code(np.abs(values), _E4M3_MIDPOINTS)
    code = np.where(np.isnan(values), E4M3_NAN, code)
    return code.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7


def decode_e8m0(codes: U8) -> F32:
    """Values of E8M0 codes: 2**(code - 127); 0xFF is NaN."""
    return E8M0_VALUES[codes]


def pow2_ceil(values: ArrayLike) -> U8:
    """E8M0 codes of 2**ceil(log2(v)), from the bits of positive float32 values.

    The code is the biased exponent, plus one when the mantissa is not zero. Values above 2**127 and
    NaN give 0xFF, the code of NaN.
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    code = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0)
    return np.minimum(code, E8M0_NAN).astype(np.uint8)


def decode_e2m1(codes: U8) -> F32:
    """Values of unpacked E2M1 codes 0..15."""
    return E2M1_VALUES[codes]


def encode_e2m1(values: ArrayLike) -> U8:
    """Nearest unpacked E2M1 codes, ties to the even code; sizes above 6 become 6, signs stay.

    The format has no NaN; it becomes 6, so look for it before.
    """
    values = _float64(values)
    code = np.where(np.isnan(values), 7, _nearest_code(np.abs(values), _E2M1_MIDPOINTS))
    return code.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 3


def pack_e2m1(codes: U8) -> U8:
    """Two codes to a byte along the last axis, the even element in the low nibble."""
    assert codes.shape[-1] % 2 == 0, f"an even number of codes packs, not {codes.shape[-1]}"
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: U8) -> U8:
    """The codes of packed bytes: twice as many along the last axis."""
    packed = np.asarray(packed).view(np.uint8)
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def bf16_bits(values: ArrayLike) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even.

    float64 goes through float32, each step to nearest even, as the canonical numerics have it: a
    single rounding gives other bits where float32 lands on a tie. NaN becomes 0x7FC0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.asarray(values).astype(np.float32)
    bits = values.view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return np.where(np.isnan(values), 0x7FC0, rounded >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> F32:
    """Values of bf16 bits."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: ArrayLike) -> F32:
    """Values rounded to bf16."""
    return bf16_values(bf16_bits(values))


class Quantised(NamedTuple):
    """Codes along the channels (packed for FP4) and one scale code per group of channels."""

    codes: U8
    scales: U8


def _groups(values: ArrayLike, channels: int) -> F64:
    """Split the last axis into groups of `channels`; the last group is filled up with zeros."""
    values = _float64(values)
    missing = -values.shape[-1] % channels
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return padded.reshape(*values.shape[:-1], -1, channels)


def _ungroup(groups: np.ndarray, channels: int) -> np.ndarray:
    return groups.reshape(*groups.shape[:-2], -1)[..., :channels]


def _amax(groups: F64, least: float) -> F32:
    return np.maximum(np.abs(groups).max(axis=-1, keepdims=True), least).astype(np.float32)


def _spread(scales: np.ndarray, per_scale: int, channels: int) -> F64:
    return np.repeat(scales.astype(np.float64), per_scale, axis=-1)[..., :channels]


def quantise_fp8(values: ArrayLike) -> Quantised:
    """FP8 activation: E4M3 with one E8M0 scale per row and 32 channels.

    values [..., n]; codes [..., n], scales [..., ceil(n / 32)].
    """
    groups = _groups(values, SCALE_CHANNELS)
    scales = pow2_ceil(_amax(groups, 1e-4) * np.float32(1 / FP8_MAX))
    scaled = np.clip(groups / decode_e8m0(scales), -FP8_MAX, FP8_MAX)
    return Quantised(_ungroup(encode_e4m3(scaled), np.shape(values)[-1]), scales[..., 0])


def dequantise_fp8(codes: U8, scales: U8) -> F64:
    """Values of FP8 rows with one E8M0 scale per 32 channels: activations and Engram rows."""
    return decode_e4m3(codes) * _spread(decode_e8m0(scales), SCALE_CHANNELS, codes.shape[-1])


def quantise_fp4_e8m0(values: ArrayLike) -> Quantised:
    """FP4 activation of indexer queries and keys: E2M1, one E8M0 scale per 32 channels.

    values [..., n], n even; codes [..., n / 2] packed, scales [..., ceil(n / 32)].
    """
    groups = _groups(values, SCALE_CHANNELS)
    scales = pow2_ceil(_amax(groups, FP4_MAX * 2.0**-126) * np.float32(1 / FP4_MAX))
    codes = encode_e2m1(groups / decode_e8m0(scales))
    return Quantised(pack_e2m1(_ungroup(codes, np.shape(values)[-1])), scales[..., 0])


def dequantise_fp4_e8m0(packed: U8, scales: U8) -> F64:
    """Values of packed FP4 rows with one E8M0 scale per 32 channels: weights and index keys."""
    codes = unpack_e2m1(packed)
    return decode_e2m1(codes) * _spread(decode_e8m0(scales), SCALE_CHANNELS, codes.shape[-1])


def quantise_fp4_e4m3(values: ArrayLike) -> Quantised:
    """FP4 of the compressed latent: E2M1, one E4M3 scale per 16 channels.

    values [..., n], n even; codes [..., n / 2] packed, scales [..., ceil(n / 16)].
    """
    groups = _groups(values, KV_SCALE_CHANNELS)
    scales = encode_e4m3(_amax(groups, FP4_MAX * 2.0**-9).astype(np.float64) / FP4_MAX)
    codes = encode_e2m1(groups / decode_e4m3(scales))
    return Quantised(pack_e2m1(_ungroup(codes, np.shape(values)[-1])), scales[..., 0])


def dequantise_fp4_e4m3(packed: U8, scales: U8) -> F64:
    """Values of packed FP4 rows with one E4M3 scale per 16 channels."""
    codes = unpack_e2m1(packed)
    return decode_e2m1(codes) * _spread(decode_e4m3(scales), KV_SCALE_CHANNELS, codes.shape[-1])


def dequantise_fp8_weight(codes: U8, scales: U8) -> F64:
    """Values of an FP8 weight [out, in] with one E8M0 scale per 32 x 32 block."""
    rows, columns = codes.shape
    grid = -(-rows // SCALE_CHANNELS), -(-columns // SCALE_CHANNELS)
    assert scales.shape == grid, f"scale grid {scales.shape}, not {grid}"
    down = np.repeat(decode_e8m0(scales), SCALE_CHANNELS, axis=0)[:rows]
    return decode_e4m3(codes) * _spread(down, SCALE_CHANNELS, columns)
