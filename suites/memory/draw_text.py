"""A memory map drawn in characters for a terminal: addresses upwards, ops to the right.

It does not judge; a cell that two buffers claim at once is drawn as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.memmap import MemoryMap, Temporary
from engine.units import format_size
from suites.memory.render_text import own_buffers

SHADES = " .:-=+*#%@"
"""From no byte of a cell in use to all of them."""
DOUBLE = "!"
"""More bytes live in a cell than it has: two buffers on the same ones."""


def cells(
    temporaries: Sequence[Temporary], height: int, width: int, rows: int, columns: int
) -> np.ndarray:
    """[rows, columns]: how much of each cell's bytes is live at its busiest op, from 0 to above 1.

    height is bytes of the arena, width ops of the graph; row 0 is the lowest address.
    """
    ops = min(width, 4096)
    edges = np.linspace(0, height, rows + 1)
    change = np.zeros((rows, ops + 1))
    for t in own_buffers(temporaries):
        covered = np.minimum(edges[1:], t.offset + t.nbytes) - np.maximum(edges[:-1], t.offset)
        part = np.clip(covered, 0, None) / (edges[1:] - edges[:-1])
        first = t.first_write * ops // width
        last = max(first, (t.last_read + 1) * ops // width - 1)
        change[:, first] += part
        change[:, last + 1] -= part
    level = np.cumsum(change, axis=1)[:, :ops]
    starts = np.arange(columns) * ops // columns
    stops = np.maximum((np.arange(columns) + 1) * ops // columns, starts + 1)
    busiest = [level[:, a:b].max(axis=1) for a, b in zip(starts, stops, strict=True)]
    return np.stack(busiest, axis=1)


def _shade(share: float) -> str:
    if share > 1 + 1e-6:
        return DOUBLE
    if share <= 1e-9:
        return SHADES[0]
    return SHADES[max(1, min(len(SHADES) - 1, int(share * (len(SHADES) - 1) + 1e-6)))]


def draw_map(memory_map: MemoryMap, rows: int = 20, columns: int = 72) -> str:
    """Every graph of every rank as a block of characters, with the bytes on the left."""
    lines: list[str] = []
    for rank in memory_map.ranks:
        held: dict[str, list[Temporary]] = {}
        for t in rank.temporaries:
            held.setdefault(t.graph, []).append(t)
        for name, temporaries in held.items():
            lines += [f"rank {rank.rank}, graph {name}", *_block(temporaries, rows, columns), ""]
    return "\n".join(lines)


def _block(temporaries: Sequence[Temporary], rows: int, columns: int) -> Iterator[str]:
    height = max(t.offset + t.nbytes for t in temporaries)
    width = 1 + max(t.last_read for t in temporaries)
    if height == 0:
        yield "  no bytes"
        return
    # One op takes at most two characters, so that a short graph is not blown up.
    grid = cells(temporaries, height, width, rows, min(columns, max(1, 2 * width)))
    for row in reversed(range(rows)):
        top = format_size(round(height * (row + 1) / rows))
        yield f"{top:>12} |" + "".join(_shade(share) for share in grid[row])
    yield f"{'':>12} +" + "-" * grid.shape[1]
    yield f"{'':>12}  ops 0 to {width - 1}"
