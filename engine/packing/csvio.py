"""MiniMalloc's CSV: one buffer a row with id, lower, upper and size, and an offset when placed.

Columns may come in any order; `alignment`, `gaps` (as in "3-5 7-9") and `offset` are optional.
Whatever is malformed is refused with the file, the line and the value.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.packing.data import Buffer, Instance
from engine.packing.errors import PackingInputError

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "gaps", "offset")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_GAP = re.compile(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})")


def _header(columns: Sequence[str], where: str) -> list[str]:
    names = [column.strip() for column in columns]
    for name in names:
        if name not in REQUIRED + OPTIONAL:
            raise PackingInputError(
                f"{where}: unknown column {name!r}; accepted: {', '.join(REQUIRED + OPTIONAL)}"
            )
        if names.count(name) > 1:
            raise PackingInputError(f"{where}: column {name!r} appears twice")
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        raise PackingInputError(f"{where}: no column {missing[0]!r}; found: {', '.join(names)}")
    return names


def _integer(text: str, column: str, where: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise PackingInputError(f"{where}: {column} is {text!r}; accepted: an integer")
    return int(text)


def _gaps(text: str, where: str) -> tuple[tuple[int, int], ...]:
    gaps = []
    for item in text.split():
        match = _GAP.fullmatch(item)
        if not match:
            raise PackingInputError(
                f"{where}: gap {item!r}; accepted: lower-upper, several separated by spaces "
                "(gaps with windows are not supported)"
            )
        gaps.append((int(match[1]), int(match[2])))
    return tuple(gaps)


def _row(values: Mapping[str, str], where: str) -> tuple[Buffer, int | None]:
    if not values["id"]:
        raise PackingInputError(f"{where}: id is empty")
    numbers = {name: _integer(values[name], name, where) for name in ("lower", "upper", "size")}
    alignment = _integer(values["alignment"], "alignment", where) if values.get("alignment") else 1
    offset = _integer(values["offset"], "offset", where) if values.get("offset") else None
    try:
        buffer = Buffer(
            values["id"], **numbers, alignment=alignment, gaps=_gaps(values.get("gaps", ""), where)
        )
    except PackingInputError as error:
        if str(error).startswith(where):
            raise
        raise PackingInputError(f"{where}: {error}") from error
    return buffer, offset


def read_csv(path: Path) -> tuple[Instance, dict[str, int]]:
    """The buffers of a file in its order, and the offsets it states (empty without the column)."""
    buffers: dict[str, Buffer] = {}
    lines: dict[str, int] = {}
    offsets: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PackingInputError(f"{path}: cannot be read as text: {error}") from error
    reader = csv.reader(text.splitlines())
    columns = next(reader, None)
    if columns is None:
        raise PackingInputError(f"{path}: is empty; accepted: a header and one row per buffer")
    names = _header(columns, f"{path}:1")
    for cells in reader:
        where = f"{path}:{reader.line_num}"
        if not cells:
            continue
        if len(cells) != len(names):
            raise PackingInputError(f"{where}: {len(cells)} values; the header has {len(names)}")
        buffer, offset = _row(dict(zip(names, map(str.strip, cells), strict=True)), where)
        if buffer.id in lines:
            raise PackingInputError(
                f"{where}: id {buffer.id!r} is already on line {lines[buffer.id]}; ids are unique"
            )
        buffers[buffer.id], lines[buffer.id] = buffer, reader.line_num
        if offset is not None:
            offsets[buffer.id] = offset
    return Instance(tuple(buffers.values())), offsets


def write_csv(path: Path, buffers: Sequence[Buffer], offsets: Mapping[str, int]) -> None:
    """Writes buffers with their offsets; alignment and gaps only where some buffer has them."""
    aligned = any(buffer.alignment != 1 for buffer in buffers)
    gapped = any(buffer.gaps for buffer in buffers)
    header = [*REQUIRED, *(["alignment"] if aligned else []), *(["gaps"] if gapped else [])]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*header, "offset"])
        for buffer in buffers:
            row = [buffer.id, buffer.lower, buffer.upper, buffer.size]
            row += [buffer.alignment] if aligned else []
            row += [" ".join(f"{a}-{b}" for a, b in buffer.gaps)] if gapped else []
            writer.writerow([*row, offsets[buffer.id]])
