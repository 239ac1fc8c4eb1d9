"""The ledger: map, package file, process memory and server metrics reconciled line by line.

It does not know the engine: it reads a map, the head of a safetensors file, a `/proc` status and
a metrics text. What no line explains is named and has a limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import PackageError, UsageError
from engine.memmap import RankMap
from engine.units import format_size
from suites.findings import Finding, NotChecked

HEADER_LENGTH_BYTES = 8
HEADER_BYTES_MAX = 1 << 30
PACKED_CATEGORIES = ("weights", "constants")
"""Allocations whose bytes come out of the package."""


@dataclass(frozen=True)
class PackageFile:
    """What a rank's file holds, from its own head.

    tensors  bytes of each tensor; resident ones are loaded to the device, others stay on disk
    """

    path: str
    size_bytes: int
    header_bytes: int
    tensors: Mapping[str, int]
    on_disk: frozenset[str] = frozenset()

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors.values())


def read_package_file(path: Path) -> PackageFile:
    """Read the head of a safetensors file. Raises PackageError where it has none."""
    path = Path(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        size = path.stat().st_size
        if not 2 <= length <= min(size - HEADER_LENGTH_BYTES, HEADER_BYTES_MAX):
            raise PackageError(f"{path}: header of {length} bytes in a file of {size}")
        try:
            head = json.loads(file.read(length))
        except ValueError as error:
            raise PackageError(f"{path}: the header is not JSON: {error}") from error
    metadata = head.pop("__metadata__", {})
    facts = json.loads(metadata.get("tensors", "{}"))
    return PackageFile(
        str(path),
        size,
        HEADER_LENGTH_BYTES + length,
        {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in head.items()},
        frozenset(name for name, entry in facts.items() if not entry.get("resident", True)),
    )


def process_bytes(status_text: str) -> int:
    """Memory that a process holds for itself, from `/proc/PID/status`: anonymous and shared.

    Pages of mapped files are left out: they are the page cache's. Raises UsageError when a counter
    is missing, since a guess would hide what the ledger is for.
    """
    counters = {}
    for line in status_text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in ("RssAnon", "RssShmem"):
            if len(words) != 2 or not words[0].isdigit() or words[1] != "kB":
                raise UsageError(f"process status: line {line!r}; `{name}: NUMBER kB` is expected")
            counters[name] = int(words[0]) * 1024
    missing = {"RssAnon", "RssShmem"} - set(counters)
    if missing:
        raise UsageError(f"process status lacks {', '.join(sorted(missing))}")
    return sum(counters.values())


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus text by name, labels included as written."""
    found = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, value = line.rstrip().rpartition(" ")
        try:
            found[name.strip()] = float(value)
        except ValueError as error:
            raise UsageError(f"metrics: line {line!r} has no number at its end") from error
    return found


@dataclass(frozen=True)
class Readings:
    """All that is known about one rank while it serves; None where something was not read.

    runtime_bytes  what the process holds before any model is loaded: interpreter, libraries
    kv             the map's KV facts
    """

    map: RankMap
    kv: Mapping[str, object] = field(default_factory=dict)
    package: PackageFile | None = None
    process_bytes: int | None = None
    runtime_bytes: int | None = None
    metrics: Mapping[str, float] | None = None
    cache_requested_bytes: int | None = None
    cache_granted_bytes: int | None = None


@dataclass(frozen=True)
class Line:
    """One entry: what, how many bytes, and where the figure comes from."""

    what: str
    nbytes: int
    source: str


@dataclass(frozen=True)
class Ledger:
    """The lines that explain a rank's memory, what is left over, and what is wrong."""

    rank: int
    lines: tuple[Line, ...]
    held_bytes: int | None
    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]

    @property
    def explained_bytes(self) -> int:
        """Sum of the lines."""
        return sum(line.nbytes for line in self.lines)

    @property
    def unaccounted_bytes(self) -> int | None:
        """What the process holds beyond the lines; negative when it holds less."""
        return None if self.held_bytes is None else self.held_bytes - self.explained_bytes


def reconcile(readings: Readings, unaccounted_bytes_max: int = 512 * 1024**2) -> Ledger:
    """Set one rank's figures side by side; every figure that was not read is said to be missing."""
    lines = tuple(_lines(readings))
    findings = [
        *(_package_findings(readings) if readings.package else ()),
        *(_metric_findings(readings) if readings.metrics is not None else ()),
        *_cache_findings(readings),
    ]
    ledger = Ledger(readings.map.rank, lines, readings.process_bytes, (), ())
    rest = ledger.unaccounted_bytes
    if (
        rest is not None
        and readings.runtime_bytes is not None
        and abs(rest) > unaccounted_bytes_max
    ):
        sign = "more" if rest > 0 else "less"
        findings.append(
            Finding(
                "unaccounted",
                f"rank {readings.map.rank}",
                f"the process holds {abs(rest)} bytes {sign} than the {len(lines)} lines of the "
                f"ledger explain; {unaccounted_bytes_max} are allowed",
                {"unaccounted_bytes": rest, "allowed_bytes": unaccounted_bytes_max},
            )
        )
    return Ledger(
        readings.map.rank,
        lines,
        readings.process_bytes,
        tuple(findings),
        tuple(_not_checked(readings)),
    )


def _lines(readings: Readings) -> Iterator[Line]:
    for row, size in readings.map.inventory_bytes.items():
        if row != "core_fixed_mappings" and size:
            yield Line(row, size, "memory map")
    tokens = _kv_tokens(readings)
    per_token = readings.kv.get("bytes_per_token")
    if tokens is not None and per_token:
        yield Line("kv_pages", round(tokens * per_token), "server metrics and bytes per token")
    if readings.runtime_bytes is not None:
        yield Line("runtime", readings.runtime_bytes, "process before loading")


def _kv_tokens(readings: Readings) -> float | None:
    return (readings.metrics or {}).get("flare_total_kv_tokens")


def _not_checked(readings: Readings) -> Iterator[NotChecked]:
    for what, value in (
        ("package file", readings.package),
        ("process memory", readings.process_bytes),
        ("runtime before loading", readings.runtime_bytes),
        ("server metrics", readings.metrics),
        ("requested cache", readings.cache_requested_bytes),
    ):
        if value is None:
            yield NotChecked(what, "was not read")


def _package_findings(readings: Readings) -> Iterator[Finding]:
    package, rank = readings.package, readings.map.rank
    assert package is not None
    where = f"rank {rank} / {package.path}"
    wanted = package.header_bytes + package.data_bytes
    if wanted != package.size_bytes:
        yield Finding(
            "package-size",
            where,
            f"{package.size_bytes} bytes, but header {package.header_bytes} and tensors "
            f"{package.data_bytes} sum to {wanted}",
            {"size_bytes": package.size_bytes, "expected_bytes": wanted},
        )
    mapped = {a.name: a.nbytes for a in readings.map.allocations if a.category in PACKED_CATEGORIES}
    packed = {name: size for name, size in package.tensors.items() if name not in package.on_disk}
    for name in sorted(mapped.keys() | packed.keys()):
        if mapped.get(name) != packed.get(name):
            yield Finding(
                "weights-mismatch",
                f"{where} / {name}",
                f"{mapped.get(name)} bytes in the map, {packed.get(name)} in the package",
                {"name": name, "map_bytes": mapped.get(name), "package_bytes": packed.get(name)},
            )


def _metric_findings(readings: Readings) -> Iterator[Finding]:
    where = f"rank {readings.map.rank} / metrics"
    tokens, page = _kv_tokens(readings), readings.kv.get("page_tokens")
    if tokens is None:
        yield Finding("metric-mismatch", where, "flare_total_kv_tokens is absent", {})
        return
    if page and tokens % page:
        yield Finding(
            "metric-mismatch",
            where,
            f"flare_total_kv_tokens is {tokens:g}, no multiple of the page of {page} tokens",
            {"tokens": tokens, "page_tokens": page},
        )
    names = ("flare_free_kv_tokens", "flare_cached_kv_tokens", "flare_used_kv_tokens")
    parts = [readings.metrics[name] for name in names if name in readings.metrics]
    if len(parts) == len(names) and sum(parts) != tokens:
        yield Finding(
            "metric-mismatch",
            where,
            f"free, cached and used are {parts} and do not sum to the total {tokens:g}",
            {"parts": parts, "tokens": tokens},
        )


def _cache_findings(readings: Readings) -> Iterator[Finding]:
    requested, granted = readings.cache_requested_bytes, readings.cache_granted_bytes
    if requested is None:
        return
    tokens, per_token = _kv_tokens(readings), readings.kv.get("bytes_per_token")
    if granted is None and tokens is not None and per_token:
        page = int(readings.kv.get("page_tokens") or 1)
        # Up to one page may be lost to rounding; the rest of what was asked for must be there.
        granted = round((tokens + page) * per_token)
    if granted is not None and granted < requested:
        yield Finding(
            "cache-clamped",
            f"rank {readings.map.rank}",
            f"{requested} bytes of cache were requested, {granted} at most are there",
            {"requested_bytes": requested, "granted_bytes": granted},
        )


def ledger_text(ledger: Ledger) -> str:
    """The ledger as a table for people."""
    rows = [(line.what, format_size(line.nbytes), line.source) for line in ledger.lines]
    rows.append(("explained", format_size(ledger.explained_bytes), ""))
    if ledger.held_bytes is not None:
        rest = ledger.unaccounted_bytes or 0
        share = 100 * rest / ledger.held_bytes if ledger.held_bytes else 0
        rows.append(("process", format_size(ledger.held_bytes), "anonymous and shared pages"))
        rows.append(("unaccounted", format_size(rest), f"{share:.1f} % of the process"))
    text = [f"rank {ledger.rank}"]
    text += [f"  {what:32}{size:>14}  {source}".rstrip() for what, size, source in rows]
    text += [f"  {finding}" for finding in ledger.findings]
    text += [f"  {entry}" for entry in ledger.not_checked]
    return "\n".join(text) + "\n"
