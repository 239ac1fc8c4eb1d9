"""The measurement faults P01 to P07 planted in memory, with the exact detectors that must ring.

Each plant also shows that it is active: a naive reading of the same samples is fooled by it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from suites.perf.bench import BenchPlan, RunStore, run_bench
from suites.perf.bench_stamp import Stamp, stamp_path
from suites.perf.cells import MINI_CELLS, Cell
from suites.perf.codec import to_data
from suites.perf.double import CLEAN, Faults, always_healthy, double_arms
from suites.perf.errors import PerfError
from suites.perf.gate import gate, gate_records
from suites.perf.gate_result import Exit, GateOptions
from suites.perf.ledger import LedgerEntry
from suites.perf.run_record import RunRecord
from suites.perf.stats import Policy

DECODE, PREFILL = MINI_CELLS[0], MINI_CELLS[2]
BASE_COMMIT, HEAD_COMMIT = "a" * 40, "b" * 40
SEED = 12
MANY = (replace(DECODE, samples=60, windows_max=40),)


@dataclass(frozen=True)
class Rung:
    """What came out of a plant: finding codes, exit code, and what the naive reading says."""

    codes: frozenset[str]
    exit: Exit
    naive: float


@dataclass(frozen=True)
class Plant:
    """One planted fault: how it runs, which detectors must ring and no other, how naive is fooled.

    `fooled` takes the naive change of the head (a fraction) and says whether the fault was active.
    """

    fault: str
    what: str
    detectors: frozenset[str]
    run: Callable[[Path], Rung]
    fooled: Callable[[float], bool]


def bench_records(
    folder: Path,
    head: Faults = CLEAN,
    base: Faults = CLEAN,
    state: Callable[[int], float] = always_healthy,
    cells: tuple[Cell, ...] = MINI_CELLS,
    pairs_max: int = 12,
) -> tuple[RunRecord, RunRecord]:
    """The two records of a bench of the double, as far as it went."""
    arms, host = double_arms(SEED, base, head, state)
    run_bench(BenchPlan(cells, Policy(pairs_max=pairs_max)), arms, host.host(), RunStore(folder))
    records = RunStore(folder).load()
    assert records is not None, "a bench that ran left no records"
    return records


def naive_change(
    records: tuple[RunRecord, RunRecord], cell: Cell, middle: Callable[..., float] = mean
) -> float:
    """Head over base by the mean (or median) of every sample, as if all were alike."""
    base, head = (
        middle([v for start in r.starts for v in start.samples(cell.name).values(cell)])
        for r in records
    )
    return head / base - 1


def _gated(records: tuple[RunRecord, RunRecord], naive: float) -> Rung:
    result = gate_records(*records)
    return Rung(frozenset(result.codes), result.exit, naive)


def _bench(cell: Cell, middle: Callable[..., float] = mean, **faults) -> Callable[[Path], Rung]:
    def run(folder: Path) -> Rung:
        records = bench_records(folder, **faults)
        return _gated(records, naive_change(records, cell, middle))

    return run


def _one_process(folder: Path) -> Rung:
    """One start per arm, its requests dealt out as five pairs."""
    one = Faults(one_process=True, start_sd=0.06)
    return _bench(DECODE, head=one, base=one)(folder)


def _two_sessions(folder: Path) -> Rung:
    base, head = bench_records(folder, Faults(speed=0.9))
    records = base, replace(head, session="another")
    return _gated(records, naive_change(records, DECODE))


def _renamed_cell(folder: Path) -> Rung:
    base, head = bench_records(folder, Faults(speed=0.5))
    cells = tuple(replace(c, name=c.name.replace("decode", "decoding")) for c in head.cells)
    starts = tuple(
        replace(
            s, cells=tuple(replace(x, cell=c.name) for x, c in zip(s.cells, cells, strict=True))
        )
        for s in head.starts
    )
    # What a comparison by name has left over: nothing that is slower.
    return _gated((base, replace(head, cells=cells, starts=starts)), 0.0)


def _one_arm_first(folder: Path) -> Rung:
    """All pairs in the order A B while the host slows down evenly."""
    base, head = bench_records(folder, state=lambda index: 0.96 ** (index // 2))
    # Both arms are the same engine, so the earlier start of each pair may be called the base.
    pairs = [
        sorted(both, key=lambda s: s.slot) for both in zip(base.starts, head.starts, strict=True)
    ]
    records = tuple(
        replace(record, starts=tuple(pair[side] for pair in pairs))
        for side, record in enumerate((base, head))
    )
    return _gated(records, naive_change(records, DECODE))


def _flips(index: int) -> float:
    """Three canaries of reference, then two a start: slow whenever the head runs (A B B A ...)."""
    return 63 / 94 if index >= 3 and ((index - 3) // 2).bit_count() % 2 else 1.0


def _usage_missing(folder: Path) -> Rung:
    faults = Faults(usage=False, chunk_tokens=3)
    (_, arm), _ = double_arms(SEED, head=faults)
    chunks = len(arm.start().measure(DECODE, SEED).traces[0].events)
    try:
        bench_records(folder, faults)
    except PerfError as error:
        return Rung(frozenset({error.code}), Exit.INVALID, chunks / DECODE.new_tokens - 1)
    raise AssertionError("a stream without usage was accepted")


def write_bench_json(path: Path, commit: str, mean_s: float, minute: int, name: str) -> None:
    """A pytest-benchmark file as small as the gate reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cpu = {"brand_raw": "cpu", "count": 2}
    data = {
        "machine_info": {
            "node": "vm", "machine": "x86_64", "release": "6", "python_version": "3.11", "cpu": cpu
        },
        "commit_info": {"id": commit, "dirty": False},
        "benchmarks": [{"fullname": name, "stats": {"mean": mean_s, "rounds": 5}}],
        "datetime": f"2026-01-01T00:{minute:02d}:00+00:00",
    }  # fmt: skip
    path.write_text(json.dumps(data))


def _micro(
    head_name: str = "bench.py::test_plan",
    stamp: Stamp | None = None,
    red_before: bool = False,
    base_commit: str = BASE_COMMIT,
) -> Callable[[Path], Rung]:
    """A 2x slowdown in pytest-benchmark files that its own compare lets through."""

    def run(folder: Path) -> Rung:
        base, head = folder / "main.json", folder / "change.json"
        write_bench_json(
            base, base_commit, 0.002 if red_before else 0.001, 0, "bench.py::test_plan"
        )
        if stamp is None:
            write_bench_json(head, HEAD_COMMIT, 0.002, 1, head_name)
        else:
            stamp_path(head).write_text(json.dumps(to_data(stamp)))
        red = LedgerEntry("0" * 64, BASE_COMMIT, "c" * 40, int(Exit.WORSE), 0.0)
        options = GateOptions(BASE_COMMIT, HEAD_COMMIT, ledger=(red,) if red_before else ())
        result = gate(base, head, options)
        return Rung(frozenset(result.codes) - {"one-process"}, result.exit, 0.0)

    return run


def _large(change: float) -> bool:
    return abs(change) > 0.03


def _none(change: float) -> bool:
    return abs(change) < 0.02


def _codes(*codes: str) -> frozenset[str]:
    return frozenset(codes)


PLANTS = (
    Plant("P01", "requests of one start dealt out as pairs", _codes("start-reused"), _one_process,
          _large),
    Plant("P01", "arms of two sessions", _codes("no-pairs"), _two_sessions, _large),
    Plant("P02", "2x slower in parallel workers", _codes("parallel-workers"),
          _micro(stamp=Stamp(2, True, 1, 0, "")), _none),
    Plant("P02", "2x slower with benchmarks disabled", _codes("benchmarks-disabled"),
          _micro(stamp=Stamp(0, True, 1, 0, "")), _none),
    Plant("P02", "2x slower under another name", _codes("cells-renamed"),
          _micro(head_name="bench.py::test_planner"), _none),
    Plant("P02", "red run of a change saved as the baseline", _codes("base-commit"),
          _micro(base_commit="d" * 40, red_before=False), _none),
    Plant("P02", "red commit as the baseline", _codes("baseline-red"), _micro(red_before=True),
          _none),
    Plant("P02", "renamed cell in a stored run", _codes("cells-renamed"), _renamed_cell, _none),
    Plant("P03", "fixed seed fills the prefix cache", _codes("prompt-repeated", "prefix-cache"),
          _bench(PREFILL, head=Faults(fixed_seed=True, cached_share=0.57),
                 base=Faults(fixed_seed=True)), _large),
    Plant("P03", "the head finds its prompts on disk", _codes("prefix-cache"),
          _bench(PREFILL, head=Faults(cached_share=0.57)), _large),
    Plant("P04", "host state flips between the arms", _codes("state-flip", "state-follows-arm"),
          _bench(DECODE, state=_flips), _large),
    Plant("P04", "one arm always first on a host that drifts", _codes("not-alternating"),
          _one_arm_first, _large),
    Plant("P05", "stream without usage", _codes("usage-missing"), _usage_missing, _large),
    Plant("P05", "usage counts chunks of three tokens", _codes("tokens-missing"),
          _bench(DECODE, head=Faults(usage_counts_chunks=True, chunk_tokens=3)), _large),
    Plant("P05", "three tokens a chunk, empty first chunk",
          _codes("chunks-not-tokens", "empty-first-chunk"),
          lambda folder: _chunk_reading(folder), _large),
    Plant("P06", "faster, other logprobs", _codes("outputs-void"),
          _bench(DECODE, head=Faults(speed=1.15, logprobs="garbage")), _large),
    Plant("P06", "faster, needle lost", _codes("outputs-void"),
          _bench(DECODE, head=Faults(speed=1.15, needle_found=False)), _large),
    Plant("P07", "one request in four 20 % slow, the mean as before", _codes("hidden-slow"),
          _bench(DECODE, head=Faults(slow_requests=0.25, hide_slow=1.0625), cells=MANY,
                 pairs_max=6), _none),
    Plant("P07", "one start in four 20 % slow behind a good median", _codes("hidden-slow"),
          _bench(DECODE, median, head=Faults(slow_starts=(1, 5, 9))), _none),
)  # fmt: skip


def _chunk_reading(folder: Path) -> Rung:
    """The verdict stands (counts come from usage); a reading by chunks is off."""
    records = bench_records(folder, Faults(chunk_tokens=3, empty_first_chunk=True))
    streams = records[1].starts[0].samples(DECODE.name).samples[0].streams
    return _gated(records, streams[0].chunks / streams[0].completion_tokens - 1)


def clean_run(folder: Path) -> Rung:
    """The double with nothing wrong: no detector may ring."""
    return _bench(DECODE)(folder)


def detector_table(folder: Path) -> str:
    """Fault x detector in Markdown: each plant run, with what rang and what naive said."""
    lines = [
        "| fault | planted | rang | expected | exit | naive reading |",
        "|---|---|---|---|---|---|",
    ]
    clean = clean_run(folder / "clean")
    lines.append(f"| - | nothing | {_listed(clean.codes)} | - | {int(clean.exit)} | right |")
    for number, plant in enumerate(PLANTS):
        target = folder / str(number)
        target.mkdir()
        rung = plant.run(target)
        fooled = f"fooled ({rung.naive:+.0%})" if plant.fooled(rung.naive) else "NOT ACTIVE"
        lines.append(
            f"| {plant.fault} | {plant.what} | {_listed(rung.codes)} | {_listed(plant.detectors)} |"
            f" {int(rung.exit)} | {fooled} |"
        )
    return "\n".join(lines) + "\n"


def _listed(codes: frozenset[str]) -> str:
    return ", ".join(sorted(codes)) or "-"
