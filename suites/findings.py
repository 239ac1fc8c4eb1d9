"""What a check has to say: findings, and what it could not look at, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

SEVERITIES = ("error", "warning")


@dataclass(frozen=True)
class Finding:
    """One violation.

    name      from a closed list that the suite keeps (for memory: suites.memory.names)
    where     the place, outermost first: `rank 1 / graph decode / l3.q`
    message   one sentence with the values found and what was expected
    data      the same facts as JSON values
    severity  an error makes the run red; a warning is worth reading
    """

    name: str
    where: str
    message: str
    data: Mapping[str, object] = field(default_factory=dict)
    severity: str = "error"

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, f"severity is {self.severity!r}"

    def __str__(self) -> str:
        return f"{self.name}: {self.where}: {self.message}"

    def to_json(self) -> dict:
        """The finding as a JSON value."""
        return {**asdict(self), "data": dict(self.data)}


@dataclass(frozen=True)
class NotChecked:
    """A check that could not be made, and what it would have needed; never counts as a pass."""

    check: str
    reason: str

    def __str__(self) -> str:
        return f"not checked: {self.check}: {self.reason}"


@dataclass(frozen=True)
class Judgement:
    """All that one run of checks found, in the order the checks ran."""

    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names of the findings, sorted."""
        return tuple(sorted({finding.name for finding in self.findings}))

    @property
    def is_clean(self) -> bool:
        """True when no finding is an error; what was not checked is for the caller to weigh."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict:
        """The judgement as a JSON value."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "not_checked": [asdict(entry) for entry in self.not_checked],
        }


def joined(judgements: Iterable[Judgement]) -> Judgement:
    """Several judgements as one, in order."""
    every = list(judgements)
    return Judgement(
        tuple(finding for judgement in every for finding in judgement.findings),
        tuple(dict.fromkeys(entry for judgement in every for entry in judgement.not_checked)),
    )
