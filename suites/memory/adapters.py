"""Other engines' memory dumps as memory maps, each with a statement of what it cannot show.

Three forms are read: the seed engine's `flare inspect` JSON, a torch CUDA allocator snapshot
(torch_snapshot), and MiniMalloc's CSV with offsets. A map that is already `memmap/1` is passed on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UsageError
from engine.memmap import (
    CATEGORIES,
    VERSION,
    Allocation,
    MemoryMap,
    RankMap,
    Temporary,
    memory_map_from_json,
)
from suites.findings import NotChecked
from suites.memory.torch_snapshot import read_snapshot, snapshot_map, trace_map

UNKNOWN_CATEGORY = "io"
"""Where mappings of unknown purpose are counted: the row of other owned tensors."""
CSV_COLUMNS = ("id", "lower", "upper", "size")
CSV_OPTIONAL = ("alignment", "gaps", "offset")


@dataclass(frozen=True)
class Adapted:
    """A foreign dump as a map, and what the dump does not tell."""

    memory_map: MemoryMap
    not_checked: tuple[NotChecked, ...] = ()


def read_foreign(path: Path) -> Adapted:
    """Read a dump by its suffix: .json, .pickle or .pkl, .csv. Raises UsageError for anything else.

    Of a torch snapshot with a history of events, the history is what is read: it has lives.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        return from_inspect_json(document, str(path))
    if suffix in (".pickle", ".pkl"):
        snapshot = read_snapshot(path)
        has_history = any(snapshot["device_traces"])
        return Adapted(*(trace_map if has_history else snapshot_map)(snapshot, str(path)))
    if suffix == ".csv":
        return from_minimalloc_csv(path)
    raise UsageError(f"{path}: suffix {suffix!r}; accepted: .json, .pickle, .pkl, .csv")


def from_inspect_json(document: object, where: str = "document") -> Adapted:
    """The seed's `flare inspect` JSON; only `ranks[*].allocations[*].nbytes` must be there.

    What an allocation says besides (name, category, arena, offset, alignment, dtype, shape) is
    used. Raises UsageError, naming the place, for anything that is not of this form.
    """
    if isinstance(document, dict) and document.get("version") == VERSION:
        return Adapted(memory_map_from_json(document))
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list):
        raise UsageError(f"{where}: a list `ranks` is expected; found {_short(document)}")
    not_checked: dict[NotChecked, None] = {}
    ranks = []
    for number, entry in enumerate(document["ranks"]):
        at = f"{where}: ranks[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("allocations"), list):
            raise UsageError(f"{at}: a list `allocations` is expected; found {_short(entry)}")
        allocations = [
            _allocation(item, index, f"{at}.allocations[{index}]", not_checked)
            for index, item in enumerate(entry["allocations"])
        ]
        ranks.append(RankMap(entry.get("rank", number), tuple(allocations), ()))
    not_checked[NotChecked("temporaries", "the dump lists fixed mappings only")] = None
    recipe = document.get("recipe") if isinstance(document.get("recipe"), dict) else {}
    model = document.get("model") if isinstance(document.get("model"), dict) else {}
    return Adapted(MemoryMap(recipe, model, tuple(ranks)), tuple(not_checked))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _allocation(
    item: object, index: int, where: str, not_checked: dict[NotChecked, None]
) -> Allocation:
    if not isinstance(item, dict) or type(item.get("nbytes")) is not int or item["nbytes"] < 0:
        raise UsageError(f"{where}: `nbytes` of 0 or more is expected; found {_short(item)}")
    size = item["nbytes"]
    category = item.get("category")
    if category not in CATEGORIES:
        not_checked[NotChecked("inventory rows", f"category {category!r} is not known")] = None
        category = UNKNOWN_CATEGORY
    placed = isinstance(item.get("offset"), int) and isinstance(item.get("arena"), str)
    if not placed:
        reason = "allocations have no arena and offset"
        not_checked[NotChecked("overlap, bounds, alignment", reason)] = None
    shaped = isinstance(item.get("shape"), list) and isinstance(item.get("dtype"), str)
    if not shaped:
        reason = "allocations have no dtype and shape"
        not_checked[NotChecked("size from shape", reason)] = None
    return Allocation(
        name=str(item.get("name", f"allocation.{index}")),
        category=category,
        nbytes=size,
        arena=item["arena"] if placed else f"unplaced.{index}",
        offset=item["offset"] if placed else 0,
        alignment=item.get("alignment", 1) if placed else 1,
        dtype=item["dtype"] if shaped else "u8",
        shape=tuple(item["shape"]) if shaped else (size,),
    )


def from_minimalloc_csv(path: Path, capacity_bytes: int | None = None) -> Adapted:
    """A placed MiniMalloc CSV: one graph of buffers with half-open lives at their offsets.

    capacity_bytes  size of the arena; by default where the highest buffer ends
    Raises UsageError for a malformed row or one without an offset. A buffer with gaps becomes one
    buffer per stretch of life, `id[0]`, `id[1]` ...
    """
    path = Path(path)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
    columns = set(rows[0]) if rows else set()
    for name in CSV_COLUMNS:
        if name not in columns:
            raise UsageError(
                f"{path}: column {name!r} is missing; found {sorted(map(str, columns))}"
            )
    if strange := columns - set(CSV_COLUMNS) - set(CSV_OPTIONAL):
        raise UsageError(
            f"{path}: column {sorted(map(str, strange))[0]!r}; accepted: "
            f"{', '.join(CSV_COLUMNS + CSV_OPTIONAL)}"
        )
    temporaries: list[Temporary] = []
    for line, row in enumerate(rows, start=2):
        temporaries += _placed(row, f"{path}:{line}")
    top = max((t.offset + t.nbytes for t in temporaries), default=0)
    size = top if capacity_bytes is None else capacity_bytes
    alignment = _common_alignment(rows, str(path))
    arena = Allocation(
        "temporaries", "temporaries", size, "temporaries", 0, alignment, "u8", (size,)
    )
    return Adapted(
        MemoryMap({}, {"name": path.name}, (RankMap(0, (arena,), tuple(temporaries)),)),
        (
            NotChecked("aliases, in-place pairs, sizes", "the CSV has sizes and lives only"),
            NotChecked("order between streams", "the CSV has one order of time"),
        ),
    )


def _number(row: Mapping[str, str | None], name: str, where: str) -> int:
    text = (row.get(name) or "").strip()
    if not text.lstrip("+-").isdigit():
        raise UsageError(f"{where}: {name} is {text!r}; accepted: an integer")
    return int(text)


def _placed(row: Mapping[str, str | None], where: str) -> list[Temporary]:
    if not (row.get("offset") or "").strip():
        raise UsageError(f"{where}: no offset; place the buffers first (ignition pack)")
    lower, upper, size, offset = (
        _number(row, name, where) for name in ("lower", "upper", "size", "offset")
    )
    if lower >= upper or size < 0 or offset < 0:
        raise UsageError(
            f"{where}: lower {lower}, upper {upper}, size {size}, offset {offset}; accepted: "
            f"lower below upper, size and offset 0 or more"
        )
    name = (row.get("id") or "").strip()
    lives, start = [], lower
    for gap in (row.get("gaps") or "").split():
        first, _, last = gap.partition("-")
        if not (first.isdigit() and last.isdigit() and start <= int(first) < int(last) <= upper):
            raise UsageError(
                f"{where}: gap {gap!r}; accepted: lower-upper inside the life, in order"
            )
        lives.append((start, int(first)))
        start = int(last)
    lives.append((start, upper))
    held = [(first, last) for first, last in lives if first < last]
    names = [name] if len(held) == 1 else [f"{name}[{n}]" for n in range(len(held))]
    return [
        Temporary("csv", part, size, offset, first, last - 1, "compute")
        for part, (first, last) in zip(names, held, strict=True)
    ]


def _common_alignment(rows: Sequence[Mapping[str, str | None]], where: str) -> int:
    """The least alignment of any row: what every offset must keep."""
    stated = [
        _number(row, "alignment", f"{where}:{line}")
        for line, row in enumerate(rows, start=2)
        if (row.get("alignment") or "").strip()
    ]
    return max(1, min(stated)) if len(stated) == len(rows) and stated else 1
