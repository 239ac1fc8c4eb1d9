"""A torch CUDA allocator snapshot as a memory map, read without running anything it contains.

`torch.cuda.memory._dump_snapshot` writes a pickle of plain lists and dictionaries. Reading goes
through an unpickler that knows no classes or functions at all, so a file that asks for one is
refused by name before anything is called.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.errors import UsageError
from engine.ir import STREAMS
from engine.memmap import Allocation, MemoryMap, RankMap, Temporary
from suites.findings import NotChecked

BLOCK_ALIGNMENT_BYTES = 512
"""The allocator's grid."""
FREE_STATE = "inactive"
DEFAULT_POOL = (0, 0)


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, tuples, texts, numbers; refuses every name."""

    def find_class(self, module: str, name: str) -> object:
        raise UsageError(
            f"the pickle asks for {module}.{name}; a snapshot holds plain values only, so nothing "
            f"of it was run or kept"
        )

    def persistent_load(self, pid: object) -> object:
        raise UsageError(f"the pickle refers to something outside itself: {pid!r:.80}")


def read_snapshot(path: Path) -> dict:
    """The snapshot's plain data. Raises UsageError for anything else than a plain snapshot."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            snapshot = _PlainUnpickler(file).load()
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
        UnicodeDecodeError,
    ) as error:
        raise UsageError(f"{path} is not a readable pickle: {error!r:.200}") from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise UsageError(f"{path}: a dictionary with a list `segments` is expected")
    for number, segment in enumerate(snapshot["segments"]):
        for key in ("address", "total_size"):
            _integer(segment, key, f"{path}: segments[{number}]")
    traces = snapshot.setdefault("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(events, list) for events in traces):
        raise UsageError(f"{path}: `device_traces` is expected to be a list of lists")
    return snapshot


def _integer(entry: object, key: str, where: str) -> int:
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) is not int or value < 0:
        raise UsageError(f"{where}: `{key}` is {value!r:.80}; accepted: an integer of 0 or more")
    return value


def _blocks(segment: Mapping, where: str) -> Iterator[tuple[int, int, str]]:
    """(address, size, state) of each block; older snapshots leave the address out."""
    at = _integer(segment, "address", where)
    blocks = segment.get("blocks")
    if not isinstance(blocks, list):
        raise UsageError(f"{where}: a list `blocks` is expected")
    for index, block in enumerate(blocks):
        inside = f"{where}.blocks[{index}]"
        size = _integer(block, "size", inside)
        address = _integer(block, "address", inside) if "address" in block else at
        yield address, size, str(block.get("state"))
        at = address + size


def snapshot_map(snapshot: Mapping, where: str) -> tuple[MemoryMap, tuple[NotChecked, ...]]:
    """The moment of the snapshot: every block of every segment, a rank per device.

    Free blocks are allocator slack, those of a private pool are the graph capture pool's, the rest
    counts as other owned tensors. A segment is an arena.
    """
    ranks: dict[int, list[Allocation]] = {}
    for number, segment in enumerate(snapshot["segments"]):
        at = f"{where}: segments[{number}]"
        device = _integer(segment, "device", at) if "device" in segment else 0
        base, total = _integer(segment, "address", at), _integer(segment, "total_size", at)
        pool = tuple(segment.get("segment_pool_id") or DEFAULT_POOL)
        used = "io" if pool == DEFAULT_POOL else "graph_capture_pool"
        covered = 0
        for index, (address, size, state) in enumerate(_blocks(segment, at)):
            covered += size
            category = "allocator_slack" if state == FREE_STATE else used
            ranks.setdefault(device, []).append(
                Allocation(
                    f"segment.{number}.block.{index}",
                    category,
                    size,
                    f"segment.{number}",
                    address - base,
                    BLOCK_ALIGNMENT_BYTES,
                    "u8",
                    (size,),
                )
            )
        if covered != total:
            raise UsageError(f"{at}: blocks sum to {covered} bytes, `total_size` is {total}")
    devices = sorted(ranks)
    memory_map = MemoryMap(
        {"devices": devices},
        {},
        tuple(RankMap(rank, tuple(ranks[device]), ()) for rank, device in enumerate(devices)),
    )
    return memory_map, (
        NotChecked("lives", "a snapshot without events is one moment"),
        NotChecked(
            "inventory rows",
            "blocks have no purpose; all but free ones and private pools "
            "count as other owned tensors",
        ),
        NotChecked("memory outside the allocator", "the context and libraries are not in it"),
    )


def trace_map(snapshot: Mapping, where: str) -> tuple[MemoryMap, tuple[NotChecked, ...]]:
    """The history of the snapshot: every block that was handed out, from its alloc to its free.

    Events take the place of ops. A rank per device with a trace; the arena is every address that
    was ever reserved, relative to the lowest.
    """
    ranks, devices = [], []
    unfinished = unstarted = 0
    streams: set[object] = set()
    for device, events in enumerate(snapshot["device_traces"]):
        if not events:
            continue
        lives, open_end, early = _lives(events, f"{where}: device_traces[{device}]")
        unfinished, unstarted = unfinished + open_end, unstarted + early
        streams |= {stream for *_, stream in lives}
        ranks.append(_trace_rank(len(ranks), device, lives, snapshot["segments"]))
        devices.append(device)
    not_checked = [
        NotChecked("reads and writes", "a trace shows when bytes were held, not who touched them"),
        NotChecked("fixed memory", "the arena is all addresses ever reserved, not what is mapped"),
    ]
    if len(streams) > 1:
        not_checked.append(NotChecked("order between streams", "a trace has no waits"))
    if unfinished:
        not_checked.append(NotChecked("ends", f"{unfinished} blocks were not freed in the trace"))
    if unstarted:
        not_checked.append(NotChecked("starts", f"{unstarted} blocks are older than the trace"))
    return MemoryMap({"devices": devices}, {}, tuple(ranks)), tuple(not_checked)


_Life = tuple[int, int, int, int, object]
"""Address, size, index of the alloc, index of the last event before the free, stream."""


def _lives(events: Sequence, where: str) -> tuple[list[_Life], int, int]:
    """Lives of blocks, how many were still open at the end, how many frees had no alloc."""
    held: dict[int, tuple[int, int, object]] = {}
    lives: list[_Life] = []
    early = 0
    for index, event in enumerate(events):
        action = event.get("action") if isinstance(event, dict) else None
        if action not in ("alloc", "free_completed"):
            continue
        at = f"{where}[{index}]"
        address = _integer(event, "addr", at)
        if action == "alloc":
            if address in held:
                size, first, stream = held.pop(address)
                lives.append((address, size, first, len(events) - 1, stream))
            held[address] = (_integer(event, "size", at), index, event.get("stream", 0))
        elif address in held:
            size, first, stream = held.pop(address)
            lives.append((address, size, first, index - 1, stream))
        else:
            early += 1
    for address, (size, first, stream) in held.items():
        lives.append((address, size, first, len(events) - 1, stream))
    return sorted(lives, key=lambda life: (life[2], life[0])), len(held), early


def _trace_rank(
    rank: int, device: int, lives: Sequence[_Life], segments: Sequence[Mapping]
) -> RankMap:
    spans = [(address, address + size) for address, size, *_ in lives]
    spans += [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if segment.get("device", 0) == device
    ]
    base = min((start for start, _ in spans), default=0)
    names = {
        stream: STREAMS[min(n, len(STREAMS) - 1)]
        for n, stream in enumerate(dict.fromkeys(stream for *_, stream in lives))
    }
    allocations = tuple(
        Allocation(
            f"reserved.{n}",
            "temporaries",
            end - start,
            "temporaries",
            start - base,
            BLOCK_ALIGNMENT_BYTES if (start - base) % BLOCK_ALIGNMENT_BYTES == 0 else 1,
            "u8",
            (end - start,),
        )
        for n, (start, end) in enumerate(_merged(spans))
    )
    temporaries = tuple(
        Temporary("trace", f"alloc.{first}", size, address - base, first, last, names[stream])
        for address, size, first, last, stream in lives
    )
    return RankMap(rank, allocations, temporaries)


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping and touching address ranges as one each."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
