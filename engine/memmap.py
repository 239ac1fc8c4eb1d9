"""The memory map: every fixed device mapping of every rank, as data with one JSON form.

The sum of `nbytes` over a rank's allocations is that rank's fixed device memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.units import MIB

VERSION = "memmap/1"

INVENTORY_ROWS = (
    "core_fixed_mappings",
    "weights_and_numeric_constants",
    "graph_scratch_pools",
    "operator_scratch",
    "other_owned_tensors",
    "graph_capture_pool",
    "allocator_slack",
)
"""The seed report's rows; the first is the sum of the owned rows below it and the slack."""

CATEGORIES = (
    "weights",
    "constants",
    "graph_scratch_pools",
    "operator_scratch",
    "temporaries",
    "state",
    "io",
    "collective_staging",
    "graph_capture_pool",
    "allocator_slack",
)

ROW_OF_CATEGORY: Mapping[str, str] = {
    "weights": "weights_and_numeric_constants",
    "constants": "weights_and_numeric_constants",
    "graph_scratch_pools": "graph_scratch_pools",
    "operator_scratch": "operator_scratch",
    "temporaries": "other_owned_tensors",
    "state": "other_owned_tensors",
    "io": "other_owned_tensors",
    "collective_staging": "other_owned_tensors",
    "graph_capture_pool": "graph_capture_pool",
    "allocator_slack": "allocator_slack",
}


@dataclass(frozen=True)
class Allocation:
    """One fixed device mapping: `nbytes` at `offset` of `arena`."""

    name: str
    category: str
    nbytes: int
    arena: str
    offset: int
    alignment: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Temporary:
    """One planned buffer inside the temporaries arena of its graph.

    first_write and last_read are indices into the graph's ops; last_read is the last access.
    """

    graph: str
    name: str
    nbytes: int
    offset: int
    first_write: int
    last_read: int
    stream: str
    alias_of: str | None = None


@dataclass(frozen=True)
class RankMap:
    """The mappings of one rank."""

    rank: int
    allocations: tuple[Allocation, ...]
    temporaries: tuple[Temporary, ...]

    @property
    def fixed_bytes(self) -> int:
        """Fixed device memory of the rank."""
        return sum(allocation.nbytes for allocation in self.allocations)

    @property
    def inventory_bytes(self) -> dict[str, int]:
        """Bytes per inventory row; `core_fixed_mappings` is their sum."""
        rows = dict.fromkeys(INVENTORY_ROWS, 0)
        for allocation in self.allocations:
            rows[ROW_OF_CATEGORY[allocation.category]] += allocation.nbytes
        rows["core_fixed_mappings"] = self.fixed_bytes
        return rows

    @property
    def inventory_mib(self) -> dict[str, float]:
        """The inventory in MiB, to three decimals, as the JSON holds it."""
        return {row: round(size / MIB, 3) for row, size in self.inventory_bytes.items()}


@dataclass(frozen=True)
class MemoryMap:
    """The maps of all ranks with what they were planned for."""

    recipe: Mapping[str, object]
    model: Mapping[str, object]
    ranks: tuple[RankMap, ...]
    kv: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> dict:
        """The `memmap/1` document."""
        return {
            "version": VERSION,
            "recipe": dict(self.recipe),
            "model": dict(self.model),
            "kv": dict(self.kv),
            "ranks": [
                {
                    "rank": r.rank,
                    "allocations": [_plain(a) for a in r.allocations],
                    "temporaries": [_plain(t) for t in r.temporaries],
                    "inventory": r.inventory_mib,
                }
                for r in self.ranks
            ],
        }

    def with_rank(self, rank_map: RankMap) -> MemoryMap:
        """The same map with one rank replaced."""
        ranks = tuple(rank_map if r.rank == rank_map.rank else r for r in self.ranks)
        return replace(self, ranks=ranks)


def _plain(item: Allocation | Temporary) -> dict:
    values = asdict(item)
    if "shape" in values:
        values["shape"] = list(values["shape"])
    return values


def memory_map_from_json(document: Mapping) -> MemoryMap:
    """Read a `memmap/1` document.

    Keys outside the contract raise TypeError, other versions ValueError.
    """
    if document.get("version") != VERSION:
        raise ValueError(f"memory map version is {document.get('version')!r}; accepted: {VERSION}")
    ranks = []
    for entry in document["ranks"]:
        listed = entry["allocations"]
        allocations = [Allocation(**{**a, "shape": tuple(a["shape"])}) for a in listed]
        temporaries = [Temporary(**t) for t in entry["temporaries"]]
        ranks.append(RankMap(entry["rank"], tuple(allocations), tuple(temporaries)))
    return MemoryMap(document["recipe"], document["model"], tuple(ranks), document.get("kv", {}))


def read_memory_map(path: Path) -> MemoryMap:
    """Read a map file."""
    return memory_map_from_json(json.loads(Path(path).read_text()))
