"""What `flare inspect` asks of this suite: foreign dumps, `--check`, `--diff`, `--html`, `--draw`.

The engine calls this module by name, so that it works without the suites installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.ir import Graph
from engine.memmap import memory_map_from_json
from suites.findings import Judgement, NotChecked
from suites.memory.adapters import read_foreign
from suites.memory.checks import check_document
from suites.memory.diff import diff_maps, diff_text
from suites.memory.draw_text import draw_map
from suites.memory.html import render_html

FOUND = 1
"""What a command returns when a check found something or two maps differ."""

Graphs = Mapping[int, Sequence[Graph]]


def read(path: Path) -> tuple[dict, tuple[NotChecked, ...]]:
    """Another engine's dump as a `memmap/1` document, and what it does not tell."""
    adapted = read_foreign(path)
    return adapted.memory_map.to_json(), adapted.not_checked


def check(
    document: Mapping, graphs: Graphs | None = None, untold: Sequence[NotChecked] = ()
) -> tuple[int, dict, str]:
    """Judge a document: the exit code, everything found as a JSON value, and as text."""
    judged = check_document(document, graphs)
    judged = replace(judged, not_checked=(*judged.not_checked, *untold))
    found = {
        "findings": [finding.to_json() for finding in judged.findings],
        "not_checked": [vars(item) for item in judged.not_checked],
    }
    return (FOUND if judged.findings else 0), found, check_text(judged)


def check_text(judged: Judgement) -> str:
    """Every finding, what was not checked, and a last line with the counts."""
    lines = [*map(str, judged.findings), *map(str, judged.not_checked)]
    count = len(judged.findings)
    names = f": {', '.join(judged.names)}" if count else ""
    return "\n".join([*lines, f"{count} finding{'s' * (count != 1)}{names}"])


def diff(first: Mapping, second: Mapping, names: tuple[str, str]) -> tuple[int, str]:
    """Compare two documents: the exit code, and the difference as text."""
    found = diff_maps(memory_map_from_json(first), memory_map_from_json(second))
    return (0 if found.is_empty else FOUND), diff_text(found, names).rstrip("\n")


def html(document: Mapping, graphs: Graphs | None, output: Path) -> None:
    """Write the picture of a map, conflicts in red, as one self-contained page."""
    judged = check_document(document, graphs)
    page = render_html(memory_map_from_json(document), graphs, judged)
    Path(output).write_text(page, encoding="utf-8")


def draw(document: Mapping) -> str:
    """Address over time, in characters."""
    return draw_map(memory_map_from_json(document))
