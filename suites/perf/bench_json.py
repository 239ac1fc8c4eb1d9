"""Reads pytest-benchmark's JSON and detects the ways in which its own compare passes a 2x slowdown.

The four (P02): parallel workers and disabled benchmarks (it writes nothing and exits 0), a renamed
benchmark (it compares what both have), a red run saved as the next baseline. It does not know
whether a benchmark measures what its name says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from suites.perf.bench_stamp import Stamp, file_sha256, read_stamp
from suites.perf.errors import RecordError
from suites.perf.files import read_json
from suites.perf.findings import Finding, hold, note, void

MACHINE_FIELDS = ("node", "machine", "release", "python_version", "cpu")


@dataclass(frozen=True)
class BenchFile:
    """One pytest-benchmark run: the mean seconds per benchmark of one process."""

    path: Path
    sha256: str
    commit: str
    dirty: bool
    at: datetime
    machine: tuple[str, ...]
    means_s: dict[str, float]
    stamp: Stamp | None


def is_benchmark_json(data: Any) -> bool:
    return isinstance(data, dict) and "benchmarks" in data and "machine_info" in data


def json_paths(path: Path) -> tuple[Path, ...]:
    """The files of one side: the file itself, or every *.json of a folder in name order."""
    return tuple(sorted(path.glob("*.json"))) if path.is_dir() else (path,)


def not_run(path: Path) -> Finding | None:
    """Why a file proves no run, or None: P02's disabled and parallel ways, and stale files."""
    stamp = read_stamp(path)
    if stamp is not None and stamp.workers:
        return void(
            "parallel-workers",
            f"{path}: run with {stamp.workers} parallel workers, which switches benchmarks off;"
            " run without -n (or with -n0)",
            "P02",
        )
    if stamp is not None and stamp.disabled:
        return void(
            "benchmarks-disabled",
            f"{path}: run with benchmarks disabled or skipped; run with --benchmark-enable",
            "P02",
        )
    if not path.is_file() or (stamp is not None and not stamp.json_sha256):
        return void(
            "benchmarks-not-run",
            f"{path}: this run wrote none: disabled, in parallel workers, or none selected",
            "P02",
        )
    if stamp is not None and stamp.json_sha256 != file_sha256(path):
        return void("stale-json", f"{path} is not the file that its stamp was written for", "P02")
    return None


def read_bench(path: Path) -> BenchFile:
    """A pytest-benchmark JSON; RecordError when it is damaged or of another format."""
    data = read_json(path)
    if not is_benchmark_json(data):
        raise RecordError("format", f"{path}: neither perf-run/1 nor a pytest-benchmark JSON")
    try:
        commit, machine = data["commit_info"], data["machine_info"]
        cpu = machine["cpu"]
        return BenchFile(
            path,
            file_sha256(path),
            str(commit.get("id", "")),
            bool(commit.get("dirty", False)),
            datetime.fromisoformat(data["datetime"]),
            (
                *(str(machine[name]) for name in MACHINE_FIELDS if name != "cpu"),
                f"{cpu.get('brand_raw')} x{cpu.get('count')}",
            ),
            {b["fullname"]: _mean_s(b, path) for b in data["benchmarks"]},
            read_stamp(path),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError("format", f"{path}: not a pytest-benchmark JSON: {error!r}") from error


def _mean_s(benchmark: dict[str, Any], path: Path) -> float:
    mean_s, rounds = float(benchmark["stats"]["mean"]), int(benchmark["stats"]["rounds"])
    if rounds < 1 or not 0 < mean_s < float("inf"):
        raise RecordError(
            "benchmarks-not-run",
            f"{path}: {benchmark['fullname']} ran {rounds} rounds with mean {mean_s} s",
        )
    return mean_s


def side_findings(base: tuple[BenchFile, ...], head: tuple[BenchFile, ...]) -> Iterator[Finding]:
    """Names, machines and commits of both sides held against each other."""
    for file in (*base, *head):
        if not file.means_s:
            yield void("benchmarks-not-run", f"{file.path}: no benchmark in it", "P02")
    yield from _names(base, head)
    for file in (*base, *head):
        differing = [
            f"{name}: {a}, {b}"
            for name, a, b in zip(MACHINE_FIELDS, base[0].machine, file.machine, strict=True)
            if a != b
        ]
        if differing:
            yield void("fingerprint", f"{base[0].path} and {file.path}: {'; '.join(differing)}")


def _names(base: tuple[BenchFile, ...], head: tuple[BenchFile, ...]) -> Iterator[Finding]:
    names = [set().union(*(file.means_s for file in side)) for side in (base, head)]
    for side, known in zip((base, head), names, strict=True):
        for file in side:
            if lost := sorted(known - set(file.means_s)):
                yield void("cells-missing", f"{file.path} lacks {lost}", "P02")
    yield from name_findings(*names)


def name_findings(base: set[str], head: set[str]) -> Iterator[Finding]:
    """Cells that vanished (under another name or altogether) and cells that are new."""
    gone, new = sorted(base - head), sorted(head - base)
    if gone and new:
        yield void(
            "cells-renamed",
            f"{gone} vanished and {new} appeared: a renamed cell escapes its baseline; measure the"
            " baseline under the new names",
            "P02",
        )
    elif gone:
        yield void("cells-missing", f"{gone} of the baseline are not in the head", "P02")
    elif new:
        yield note("cells-new", f"{new} have no baseline yet")


def commit_findings(
    base: tuple[BenchFile, ...],
    head: tuple[BenchFile, ...],
    base_commit: str | None,
    head_commit: str | None,
) -> Iterator[Finding]:
    """P02: the baseline must be a clean run of the commit that is stated, the head must be new."""
    for role, side, stated in (("base", base, base_commit), ("head", head, head_commit)):
        commits = sorted({file.commit for file in side})
        if len(commits) > 1:
            yield void("commit", f"the {role} mixes commits {commits}", "P02")
        elif stated is not None and not same_commit(commits[0], stated):
            yield void(
                f"{role}-commit",
                f"{side[0].path} is of {commits[0]!r}, stated is {stated!r}",
                "P02",
            )
    if base_commit is None:
        yield void(
            "commit-unstated",
            "the baseline's commit must be stated (--base-commit): a saved red run looks the same",
            "P02",
        )
    if any(file.dirty for file in base):
        yield void("base-dirty", f"{base[0].path} was measured with uncommitted changes", "P02")
    if base[0].commit == head[0].commit:
        yield void("same-commit", f"base and head are both of {base[0].commit!r}", "P02")
    unproven = [file.path.name for file in head if file.stamp is None]
    if head_commit is None and unproven:
        yield hold(
            "run-unproven",
            f"nothing shows that {unproven} are of this run: state --head-commit, or run pytest"
            " with -p suites.perf.bench_stamp",
            "P02",
        )


def same_commit(found: str, stated: str) -> bool:
    """Equal commits, where either may be shortened to at least seven hex digits."""
    shorter, longer = sorted((found.lower(), stated.lower()), key=len)
    return len(shorter) >= 7 and longer.startswith(shorter)
