"""Tests that judge the judges."""
