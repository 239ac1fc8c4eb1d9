"""Whether a placement is right: every violation by name, found without any part of the solver.

Knows only the data types. Does not know whether a lower peak would have been possible, and takes
the lives of the buffers as given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.packing.data import Buffer

OVERLAP = "overlap"
OUT_OF_CAPACITY = "out-of-capacity"
NEGATIVE_OFFSET = "negative-offset"
MISALIGNED = "misaligned"
MISSING = "missing"
UNKNOWN = "unknown-buffer"


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong: its name, the buffers it concerns, and a sentence."""

    name: str
    ids: tuple[str, ...]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def _own_violations(
    buffer: Buffer, offset: int | None, capacity_bytes: int | None
) -> list[Violation]:
    if offset is None:
        return [Violation(MISSING, (buffer.id,), f"buffer {buffer.id!r} has no offset")]
    found = []
    if offset < 0:
        found.append((NEGATIVE_OFFSET, f"buffer {buffer.id!r} lies at {offset}, below 0"))
    if offset % buffer.alignment:
        found.append(
            (
                MISALIGNED,
                f"buffer {buffer.id!r} lies at {offset}, not a multiple of {buffer.alignment}",
            )
        )
    if capacity_bytes is not None and offset + buffer.size > capacity_bytes:
        found.append(
            (
                OUT_OF_CAPACITY,
                f"buffer {buffer.id!r} at {offset} ends at {offset + buffer.size}, "
                f"past the capacity {capacity_bytes}",
            )
        )
    return [Violation(name, (buffer.id,), detail) for name, detail in found]


def _common_time(one: Buffer, other: Buffer) -> tuple[int, int] | None:
    """The first interval in which both are live."""
    for start, stop in one.lives:
        for other_start, other_stop in other.lives:
            if max(start, other_start) < min(stop, other_stop):
                return max(start, other_start), min(stop, other_stop)
    return None


def _overlaps(placed: Sequence[tuple[int, Buffer]]) -> list[Violation]:
    """Sweeps over address: only buffers whose addresses meet are compared in time."""
    found = []
    active: list[tuple[int, Buffer]] = []
    for offset, buffer in sorted(placed, key=lambda entry: entry[0]):
        active = [(o, b) for o, b in active if o + b.size > offset]
        for other_offset, other in active:
            common = _common_time(other, buffer)
            if common:
                stop = min(other_offset + other.size, offset + buffer.size)
                found.append(
                    Violation(
                        OVERLAP,
                        (other.id, buffer.id),
                        f"buffers {other.id!r} and {buffer.id!r} share bytes [{offset}, {stop}) "
                        f"during [{common[0]}, {common[1]})",
                    )
                )
        active.append((offset, buffer))
    return found


def violations_of(
    buffers: Sequence[Buffer], offsets: Mapping[str, int], capacity_bytes: int | None = None
) -> list[Violation]:
    """Everything that is wrong with `offsets` for these buffers; empty when the placement holds."""
    found = []
    for buffer in buffers:
        found += _own_violations(buffer, offsets.get(buffer.id), capacity_bytes)
    for stranger in sorted(set(offsets) - {buffer.id for buffer in buffers}):
        found.append(Violation(UNKNOWN, (stranger,), f"offset for unknown buffer {stranger!r}"))
    placed = [(offsets[b.id], b) for b in buffers if b.id in offsets and b.size]
    return found + _overlaps(placed)


def conflict_violations_of(
    sizes: Sequence[int],
    alignments: Sequence[int],
    conflicts: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    capacity_bytes: int | None = None,
) -> list[Violation]:
    """The same for buffers known by index whose conflicts are given as pairs."""
    found = []
    for index, (size, alignment) in enumerate(zip(sizes, alignments, strict=True)):
        buffer = Buffer(str(index), 0, 1, size, alignment)
        offset = offsets[index] if index < len(offsets) else None
        found += _own_violations(buffer, offset, capacity_bytes)
    for one, other in conflicts:
        if max(one, other) < len(offsets):
            start = max(offsets[one], offsets[other])
            stop = min(offsets[one] + sizes[one], offsets[other] + sizes[other])
            if start < stop:
                detail = f"buffers {one} and {other} share bytes [{start}, {stop})"
                found.append(Violation(OVERLAP, (str(one), str(other)), detail))
    return found
