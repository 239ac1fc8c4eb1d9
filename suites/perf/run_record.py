"""The stored run (`perf-run/1`): one JSON per arm of a session, raw enough to judge it again.

Both arms of a bench share `session`; start i of pair p in one file is compared with pair p in the
other. A record is complete after every start, so an interrupted bench goes on from it.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema

from suites.perf.cells import Cell
from suites.perf.codec import from_data, to_data
from suites.perf.errors import RecordError
from suites.perf.files import read_json, write_atomically
from suites.perf.rates import Sample, value_of
from suites.perf.states import Canary, StartState, StateLimits
from suites.perf.stats import Policy

SCHEMA = "perf-run/1"
SUITE_VERSION = "1"
SCHEMA_PATH = Path(__file__).parents[2] / "fixtures" / "schemas" / "perf-run-1.schema.json"


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal for two runs to be comparable; `hosts` in rank order."""

    hosts: tuple[str, ...]
    kernel: str
    driver: str
    device: str
    cores: int
    memory_bytes: int
    suite_version: str = SUITE_VERSION

    def differences(self, other: "Fingerprint") -> tuple[str, ...]:
        """`field: ours, theirs` for every field that differs."""
        mine, theirs = to_data(self), to_data(other)
        return tuple(
            f"{name}: {mine[name]}, {theirs[name]}" for name in mine if mine[name] != theirs[name]
        )


@dataclass(frozen=True)
class ArmFacts:
    """What an arm is. `commit` is hex digits; `dirty` says that files differ from that commit."""

    target: str
    commit: str
    package_sha256: str
    recipe: str
    fingerprint: Fingerprint
    dirty: bool = False


@dataclass(frozen=True)
class OutputCheck:
    """What the timed process answered: the needle, and a hash over its first-token logprobs."""

    needle_found: bool
    logprob_sha256: str


@dataclass(frozen=True)
class CacheDrop:
    """Whether the page cache was dropped before a start; how, or the reason why not."""

    dropped: bool
    how: str


@dataclass(frozen=True)
class CellSamples:
    """A cell's raw samples in one start, after a warm-up of `windows` windows."""

    cell: str
    samples: tuple[Sample, ...]
    windows: int
    settled: bool

    def values(self, cell: Cell) -> tuple[float, ...]:
        """Figures of the samples in the cell's unit."""
        return tuple(value_of(cell, sample) for sample in self.samples)


@dataclass(frozen=True)
class Start:
    """One engine start with everything measured in it; `slot` counts all starts of the session."""

    pair: int
    slot: int
    identity: str
    began_s: float
    ready_s: float
    ended_s: float
    canary_before: Canary
    canary_after: Canary
    cache_drop: CacheDrop
    cells: tuple[CellSamples, ...]
    outputs: OutputCheck

    @property
    def state(self) -> StartState:
        settled = all(samples.settled for samples in self.cells)
        return StartState(self.canary_before, self.canary_after, settled, self.cache_drop.dropped)

    def samples(self, cell: str) -> CellSamples:
        """The samples of a cell; RecordError names the cells there are."""
        for samples in self.cells:
            if samples.cell == cell:
                return samples
        names = [samples.cell for samples in self.cells]
        raise RecordError("cells-missing", f"start {self.slot} lacks {cell!r}; it has {names}")

    def value(self, cell: Cell) -> float:
        """The start's figure: the mean of its samples, so that slow ones are not hidden."""
        values = self.samples(cell.name).values(cell)
        if not values:
            raise RecordError("no-samples", f"start {self.slot}, {cell.name}: 0 samples; 1 or more")
        return sum(values) / len(values)


@dataclass(frozen=True)
class FailedStart:
    """A start that did not come up or died; counted and reported, never retried in silence."""

    pair: int
    slot: int
    at_s: float
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """One arm of a session: what was compared under which rules, and every start of this arm."""

    schema: str
    session: str
    arm: str
    facts: ArmFacts
    base_commit: str
    policy: Policy
    limits: StateLimits
    reference: Canary
    outputs_rule: str
    idle_s: float
    cells: tuple[Cell, ...]
    starts: tuple[Start, ...] = ()
    failed: tuple[FailedStart, ...] = ()

    def with_start(self, start: Start) -> "RunRecord":
        return replace(self, starts=(*self.starts, start))

    def with_failure(self, failure: FailedStart) -> "RunRecord":
        return replace(self, failed=(*self.failed, failure))

    @property
    def cell_names(self) -> tuple[str, ...]:
        return tuple(cell.name for cell in self.cells)


@lru_cache(maxsize=1)
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text()))


def parse_record(data: Any, source: str) -> RunRecord:
    """A record from plain data, held against the JSON Schema first; RecordError with the path."""
    errors = sorted(_validator().iter_errors(data), key=lambda error: list(error.absolute_path))
    if errors:
        where = "/".join(str(part) for part in errors[0].absolute_path) or "the document"
        raise RecordError("schema", f"{source}: {where}: {errors[0].message}")
    return from_data(RunRecord, data, source)


def load_record(path: Path) -> RunRecord:
    """A stored run; RecordError when it is missing, damaged or of another format."""
    return parse_record(read_json(path), str(path))


def save_record(record: RunRecord, path: Path) -> None:
    """Write a record so that a reader sees the old file or the new one, never a part."""
    write_atomically(path, json.dumps(to_data(record), allow_nan=False) + "\n")
