"""The gate's memory: which files and commits were red, so that none of them becomes a baseline."""

import json
from dataclasses import dataclass
from pathlib import Path

from suites.perf.codec import to_data
from suites.perf.errors import RecordError
from suites.perf.files import read_json_text, write_atomically

WORSE = 1


@dataclass(frozen=True)
class LedgerEntry:
    """One verdict of the gate on a head; `accepted` holds the reason when people took it anyway."""

    head_sha256: str
    head_commit: str
    base_commit: str
    exit_code: int
    at_s: float
    accepted: str = ""

    @property
    def red(self) -> bool:
        return self.exit_code == WORSE and not self.accepted


def read_ledger(path: Path) -> tuple[LedgerEntry, ...]:
    """All entries, oldest first; empty when there is no ledger yet, RecordError when damaged."""
    if not path.exists():
        return ()
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return tuple(
        read_json_text(LedgerEntry, line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
    )


def append_entry(path: Path, entry: LedgerEntry) -> None:
    """Add an entry; the file is rewritten whole, so a reader never sees half a line."""
    lines = [json.dumps(to_data(old)) for old in (*read_ledger(path), entry)]
    write_atomically(path, "\n".join(lines) + "\n")


def red_verdict(entries: tuple[LedgerEntry, ...], sha256: str, commit: str) -> LedgerEntry | None:
    """The entry that forbids this file or commit as a baseline: its latest word was red."""
    assert len(sha256) == 64, f"sha256 is {sha256!r}"
    same_file = [entry for entry in entries if entry.head_sha256 == sha256]
    same_commit = [entry for entry in entries if commit and entry.head_commit == commit]
    for known in (same_file, same_commit):
        if known and known[-1].red:
            return known[-1]
    return None


def require_writable(path: Path) -> None:
    """RecordError when the ledger's folder cannot be made: better before judging than after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError("ledger", f"{path}: {error}") from error
