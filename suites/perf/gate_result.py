"""What the gate is told and what it answers; data only."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from suites.perf.codec import to_data
from suites.perf.findings import Finding, Severity
from suites.perf.ledger import LedgerEntry
from suites.perf.stats import Policy, Verdict

ONE_PROCESS_SPREAD = 0.10


class Exit(IntEnum):
    """Exit codes of `gate` and `bench`."""

    SAME_OR_BETTER = 0
    WORSE = 1
    INCONCLUSIVE = 2
    INVALID = 3


@dataclass(frozen=True)
class GateOptions:
    """What the caller states. Commits may be shortened to seven digits; margin is a fraction.

    `baseline` is the stored run of the merged commit that the base must agree with; `policy` and
    `one_process_spread` (standard deviation of log time between processes, assumed) serve
    pytest-benchmark files only, since a perf-run/1 record carries its own policy.
    """

    base_commit: str | None = None
    head_commit: str | None = None
    margin: float | None = None
    baseline: Path | None = None
    ledger: tuple[LedgerEntry, ...] = ()
    policy: Policy = Policy()
    one_process_spread: float = ONE_PROCESS_SPREAD


@dataclass(frozen=True)
class GateResult:
    """The gate's answer; `verdicts` is empty when the runs are invalid.

    `has_records` tells perf-run/1 records from pytest-benchmark files.
    """

    exit: Exit
    verdicts: tuple[Verdict, ...] = ()
    findings: tuple[Finding, ...] = ()
    pairs: int = 0
    excluded: tuple[tuple[str, int], ...] = ()
    base_commit: str = ""
    head_commit: str = ""
    head_sha256: str = ""
    has_records: bool = False

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(finding.code for finding in self.findings)

    def entry(self, at_s: float, accepted: str = "") -> LedgerEntry:
        """What the ledger keeps of this result."""
        return LedgerEntry(
            self.head_sha256, self.head_commit, self.base_commit, int(self.exit), at_s, accepted
        )

    def data(self) -> dict[str, Any]:
        """Plain data for a JSON report."""
        return {**to_data(self), "exit": int(self.exit), "outcome": self.exit.name.lower()}


def has_void(findings: Iterable[Finding]) -> bool:
    return any(finding.severity is Severity.VOID for finding in findings)


def exit_of(judged: Iterable[Verdict], gating: set[str], findings: Iterable[Finding]) -> Exit:
    """The exit code: void, then worse, then anything undecided or held, then a pass."""
    found = tuple(findings)
    deciding = [verdict for verdict in judged if verdict.cell in gating]
    if has_void(found):
        return Exit.INVALID
    if any(verdict.worse for verdict in deciding):
        return Exit.WORSE
    held = any(finding.severity is Severity.HOLD for finding in found)
    if held or not deciding or not all(verdict.decided for verdict in deciding):
        return Exit.INCONCLUSIVE
    return Exit.SAME_OR_BETTER
