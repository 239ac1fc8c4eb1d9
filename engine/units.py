"""Sizes in bytes: reading and writing them with the binary and decimal units kept apart."""

from __future__ import annotations

import re
from fractions import Fraction

from engine.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 1024**4,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    # A bare letter is what `--prefix-cache-disk-limit 50G` uses; it means the binary unit.
    "K": KIB,
    "M": MIB,
    "G": GIB,
    "T": 1024**4,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse_size(text: str, what: str = "size") -> int:
    """Bytes for `8GiB`, `50G` (binary), `50GB` (decimal), `512 MiB` or a plain byte count.

    Raises UsageError for anything else, naming the value and the accepted units.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2).upper() not in _FACTORS:
        raise UsageError(
            f"{what} is {text!r}; accepted: a number with B, KiB, MiB, GiB, TiB (binary), "
            f"KB, MB, GB, TB (decimal) or K, M, G, T (binary), for example 8GiB"
        )
    size = Fraction(match.group(1)) * _FACTORS[match.group(2).upper()]
    if size.denominator != 1:
        raise UsageError(f"{what} is {text!r}, which is not a whole number of bytes")
    return size.numerator


def mib(size_bytes: int) -> float:
    """Bytes as MiB."""
    return size_bytes / MIB


def format_size(size_bytes: int) -> str:
    """A size for people: the largest binary unit that leaves at least one whole unit."""
    for unit, factor in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:,.2f} {unit}"
    return f"{size_bytes} B"


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    assert multiple > 0, f"multiple is {multiple}"
    return -(-value // multiple) * multiple
