"""Host memory readings: the right counter, typed errors, and both figures of a refusal."""

from __future__ import annotations

import pytest

from engine.errors import MemoryFloorError
from engine.hostmem import (
    MemoryReadingError,
    check_floor,
    parse_meminfo,
    read_host_memory,
    shortfall,
)
from engine.units import GIB, MIB

TEXT = """\
MemTotal:       127601664 kB
MemFree:         5242880 kB
MemAvailable:   104857600 kB
Buffers:            1024 kB
Active(anon):       2048 kB
HugePages_Total:       0
"""


def test_available_memory_counts_the_page_cache_that_the_kernel_gives_back():
    memory = parse_meminfo(TEXT)
    assert memory.available_bytes == 100 * GIB
    assert memory.free_bytes == 5 * GIB
    assert memory.total_bytes == 127_601_664 * 1024


def test_this_host_can_be_read():
    memory = read_host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_path_of_the_reading_is_an_argument(tmp_path):
    (tmp_path / "meminfo").write_text(TEXT)
    assert read_host_memory(tmp_path / "meminfo") == parse_meminfo(TEXT)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (TEXT.replace("MemAvailable", "MemAvaliable"), "lacks MemAvailable"),
        (TEXT.replace("MemTotal", "Total"), "lacks MemTotal"),
        ("", "lacks MemTotal, MemFree, MemAvailable"),
        (TEXT.replace("104857600 kB", "lots kB"), "line 'MemAvailable:   lots kB'"),
        (TEXT.replace("104857600 kB", "-1 kB"), "line 'MemAvailable:   -1 kB'"),
        (TEXT.replace("104857600 kB", "1e8 kB"), "line 'MemAvailable:"),
        (TEXT.replace("104857600 kB", "104857600 MB"), "line 'MemAvailable:"),
        (TEXT.replace("104857600 kB", "104857600"), "MemAvailable without its unit"),
        (TEXT + "MemFree: 1 kB\n", "MemFree appears twice"),
        (TEXT + "\n", "line ''"),
        (TEXT.replace("5242880", "127601665"), "MemFree is .* at most MemTotal"),
        (TEXT.replace("104857600", "127601665"), "MemAvailable is .* at most MemTotal"),
    ],
)
def test_reading_that_cannot_be_trusted_is_refused(text, pattern):
    with pytest.raises(MemoryReadingError, match=pattern):
        parse_meminfo(text)


def test_unreadable_file_is_refused_by_name(tmp_path):
    with pytest.raises(MemoryReadingError, match="cannot read .*absent"):
        read_host_memory(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(MemoryReadingError, match="binary is not ASCII"):
        read_host_memory(tmp_path / "binary")


def test_failed_reading_ends_like_too_little_memory():
    assert issubclass(MemoryReadingError, MemoryFloorError)


def test_floor_refusal_states_both_figures_in_mib():
    with pytest.raises(MemoryFloorError, match="12,269 MiB available, 12,288 MiB required"):
        check_floor(12_269 * MIB, 12 * GIB)
    with pytest.raises(MemoryFloorError, match="host memory before compilation: 7,629 MiB av"):
        check_floor(8 * 10**9, 8 * GIB, "before compilation")


@pytest.mark.parametrize("missing_bytes", [1, MIB - 1, MIB])
def test_figures_of_a_refusal_differ_however_close(missing_bytes):
    with pytest.raises(MemoryFloorError, match="8,191 MiB available, 8,192 MiB required"):
        check_floor(8 * GIB - missing_bytes, 8 * GIB)


def test_exactly_the_floor_is_enough():
    check_floor(8 * GIB, 8 * GIB)
    check_floor(0, 0)


def test_what_is_needed_is_rounded_up_and_what_is_there_down():
    assert shortfall(2 * MIB - 1, 2 * MIB + 1) == "1 MiB available, 3 MiB required"
