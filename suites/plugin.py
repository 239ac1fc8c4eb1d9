"""The pytest plugin of the suites: which target is judged, and how a run is reported."""

from __future__ import annotations
