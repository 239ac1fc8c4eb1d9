"""How long packing takes and what each trick of the search saves: python benchmarks/packing.py.

Prints instance x time x choices with all tricks, what each trick did, and the choices needed with
each trick off. `--data` names a folder of MiniMalloc CSVs called NAME.CAPACITY.csv.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.packing import (
    ALL_TRICKS,
    Buffer,
    DoesNotFitError,
    GaveUpError,
    Tricks,
    pack,
    read_csv,
    violations_of,
)

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "minimalloc"
SECONDS_MAX = 60.0
NODES_MAX = 200_000


@dataclass(frozen=True)
class Problem:
    """One instance: its name, its buffers and the capacity to fit."""

    name: str
    buffers: tuple[Buffer, ...]
    capacity: int


@dataclass(frozen=True)
class Result:
    """One run: whether it fitted, seconds, and the counters."""

    fitted: bool
    seconds: float
    strategy: str
    counters: Counter

    @property
    def cell(self) -> str:
        return f"{self.counters['nodes']:,}" if self.fitted else "-"


def problems_in(folder: Path, names: Sequence[str]) -> list[Problem]:
    """The instances of a folder, by file name; all of them when no names are given."""
    found = []
    for path in sorted(folder.glob("*.csv")):
        name, capacity = path.name.split(".")[:2]
        if not names or name in names:
            found.append(Problem(name, read_csv(path)[0].buffers, int(capacity)))
    if not found:
        raise SystemExit(f"no instances {' '.join(names)} in {folder}; give a folder with --data")
    return found


def timed(problem: Problem, tricks: Tricks, nodes_max: int | None, seed: int) -> Result:
    """One run, its placement checked by the validator."""
    began = time.perf_counter()
    try:
        placement = pack(
            problem.buffers,
            problem.capacity,
            SECONDS_MAX,
            nodes_max=nodes_max,
            tricks=tricks,
            seed=seed,
        )
    except (DoesNotFitError, GaveUpError) as error:
        return Result(False, time.perf_counter() - began, f"{error}", Counter())
    seconds = time.perf_counter() - began
    wrong = violations_of(problem.buffers, placement.by_id, problem.capacity)
    if wrong:
        raise SystemExit(f"{problem.name}: {len(wrong)} violations, first: {wrong[0]}")
    return Result(True, seconds, placement.strategy, Counter(placement.counters))


def greedy_ratio(problem: Problem) -> float:
    return pack(problem.buffers, nodes_max=0).ratio


def print_instances(problems: Sequence[Problem], results: Sequence[Result]) -> None:
    print("| instance | buffers | greedy / bound | fits | seconds | choices | runs | found by |")
    print("|---|---|---|---|---|---|---|---|")
    for problem, result in zip(problems, results, strict=True):
        print(
            f"| {problem.name} | {len(problem.buffers)} | {greedy_ratio(problem):.3f} "
            f"| {'yes' if result.fitted else 'no'} | {result.seconds:.2f} | {result.cell} "
            f"| {result.counters['runs']} | {result.strategy} |"
        )
    seconds = sum(result.seconds for result in results)
    print(f"\nall: {seconds:.2f} s, {sum(r.counters['nodes'] for r in results):,} choices\n")


def print_counters(results: Sequence[Result]) -> None:
    total: Counter = sum((result.counters for result in results), Counter())
    print("| what happened, all instances together | times |")
    print("|---|---|")
    for name, count in sorted(total.items()):
        print(f"| {name} | {count:,} |")
    print()


def print_tricks(problems: Sequence[Problem], nodes_max: int, seed: int) -> None:
    """Choices per instance with each trick off; "-" where the budget did not suffice."""
    print(f"choices needed with one trick off, '-': none found in {nodes_max:,} choices\n")
    names = [problem.name for problem in problems]
    print(f"| off | {' | '.join(names)} | fitted | seconds |")
    print(f"|---|{'---|' * (len(names) + 2)}")
    variants = {"nothing": ALL_TRICKS} | {n: ALL_TRICKS.without(n) for n in Tricks._fields}
    for name, tricks in variants.items():
        results = [timed(problem, tricks, nodes_max, seed) for problem in problems]
        cells = " | ".join(result.cell for result in results)
        fitted = sum(result.fitted for result in results)
        seconds = sum(result.seconds for result in results)
        print(f"| {name} | {cells} | {fitted} of {len(results)} | {seconds:.1f} |", flush=True)


def main() -> int:
    """1 when an instance does not fit or takes longer than SECONDS_MAX."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="instances; all by default")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--nodes-max", type=int, default=NODES_MAX, help="with a trick off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tricks", action="store_true", help="also with each trick off (minutes)")
    options = parser.parse_args()
    problems = problems_in(options.data, options.names)
    began = time.perf_counter()
    timed(problems[0], ALL_TRICKS, 1, options.seed)
    print(f"compiled search ready after {time.perf_counter() - began:.1f} s, seed {options.seed}\n")
    results = [timed(problem, ALL_TRICKS, None, options.seed) for problem in problems]
    print_instances(problems, results)
    print_counters(results)
    if options.tricks:
        print_tricks(problems, options.nodes_max, options.seed)
    return 0 if all(r.fitted and r.seconds < SECONDS_MAX for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
