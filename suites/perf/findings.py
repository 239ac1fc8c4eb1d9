"""Findings: named statements about a run, and what each does to its verdict."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """VOID: the run proves nothing. HOLD: it may not pass. NOTE: the reader must know."""

    VOID = "void"
    HOLD = "hold"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One statement; `fault` is the fault class (P01..P07) that it detects, or empty."""

    code: str
    severity: Severity
    message: str
    fault: str = ""
    cell: str = ""

    def __str__(self) -> str:
        where = f" {self.cell}:" if self.cell else ""
        return f"{self.severity} {self.code}:{where} {self.message}"


def void(code: str, message: str, fault: str = "", cell: str = "") -> Finding:
    return Finding(code, Severity.VOID, message, fault, cell)


def hold(code: str, message: str, fault: str = "", cell: str = "") -> Finding:
    return Finding(code, Severity.HOLD, message, fault, cell)


def note(code: str, message: str, fault: str = "", cell: str = "") -> Finding:
    return Finding(code, Severity.NOTE, message, fault, cell)
