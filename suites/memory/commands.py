"""What `flare inspect --check`, `--diff` and `--html` ask of this suite: documents in, text out.

The engine calls this module by name, so that it works without the suites installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.ir import Graph
from engine.memmap import memory_map_from_json
from suites.findings import Judgement
from suites.memory.checks import check_document

FOUND = 1
"""What a command returns when a check found something or two maps differ."""


def check(
    document: Mapping, graphs: Mapping[int, Sequence[Graph]] | None = None
) -> tuple[int, dict]:
    """Judge a `memmap/1` document; the exit code, and everything found as a JSON value."""
    judged = check_document(document, graphs)
    return (FOUND if judged.findings else 0), {
        "findings": [finding.to_json() for finding in judged.findings],
        "not_checked": [vars(item) for item in judged.not_checked],
        "text": check_lines(judged),
    }


def check_lines(judged: Judgement) -> list[str]:
    """Every finding, what was not checked, and a last line with the counts."""
    lines = [str(finding) for finding in judged.findings]
    lines += [str(item) for item in judged.not_checked]
    count = len(judged.findings)
    names = f": {', '.join(judged.names)}" if count else ""
    return [*lines, f"{count} finding{'s' * (count != 1)}{names}"]


def diff(first: Mapping, second: Mapping) -> tuple[int, list[str]]:
    """Compare two documents; the exit code, and the difference in lines."""
    from suites.memory.diff import diff_lines

    lines = diff_lines(memory_map_from_json(first), memory_map_from_json(second))
    return (FOUND if lines else 0), lines


def html(document: Mapping, graphs: Mapping[int, Sequence[Graph]] | None, output: Path) -> None:
    """Write the picture of a map as one self-contained page."""
    from suites.memory.picture import write_page

    write_page(memory_map_from_json(document), graphs, output)
