"""Errors of the perf suite that a user can cause and mend; each carries a code to test against."""

from engine.errors import SparkproofError


class PerfError(SparkproofError):
    """A measurement or a stored run that cannot be used.

    `code` is stable and machine-readable, the message carries the value found and what would be
    accepted. The exit code is the gate's "invalid".
    """

    exit_code = 3

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class TraceError(PerfError):
    """A stream whose time stamps or usage counts give no rate."""


class RecordError(PerfError):
    """A stored run that is damaged, of another format, or not the one to resume."""


class HostCappedError(PerfError):
    """The host runs at a fraction of its clock: nothing measured on it says anything."""


class ArmError(PerfError):
    """An engine that did not start, or died while it was measured."""


class BenchStoppedError(PerfError):
    """A bench that cannot go on: too many failed starts, or too many excluded pairs."""
