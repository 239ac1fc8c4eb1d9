"""The pools strategy: the fixed pool of each temporary, as in an engine without lifetimes.

A phase instance is a run of ops of one phase in issue order. Temporaries of one instance never
share bytes; the next instance of the phase, usually in the next layer, starts over in the same
pool. What is touched by more than one instance lives in the carry pool, what a single op uses
for itself in the operator scratch pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.ir import Graph
from engine.planner.lives import Group

CARRY = "pool.carry"
OPERATOR = "pool.operator_scratch"


def _instances(graph: Graph) -> list[int]:
    """Per op, the number of its phase instance."""
    numbers, phase, number = [], None, -1
    for op in graph.ops:
        if op.phase != phase:
            phase, number = op.phase, number + 1
        numbers.append(number)
    return numbers


def _is_scratch(graph: Graph, group: Group) -> bool:
    if len(group.accesses) > 1:
        return False
    op = graph.ops[group.first_access]
    roots = {graph.root(name) for name in op.inputs + op.outputs}
    return roots.isdisjoint(group.places)


def pool_names(graph: Graph, groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Per group, the name and the inventory category of its pool."""
    instances = _instances(graph)
    named = []
    for group in groups:
        if _is_scratch(graph, group):
            named.append((OPERATOR, "operator_scratch"))
        elif len({instances[index] for index in group.accesses}) > 1:
            named.append((CARRY, "graph_scratch_pools"))
        else:
            phase = graph.ops[group.first_access].phase or "other"
            named.append((f"pool.phase.{phase}", "graph_scratch_pools"))
    return named


def same_instance(graph: Graph, groups: Sequence[Group]) -> np.ndarray:
    """Boolean [groups, groups]: True for phase temporaries of one instance, which share nothing."""
    instances = _instances(graph)
    own = []
    for number, group in enumerate(groups):
        touched = {instances[index] for index in group.accesses}
        private = len(touched) == 1 and not _is_scratch(graph, group)
        # Numbers below zero are unlike each other, so these groups are kept apart by life alone.
        own.append(touched.pop() if private else -1 - number)
    column = np.array(own, dtype=np.int64)
    same = column[:, None] == column[None, :]
    np.fill_diagonal(same, False)
    return same
