"""The gate over pytest-benchmark files: one process per file, paired by the time of writing."""

from collections.abc import Iterator
from pathlib import Path

from suites.perf import bench_json
from suites.perf.bench_json import BenchFile
from suites.perf.findings import Finding, note, void
from suites.perf.gate_result import Exit, GateOptions, GateResult, exit_of, has_void
from suites.perf.ledger import red_verdict
from suites.perf.red_baseline import red_finding
from suites.perf.stats import Verdict, judge, judge_one_process

Side = tuple[BenchFile, ...]


def gate_benchmarks(base: Path, head: Path, options: GateOptions) -> GateResult:
    """Judge two files, or two folders of as many files, written by pytest-benchmark.

    Raises RecordError for files that are damaged or of another format.
    """
    paths = [bench_json.json_paths(path) for path in (base, head)]
    for path, side in zip((base, head), paths, strict=True):
        if not side:
            finding = void("benchmarks-not-run", f"{path} holds no *.json", "P02")
            return GateResult(Exit.INVALID, findings=(finding,))
    absent = [bench_json.not_run(path) for side in paths for path in side]
    if problems := tuple(finding for finding in absent if finding is not None):
        return GateResult(Exit.INVALID, findings=problems)
    base_side, head_side = (_read(side) for side in paths)
    return _gate_sides(base_side, head_side, options)


def _read(paths: tuple[Path, ...]) -> Side:
    return tuple(sorted(map(bench_json.read_bench, paths), key=lambda file: file.at))


def _gate_sides(base: Side, head: Side, options: GateOptions) -> GateResult:
    found = (
        *bench_json.side_findings(base, head),
        *bench_json.commit_findings(base, head, options.base_commit, options.head_commit),
        *pairing_findings(base, head),
        *_red(base, options),
    )
    judged = () if has_void(found) else _judge(base, head, options)
    return GateResult(
        exit_of(judged, {verdict.cell for verdict in judged}, found),
        judged,
        found,
        len(base),
        (),
        base[0].commit,
        head[0].commit,
        head[-1].sha256,
    )


def _red(base: Side, options: GateOptions) -> Iterator[Finding]:
    for file in base:
        red = red_verdict(options.ledger, file.sha256, file.commit)
        if red is not None:
            yield red_finding(red)
            return


def pairing_findings(base: Side, head: Side) -> Iterator[Finding]:
    """Files of both sides must alternate in time, two by two."""
    if len(base) != len(head):
        yield void("no-pairs", f"{len(base)} base and {len(head)} head files; as many", "P01")
    elif len(base) == 1:
        yield note("one-process", "one process per side: only a large change can be told", "P01")
    else:
        marked = [(file.at, "A") for file in base] + [(file.at, "B") for file in head]
        order = "".join(mark for _, mark in sorted(marked))
        pairs = {order[i : i + 2] for i in range(0, len(order), 2)}
        if not pairs <= {"AB", "BA"}:
            yield void(
                "no-pairs",
                f"the files were written in the order {order}; A B B A is accepted",
                "P01",
            )
        elif len(pairs) == 1:
            yield void(
                "not-alternating",
                f"the files were written in the order {order}, one side always first; A B B A is"
                " accepted",
                "P04",
            )


def _judge(base: Side, head: Side, options: GateOptions) -> tuple[Verdict, ...]:
    one = _one_process if len(base) == 1 else _paired
    names = sorted(base[0].means_s)
    return tuple(one(name, base, head, options, len(names)) for name in names)


def _one_process(name: str, base: Side, head: Side, options: GateOptions, cells: int) -> Verdict:
    return judge_one_process(
        name,
        base[0].means_s[name],
        head[0].means_s[name],
        options.policy,
        options.one_process_spread,
        cells=cells,
    )


def _paired(name: str, base: Side, head: Side, options: GateOptions, cells: int) -> Verdict:
    return judge(
        name,
        [file.means_s[name] for file in base],
        [file.means_s[name] for file in head],
        options.policy,
        cells=cells,
        higher_is_better=False,
        margin=options.margin,
    )
