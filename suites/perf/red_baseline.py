"""The finding for a baseline that the gate itself called red (P02)."""

from suites.perf.findings import Finding, void
from suites.perf.ledger import LedgerEntry


def red_finding(red: LedgerEntry) -> Finding:
    """Void, with what the ledger says and how a wanted regression is taken."""
    return void(
        "baseline-red",
        f"the gate found {red.head_commit or red.head_sha256[:12]} worse than"
        f" {red.base_commit or 'its base'} before: a red run is no baseline (state --accept REASON"
        " on its own gate run when people took the regression on purpose)",
        "P02",
    )
