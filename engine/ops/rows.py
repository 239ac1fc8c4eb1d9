"""Running a kernel over rows with a fixed number of threads.

Rows are independent, so how they are dealt to threads cannot move a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Workers:
    """`threads` threads that share the rows of a kernel; one thread means a plain call."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"threads is {threads}"
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def run(self, kernel: Callable, rows: int, least: int, *args) -> None:
        """Call `kernel(first, past, *args)` over 0..rows, split where a part has `least` rows."""
        parts = min(self.threads, rows // least) if least else 1
        if parts < 2 or self._pool is None:
            kernel(0, rows, *args)
            return
        size = -(-rows // parts)
        others = [
            self._pool.submit(kernel, first, min(first + size, rows), *args)
            for first in range(size, rows, size)
        ]
        kernel(0, size, *args)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
