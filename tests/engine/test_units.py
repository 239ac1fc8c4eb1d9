"""Sizes are read and written with binary and decimal units kept apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.units import GIB, MIB, format_size, mib, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("8GiB", 8 * 2**30),
        ("50G", 50 * 2**30),
        ("50GB", 50 * 10**9),
        (" 512 mib ", 512 * 2**20),
        ("1.5KiB", 1536),
        ("1.5kb", 1500),
        ("2T", 2**41),
        ("3TB", 3 * 10**12),
        ("0.001GB", 10**6),
        # More digits than a float has.
        ("9007199254740993", 2**53 + 1),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_a_size_is_read_to_the_byte(text, size_bytes):
    assert parse_size(text) == size_bytes


NO_SIZES = ["", "GiB", "-1", "1e9", "8 Gi B", "8Gib/s", "1.", ".5G", "0x10", "8Q"]


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused_with_the_accepted_units(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--floor")
    assert str(caught.value).startswith(f"--floor is {text!r}; accepted: a number with B, KiB")


def test_a_part_of_a_byte_is_refused():
    with pytest.raises(UsageError, match=r"size is '0.1KiB', which is not a whole number of bytes"):
        parse_size("0.1KiB")


@given(st.integers(0, 2**60), st.sampled_from([("KiB", 2**10), ("M", 2**20), ("GB", 10**9)]))
def test_whole_numbers_of_a_unit_are_exact(count, unit):
    assert parse_size(f"{count}{unit[0]}") == count * unit[1]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB - 1, "1,024.00 KiB"),
        (12_269 * MIB, "11.98 GiB"),
        (GIB, "1.00 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_it_fills(size_bytes, text):
    assert format_size(size_bytes) == text


def test_mebibytes_keep_their_fraction():
    assert mib(3 * MIB // 2) == 1.5


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_gives_the_least_multiple_that_suffices(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and value <= rounded < value + multiple


def test_rounding_to_multiples_of_nothing_is_our_own_mistake():
    with pytest.raises(AssertionError, match="multiple is 0"):
        round_up(5, 0)
