"""The ledger: what explains a rank's memory, and each way in which figures can disagree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import PackageError, UsageError
from engine.memmap import Allocation, RankMap
from suites.memory.ledger import (
    PackageFile,
    Readings,
    ledger_text,
    parse_metrics,
    process_bytes,
    read_package_file,
    reconcile,
)

MIB = 1024**2
KV = {"bytes_per_token": 890, "page_tokens": 128}
METRICS = """\
# HELP flare_total_kv_tokens Tokens the KV pool holds
# TYPE flare_total_kv_tokens gauge
flare_total_kv_tokens 1280.0
flare_free_kv_tokens 1024.0
flare_cached_kv_tokens 128.0
flare_used_kv_tokens 128.0
flare_prefix_bytes{place="disk"} 3e+06
"""


def weight(name: str, size: int, category: str = "weights") -> Allocation:
    return Allocation(name, category, size, name, 0, 256, "u8", (size,))


RANK = RankMap(
    0, (weight("w", 3 * MIB), weight("rope", MIB, "constants"), weight("s", MIB, "io")), ()
)
PACKAGE = PackageFile("model.safetensors", 4 * MIB + 512, 512, {"w": 3 * MIB, "rope": MIB})
READINGS = Readings(
    RANK,
    KV,
    PACKAGE,
    process_bytes=5 * MIB + 1280 * 890 + 2 * MIB,
    runtime_bytes=2 * MIB,
    metrics=parse_metrics(METRICS),
    cache_requested_bytes=1280 * 890,
)


def names(ledger) -> list[str]:
    return [finding.name for finding in ledger.findings]


def test_figures_that_agree_leave_nothing_unaccounted():
    ledger = reconcile(READINGS, unaccounted_bytes_max=0)
    assert ledger.findings == () and ledger.not_checked == ()
    assert ledger.unaccounted_bytes == 0
    assert [(line.what, line.nbytes) for line in ledger.lines] == [
        ("weights_and_numeric_constants", 4 * MIB),
        ("other_owned_tensors", MIB),
        ("kv_pages", 1280 * 890),
        ("runtime", 2 * MIB),
    ]


@pytest.mark.parametrize(("extra", "word"), [(8 * MIB, "more"), (-8 * MIB, "less")])
def test_memory_that_no_line_explains_is_named(extra, word):
    readings = replace(READINGS, process_bytes=READINGS.process_bytes + extra)
    (finding,) = reconcile(readings, unaccounted_bytes_max=MIB).findings
    assert finding.name == "unaccounted"
    assert f"{8 * MIB} bytes {word} than the 4 lines" in finding.message
    assert reconcile(readings, unaccounted_bytes_max=8 * MIB).findings == ()


def test_what_was_not_read_is_said():
    ledger = reconcile(Readings(RANK))
    assert [entry.check for entry in ledger.not_checked] == [
        "package file",
        "process memory",
        "runtime before loading",
        "server metrics",
        "requested cache",
    ]
    assert ledger.unaccounted_bytes is None


def test_a_package_file_longer_than_its_tensors_is_found():
    longer = replace(PACKAGE, size_bytes=PACKAGE.size_bytes + 1)
    assert names(reconcile(replace(READINGS, package=longer))) == ["package-size"]


def test_a_weight_counted_twice_is_found():
    twice = replace(RANK, allocations=(*RANK.allocations, weight("head", MIB)))
    found = reconcile(replace(READINGS, map=twice), unaccounted_bytes_max=4 * MIB)
    assert names(found) == ["weights-mismatch"]
    assert "1048576 bytes in the map, None in the package" in found.findings[0].message


def test_a_weight_missing_from_the_map_is_found():
    fewer = replace(RANK, allocations=RANK.allocations[1:])
    assert names(reconcile(replace(READINGS, map=fewer))) == ["weights-mismatch"]


def test_tensors_that_stay_on_disk_are_not_in_the_map():
    tables = replace(
        PACKAGE,
        size_bytes=PACKAGE.size_bytes + MIB,
        tensors={**PACKAGE.tensors, "engram": MIB},
        on_disk=frozenset({"engram"}),
    )
    assert names(reconcile(replace(READINGS, package=tables))) == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("flare_total_kv_tokens 1281.0", "no multiple of the page"),
        ("flare_used_kv_tokens 256.0", "do not sum to the total"),
        ("flare_total_kv_tokens 0.0", "do not sum to the total"),
    ],
)
def test_metrics_that_disagree_are_found(line, text):
    name = line.split()[0]
    lines = [line if old.startswith(name + " ") else old for old in METRICS.splitlines()]
    readings = replace(
        READINGS, metrics=parse_metrics("\n".join(lines)), cache_requested_bytes=None
    )
    found = reconcile(readings, unaccounted_bytes_max=4 * MIB)
    assert set(names(found)) == {"metric-mismatch"}
    assert any(text in finding.message for finding in found.findings)


def test_an_absent_metric_is_found():
    assert names(reconcile(replace(READINGS, metrics={}), 4 * MIB)) == ["metric-mismatch"]


def test_a_silent_clamp_shows_in_the_metrics():
    asked = replace(READINGS, cache_requested_bytes=2 * 1280 * 890)
    assert names(reconcile(asked)) == ["cache-clamped"]


def test_a_stated_clamp_is_found_without_metrics():
    asked = Readings(RANK, cache_requested_bytes=100, cache_granted_bytes=99)
    assert names(reconcile(asked)) == ["cache-clamped"]


def test_the_text_names_the_unaccounted_rest():
    readings = replace(READINGS, process_bytes=READINGS.process_bytes + MIB)
    lines = ledger_text(reconcile(readings)).splitlines()
    assert any(line.split()[:3] == ["unaccounted", "1.00", "MiB"] for line in lines)
    assert any("% of the process" in line for line in lines)


# Reading


def write_file(path: Path, tensors: dict, extra: bytes = b"", metadata: dict | None = None) -> Path:
    head, at = {"__metadata__": metadata or {}}, 0
    for name, size in tensors.items():
        head[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at) + extra)
    return path


def test_a_package_head_is_read(tmp_path):
    facts = {"tensors": json.dumps({"t": {"resident": False}, "w": {"resident": True}})}
    path = write_file(tmp_path / "m.safetensors", {"w": 100, "t": 28}, metadata=facts)
    package = read_package_file(path)
    assert dict(package.tensors) == {"w": 100, "t": 28}
    assert package.on_disk == {"t"}
    assert package.header_bytes + package.data_bytes == package.size_bytes


@pytest.mark.parametrize(
    "content",
    [b"", b"12345678", (99).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{x}"],
)
def test_a_file_without_a_head_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(PackageError, match=r"bad\.safetensors: "):
        read_package_file(path)


def test_process_memory_leaves_out_mapped_files():
    text = "Name:\tx\nVmRSS:\t 900 kB\nRssAnon:\t 300 kB\nRssFile:\t 500 kB\nRssShmem:\t 100 kB\n"
    assert process_bytes(text) == 400 * 1024


@pytest.mark.parametrize(
    "text",
    ["", "RssAnon: 3 kB\n", "RssAnon: 3 kB\nRssShmem: 3\n", "RssAnon: x kB\nRssShmem: 1 kB\n"],
)
def test_a_process_status_that_lacks_a_counter_is_refused(text):
    with pytest.raises(UsageError, match="process status"):
        process_bytes(text)


def test_metrics_are_read_with_their_labels():
    assert parse_metrics(METRICS)['flare_prefix_bytes{place="disk"}'] == 3e6


def test_a_metric_without_a_number_is_refused():
    with pytest.raises(UsageError, match="'flare_x many' has no number"):
        parse_metrics("flare_x many\n")
