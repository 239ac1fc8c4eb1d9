"""Packing: offsets for buffers whose lives overlap, in the least memory that can be found.

    instance, _ = read_csv(Path("A.1048576.csv"))
    placement = pack(instance.buffers, capacity=1048576)
    assert not violations_of(instance.buffers, placement.by_id, 1048576)

Data in the middle (`data`), around it a reader and writer (`csvio`), bounds, a greedy placer, an
exact search (`reduce`, `portfolio`, `search`) and a validator that knows none of them.
"""

from engine.packing.bounds import liveness_bound_bytes
from engine.packing.csvio import read_csv, write_csv
from engine.packing.data import Buffer, Instance, Placement
from engine.packing.errors import DoesNotFitError, GaveUpError, PackingInputError
from engine.packing.solve import pack, pack_conflicts
from engine.packing.tricks import ALL_TRICKS, Tricks
from engine.packing.validate import Violation, conflict_violations_of, violations_of

__all__ = [
    "ALL_TRICKS",
    "Buffer",
    "DoesNotFitError",
    "GaveUpError",
    "Instance",
    "PackingInputError",
    "Placement",
    "Tricks",
    "Violation",
    "conflict_violations_of",
    "liveness_bound_bytes",
    "pack",
    "pack_conflicts",
    "read_csv",
    "violations_of",
    "write_csv",
]
