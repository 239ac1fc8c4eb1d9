"""The commands `sparkproof bench` and `sparkproof gate`."""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from suites.perf import tables
from suites.perf.arms import registered_adapter
from suites.perf.bench import BenchPlan, BenchResult, RunStore, run_bench
from suites.perf.cells import CELL_SETS, cells_named
from suites.perf.errors import PerfError
from suites.perf.files import write_atomically
from suites.perf.gate import gate
from suites.perf.gate_result import ONE_PROCESS_SPREAD, Exit, GateOptions, GateResult
from suites.perf.ledger import append_entry, read_ledger, require_writable
from suites.perf.progress import Progress
from suites.perf.run_record import load_record
from suites.perf.states import StateLimits
from suites.perf.stats import Policy

INTERRUPTED = 130
EXIT_CODES = """\b
Exit codes:
    0  every cell is the same within the margin, or better
    1  at least one cell is worse
    2  inconclusive: more pairs are needed. This is never a pass.
    3  invalid: nothing may be concluded (the reasons are listed), or a wrong option
"""


class Percent(click.ParamType):
    """A fraction, written `2%` or `0.02`; above 0 and below `below`."""

    name = "percent"

    def __init__(self, below: float) -> None:
        self.below = below

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        if value is None or isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{value!r}; a percentage such as 2% or 0.02 is accepted", param, ctx)
        if not 0 < fraction < self.below:
            self.fail(f"{value!r}; above 0 and below {self.below:.0%} is accepted", param, ctx)
        return fraction


class VerdictCommand(click.Command):
    """A command whose usage errors exit with 3, since 2 is taken by "inconclusive"."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            error.exit_code = int(Exit.INVALID)
            raise


PERCENT = Percent(below=0.5)
TOLERANCE = Percent(below=1.0)
FILE = click.Path(path_type=Path)


@click.command(
    "bench",
    cls=VerdictCommand,
    epilog=EXIT_CODES + "  130  interrupted; the same command goes on where it stopped",
)
@click.argument("base")
@click.argument("head")
@click.option(
    "--pairs",
    default=5,
    show_default=True,
    help="Pairs before a verdict; 5 is the floor at which a difference can be told at all.",
)
@click.option(
    "--max-pairs",
    default=12,
    show_default=True,
    help="Pairs at most. The error levels"
    " are spread over the looks up to here, so state it before you look.",
)
@click.option(
    "--margin", type=PERCENT, default="2%", show_default=True, help="What counts as the same."
)
@click.option(
    "--alpha",
    type=PERCENT,
    default="1%",
    show_default=True,
    help="Probability of a false alarm over the whole run and all cells.",
)
@click.option(
    "--cells",
    "cell_set",
    type=click.Choice(sorted(CELL_SETS)),
    default="seed",
    show_default=True,
    help="What to time: the seed issue's cells, or a miniature.",
)
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(min=0),
    default=180.0,
    show_default=True,
    help="Seconds of rest before every start, the same for both.",
)
@click.option(
    "--canary-tolerance",
    type=TOLERANCE,
    default="5%",
    show_default=True,
    help="How far the host's canaries may lie apart within a pair; wider on a host that"
    " other work shares.",
)
@click.option(
    "--outputs",
    "outputs_rule",
    type=click.Choice(["identical", "needle"]),
    default="identical",
    show_default=True,
    help="What makes outputs valid: one logprob"
    " hash over both arms, or the needle alone (numerics are meant to change).",
)
@click.option("--base-commit", default="", help="The commit that the base must be of.")
@click.option(
    "--all-cells",
    is_flag=True,
    help="Go on until every cell is decided, even when one is already worse.",
)
@click.option(
    "--out",
    type=FILE,
    default="perf-run",
    show_default=True,
    help="Folder of base.json and head.json; an unfinished run there goes on.",
)
@click.option("--markdown", type=FILE, help="Write the table there as well.")
def bench_command(base: str, head: str, out: Path, markdown: Path | None, **options: Any) -> None:
    """Compare the speed of two targets, BASE and HEAD, by paired starts.

    A start of an engine is the unit: starts of one package differ, so requests of one start say
    nothing about another. The two targets start in turn (A B B A B A A B ...), with the page cache
    dropped, the same rest and the same prompts; pairs that met different host states do not count.
    After five pairs each cell is different, the same within the margin, or inconclusive, and pairs
    are added until all cells are decided.

    \b
    Example: compare the merged commit with a change, on the rank-0 host
        sparkproof bench packages/main packages/change --out runs/tonight
        sparkproof gate runs/tonight/base.json runs/tonight/head.json
    """
    console = Console()
    try:
        plan = _plan(**options)
        adapter = registered_adapter()
        arms = (adapter.arm(base), adapter.arm(head))
        with console.status("bench") as status:
            watch = Watcher(console, status).show
            result = run_bench(plan, arms, adapter.host(), RunStore(out), watch)
    except PerfError as error:
        _stop(console, f"{error}\nfinished starts are kept in {out}", int(error.exit_code))
    except KeyboardInterrupt:
        _stop(console, f"interrupted; run the same command to go on from {out}", INTERRUPTED)
    console.print(f"ended: {result.ended}", highlight=False)
    _show_bench(console, result, markdown)
    click.get_current_context().exit(int(result.gate.exit))


def _plan(
    *,
    pairs: int,
    max_pairs: int,
    margin: float,
    alpha: float,
    cell_set: str,
    idle_s: float,
    canary_tolerance: float,
    outputs_rule: str,
    base_commit: str,
    all_cells: bool,
) -> BenchPlan:
    return BenchPlan(
        cells_named(cell_set),
        Policy(margin, alpha, pairs_min=pairs, pairs_max=max_pairs, stop_at_worse=not all_cells),
        StateLimits(match=canary_tolerance),
        idle_s,
        outputs_rule,
        base_commit,
    )


class Watcher:
    """Shows a bench: a line per start with pairs done and the time left, and what runs just now."""

    LASTING = ("resume", "start done", "failed")

    def __init__(self, console: Console, status: Status) -> None:
        self.console = console
        self.status = status

    def show(self, progress: Progress) -> None:
        left = f"  ({progress.forecast})" if progress.forecast else ""
        line = f"{progress.event}: {progress.text}{left}"
        self.status.update(escape(line))
        if progress.event in self.LASTING:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show_bench(console: Console, result: BenchResult, markdown: Path | None) -> None:
    rows = tables.rows_of(result.base, result.head, result.gate.verdicts)
    _show(console, result.gate, rows, markdown)


def _show(
    console: Console, result: GateResult, rows: tuple[tables.Row, ...], markdown: Path | None
) -> None:
    if rows:
        console.print(tables.terminal(rows))
    for verdict in result.verdicts if not rows else ():
        console.print(f"{verdict.cell}: {tables.verdict_text(verdict)}", markup=False)
    for finding in result.findings:
        console.print(str(finding), style=tables.finding_style(finding.severity), markup=False)
    console.print(tables.headline(result), style="bold")
    if markdown is not None:
        write_atomically(markdown, tables.report_markdown(result, rows))


def _stop(console: Console, message: str, code: int) -> None:
    console.print(message, style="bold red", markup=False)
    click.get_current_context().exit(code)


@click.command("gate", cls=VerdictCommand, epilog=EXIT_CODES)
@click.argument("base", type=FILE)
@click.argument("head", type=FILE)
@click.option(
    "--base-commit",
    help="The merged commit that BASE must be of. Required for pytest-benchmark files.",
)
@click.option("--head-commit", help="The commit that HEAD must be of (guards against an old file).")
@click.option(
    "--baseline",
    type=FILE,
    help="The record that was kept of the merged commit: its commit,"
    " cells and fingerprint must agree with BASE.",
)
@click.option("--margin", type=PERCENT, help="Judge with this margin instead of the stored one.")
@click.option(
    "--ledger",
    type=FILE,
    help="A file in which the gate remembers its verdicts, so that"
    " a red run never becomes a baseline.",
)
@click.option(
    "--accept",
    default="",
    metavar="REASON",
    help="Note in the ledger that this regression was taken on purpose; the exit code stays 1.",
)
@click.option(
    "--max-pairs", default=12, show_default=True, help="Planned pairs of pytest-benchmark folders."
)
@click.option(
    "--spread",
    type=PERCENT,
    default=f"{ONE_PROCESS_SPREAD:.0%}",
    show_default=True,
    help="Assumed spread between processes when each side is a single pytest-benchmark file.",
)
@click.option("--markdown", type=FILE, help="Write verdict, table and findings there.")
@click.option("--json", "json_path", type=FILE, help="Write the result there as JSON.")
def gate_command(
    base: Path, head: Path, markdown: Path | None, json_path: Path | None, **options: Any
) -> None:
    """Judge two stored runs: may HEAD be merged on top of BASE?

    BASE and HEAD are the base.json and head.json of one `sparkproof bench`, or files of
    pytest-benchmark (or folders with one file per process, written in the order A B B A ...).
    A single pytest-benchmark file per side can only turn red or stay inconclusive: one process
    cannot show that nothing changed.

    \b
    Refused with exit 3: other fingerprints, a baseline of another commit than stated, renamed or
    missing cells, runs without pairs, wrong outputs, prompts from the prefix cache, benchmarks that
    did not run (disabled, parallel workers), a baseline that the gate called red before.

    \b
    Examples:
        sparkproof gate runs/tonight/base.json runs/tonight/head.json --base-commit $MERGED
        sparkproof gate main.json change.json --base-commit $MERGED --head-commit $CHANGE
    """
    console = Console()
    try:
        result = _gate(base, head, **options)
    except PerfError as error:
        _stop(console, str(error), int(error.exit_code))
    _show(console, result, _gate_rows(base, head, result), markdown)
    if json_path is not None:
        write_atomically(json_path, json.dumps(result.data(), indent=1) + "\n")
    click.get_current_context().exit(int(result.exit))


def _gate(
    base: Path,
    head: Path,
    *,
    base_commit: str | None,
    head_commit: str | None,
    baseline: Path | None,
    margin: float | None,
    ledger: Path | None,
    accept: str,
    max_pairs: int,
    spread: float,
) -> GateResult:
    if accept and ledger is None:
        raise PerfError("accept", "--accept is written to a ledger; state --ledger FILE as well")
    if ledger is not None:
        require_writable(ledger)
    options = GateOptions(
        base_commit,
        head_commit,
        margin,
        baseline,
        read_ledger(ledger) if ledger is not None else (),
        Policy(pairs_max=max_pairs),
        spread,
    )
    result = gate(base, head, options)
    if ledger is not None and result.head_sha256:
        append_entry(ledger, result.entry(time.time(), accept))
    return result


def _gate_rows(base: Path, head: Path, result: GateResult) -> tuple[tables.Row, ...]:
    """Rows of a table with means and ranges, which perf-run/1 records allow."""
    if not result.verdicts or not result.has_records:
        return ()
    return tables.rows_of(load_record(base), load_record(head), result.verdicts)
