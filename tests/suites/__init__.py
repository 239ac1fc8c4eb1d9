"""Tests of the suites and of the fixtures that feed them."""
