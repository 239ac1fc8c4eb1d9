"""Tile sizes that lowering and kernels agree on: they bound the scratch of an op."""

FEW_ROWS = 16
"""Up to so many rows a weight is decoded row by row instead of as a tile."""
FEW_SLOTS = 64
"""The same for (token, expert) pairs of an expert op."""
GEMM_ROWS = 512
"""Rows of one tile of a matrix product."""
GEMM_WEIGHT_ITEMS = 2 * 1024**2
"""Items of a decoded weight tile: 16 MiB of float64."""
MIX_ROWS = 64
"""Rows of one tile of hyper-connection coefficients."""
REDUCE_ROWS = 512
"""Rows of one partial sum on its way between ranks."""
INDEX_ROWS = 64
INDEX_KEYS = 1024
"""Rows and keys of one tile of index scores."""
