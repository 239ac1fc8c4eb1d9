"""Host memory as the kernel reports it, and the floor that an export or a start must leave.

Device memory is host memory on a GB10, so MemAvailable is what counts there: MemFree leaves out
page cache that the kernel would give back, and the CUDA call counts that cache as taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import MemoryFloorError
from engine.units import KIB, MIB

MEMINFO = Path("/proc/meminfo")
COUNTER = "MemAvailable"
"""The counter that sizes and floors are compared with."""

_LINE = re.compile(r"([^\s:]+):\s+(\d+)( kB)?")
_NEEDED = ("MemTotal", "MemFree", COUNTER)


class MemoryReadingError(MemoryFloorError):
    """Host memory that cannot be read, so the floor cannot be checked."""


@dataclass(frozen=True)
class HostMemory:
    """One reading; `available_bytes` is MemAvailable, `free_bytes` is MemFree."""

    total_bytes: int
    free_bytes: int
    available_bytes: int


def parse_meminfo(text: str, where: str = str(MEMINFO)) -> HostMemory:
    """The reading in the text of a `/proc/meminfo`; its `kB` are units of 1024 bytes.

    Raises MemoryReadingError for a malformed or repeated line, a counter that is missing or without
    its unit, and for free or available memory above the total.
    """
    counters: dict[str, tuple[int, str | None]] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if match is None:
            raise MemoryReadingError(f"{where}: line {line!r}; `Name:  NUMBER kB` is expected")
        name, number, unit = match.groups()
        if name in counters:
            raise MemoryReadingError(f"{where}: {name} appears twice")
        counters[name] = int(number), unit
    missing = [name for name in _NEEDED if name not in counters]
    if missing:
        raise MemoryReadingError(f"{where} lacks {', '.join(missing)}; {COUNTER} is what counts")
    if bare := [name for name in _NEEDED if counters[name][1] is None]:
        raise MemoryReadingError(f"{where}: {', '.join(bare)} without its unit; kB is expected")
    total, free, available = (counters[name][0] * KIB for name in _NEEDED)
    for name, value in (("MemFree", free), (COUNTER, available)):
        if value > total:
            raise MemoryReadingError(
                f"{where}: {name} is {value} bytes; at most MemTotal, {total} bytes, is possible"
            )
    return HostMemory(total, free, available)


def read_host_memory(path: Path = MEMINFO) -> HostMemory:
    """The reading of a `/proc/meminfo`. Raises MemoryReadingError."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise MemoryReadingError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MemoryReadingError(f"{path} is not ASCII text: {error}") from error
    return parse_meminfo(text, str(path))


def check_floor(available_bytes: int, floor_bytes: int, when: str = "") -> None:
    """Refuse to go on with less than the floor; `when` names the moment, as `before compilation`.

    Raises MemoryFloorError such as `12,269 MiB available, 12,288 MiB required`. MiB are rounded so
    that the two figures of a refusal always differ.
    """
    if available_bytes < floor_bytes:
        moment = f" {when}" if when else ""
        raise MemoryFloorError(
            f"host memory{moment}: {shortfall(available_bytes, floor_bytes)} ({COUNTER})"
        )


def shortfall(available_bytes: int, required_bytes: int) -> str:
    """Both figures in MiB, what is there rounded down and what is needed rounded up."""
    return f"{available_bytes // MIB:,} MiB available, {-(-required_bytes // MIB):,} MiB required"
