"""Checks of a map as a document: the form its version promises, and rows that add up.

It does not know who wrote the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

import jsonschema

from engine.memmap import INVENTORY_ROWS, ROW_OF_CATEGORY
from suites.findings import Finding

ROW_LISTS = ("allocations", "temporaries")
LISTED_VALUES = ("stream",)
"""Keys of a row for which the schema lists the values."""
INVENTORY_TOLERANCE_MIB = 0.0005
"""Half of the last digit that a map's inventory is written with."""


@cache
def memmap_schema() -> Mapping:
    """The JSON Schema of `memmap/1`."""
    return json.loads((files("fixtures") / "schemas" / "memmap-1.schema.json").read_text())


def _form(value: object) -> object:
    """What the schema may ask of a value by itself: its type, its sign, whether it is empty."""
    if isinstance(value, list):
        return tuple(sorted({repr(_form(entry)) for entry in value}))
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value).__name__, (value > 0) - (value < 0)
    return repr(value)


def _row_form(row: object) -> str:
    if not isinstance(row, dict):
        return repr(_form(row))
    return repr([(k, v if k in LISTED_VALUES else _form(v)) for k, v in row.items()])


def _condensed(document: object) -> tuple[object, dict[tuple, int]]:
    """The document with one row for each form of row, and where each kept row was.

    A map of a large model has 100,000 rows in a dozen forms; checking each form once is enough.
    """
    places: dict[tuple, int] = {}
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list):
        return document, places
    ranks = []
    for number, entry in enumerate(document["ranks"]):
        kept = dict(entry) if isinstance(entry, dict) else entry
        for key in ROW_LISTS if isinstance(entry, dict) else ():
            if not isinstance(entry.get(key), list):
                continue
            first_of_form: dict[str, int] = {}
            for index, row in enumerate(entry[key]):
                first_of_form.setdefault(_row_form(row), index)
            kept[key] = [entry[key][index] for index in first_of_form.values()]
            for at, index in enumerate(first_of_form.values()):
                places[number, key, at] = index
        ranks.append(kept)
    return {**document, "ranks": ranks}, places


def check_schema(document: object) -> Iterator[Finding]:
    """What in a document its schema does not allow; of rows wrong in the same way, the first."""
    condensed, places = _condensed(document)
    validator = jsonschema.Draft202012Validator(memmap_schema())
    for error in sorted(validator.iter_errors(condensed), key=lambda e: list(map(str, e.path))):
        steps = list(error.absolute_path)
        if len(steps) > 3 and tuple(steps[1:4]) in places:
            steps[3] = places[tuple(steps[1:4])]
        place = " / ".join(str(step) for step in steps) or "document"
        yield Finding("schema", place, error.message[:400], {"rule": str(error.validator)})


def check_inventory(document: Mapping) -> Iterator[Finding]:
    """The inventory written in a `memmap/1` document is the sum of its allocations, row by row."""
    for entry in document["ranks"]:
        rows = dict.fromkeys(INVENTORY_ROWS, 0)
        for a in entry["allocations"]:
            rows["core_fixed_mappings"] += a["nbytes"]
            if a["category"] in ROW_OF_CATEGORY:
                rows[ROW_OF_CATEGORY[a["category"]]] += a["nbytes"]
        written = entry.get("inventory", {})
        for row in sorted(rows.keys() | written.keys()):
            want, have = rows.get(row, 0) / 1024**2, written.get(row)
            if have is None or abs(have - want) > INVENTORY_TOLERANCE_MIB * 1.001:
                yield Finding(
                    "inventory-mismatch",
                    f"rank {entry['rank']} / {row}",
                    f"the inventory says {have} MiB, the allocations sum to {want:.3f} MiB",
                    {"row": row, "written_mib": have, "sum_mib": round(want, 6)},
                )
