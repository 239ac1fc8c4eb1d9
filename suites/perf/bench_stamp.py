"""A pytest plug-in that proves whether micro-benchmarks ran: it stamps pytest-benchmark's JSON.

pytest-benchmark writes no file when it is disabled or when pytest-xdist is active, and then an
older file of that name is easily taken for this run's. Use: `pytest -p suites.perf.bench_stamp
--benchmark-json head.json ...` writes `head.json.stamp` as well.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from suites.perf.files import read_json_text, write_atomically


@dataclass(frozen=True)
class Stamp:
    """How a benchmark run went; `json_sha256` is empty when this run wrote no JSON."""

    workers: int
    disabled: bool
    collected: int
    failed: int
    json_sha256: str


def stamp_path(json_path: Path) -> Path:
    return json_path.with_name(json_path.name + ".stamp")


def read_stamp(json_path: Path) -> Stamp | None:
    """The stamp beside a JSON; None when the run had no such plug-in, RecordError when damaged."""
    path = stamp_path(json_path)
    return read_json_text(Stamp, path.read_text(), str(path)) if path.is_file() else None


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class StampWriter:
    """Lives for one pytest run in the main process."""

    def __init__(self, config: pytest.Config, json_path: Path) -> None:
        self.config = config
        self.json_path = json_path
        self.before_ns = json_path.stat().st_mtime_ns if json_path.exists() else None

    def _written(self) -> bool:
        return self.json_path.exists() and self.json_path.stat().st_mtime_ns != self.before_ns

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        option = self.config.option
        parallel = getattr(option, "dist", "no") != "no"
        stamp = Stamp(
            int(getattr(option, "numprocesses", 0) or 0) if parallel else 0,
            bool(option.benchmark_disable and not option.benchmark_enable)
            or bool(option.benchmark_skip),
            session.testscollected,
            session.testsfailed,
            file_sha256(self.json_path) if self._written() else "",
        )
        write_atomically(stamp_path(self.json_path), json.dumps(asdict(stamp)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Stamp runs that were asked for a JSON; parallel workers leave that to the main process."""
    json_option = getattr(config.option, "benchmark_json", None)
    if json_option is None or hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(StampWriter(config, Path(str(json_option))), "bench-stamp-writer")
