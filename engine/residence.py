"""A rank's memory made as its map says: arenas, arrays at mapped offsets, the plan read back.

What `flare inspect` prints is what this allocates: nothing is planned again at a start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.comm import Communicator
from engine.errors import PackageError
from engine.executor import Observer
from engine.export import FOLD_NAME
from engine.ir import Graph
from engine.mapping import ALIGNMENT_BYTES, Progress, arena_bytes
from engine.memmap import RankMap, memory_map_from_json
from engine.package import Package
from engine.planner import ARENA, Arena, GraphPlan, Plan
from engine.rank import RankModel

PERSISTENT_ARENAS = ("weights", "state", "io")


def rank_map_of(package: Package) -> RankMap:
    """The map of the package's own rank."""
    document = package.manifest.memory_map
    try:
        ranks = memory_map_from_json(document).ranks
    except (KeyError, TypeError, ValueError) as error:
        raise PackageError(f"{package.header.path}: no memory map: {error}") from error
    found = [rank for rank in ranks if rank.rank == package.rank]
    if len(found) != 1:
        raise PackageError(
            f"{package.header.path}: one map of rank {package.rank} expected, {len(found)} found"
        )
    return found[0]


def plan_from_map(rank_map: RankMap, graphs: Sequence[Graph], strategy: str) -> Plan:
    """The plan that the map was made from, without its lower bounds, which a map does not hold."""
    arenas = {
        a.name: Arena(a.name, a.category, a.offset, a.nbytes)
        for a in rank_map.allocations
        if a.arena == ARENA
    }
    plans = {graph.name: _graph_plan(rank_map, graph) for graph in graphs}
    return Plan(strategy, ALIGNMENT_BYTES, plans, arenas)


def _graph_plan(rank_map: RankMap, graph: Graph) -> GraphPlan:
    roots = {t.name for t in graph.of_kind("temp")}
    own = {t.name: t for t in rank_map.temporaries if t.graph == graph.name and t.name in roots}
    assert own.keys() == roots, (
        f"{graph.name}: the map lacks temporaries {sorted(roots - own.keys())[:5]}"
    )
    solid = [t for t in own.values() if t.nbytes]
    low = min((t.offset for t in solid), default=0)
    high = max((t.offset + t.nbytes for t in solid), default=0)
    return GraphPlan(
        graph=graph.name,
        digest=graph.digest,
        offsets={name: t.offset for name, t in own.items()},
        sizes={name: t.nbytes for name, t in own.items()},
        heads={name: t.alias_of or name for name, t in own.items()},
        first_write={name: t.first_write for name, t in own.items()},
        last_access={name: t.last_read for name, t in own.items()},
        peak_bytes=high - low,
        lower_bound_bytes=0,
    )


def aligned_zeros(size_bytes: int) -> np.ndarray:
    """uint8 zeros that begin at a multiple of 256 bytes."""
    whole = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT_BYTES
    return whole[first : first + size_bytes]


def persistent_arrays(
    package: Package, rank_map: RankMap, report: Progress
) -> dict[str, np.ndarray]:
    """Bytes (uint8) of every weight, state, input and output at its mapped place.

    Resident weights are read into place and hashed on the way; arrays that stay on disk are views
    of the file. Raises PackageError for altered bytes and for a map that is not the package's.
    """
    arenas = {name: aligned_zeros(arena_bytes(rank_map, name)) for name in PERSISTENT_ARENAS}
    found: dict[str, np.ndarray] = {}
    total, done = package.resident_bytes, 0
    for a in rank_map.allocations:
        if a.arena not in arenas:
            continue
        found[a.name] = arenas[a.arena][a.offset : a.offset + a.nbytes]
        if a.category == "weights":
            _check_weight(package, a.name, a.nbytes)
            package.read_into(a.name, found[a.name])
            done += a.nbytes
            report("load", done, total)
    for name, weight in package.weights.items():
        if weight.resident and name not in found:
            raise PackageError(f"{package.header.path}: {name} has no place in the memory map")
        if not weight.resident:
            found[name] = package[name].reshape(-1).view(np.uint8)
    return found


def _check_weight(package: Package, name: str, size_bytes: int) -> None:
    weight = package.weights.get(name)
    if weight is None or not weight.resident or weight.nbytes != size_bytes:
        held = "not there" if weight is None else f"{weight.nbytes} bytes"
        raise PackageError(
            f"{package.header.path}: {name} is mapped with {size_bytes} bytes, but is {held}"
        )


def build_rank(
    package: Package,
    graphs: Sequence[Graph],
    pages: int,
    comm: Communicator,
    threads: int,
    report: Progress,
    observer: Observer | None = None,
) -> RankModel:
    """The rank of a package with its weights loaded and `pages` KV pages, ready to run."""
    manifest = package.manifest
    rank_map = rank_map_of(package)
    return RankModel(
        manifest.config,
        manifest.recipe,
        manifest.deals,
        graphs,
        plan_from_map(rank_map, graphs, manifest.recipe.scratch),
        persistent_arrays(package, rank_map, report),
        pages,
        comm,
        threads,
        observer,
    )


def fold_of(package: Package) -> np.ndarray:
    """int64 [vocabulary]: the Engram id of every token id."""
    if FOLD_NAME in package:
        return package[FOLD_NAME].astype(np.int64)
    return np.arange(package.manifest.config.vocab_size, dtype=np.int64)
