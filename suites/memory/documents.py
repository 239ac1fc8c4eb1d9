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

INVENTORY_TOLERANCE_MIB = 0.0005
"""Half of the last digit that a map's inventory is written with."""


@cache
def memmap_schema() -> Mapping:
    """The JSON Schema of `memmap/1`."""
    return json.loads((files("fixtures") / "schemas" / "memmap-1.schema.json").read_text())


def check_schema(document: object) -> Iterator[Finding]:
    """Everything in a document that its schema does not allow."""
    validator = jsonschema.Draft202012Validator(memmap_schema())
    for error in sorted(validator.iter_errors(document), key=lambda e: list(map(str, e.path))):
        place = " / ".join(str(step) for step in error.absolute_path) or "document"
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
