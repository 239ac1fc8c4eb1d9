"""How long packing takes and what each trick of the search saves: python benchmarks/packing.py.

Prints instance x time x choices with all tricks and what each trick did; with --tricks also the
choices needed with each trick off, to fit the instances and to prove that generated ones do not
fit. `--data` names a folder of MiniMalloc CSVs called NAME.CAPACITY.csv.
"""

from __future__ import annotations

import argparse
import itertools
import random
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
VARIANTS = {"nothing": ALL_TRICKS} | {name: ALL_TRICKS.without(name) for name in Tricks._fields}


@dataclass(frozen=True)
class Problem:
    """One instance: its name, its buffers and the capacity to fit."""

    name: str
    buffers: tuple[Buffer, ...]
    capacity: int


@dataclass(frozen=True)
class Result:
    """One run: whether it fitted or was proven not to, seconds, and the counters."""

    fitted: bool
    proven: bool
    seconds: float
    strategy: str
    counters: Counter

    @property
    def choices(self) -> int:
        return self.counters["nodes"]

    @property
    def rank(self) -> tuple[bool, int]:
        """Sorts runs from good to bad."""
        return not self.fitted, self.choices

    @property
    def cell(self) -> str:
        return f"{self.choices:,}" if self.fitted else "-"


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
        proven = isinstance(error, DoesNotFitError)
        seconds = time.perf_counter() - began
        return Result(False, proven, seconds, "", Counter(error.counters))
    seconds = time.perf_counter() - began
    wrong = violations_of(problem.buffers, placement.by_id, problem.capacity)
    if wrong:
        raise SystemExit(f"{problem.name}: {len(wrong)} violations, first: {wrong[0]}")
    return Result(True, False, seconds, placement.strategy, Counter(placement.counters))


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


def print_tricks(problems: Sequence[Problem], nodes_max: int, seeds: range) -> None:
    """Median choices per instance with each trick off; "-" where most runs found nothing."""
    print(
        f"median choices to fit with one trick off, seeds {seeds.start} to {seeds.stop - 1}; "
        f"'-': not in {nodes_max:,}\n"
    )
    names = [problem.name for problem in problems]
    print(f"| off | {' | '.join(names)} | runs that fitted | seconds |")
    print(f"|---|{'---|' * (len(names) + 2)}")
    for name, tricks in VARIANTS.items():
        rows = [[timed(p, tricks, nodes_max, seed) for seed in seeds] for p in problems]
        middle = [sorted(row, key=lambda r: r.rank)[len(row) // 2] for row in rows]
        cells = " | ".join(result.cell for result in middle)
        runs = [result for row in rows for result in row]
        fitted = sum(result.fitted for result in runs)
        seconds = sum(result.seconds for result in runs)
        print(f"| {name} | {cells} | {fitted} of {len(runs)} | {seconds:.1f} |", flush=True)


def crowded(seed: int, times: int, capacity: int, lanes: int) -> Problem:
    """Buffers that fill the capacity at every moment, with no regard to where they could lie."""
    choose = random.Random(seed)

    def split(total: int, parts: int) -> list[int]:
        cuts = sorted(choose.sample(range(1, total), min(parts, total) - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]

    live = [(0, size) for size in split(capacity, lanes)]
    done = []
    for time_index in range(1, times):
        choose.shuffle(live)
        count = choose.randint(1, 3)
        ending, live = live[:count], live[count:]
        done += [(start, time_index, size) for start, size in ending]
        total = sum(size for _, size in ending)
        live += [(time_index, size) for size in split(total, choose.randint(1, 3))]
    done += [(start, times, size) for start, size in live]
    buffers = tuple(Buffer(str(i), *entry) for i, entry in enumerate(done))
    return Problem(f"crowded-{seed}", buffers, capacity)


def print_proofs(count: int, nodes_max: int) -> None:
    """Choices to prove that instances do not fit, each trick off; restarts off throughout."""
    candidates = (crowded(seed, 14, 60, 8) for seed in itertools.count())
    problems = (p for p in candidates if timed(p, ALL_TRICKS, 10_000, 0).proven)
    chosen = list(itertools.islice(problems, count))
    print(f"\nchoices to prove that {count} crowded instances do not fit, no restarts\n")
    print("| off | proven | choices | seconds |\n|---|---|---|---|")
    for name, tricks in VARIANTS.items():
        results = [timed(p, tricks.without("restarts"), nodes_max, 0) for p in chosen]
        proven = sum(result.proven for result in results)
        choices = sum(result.choices for result in results)
        seconds = sum(result.seconds for result in results)
        print(f"| {name} | {proven} of {count} | {choices:,} | {seconds:.1f} |", flush=True)


def main() -> int:
    """1 when an instance does not fit or takes longer than SECONDS_MAX."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="instances; all by default")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--nodes-max", type=int, default=NODES_MAX, help="with a trick off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="runs per cell with a trick off")
    parser.add_argument("--proofs", type=int, default=20, help="instances to prove unfit")
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
        seeds = range(options.seed, options.seed + options.seeds)
        print_tricks(problems, options.nodes_max, seeds)
        print_proofs(options.proofs, options.nodes_max)
    return 0 if all(r.fitted and r.seconds < SECONDS_MAX for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
