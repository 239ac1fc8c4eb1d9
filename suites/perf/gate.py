"""The merge gate: one exit code from two stored runs, and every reason why they may not be judged.

What it does not know: whether the cells matter to users, and what was not measured. It never turns
"inconclusive" into a pass.
"""

from dataclasses import replace
from pathlib import Path

from suites.perf.bench_stamp import file_sha256
from suites.perf.errors import PerfError
from suites.perf.files import read_json
from suites.perf.findings import void
from suites.perf.gate_benchmarks import gate_benchmarks
from suites.perf.gate_result import Exit, GateOptions, GateResult, exit_of, has_void
from suites.perf.judging import exclusions, pairs_of, verdicts
from suites.perf.ledger import red_verdict
from suites.perf.red_baseline import red_finding
from suites.perf.refusals import refuse_records
from suites.perf.run_record import RunRecord, parse_record
from suites.perf.traps import trap_findings


def gate(base: Path, head: Path, options: GateOptions | None = None) -> GateResult:
    """Judge two stored runs: perf-run/1 records, pytest-benchmark files, or folders of the latter.

    Never raises for what is in the files: damaged or foreign ones give exit 3 with the reason.
    """
    chosen = options or GateOptions()
    try:
        if _is_record(base) or _is_record(head):
            return _gate_files(base, head, chosen)
        return gate_benchmarks(base, head, chosen)
    except PerfError as error:
        return GateResult(Exit.INVALID, findings=(void(error.code, error.message),))


def _is_record(path: Path) -> bool:
    if not path.is_file():
        return False
    data = read_json(path)
    return isinstance(data, dict) and "schema" in data


def _gate_files(base: Path, head: Path, options: GateOptions) -> GateResult:
    base_record, head_record = (parse_record(read_json(path), str(path)) for path in (base, head))
    result = gate_records(base_record, head_record, options)
    red = red_verdict(options.ledger, file_sha256(base), base_record.facts.commit)
    if red is not None:
        result = replace(
            result, exit=Exit.INVALID, verdicts=(), findings=(*result.findings, red_finding(red))
        )
    return replace(result, head_sha256=file_sha256(head), has_records=True)


def gate_records(
    base: RunRecord, head: RunRecord, options: GateOptions | None = None
) -> GateResult:
    """Judge the two arms of a bench session; PerfError when the figures themselves are unusable."""
    chosen = options or GateOptions()
    refused = tuple(refuse_records(base, head, chosen))
    commits = {"base_commit": base.facts.commit, "head_commit": head.facts.commit}
    if has_void(refused):
        return GateResult(Exit.INVALID, findings=refused, **commits)
    pairs = pairs_of(base, head)
    found = (*refused, *trap_findings(base, head))
    judged = () if has_void(found) else verdicts(base, head, chosen.margin)
    gating = {cell.name for cell in base.cells if cell.gates}
    return GateResult(
        exit_of(judged, gating, found),
        judged,
        found,
        sum(pair.kept for pair in pairs),
        tuple(exclusions(pairs).items()),
        **commits,
    )
