"""Scalar numerics shared by all kernels: storage formats as bits, decoded and rounded.

float64 goes to bf16 by way of float32, nearest even at both steps: that is what the reference
forward does, and a direct rounding differs once in about 2^17 values.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

FAST = {"reassoc", "contract", "nsz"}
"""Sums may be vectorised: their float64 error vanishes in the one rounding that follows."""

inline = njit(inline="always", cache=True)
kernel = njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
"""A compiled kernel `f(first, past, ...)` over rows; it releases the interpreter lock."""

_U7F = np.uint32(0x7F)
_U80 = np.uint32(0x80)
_ONE = np.uint32(1)
_S16 = np.uint32(16)
_S20 = np.uint32(20)
_S23 = np.uint32(23)
_S24 = np.uint32(24)
_HALF_BF16 = np.uint32(0x7FFF)
_HALF_E4M3 = np.uint32(0x7FFFF)
_BIAS_121 = np.uint32(121 << 23)
_BIAS_120 = np.uint32(120 << 23)
_E4M3_BIAS = np.uint32(120 << 3)
_MANTISSA = np.uint32(0x7FFFFF)
_NAN_BF16 = np.uint16(0x7FC0)
FP8_LARGEST = np.float32(448.0)
INVERSE_448 = np.float32(1.0 / 448.0)
INVERSE_6 = np.float32(1.0 / 6.0)
FP8_FLOOR = np.float32(1e-4)
FP4_FLOOR = np.float32(6.0 * 2.0**-126)
FP4_KV_FLOOR = np.float32(6.0 * 2.0**-9)


@inline
def f32_bits(x):
    """Bits of a float32."""
    return np.float32(x).view(np.uint32)


@inline
def bits_f32(bits):
    """The float32 of 32 bits."""
    return np.uint32(bits).view(np.float32)


@inline
def from_bf16(code):
    """bf16 bits (uint16) as float64."""
    return np.float64(bits_f32(np.uint32(code) << _S16))


@inline
def to_bf16(x):
    """float64 to bf16 bits through float32, nearest even at both steps; NaN stays NaN."""
    single = np.float32(x)
    bits = f32_bits(single)
    rounded = np.uint16((bits + _HALF_BF16 + ((bits >> _S16) & _ONE)) >> _S16)
    return _NAN_BF16 if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded


@inline
def round_bf16(x):
    """The float64 value of x rounded to bf16."""
    return from_bf16(to_bf16(x))


@inline
def from_e4m3(code):
    """E4M3 bits as float32. Written without float32 subnormals, which are slow to multiply."""
    byte = np.uint32(code)
    magnitude = byte & _U7F
    small = bits_f32((magnitude << _S20) + _BIAS_121) - np.float32(2.0**-6)
    large = bits_f32((magnitude << _S20) + _BIAS_120)
    value = small if magnitude < np.uint32(8) else large
    return bits_f32(f32_bits(value) | ((byte & _U80) << _S24))


@inline
def to_e4m3(x):
    """float32 with |x| <= 448 to E4M3 bits, nearest even."""
    bits = f32_bits(x)
    sign = (bits >> _S24) & _U80
    size = bits & np.uint32(0x7FFFFFFF)
    normal = ((size + _HALF_E4M3 + ((size >> _S20) & _ONE)) >> _S20) - _E4M3_BIAS
    # Adding 2^14 leaves the multiple of 2^-9, the subnormal step, in the low bits.
    subnormal = f32_bits(bits_f32(size) + np.float32(16384.0)) & np.uint32(0xF)
    code = subnormal if size < np.uint32(121 << 23) else normal
    return np.uint8(code | sign)


@inline
def from_e8m0(code):
    """E8M0 bits as float64: 2^(code - 127)."""
    return np.int64((np.int64(code) + np.int64(896)) << np.int64(52)).view(np.float64)


@inline
def scale_code(v):
    """E8M0 bits of 2^ceil(log2(v)) for a positive normal float32, from its bit pattern."""
    bits = f32_bits(v)
    return (bits >> _S23) + (_ONE if (bits & _MANTISSA) != np.uint32(0) else np.uint32(0))


@inline
def from_e2m1(code):
    """Four bits of E2M1 as float32."""
    nibble = np.uint32(code)
    magnitude = nibble & np.uint32(7)
    large = bits_f32((magnitude << np.uint32(22)) + np.uint32(126 << 23))
    value = large if magnitude > _ONE else np.float32(magnitude) * np.float32(0.5)
    return bits_f32(f32_bits(value) | ((nibble & np.uint32(8)) << np.uint32(28)))


@inline
def to_e2m1(x):
    """float64 to E2M1 bits: nearest, ties to the even code, saturating at 6, sign kept."""
    size = abs(x)
    code = np.uint32(size > 0.25)
    code += np.uint32(size >= 0.75)
    code += np.uint32(size > 1.25)
    code += np.uint32(size >= 1.75)
    code += np.uint32(size > 2.5)
    code += np.uint32(size >= 3.5)
    code += np.uint32(size > 5.0)
    return code | (np.uint32(8) if math.copysign(1.0, x) < 0 else np.uint32(0))


LOG2_E = 1.4426950408889634
LN2_HIGH = 0.6931471803691238
"""ln 2 to 33 bits, so that multiples of it up to 2^20 are exact."""
LN2_LOW = 1.9082149292705877e-10
EXP_LEAST = -708.0
EXP_MOST = 709.0


@inline
def exp(x):
    """e^x in float64 to about one unit in the last place, 0 below -708, clamped above 709.

    Range reduction by ln 2 and the Taylor sum to x^13 of a remainder below 0.35, so that loops over
    it can be vectorised and no result depends on a machine's mathematics library.
    """
    y = min(max(x, EXP_LEAST), EXP_MOST)
    n = math.floor(y * LOG2_E + 0.5)
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    s = 1.6059043836821613e-10
    s = s * r + 2.08767569878681e-09
    s = s * r + 2.505210838544172e-08
    s = s * r + 2.755731922398589e-07
    s = s * r + 2.7557319223985893e-06
    s = s * r + 2.48015873015873e-05
    s = s * r + 0.0001984126984126984
    s = s * r + 0.001388888888888889
    s = s * r + 0.008333333333333333
    s = s * r + 0.041666666666666664
    s = s * r + 0.16666666666666666
    s = s * r + 0.5
    s = s * r + 1.0
    s = s * r + 1.0
    scale = np.int64((np.int64(n) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return s * scale if x >= EXP_LEAST else 0.0


@njit
def _tables():
    e4m3 = np.empty(256, dtype=np.float64)
    e2m1 = np.empty((256, 2), dtype=np.float64)
    for code in range(256):
        e4m3[code] = np.float64(from_e4m3(np.uint8(code)))
        e2m1[code, 0] = np.float64(from_e2m1(np.uint8(code & 15)))
        e2m1[code, 1] = np.float64(from_e2m1(np.uint8(code >> 4)))
    return e4m3, e2m1


E4M3, E2M1_PAIRS = _tables()
"""Every E4M3 code, and both values of every byte of two E2M1 codes: loads beat decoding."""
E2M1_PAIRS_F32 = E2M1_PAIRS.astype(np.float32)
