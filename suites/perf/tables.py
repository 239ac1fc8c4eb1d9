"""Tables of a comparison in the seed issue's layout, for Markdown and for a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from suites.perf.findings import Severity
from suites.perf.gate_result import Exit, GateResult
from suites.perf.judging import kept_pairs
from suites.perf.run_record import RunRecord
from suites.perf.stats import Outcome, Verdict, percent

HEADLINES = {
    Exit.SAME_OR_BETTER: "same or better",
    Exit.WORSE: "worse",
    Exit.INCONCLUSIVE: "inconclusive, which is not a pass",
    Exit.INVALID: "invalid: the runs prove nothing",
}


@dataclass(frozen=True)
class Spread:
    """Mean and range of single starts."""

    mean: float
    low: float
    high: float

    @property
    def range(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{figure(self.mean)} ({figure(self.low)} to {figure(self.high)})"


def spread_of(starts: Sequence[float]) -> Spread:
    """Mean, lowest and highest of the figures of several starts (at least one)."""
    assert starts, "a spread needs at least one start"
    return Spread(sum(starts) / len(starts), min(starts), max(starts))


def figure(value: float) -> str:
    """45.5 for small figures, 2,764 for large ones, as the seed issue prints them."""
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Row:
    """One cell of a comparison; `verdict` None where none was made."""

    cell: str
    unit: str
    base: Spread
    head: Spread
    verdict: Verdict | None

    @property
    def change(self) -> float:
        """Difference of the means as a fraction of the base's."""
        return self.head.mean / self.base.mean - 1

    @property
    def inside_single_starts(self) -> bool:
        """Whether the difference of the means is no larger than single starts of one arm differ."""
        return abs(self.head.mean - self.base.mean) <= max(self.base.range, self.head.range)

    @property
    def texts(self) -> tuple[str, ...]:
        inside = "inside" if self.inside_single_starts else "outside"
        return (
            f"{self.cell} ({self.unit})",
            str(self.base),
            str(self.head),
            f"{self.change:+.1%}",
            inside,
            verdict_text(self.verdict),
        )


COLUMNS = (
    "cell",
    "base: mean (range)",
    "head: mean (range)",
    "difference",
    "single starts",
    "verdict",
)


def verdict_text(verdict: Verdict | None) -> str:
    """The verdict with direction, interval and what is missing."""
    if verdict is None:
        return "none"
    shown = verdict.interval_same if verdict.outcome is Outcome.SAME else verdict.interval
    words = str(verdict.outcome)
    if verdict.outcome is Outcome.DIFFERENT:
        words = f"{words}: {verdict.direction}"
    if shown is not None:
        words += f" {percent(shown)}"
    if not verdict.decided:
        more = "more than can be planned" if verdict.pairs_more is None else verdict.pairs_more
        words += f", pairs missing: about {more}"
    return words


def rows_of(base: RunRecord, head: RunRecord, verdicts: Sequence[Verdict]) -> tuple[Row, ...]:
    """One row per cell over the pairs that count; without any, over all starts there are."""
    judged = {verdict.cell: verdict for verdict in verdicts}
    pairs = kept_pairs(base, head)
    starts = (
        ([p.base for p in pairs], [p.head for p in pairs])
        if pairs
        else (list(base.starts), list(head.starts))
    )
    return tuple(
        Row(
            cell.name,
            cell.unit if cell.gates else f"{cell.unit}, does not gate",
            *(spread_of([start.value(cell) for start in arm]) for arm in starts),
            judged.get(cell.name),
        )
        for cell in base.cells
        if all(starts)
    )


def row_of_figures(
    cell: str, unit: str, base: Sequence[float], head: Sequence[float], verdict: Verdict | None
) -> Row:
    """A row from plain figures, one per start (published tables, for instance)."""
    return Row(cell, unit, spread_of(base), spread_of(head), verdict)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; ends with the sentence about single starts where it holds for all rows."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row.texts)} |" for row in rows]
    if rows and all(row.inside_single_starts for row in rows):
        lines += ["", "Every difference lies within the range of single starts."]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row], title: str = "") -> Table:
    """The same table for rich."""
    table = Table(*COLUMNS, title=title or None)
    for row in rows:
        table.add_row(*row.texts)
    return table


def headline(result: GateResult) -> str:
    """One line: the outcome, pairs, and what was excluded."""
    excluded = ", ".join(f"{count} {reason}" for reason, count in result.excluded)
    pairs = f"{result.pairs} pairs" + (f", excluded: {excluded}" if excluded else "")
    return f"{HEADLINES[result.exit]} (exit {int(result.exit)}; {pairs})"


def report_markdown(result: GateResult, rows: Sequence[Row]) -> str:
    """Verdict first, then the table, the findings, and what was not shown."""
    parts = [f"**{headline(result)}**", ""]
    if rows:
        parts += [markdown(rows)]
    parts += [f"- {finding}" for finding in result.findings]
    if result.verdicts:
        parts += ["", not_shown(result)]
    return "\n".join(parts).rstrip() + "\n"


def not_shown(result: GateResult) -> str:
    """What this many clean starts leave open."""
    rate = result.verdicts[0].rare_fault_excluded
    return (
        f"Not shown: an intermittent fault in fewer than {rate:.0%} of starts"
        f" ({result.verdicts[0].pairs} starts per arm, 95 %); cells that were not measured."
    )


def finding_style(severity: Severity) -> str:
    """The colour of a finding on a terminal."""
    return {Severity.VOID: "bold red", Severity.HOLD: "yellow", Severity.NOTE: "dim"}[severity]
