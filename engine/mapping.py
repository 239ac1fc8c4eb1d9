"""From a configuration and a recipe to every byte of every rank: deal, lower, plan, map.

The same function serves `ignition plan`, the export and the run time, so what is printed without
hardware is what a rank maps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from engine.config import ModelConfig
from engine.ir import Graph, Tensor
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from engine.model import KV_POOL, CacheLayout, build_graphs
from engine.model.builder import IR_DTYPE
from engine.planner import Plan, plan_ranks, to_allocations, to_temporaries
from engine.recipe import Recipe
from engine.shard import Deal, Weight, deal_ranks, rank_weights, resident_bytes
from engine.units import MIB, round_up

ALIGNMENT_BYTES = 256
SPREAD_BYTES_MAX = 4 * MIB
"""How far the fixed memory of the ranks may differ: the lightest rank's surplus serves nobody."""
ROUNDS_MAX = 4

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PlannedRank:
    """What one rank runs and maps."""

    deal: Deal
    graphs: tuple[Graph, ...]
    plan: Plan
    map: RankMap


@dataclass(frozen=True)
class PlannedModel:
    """All ranks, planned. Ranks are equal in everything but their deals."""

    config: ModelConfig
    recipe: Recipe
    ranks: tuple[PlannedRank, ...]

    @property
    def deals(self) -> tuple[Deal, ...]:
        """Who owns what."""
        return tuple(rank.deal for rank in self.ranks)

    @property
    def spread_bytes(self) -> int:
        """Fixed memory of the heaviest rank minus that of the lightest."""
        sizes = [rank.map.fixed_bytes for rank in self.ranks]
        return max(sizes) - min(sizes)

    @property
    def graph_digests(self) -> dict[str, str]:
        """A digest of each graph over all ranks, by name."""
        return digests_over_ranks([rank.graphs for rank in self.ranks])

    @cached_property
    def memory_map(self) -> MemoryMap:
        """The map of all ranks with what they were planned for."""
        return MemoryMap(
            recipe=self.recipe.to_json(),
            model=model_facts(self.config),
            ranks=tuple(rank.map for rank in self.ranks),
            kv=kv_facts(self.config, self.recipe, self.ranks[0].map),
        )


def digests_over_ranks(graphs: Sequence[Sequence[Graph]]) -> dict[str, str]:
    """From the graphs of each rank, a digest of each graph over all ranks, by name."""
    found = {}
    for same in zip(*graphs, strict=True):
        text = " ".join(graph.digest for graph in same)
        found[same[0].name] = hashlib.sha256(text.encode()).hexdigest()
    return found


def plan_model(
    config: ModelConfig, recipe: Recipe, on_progress: Progress | None = None
) -> PlannedModel:
    """Deal the model to the recipe's ranks, lower, plan, and level what is left uneven.

    The bytes that are no weights depend on the deal (a rank with more heads needs more scratch),
    so the deal is repeated with what was measured until the ranks lie within 4 MiB, or as close
    as whole units allow.
    """
    report = on_progress or (lambda phase, done, total: None)
    other_bytes = [0] * recipe.ranks
    best, seen = None, set()
    for _ in range(ROUNDS_MAX):
        deals = deal_ranks(config, recipe, other_bytes)
        if deals in seen:
            break
        seen.add(deals)
        found = PlannedModel(config, recipe, _plan_ranks(config, recipe, deals, report))
        if best is None or found.spread_bytes < best.spread_bytes:
            best = found
        if best.spread_bytes <= SPREAD_BYTES_MAX:
            break
        other_bytes = [
            rank.map.fixed_bytes - resident_bytes(config, recipe, rank.deal) for rank in found.ranks
        ]
    assert best is not None, "no round was planned"
    return best


def _plan_ranks(
    config: ModelConfig, recipe: Recipe, deals: Sequence[Deal], report: Progress
) -> tuple[PlannedRank, ...]:
    report("plan", 0, len(deals))
    graphs = [build_graphs(config, recipe, deals, rank) for rank in range(len(deals))]
    plans = plan_ranks(graphs, recipe.scratch, ALIGNMENT_BYTES)
    ranks = []
    for rank, deal in enumerate(deals):
        rank_map = map_rank(config, recipe, deal, rank, graphs[rank], plans[rank])
        ranks.append(PlannedRank(deal, graphs[rank], plans[rank], rank_map))
        report("plan", rank + 1, len(deals))
    return tuple(ranks)


def map_rank(
    config: ModelConfig,
    recipe: Recipe,
    deal: Deal,
    rank: int,
    graphs: Sequence[Graph],
    plan: Plan,
) -> RankMap:
    """Every fixed mapping of a rank: weights, states, inputs and outputs, and the planned arenas.

    The KV pool is no part of it (its size is found at start), nor are arrays that stay on disk.
    """
    weights = rank_weights(config, recipe, deal)
    resident = [_of_weight(weight) for weight in weights if weight.resident]
    known = {weight.name for weight in weights}
    loose = _largest(graphs, known | {KV_POOL})
    constants = [_of_tensor(t, n, "constants") for t, n in loose if t.kind == "weight"]
    states = [_of_tensor(t, n, "state") for t, n in loose if t.kind == "state"]
    io = [_of_tensor(t, n, "io") for t, n in loose if t.kind == "io"]
    allocations = (
        *_arena("weights", [*resident, *constants]),
        *_arena("state", states),
        *_arena("io", io),
        *to_allocations(plan),
    )
    temporaries: list[Temporary] = []
    for graph in graphs:
        temporaries.extend(to_temporaries(plan, graph))
    return RankMap(rank, allocations, tuple(temporaries))


class _Array(NamedTuple):
    """An array that wants a place in an arena."""

    name: str
    category: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def _of_weight(weight: Weight) -> _Array:
    dtype = IR_DTYPE[weight.dtype]
    return _Array(weight.name, "weights", weight.nbytes, dtype, weight.shape)


def _of_tensor(tensor: Tensor, counts: Mapping[str, int], category: str) -> _Array:
    return _Array(
        tensor.name, category, tensor.size_bytes(counts), tensor.dtype, tensor.dims(counts)
    )


def _largest(graphs: Iterable[Graph], without: set[str]) -> list[tuple[Tensor, Mapping[str, int]]]:
    """Root tensors that live across graphs, each with the limits under which it is largest."""
    found: dict[str, tuple[Tensor, Mapping[str, int]]] = {}
    for graph in graphs:
        for tensor in graph.tensors.values():
            if tensor.kind == "temp" or tensor.alias_of is not None or tensor.name in without:
                continue
            size_bytes = tensor.size_bytes(graph.limits)
            old = found.get(tensor.name)
            if old is None or size_bytes > old[0].size_bytes(old[1]):
                found[tensor.name] = (tensor, graph.limits)
    return list(found.values())


def _arena(name: str, arrays: Sequence[_Array]) -> list[Allocation]:
    """Place arrays in order at multiples of 256 bytes.

    The bytes between them are allocator slack, kept as one mapping of an arena of its own, so that
    the sum over all mappings is what the arena takes.
    """
    allocations, at, gaps = [], 0, 0
    for array in arrays:
        allocations.append(
            Allocation(
                array.name,
                array.category,
                array.nbytes,
                name,
                at,
                ALIGNMENT_BYTES,
                array.dtype,
                array.shape,
            )
        )
        size_bytes = round_up(array.nbytes, ALIGNMENT_BYTES)
        at, gaps = at + size_bytes, gaps + size_bytes - array.nbytes
    if gaps:
        label = f"{name}.gaps"
        allocations.append(Allocation(label, "allocator_slack", gaps, label, 0, 1, "u8", (gaps,)))
    return allocations


def arena_bytes(rank_map: RankMap, arena: str) -> int:
    """Size of an arena: past the end of its last allocation, gaps included."""
    ends = (a.offset + a.nbytes for a in rank_map.allocations if a.arena == arena)
    return round_up(max(ends, default=0), ALIGNMENT_BYTES)


def kv_facts(config: ModelConfig, recipe: Recipe, rank_map: RankMap) -> dict[str, object]:
    """What a start needs to size the KV pool, all from the formats (spec 3).

    bytes_per_token  of one rank, over all KV sources; 890 for the release
    fixed_bytes      what sequences need beside pages (window rings, open groups); it is part of
                     the fixed memory already
    sources          entries of each KV source per page, and bytes of one entry
    """
    layout = CacheLayout(config, recipe)
    per_token = layout.bytes_per_token
    return {
        "bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "page_tokens": recipe.kv_page_tokens,
        "page_bytes": layout.page_bytes,
        "fixed_bytes": sum(a.nbytes for a in rank_map.allocations if a.category == "state"),
        "positions_max": config.max_position_embeddings,
        "sources": [
            {
                "layer": source,
                "ratio": config.ratio(source),
                "entries_per_page": layout.entries_per_page(source),
                "entry_bytes": layout.entry_bytes,
            }
            for source in config.kv_source_layer_ids
        ],
    }


def model_facts(config: ModelConfig) -> dict[str, object]:
    """The model in short: enough to tell two maps apart, and the digest of the whole."""
    document = json.dumps(config.to_json(), sort_keys=True)
    return {
        "config_sha256": hashlib.sha256(document.encode()).hexdigest(),
        "layers": config.num_hidden_layers,
        "draft_blocks": config.num_nextn_predict_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "routed_experts": config.n_routed_experts,
        "max_position_embeddings": config.max_position_embeddings,
        "resident_bytes": _whole_bytes(config),
    }


def _whole_bytes(config: ModelConfig) -> int:
    """Bytes of all weights that a single rank would keep on its device, drafts included."""
    alone = Recipe(ranks=1)
    (deal,) = deal_ranks(config, alone)
    return resident_bytes(config, alone, deal)
