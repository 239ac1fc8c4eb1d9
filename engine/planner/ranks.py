"""One layout for all ranks: planned once, for the largest size that each temporary has on any of them.

Ranks run the same ops over temporaries that differ in size only, and the KV cache is what the fullest
rank leaves, so bytes that a lighter rank could save would serve nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.ir import Graph, Tensor
from engine.planner.plan import GraphPlan, Plan


def widest(graphs: Sequence[Graph]) -> Graph:
    """A graph of all ranks with every temporary in its largest form."""
    first = graphs[0]
    for graph in graphs[1:]:
        assert [op.name for op in graph.ops] == [op.name for op in first.ops], (
            f"{first.name}: ranks run different ops"
        )
    tensors = {name: _largest(name, graphs) for name in first.tensors}
    limits = {count: max(g.limits[count] for g in graphs) for count in first.limits}
    return replace(first, tensors=tensors, limits=limits)


def _largest(name: str, graphs: Sequence[Graph]) -> Tensor:
    return max((g.tensors[name] for g in graphs), key=lambda t: t.size_bytes(graphs[0].limits))


def for_rank(plan: Plan, graphs: Sequence[Graph]) -> Plan:
    """The common plan as one rank's own: its sizes at the common offsets."""
    return replace(plan, graphs={g.name: _own(plan.graphs[g.name], g) for g in graphs})


def _own(common: GraphPlan, graph: Graph) -> GraphPlan:
    sizes = {name: graph.tensors[name].size_bytes(graph.limits) for name in common.sizes}
    over = {n: s for n, s in sizes.items() if s > common.sizes[n]}
    assert not over, f"{graph.name}: larger than planned: {over}"
    return replace(common, digest=graph.digest, sizes=sizes)
