"""What can go wrong with a packing request: a malformed input, or buffers that do not fit."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import SparkproofError, UsageError


class PackingInputError(UsageError):
    """A file, buffer or option that is malformed; the message names the place and the value."""


class _NoPlacementError(SparkproofError):
    """No placement; `counters` says how much was tried, as in a placement."""

    def __init__(self, message: str, counters: Mapping[str, int]) -> None:
        super().__init__(message)
        self.counters = counters


class DoesNotFitError(_NoPlacementError):
    """No placement within the capacity exists; this is proven, not merely not found."""

    exit_code = 10


class GaveUpError(_NoPlacementError):
    """No placement within the capacity was found before the node budget or deadline ran out."""

    exit_code = 11
