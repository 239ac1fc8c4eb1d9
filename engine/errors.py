"""Every error that is the caller's fault, one class per kind, each with an exit code."""

from __future__ import annotations


class SparkproofError(Exception):
    """A request that cannot be carried out as asked; `exit_code` is what a command returns."""

    exit_code = 1


class UsageError(SparkproofError):
    """An option, argument or environment variable that is unknown or out of range."""

    exit_code = 2


class ConfigError(SparkproofError):
    """A model configuration that is incomplete, unknown or contradictory."""

    exit_code = 3


class CheckpointError(SparkproofError):
    """A checkpoint whose files do not hold what its configuration calls for."""

    exit_code = 4


class PackageError(SparkproofError):
    """A package that is truncated, altered, or of another version, rank or recipe."""

    exit_code = 5


class RendezvousError(SparkproofError):
    """Ranks that do not come together: missing, doubled, strange or differently configured."""

    exit_code = 6


class MemoryFloorError(SparkproofError):
    """Too little host memory; the message states both MiB available and MiB required."""

    exit_code = 7


class RequestError(SparkproofError):
    """A request to a server that is malformed or over a limit (HTTP 4xx)."""

    exit_code = 8


class PeerLostError(SparkproofError):
    """A rank that ended or fell silent while the others still needed it."""

    exit_code = 9


def must_be_one_of(what: str, value: object, choices: object) -> str:
    """The sentence for a value outside a closed list of choices."""
    return f"{what} is {value!r}; accepted: {', '.join(str(choice) for choice in choices)}"
