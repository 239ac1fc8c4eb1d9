"""Numeric checks: identity, invariance, first divergence and the independent float64 oracle."""
