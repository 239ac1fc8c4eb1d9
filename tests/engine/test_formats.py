"""Numeric formats: equal to torch's where torch has them, and to their definitions elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine import formats as f
from suites.numerics import oracle_formats
from tests.engine.mini_files import GOLDEN, read_file, shard_of

ALL = np.arange(256, dtype=np.uint8)
QUICK = settings(max_examples=60, deadline=None)


def f32_from_bits(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits_in_all_ranges(count: int, seed: int) -> np.ndarray:
    """float32 values with uniform bits: every exponent, subnormals, infinities and NaN."""
    return f32_from_bits(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32))


def torch_bytes(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, any NaN equal to any other."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


def near_e4m3() -> np.ndarray:
    """Every E4M3 value and midpoint with its float32 neighbours, both signs."""
    values = f.E4M3_VALUES[:127].astype(np.float64)
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2, [464, 480, 1e9]]).astype(
        np.float32
    )
    around = [np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf)]
    return np.concatenate([s * v for s in (1, -1) for v in (exact, *around)])


def test_e4m3_decodes_as_in_torch():
    expected = torch.from_numpy(ALL.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert same_values(f.decode_e4m3(ALL), expected)


def test_e8m0_decodes_as_in_torch():
    expected = torch.from_numpy(ALL.copy()).view(torch.float8_e8m0fnu).float().numpy()
    assert same_values(f.decode_e8m0(ALL), expected)


def test_e8m0_is_a_power_of_two_and_no_number_of_its_own():
    assert f.decode_e8m0(np.uint8(127)) == 1 and f.decode_e8m0(np.uint8(120)) == 2.0**-7
    assert np.isnan(f.decode_e8m0(np.uint8(f.E8M0_NAN)))


@pytest.mark.parametrize(
    "values", [near_e4m3(), bits_in_all_ranges(200_000, 3)], ids=["ties", "all"]
)
def test_e4m3_encodes_as_in_torch(values):
    codes, expected = f.encode_e4m3(values), torch_bytes(values, torch.float8_e4m3fn)
    nan = np.isnan(values)
    assert np.array_equal(codes[~nan], expected[~nan])
    assert (codes[nan] & 0x7F == f.E4M3_NAN).all()


def test_every_e4m3_code_survives_a_round_trip():
    assert np.array_equal(f.encode_e4m3(f.decode_e4m3(ALL[:127])), ALL[:127])
    assert np.array_equal(f.encode_e4m3(f.decode_e4m3(ALL[128:255])), ALL[128:255])


def test_e2m1_ties_go_to_the_even_code_and_signs_stay():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert f.decode_e2m1(f.encode_e2m1(ties)).tolist() == rounded
    assert f.decode_e2m1(f.encode_e2m1(np.negative(ties))).tolist() == np.negative(rounded).tolist()
    assert f.encode_e2m1([-0.0, -0.1, 0.0]).tolist() == [8, 8, 0]
    assert f.encode_e2m1([7, 1e30, np.inf, -np.inf]).tolist() == [7, 7, 7, 15]


@QUICK
@given(hnp.arrays(np.float64, 50, elements=st.floats(-8, 8)))
def test_e2m1_is_never_further_than_another_code(values):
    found = f.decode_e2m1(f.encode_e2m1(values)).astype(np.float64)
    distance = np.abs(values[:, None] - f.E2M1_VALUES.astype(np.float64))
    assert np.array_equal(np.abs(values - found), distance.min(axis=1))
    assert np.array_equal(np.signbit(found), np.signbit(values))


def test_even_element_lies_in_the_low_nibble():
    assert f.pack_e2m1(np.array([1, 2, 15, 0], np.uint8)).tolist() == [0x21, 0x0F]
    assert f.unpack_e2m1(np.array([[0x21, 0x0F]], np.uint8)).tolist() == [[1, 2, 15, 0]]
    with pytest.raises(AssertionError, match="even number"):
        f.pack_e2m1(np.zeros(3, np.uint8))


def test_packed_bytes_survive_a_round_trip():
    assert np.array_equal(f.pack_e2m1(f.unpack_e2m1(ALL)), ALL)
    assert np.array_equal(f.unpack_e2m1(ALL.view(np.int8)), f.unpack_e2m1(ALL))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bf16_rounds_as_torch_does(dtype):
    values = bits_in_all_ranges(100_000, 5)
    values = values[~np.isnan(values)].astype(dtype)
    if dtype == np.float64:
        # Values just beside a bf16 tie: float32 lands on the tie, so two roundings show.
        ties = f32_from_bits(np.arange(0x3F80_8000, 0x4000_8000, 0x10000)).astype(np.float64)
        beside = [ties * (1 + sign * 2.0**-30) for sign in (-1, 1)]
        values = np.concatenate([values, ties, *beside, [1e300, -1e300, 1e-300]])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(f.bf16_bits(values), expected)


def test_bf16_goes_through_float32():
    value = 1 + 2.0**-8 + 2.0**-40
    assert f.round_bf16(value) == 1.0  # a single rounding would give 1 + 2**-7


def test_bf16_bits_survive_a_round_trip_and_nan_stays_nan():
    bits = np.arange(2**16, dtype=np.uint16)
    values = f.bf16_values(bits)
    nan = np.isnan(values)
    assert np.array_equal(f.bf16_bits(values)[~nan], bits[~nan])
    assert np.isnan(f.round_bf16(values[nan])).all() and nan.sum() == 254


@QUICK
@given(hnp.arrays(np.float32, 20, elements=st.floats(2.0**-126, 2.0**126, width=32)))
def test_scale_is_the_smallest_power_of_two_not_below_the_value(values):
    scale = f.decode_e8m0(f.pow2_ceil(values)).astype(np.float64)
    assert (scale >= values).all() and (scale / 2 < values).all()


def test_scale_of_a_power_of_two_is_itself():
    codes = ALL[1:255]
    assert np.array_equal(f.pow2_ceil(f.decode_e8m0(codes)), codes)
    assert f.pow2_ceil(np.float32(np.inf)) == f.pow2_ceil(np.float32(np.nan)) == f.E8M0_NAN


def rows(count: int, width: int, seed: int) -> np.ndarray:
    """bf16 rows whose groups differ in size by many powers of two; one row of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, width)) * np.exp2(rng.integers(-30, 12, (count, width)))
    values[0] = 0
    return f.round_bf16(values)


KINDS = {
    "fp8": (f.quantise_fp8, f.dequantise_fp8, 32, 1),
    "fp4_e8m0": (f.quantise_fp4_e8m0, f.dequantise_fp4_e8m0, 32, 2),
    "fp4_e4m3": (f.quantise_fp4_e4m3, f.dequantise_fp4_e4m3, 16, 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 512, 48, 80, 2])
def test_round_trip_has_the_packed_bytes_and_keeps_its_values(kind, width):
    quantise, dequantise, channels, packing = KINDS[kind]
    values = rows(40, width, 11)
    codes, scales = quantise(values)
    assert codes.dtype == scales.dtype == np.uint8
    assert codes.shape == (40, width // packing)
    assert scales.shape == (40, -(-width // channels))
    found = dequantise(codes, scales)
    assert found.shape == values.shape and not np.isnan(found).any()
    assert np.array_equal(f.round_bf16(found), found.astype(np.float32))
    assert not found[0].any()


@pytest.mark.parametrize(
    ("kind", "oracle"),
    [("fp8", oracle_formats.fp8_round_trip), ("fp4_e8m0", oracle_formats.fp4_round_trip_e8m0),
     ("fp4_e4m3", oracle_formats.fp4_round_trip_e4m3)],
)  # fmt: skip
def test_round_trip_gives_the_bits_of_the_oracle(kind, oracle):
    quantise, dequantise, _, _ = KINDS[kind]
    values = rows(500, 96, 23)
    expected = oracle(torch.from_numpy(values.astype(np.float64))).numpy()
    assert dequantise(*quantise(values)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_group_makes_the_group_nan(kind):
    quantise, dequantise, channels, _ = KINDS[kind]
    values = np.full((1, 2 * channels), 6.0, np.float32)
    values[0, 3] = np.nan
    found = dequantise(*quantise(values))[0]
    assert np.isnan(found[:channels]).all() and (found[channels:] == 6).all()


@pytest.mark.parametrize("kind", ["fp8", "fp4_e8m0"])
def test_round_trip_of_its_own_values_changes_nothing(kind):
    quantise, dequantise, _, _ = KINDS[kind]
    once = dequantise(*quantise(rows(30, 96, 13)))
    assert np.array_equal(dequantise(*quantise(once)), once)


@pytest.mark.parametrize(
    ("kind", "step"), [("fp8", 2.0**-4), ("fp4_e8m0", 0.25), ("fp4_e4m3", 0.25)]
)
def test_largest_channel_of_a_group_keeps_its_size(kind, step):
    quantise, dequantise, channels, _ = KINDS[kind]
    values = f.round_bf16(np.random.default_rng(17).standard_normal((200, channels)))
    found = dequantise(*quantise(values))
    at = np.arange(200), np.abs(values).argmax(axis=1)
    assert (np.abs(found[at] - values[at]) <= step * np.abs(values[at])).all()


def test_fp8_activation_follows_its_definition():
    values = np.zeros((1, 64), np.float32)
    values[0, :3] = [448, -1, 0.3]
    values[0, 32] = 449
    codes, scales = f.quantise_fp8(values)
    assert scales.tolist() == [[127, 128]]  # 448 fits with scale 1, 449 needs 2
    assert f.decode_e4m3(codes)[0, [0, 1, 2, 32]].tolist() == [448, -1, 0.3125, 224]
    assert f.quantise_fp8(np.zeros((1, 32)))[1].tolist() == [[105]]  # 1e-4 / 448 rounded up: 2**-22


def test_fp8_activation_matches_torch_step_by_step():
    values = rows(300, 128, 19)
    groups = torch.from_numpy(values).view(300, 4, 32)
    amax = groups.abs().amax(-1).clamp(min=1e-4) * torch.tensor(1 / 448, dtype=torch.float32)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent - (mantissa == 0.5).int()
    scaled = (groups / torch.ldexp(torch.ones_like(amax), exponent)[..., None]).clamp(-448, 448)
    codes, scales = f.quantise_fp8(values)
    assert np.array_equal(scales, (exponent + 127).numpy().astype(np.uint8))
    assert np.array_equal(codes, torch_bytes(scaled.numpy(), torch.float8_e4m3fn).reshape(300, 128))


def test_compressed_latent_uses_e4m3_scales_per_16_channels():
    values = np.zeros((1, 32), np.float32)
    values[0, 0], values[0, 16] = 6.0, 7.0
    codes, scales = f.quantise_fp4_e4m3(values)
    assert f.decode_e4m3(scales).tolist() == [[1.0, 1.125]]  # 7 / 6 is nearest to 1.125
    assert f.dequantise_fp4_e4m3(codes, scales)[0, [0, 16]].tolist() == [6.0, 6.75]
    assert f.decode_e4m3(f.quantise_fp4_e4m3(np.zeros((1, 16)))[1]).tolist() == [[2.0**-9]]


def test_index_key_uses_power_of_two_scales_per_32_channels():
    values = np.zeros((1, 64), np.float32)
    values[0, 0], values[0, 32] = 6.0, 7.0
    codes, scales = f.quantise_fp4_e8m0(values)
    assert scales.tolist() == [[127, 128]]
    assert f.dequantise_fp4_e8m0(codes, scales)[0, [0, 32]].tolist() == [6.0, 8.0]
    assert f.quantise_fp4_e8m0(np.zeros((1, 32)))[1].tolist() == [[1]]  # 2**-126


def golden(name: str) -> np.ndarray:
    _, shape, data = read_file(shard_of(GOLDEN, name))[name]
    return np.frombuffer(data, np.uint8).reshape(shape)


def test_fp8_weight_of_a_checkpoint_dequantises_as_with_torch():
    codes, scales = golden("layers.0.attn.wo_b.weight"), golden("layers.0.attn.wo_b.scale")
    weight = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double()
    grid = torch.from_numpy(scales.copy()).view(torch.float8_e8m0fnu).double()
    expected = weight * torch.kron(grid, torch.ones(32, 32, dtype=torch.float64))
    assert np.array_equal(f.dequantise_fp8_weight(codes, scales), expected.numpy())


def test_fp8_weight_with_partial_blocks_uses_the_last_scale():
    codes = np.full((40, 33), f.encode_e4m3(1.0), np.uint8)
    scales = np.array([[127, 128], [129, 130]], np.uint8)
    values = f.dequantise_fp8_weight(codes, scales)
    assert [values[0, 0], values[31, 32], values[32, 31], values[39, 32]] == [1, 2, 4, 8]
    with pytest.raises(AssertionError, match="scale grid"):
        f.dequantise_fp8_weight(codes, scales[:1])


def test_fp4_weight_of_a_checkpoint_dequantises_element_by_element():
    name = "layers.2.ffn.experts.5.w1"
    packed, scales = golden(f"{name}.weight"), golden(f"{name}.scale")
    values = f.dequantise_fp4_e8m0(packed, scales)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row, column in [(0, 0), (0, 1), (3, 70), (127, 255), (64, 129)]:
        nibble = packed[row, column // 2] >> (4 * (column % 2)) & 15
        size = sizes[nibble & 7] * 2.0 ** (int(scales[row, column // 32]) - 127)
        assert values[row, column] == (-size if nibble & 8 else size)


def test_table_rows_have_their_own_scales():
    codes, scales = golden("layers.1.engram.embed.weight"), golden("layers.1.engram.embed.scale")
    values = f.dequantise_fp8(codes, scales)
    for row in (0, 31, 32, 659):
        scale = 2.0 ** (int(scales[row, 0]) - 127)
        assert np.array_equal(values[row], f.decode_e4m3(codes[row]).astype(np.float64) * scale)
