"""Kernels: what each kind of op computes, row by row, in float64 with one rounding (spec 1)."""
