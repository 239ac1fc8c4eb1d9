"""Perf suite: exact counters on every change, clocks judged by paired starts."""
