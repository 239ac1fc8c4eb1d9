"""The tables that commands print: inventory by rank, KV facts, arenas and allocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from engine.memmap import INVENTORY_ROWS, MemoryMap, RankMap
from engine.units import MIB, format_size

ALLOCATIONS_SHOWN = 20
_LABELS = {
    "core_fixed_mappings": "core fixed mappings",
    "weights_and_numeric_constants": "weights and numeric constants",
    "graph_scratch_pools": "graph scratch pools",
    "operator_scratch": "operator scratch",
    "other_owned_tensors": "other owned tensors",
    "graph_capture_pool": "graph capture pool",
    "allocator_slack": "allocator slack",
}


def console() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    found = Console(highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(highlight=False, soft_wrap=True, width=120)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def inventory(memory_map: MemoryMap) -> Table:
    """The seed report's rows in MiB, a column per rank."""
    ranks = memory_map.ranks
    table = _table("fixed device memory, MiB", "row", [f"rank {r.rank}" for r in ranks])
    for row in INVENTORY_ROWS:
        values = [f"{rank.inventory_bytes[row] / MIB:,.3f}" for rank in ranks]
        table.add_row(_LABELS[row], *values)
    return table


def kv_lines(memory_map: MemoryMap) -> list[str]:
    """What the KV cache costs, in sentences."""
    kv = memory_map.kv
    if not kv:
        return []
    sizes = [rank.fixed_bytes for rank in memory_map.ranks]
    return [
        f"fixed memory of the ranks differs by {format_size(max(sizes) - min(sizes))}",
        f"KV cache: {kv['bytes_per_token']:,} bytes a token on every rank, pages of "
        f"{kv['page_tokens']} tokens = {kv['page_bytes']:,} bytes",
        f"window rings and open groups: {format_size(kv['fixed_bytes'])}, part of the above",
    ]


def arenas(rank: RankMap) -> Table:
    """One line per arena and category of a rank."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for allocation in rank.allocations:
        sizes.setdefault((allocation.arena, allocation.category), []).append(allocation.nbytes)
    table = _table(f"rank {rank.rank}: arenas", "arena / category", ["mappings", "bytes", "MiB"])
    for (arena, category), found in sizes.items():
        total = sum(found)
        table.add_row(f"{arena} / {category}", f"{len(found):,}", f"{total:,}", _mib(total))
    return table


def largest(rank: RankMap, count: int = ALLOCATIONS_SHOWN) -> Table:
    """The largest mappings of a rank."""
    table = _table(
        f"rank {rank.rank}: {count} largest of {len(rank.allocations):,} mappings",
        "name",
        ["category", "dtype", "shape", "offset", "MiB"],
    )
    for allocation in sorted(rank.allocations, key=lambda a: (-a.nbytes, a.name))[:count]:
        shape = " x ".join(map(str, allocation.shape))
        cells = (allocation.category, allocation.dtype, shape, f"{allocation.offset:,}")
        table.add_row(allocation.name, *cells, _mib(allocation.nbytes))
    return table


def graphs(rank: RankMap) -> Table:
    """The temporaries of each graph of a rank."""
    table = _table(
        f"rank {rank.rank}: temporaries", "graph", ["buffers", "sum MiB", "extent MiB", "last op"]
    )
    for name in dict.fromkeys(t.graph for t in rank.temporaries):
        own = [t for t in rank.temporaries if t.graph == name]
        roots = [t for t in own if t.alias_of is None]
        extent = max(t.offset + t.nbytes for t in own) - min(t.offset for t in own)
        total = sum(t.nbytes for t in roots)
        last = max(t.last_read for t in own)
        table.add_row(name, f"{len(own):,}", _mib(total), _mib(extent), f"{last:,}")
    return table


def facts(title: str, values: Mapping[str, object]) -> Table:
    """Names and values."""
    table = _table(title, "", [""])
    table.show_header = False
    for name, value in values.items():
        table.add_row(name, str(value))
    return table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.3f}"
