"""Running row-wise work with a fixed number of threads.

Rows are independent, so how they are dealt to threads cannot move a bit. Matrix products
run single-threaded inside each part: their own threads would spin against these.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from threadpoolctl import threadpool_limits

WORTH_ITEMS = 2**16
"""Items of element-wise work below which another thread costs more than it saves."""

THREADS_MAX = 64
"""More would leave some without a row in the smallest tiles of scratch."""


def least_rows(items_per_row: int) -> int:
    """Rows of a part that are worth a thread of their own."""
    return max(1, WORTH_ITEMS // max(1, items_per_row))


class Workers:
    """`threads` threads that share rows; one thread means a plain call."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"threads is {threads}"
        self.threads = min(threads, THREADS_MAX)
        # Looked up first, so that the library the kernels call is loaded and can be limited.
        importlib.import_module("scipy.linalg.cython_blas")
        threadpool_limits(1, user_api="blas")
        self._pool = ThreadPoolExecutor(self.threads - 1) if threads > 1 else None

    def parts(self, rows: int, least: int) -> list[tuple[int, int]]:
        """Half-open row ranges for the threads, each of at least `least` rows if there are more."""
        count = max(1, min(self.threads, rows // least))
        size = max(1, -(-rows // count))
        return [(first, min(first + size, rows)) for first in range(0, rows, size)]

    def run(self, kernel: Callable, rows: int, least: int, *args) -> None:
        """Call `kernel(first, past, *args)` over 0..rows, split where a part has `least` rows."""
        if self._pool is None or rows < 2 * least:
            kernel(0, rows, *args)
            return
        own, *rest = self.parts(rows, least)
        others = [self._pool.submit(kernel, *part, *args) for part in rest]
        kernel(*own, *args)
        for other in others:
            other.result()

    def each(self, work: Callable[[int, int, int], None], rows: int, least: int) -> None:
        """Call `work(part, first, past)` for each part of the rows, side by side."""
        own, *rest = self.parts(rows, least) or [(0, 0)]
        if self._pool is None or not rest:
            work(0, *own)
            return
        others = [self._pool.submit(work, i, *part) for i, part in enumerate(rest, start=1)]
        work(0, *own)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
