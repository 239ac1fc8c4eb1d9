"""Maps under snapshot: one readable text per recipe, and what changed when it is no longer so.

It does not judge: a change is for a person to accept. A text does not hold every buffer; where
the map that gave the accepted text is still at hand, the difference is told from the maps.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from engine.memmap import INVENTORY_ROWS, MemoryMap, memory_map_from_json
from engine.units import MIB
from suites.memory.diff import diff_maps, diff_text, signed_mib
from suites.memory.render_text import layout_digest

LISTED_MAX = 20
"""Changed lines told per section before the rest is counted."""
_BUFFER = re.compile(r"^ *([\d,]+)  (\S.*)$")
_FACT = re.compile(r"^([\w.\[\] ]+) = (.*)$")
_LAYOUT = re.compile(r"^rank \d+ layout = (\w+)$", re.MULTILINE)


class MapText(SingleFileSnapshotExtension):
    """`__snapshots__/TEST_FILE/RECIPE.txt`, written and compared as text."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0) -> str:
        """The name that the test gives, which is the recipe's."""
        assert isinstance(index, str), f"snapshot {index!r}: a recipe's name is needed"
        return index


def parse(text: str) -> dict[str, list[str]]:
    """Lines by the heading they follow; a rank's sections are `rank 1: graph decode`."""
    found: dict[str, list[str]] = {}
    rank = heading = ""
    for line in text.splitlines():
        if line.startswith("# "):
            heading = line[2:]
            rank = f"{heading}: " if heading.startswith("rank ") else ""
        elif line.startswith("## "):
            heading = rank + line[3:].removesuffix(", unlike the first rank")
        elif line:
            found.setdefault(heading, []).append(line)
    return found


@dataclass(frozen=True)
class Inventory:
    """The table of a text: MiB by row and rank."""

    ranks: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, sections: Mapping[str, Sequence[str]]) -> Inventory:
        """Read the table of a parsed text."""
        lines = next((v for k, v in sections.items() if k.startswith("inventory")), [])
        head = next((line for line in lines if line.startswith("row ")), "")
        rows = {}
        for line in lines:
            name, *cells = line.split()
            if name in INVENTORY_ROWS:
                rows[name] = tuple(float(cell.replace(",", "")) for cell in cells)
        return cls(tuple(re.findall(r"rank \d+", head)), rows)


def text_difference(old: str, new: str, name: str) -> str:
    """What changed between two texts: facts, rows per rank, KV tokens, buffers by section."""
    before, after = parse(old), parse(new)
    lines = [f"memory map of recipe {name}: accepted -> now"]
    for section in ("fingerprint", "kv"):
        lines += _facts(before.get(section, []), after.get(section, []))
    lines += _rows(Inventory.of(before), Inventory.of(after), _per_page(after))
    for section in dict.fromkeys([*before, *after]):
        if section in ("fingerprint", "kv") or section.startswith("inventory"):
            continue
        told = list(_section(before.get(section, []), after.get(section, [])))
        if told:
            lines += ["", section, *told[:LISTED_MAX]]
            if len(told) > LISTED_MAX:
                lines.append(f"  and {len(told) - LISTED_MAX} more lines")
    return "\n".join(lines) + "\n"


def _facts(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    a, b = (dict(_FACT.match(line).groups() for line in lines) for lines in (old, new))
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key) and not key.endswith(" layout"):
            yield f"{key}: {a.get(key, 'absent')} -> {b.get(key, 'absent')}"


def _per_page(sections: Mapping[str, Sequence[str]]) -> tuple[float, int]:
    facts = dict(_FACT.match(line).groups() for line in sections.get("kv", []))
    return float(facts.get("bytes_per_token", 0)), int(facts.get("page_tokens", 0))


def _rows(old: Inventory, new: Inventory, per_page: tuple[float, int]) -> list[str]:
    if old.ranks != new.ranks:
        return [f"ranks: {len(old.ranks)} -> {len(new.ranks)}"]
    changed = [row for row in new.rows if old.rows.get(row) != new.rows[row]]
    if not changed:
        return ["inventory: the same on all ranks, to 0.001 MiB"]
    lines = ["", f"{'inventory, change in MiB':32}" + "".join(f"{r:>14}" for r in new.ranks)]
    for row in changed:
        pairs = zip(old.rows.get(row, [0.0] * len(new.ranks)), new.rows[row], strict=True)
        lines.append(f"{row:32}" + "".join(f"{b - a:>+14,.3f}" for a, b in pairs))
    return [*lines, *_tokens(old, new, *per_page)]


def _tokens(
    old: Inventory, new: Inventory, token_bytes: float, page_tokens: int
) -> Iterator[str]:
    """At equal budgets the cache has what the heaviest rank leaves."""
    if token_bytes and page_tokens:
        heaviest = [max(i.rows["core_fixed_mappings"]) for i in (old, new)]
        pages = int((heaviest[0] - heaviest[1]) * MIB / token_bytes / page_tokens)
        yield f"KV tokens at an equal budget: about {pages * page_tokens:+,}"


def _section(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Buffers that appeared, vanished, grew or shrank, by name; other lines as they are."""
    mine, theirs = _buffers(old), _buffers(new)
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        if a is None:
            yield f"  + {name}  {signed_mib(b)}"
        elif b is None:
            yield f"  - {name}  {signed_mib(-a)}"
        elif a != b:
            yield f"  ~ {name}  {signed_mib(b - a)} ({a} to {b} bytes)"
    plain = [[line for line in lines if not _BUFFER.match(line)] for lines in (old, new)]
    yield from (f"  was: {line}" for line in plain[0] if line not in plain[1])
    yield from (f"  now: {line}" for line in plain[1] if line not in plain[0])


def _buffers(lines: Sequence[str]) -> dict[str, int]:
    matches = filter(None, map(_BUFFER.match, lines))
    return {match[2]: int(match[1].replace(",", "")) for match in matches}


# The maps that gave the accepted texts ------------------------------------------------------------


@dataclass(frozen=True)
class MapStore:
    """A directory with the last accepted map of each recipe, as far as this machine has seen it."""

    directory: Path

    def keep(self, name: str, text: str, memory_map: MemoryMap) -> None:
        """Keep the map that gave an accepted text; an older one of the recipe goes."""
        file = self._file(name, _LAYOUT.findall(text))
        if file.exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for old in self.directory.glob(f"{name}@*"):
            old.unlink(missing_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(gzip.compress(json.dumps(memory_map.to_json()).encode(), 1))
        part.replace(file)

    def find(self, name: str, text: str) -> MemoryMap | None:
        """The map that gave this text, if it is here and has the layout that the text states."""
        layouts = _LAYOUT.findall(text)
        file = self._file(name, layouts)
        if not file.exists():
            return None
        found = memory_map_from_json(json.loads(gzip.decompress(file.read_bytes())))
        return found if [layout_digest(rank) for rank in found.ranks] == layouts else None

    def _file(self, name: str, layouts: Sequence[str]) -> Path:
        digest = hashlib.sha256(" ".join(layouts).encode()).hexdigest()[:16]
        return self.directory / f"{name}@{digest}.json.gz"


def difference(
    name: str, accepted: str, text: str, memory_map: MemoryMap, store: MapStore | None
) -> str:
    """The reviewable difference of a recipe's map, and how to accept it."""
    old = store.find(name, accepted) if store is not None else None
    if old is not None:
        told = diff_text(diff_maps(old, memory_map), ("accepted", "now"))
        if "\n" not in told.strip():
            # Only how the text is written has changed.
            told = text_difference(accepted, text, name)
    else:
        told = text_difference(accepted, text, name)
        told += (
            "\nTold from the texts. For every buffer, plan the accepted version too "
            "(ignition plan -o) and compare with flare inspect --diff.\n"
        )
    return f"{told}\nIf this is meant: pytest suites/memory/test_snapshots.py --snapshot-update"
