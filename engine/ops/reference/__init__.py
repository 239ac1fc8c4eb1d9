"""Reference kernels: every op kind in plain torch, for any device, written to be read.

Where the compiled kernels and these disagree, these say what is meant. Values are computed in the
backend's accumulation dtype (float64 unless the recipe chose float32 on CUDA) and rounded once.
"""
