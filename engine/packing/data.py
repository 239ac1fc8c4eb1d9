"""The data of a packing problem: buffers with lives, the problem they make, and a placement.

Time intervals and address intervals are half open. Sizes, offsets and capacities are in one
unit, bytes in this engine; times are in any integer unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from engine.packing.errors import PackingInputError

TOTAL_BYTES_MAX = 1 << 60
"""Sum of all sizes and alignments up to which 64-bit arithmetic cannot overflow."""


@dataclass(frozen=True)
class Buffer:
    """Something that needs `size` bytes during [lower, upper), except in its gaps.

    alignment   its offset must be a multiple of this
    gaps        ascending disjoint time intervals inside [lower, upper) in which it is not live
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    gaps: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise PackingInputError(f"buffer {self.id!r}: size is {self.size}; accepted: 0 or more")
        if self.lower >= self.upper:
            raise PackingInputError(
                f"buffer {self.id!r}: lower {self.lower} is not below upper {self.upper}"
            )
        if self.alignment < 1:
            raise PackingInputError(
                f"buffer {self.id!r}: alignment is {self.alignment}; accepted: 1 or more"
            )
        end = self.lower
        for start, stop in self.gaps:
            if not (end <= start < stop <= self.upper):
                raise PackingInputError(
                    f"buffer {self.id!r}: gap {start}-{stop} is empty, out of order or outside "
                    f"[{self.lower}, {self.upper})"
                )
            end = stop
        if not self.lives:
            raise PackingInputError(f"buffer {self.id!r}: its gaps leave it no time to live")

    @property
    def lives(self) -> tuple[tuple[int, int], ...]:
        """The time intervals in which the buffer holds its bytes, ascending; empty ones left out"""
        starts = (self.lower, *(stop for _, stop in self.gaps))
        stops = (*(start for start, _ in self.gaps), self.upper)
        return tuple((a, b) for a, b in zip(starts, stops, strict=True) if a < b)


@dataclass(frozen=True)
class Instance:
    """Buffers with unique ids, in the order of the file."""

    buffers: tuple[Buffer, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.id in seen:
                raise PackingInputError(f"buffer id {buffer.id!r} appears twice; ids are unique")
            seen.add(buffer.id)
        total = sum(buffer.size + buffer.alignment for buffer in self.buffers)
        if total > TOTAL_BYTES_MAX:
            raise PackingInputError(
                f"sizes and alignments sum to {total}; accepted: up to {TOTAL_BYTES_MAX}"
            )

    @property
    def alignments(self) -> tuple[int, ...]:
        return tuple(buffer.alignment for buffer in self.buffers)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(buffer.size for buffer in self.buffers)


@dataclass(frozen=True)
class Placement:
    """One offset per buffer.

    ids, offsets        in the order of the input
    peak_bytes          end of the highest buffer
    lower_bound_bytes   no placement of these buffers has a lower peak (see packing.bounds)
    strategy            what found it: `greedy:<order>` or `search:<order>`
    counters            how much was tried and what each trick of the search did
    """

    ids: tuple[str, ...]
    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    strategy: str
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def by_id(self) -> Mapping[str, int]:
        return MappingProxyType(dict(zip(self.ids, self.offsets, strict=True)))

    @property
    def ratio(self) -> float:
        """Peak over lower bound, 1.0 at best; 1.0 for an empty problem."""
        return self.peak_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0
