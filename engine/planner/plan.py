"""What a plan is, and its two forms in a memory map: allocations and temporaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.ir import Graph
from engine.memmap import Allocation, Temporary

ARENA = "temporaries"
"""The one address space in which all pools lie and all offsets count."""


@dataclass(frozen=True)
class Arena:
    """One fixed mapping for temporaries: `size_bytes` at `offset_bytes` of the address space."""

    name: str
    category: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class GraphPlan:
    """Where the temporaries of one graph lie.

    offsets      byte offset of each root temporary in the address space
    sizes        bytes of each root temporary under the graph's limits
    heads        the root whose bytes it takes over in place (itself where it takes over none)
    first_write, last_access   op indices of the life of the bytes, shared ones included
    peak_bytes   from the graph's first byte to past its highest, a multiple of the alignment
    lower_bound_bytes   no plan of this graph can have a lower peak (see planner.lives)
    digest       of the graph that was planned; a plan serves no other
    """

    graph: str
    digest: str
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    heads: Mapping[str, str]
    first_write: Mapping[str, int]
    last_access: Mapping[str, int]
    peak_bytes: int
    lower_bound_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plans of all graphs of a rank over shared arenas; one graph runs at a time."""

    strategy: str
    alignment: int
    graphs: Mapping[str, GraphPlan]
    arenas: Mapping[str, Arena]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole address space."""
        return sum(arena.size_bytes for arena in self.arenas.values())


def to_allocations(plan: Plan) -> tuple[Allocation, ...]:
    """The arenas as fixed mappings of the address space `temporaries`; empty ones left out."""
    return tuple(
        Allocation(
            name=arena.name,
            category=arena.category,
            nbytes=arena.size_bytes,
            arena=ARENA,
            offset=arena.offset_bytes,
            alignment=plan.alignment,
            dtype="u8",
            shape=(arena.size_bytes,),
        )
        for arena in plan.arenas.values()
        if arena.size_bytes > 0
    )


def to_temporaries(plan: Plan, graph: Graph) -> tuple[Temporary, ...]:
    """Every temporary of a graph in order of definition, aliases included.

    All tensors on the same bytes carry the life of those bytes. `alias_of` names the tensor an
    alias was declared on, or for a root that takes over bytes in place, the root they came from.
    """
    planned = plan.graphs[graph.name]
    assert planned.digest == graph.digest, (
        f"the plan of {graph.name} was made for another graph: {planned.digest[:12]}, "
        f"not {graph.digest[:12]}"
    )
    found = []
    for tensor in graph.tensors.values():
        root = graph.root(tensor.name)
        if tensor.kind != "temp" or root not in planned.offsets:
            continue
        head = planned.heads[root]
        base = tensor.alias_of or (head if head != root else None)
        first = planned.first_write[root]
        found.append(
            Temporary(
                graph=graph.name,
                name=tensor.name,
                nbytes=tensor.size_bytes(graph.limits),
                offset=planned.offsets[root] + graph.root_offset_bytes(tensor.name),
                first_write=first,
                last_read=planned.last_access[root],
                stream=graph.ops[first].stream,
                alias_of=base,
            )
        )
    return tuple(found)
