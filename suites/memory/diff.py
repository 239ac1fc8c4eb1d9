"""The reviewable difference of two memory maps: rows, buffers, planned peaks, and KV tokens.

It does not judge: a difference is neither good nor bad here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.memmap import INVENTORY_ROWS, Allocation, MemoryMap, RankMap, Temporary
from engine.units import MIB
from suites.memory.folding import Fold, folded

LISTED_MAX = 20
"""Changed buffers listed per rank or graph before the rest is counted."""
HOW = ("appeared", "vanished", "grew", "shrank", "moved", "changed")


@dataclass(frozen=True)
class Change:
    """One buffer that differs; an offset or size of None means that it is not there.

    how  appeared, vanished, grew, shrank, moved (another offset, or pool), changed (anything else)
    """

    name: str
    how: str
    nbytes: tuple[int | None, int | None]
    offset: tuple[int | None, int | None]
    detail: str = ""

    @property
    def weight(self) -> int:
        """Bytes by which the change matters, for sorting."""
        old, new = (size or 0 for size in self.nbytes)
        return abs(new - old) or max(old, new)


def _told(fold: Fold[Change]) -> str:
    """One line for a change, or for the same change of many buffers."""
    change, name = fold.items[0], fold.title
    old, new = change.nbytes
    each = " each" if len(fold.items) > 1 else ""
    if change.how == "appeared":
        place = "" if each else f" at {change.offset[1]}"
        return f"+ {name}  {signed_mib(new)}{each}{place}"
    if change.how == "vanished":
        return f"- {name}  {signed_mib(-old)}{each}"
    if change.how in ("grew", "shrank"):
        return f"~ {name}  {signed_mib(new - old)}{each} ({old} to {new} bytes)"
    if change.how == "moved":
        return f"> {name}" + ("" if each else f"  {change.offset[0]} to {change.offset[1]}")
    return f"! {name}  {change.detail}"


def signed_mib(size_bytes: int) -> str:
    """A difference in MiB with its sign; bytes where three decimals would show nothing."""
    if size_bytes and abs(size_bytes) < 0.0005 * MIB:
        return f"{size_bytes:+d} B"
    return f"{size_bytes / MIB:+,.3f} MiB"


@dataclass(frozen=True)
class RankDiff:
    """One rank: inventory rows that moved (bytes), and allocations that changed."""

    rank: int
    rows: Mapping[str, tuple[int, int]]
    allocations: tuple[Change, ...]
    graphs: Mapping[str, tuple[Change, ...]]
    peaks: Mapping[str, tuple[int, int]]

    @property
    def is_empty(self) -> bool:
        """True when the rank is the same in both maps."""
        return not (self.rows or self.allocations or self.graphs or self.peaks)


@dataclass(frozen=True)
class MapDiff:
    """Everything that differs between two maps.

    facts   `recipe.prefill_chunk` and the like, with both values
    tokens  KV tokens gained (or lost) at an equal budget, None where it cannot be said
    """

    facts: Mapping[str, tuple[object, object]]
    ranks: tuple[RankDiff, ...]
    missing_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]
    tokens: int | None

    @property
    def is_empty(self) -> bool:
        """True when the maps are the same in all that a map says."""
        return not (
            self.facts
            or self.missing_ranks
            or self.new_ranks
            or any(not rank.is_empty for rank in self.ranks)
        )


def diff_maps(old: MemoryMap, new: MemoryMap) -> MapDiff:
    """Compare two maps rank by rank, allocation by allocation, temporary by temporary."""
    before = {rank.rank: rank for rank in old.ranks}
    after = {rank.rank: rank for rank in new.ranks}
    common = sorted(before.keys() & after.keys())
    return MapDiff(
        facts=_facts(old, new),
        ranks=tuple(_diff_rank(before[number], after[number]) for number in common),
        missing_ranks=tuple(sorted(before.keys() - after.keys())),
        new_ranks=tuple(sorted(after.keys() - before.keys())),
        tokens=_tokens(old, new),
    )


def _facts(old: MemoryMap, new: MemoryMap) -> dict[str, tuple[object, object]]:
    found = {}
    for part in ("recipe", "model", "kv"):
        a, b = getattr(old, part), getattr(new, part)
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                found[f"{part}.{key}"] = (a.get(key), b.get(key))
    return found


def _diff_rank(old: RankMap, new: RankMap) -> RankDiff:
    a, b = old.inventory_bytes, new.inventory_bytes
    graphs, peaks = {}, {}
    mine, theirs = _by_graph(old), _by_graph(new)
    for graph in sorted(mine.keys() | theirs.keys()):
        before, after = mine.get(graph, ()), theirs.get(graph, ())
        changes = _changes(before, after, _temporary_detail)
        if changes:
            graphs[graph] = changes
        if (peak := (top_of(before), top_of(after))) and peak[0] != peak[1]:
            peaks[graph] = peak
    return RankDiff(
        rank=old.rank,
        rows={row: (a[row], b[row]) for row in INVENTORY_ROWS if a[row] != b[row]},
        allocations=_changes(old.allocations, new.allocations, _allocation_detail),
        graphs=graphs,
        peaks=peaks,
    )


def _by_graph(rank: RankMap) -> dict[str, list[Temporary]]:
    found: dict[str, list[Temporary]] = {}
    for t in rank.temporaries:
        found.setdefault(t.graph, []).append(t)
    return found


def top_of(temporaries: Sequence[Temporary]) -> int:
    """Past the highest byte of any of the temporaries."""
    return max((t.offset + t.nbytes for t in temporaries), default=0)


def _changes(before: Sequence, after: Sequence, detail_of) -> tuple[Change, ...]:
    old, new = {b.name: b for b in before}, {b.name: b for b in after}
    found = []
    for name in dict.fromkeys([*old, *new]):
        a, b = old.get(name), new.get(name)
        if a == b:
            continue
        sizes = (a and a.nbytes, b and b.nbytes)
        offsets = (a and a.offset, b and b.offset)
        if a is None:
            found.append(Change(name, "appeared", (None, b.nbytes), (None, b.offset)))
        elif b is None:
            found.append(Change(name, "vanished", (a.nbytes, None), (a.offset, None)))
        elif a.nbytes != b.nbytes:
            how = "grew" if b.nbytes > a.nbytes else "shrank"
            found.append(Change(name, how, sizes, offsets, detail_of(a, b)))
        elif detail := detail_of(a, b):
            found.append(Change(name, "changed", sizes, offsets, detail))
        else:
            found.append(Change(name, "moved", sizes, offsets))
    return tuple(sorted(found, key=lambda c: (HOW.index(c.how), -c.weight, c.name)))


def _allocation_detail(a: Allocation, b: Allocation) -> str:
    kept = ("category", "arena", "alignment", "dtype", "shape")
    return _detail(a, b, kept)


def _temporary_detail(a: Temporary, b: Temporary) -> str:
    # Op indices shift with every op put in before, so only the length of a life is compared.
    lengths = [t.last_read - t.first_write for t in (a, b)]
    words = [_detail(a, b, ("stream", "alias_of"))]
    if lengths[0] != lengths[1]:
        words.append(f"life of {lengths[0] + 1} ops, now {lengths[1] + 1}")
    return ", ".join(word for word in words if word)


def _detail(a: object, b: object, attributes: Sequence[str]) -> str:
    return ", ".join(
        f"{name} {getattr(a, name)} to {getattr(b, name)}"
        for name in attributes
        if getattr(a, name) != getattr(b, name)
    )


def _tokens(old: MemoryMap, new: MemoryMap) -> int | None:
    """KV tokens that the change of the heaviest rank is worth, in whole pages, at equal budgets.

    At an equal budget the cache has what the fixed memory leaves, so the difference in bytes over
    bytes per token is the gain (0.46 GiB at 890 bytes are about 555,000 tokens).
    """
    per_token, page = new.kv.get("bytes_per_token"), new.kv.get("page_tokens")
    if not per_token or not page or not old.ranks or not new.ranks:
        return None
    if per_token != old.kv.get("bytes_per_token"):
        return None
    heaviest = [max(rank.fixed_bytes for rank in each.ranks) for each in (old, new)]
    return page * int((heaviest[0] - heaviest[1]) / per_token / page)


def diff_text(diff: MapDiff, names: tuple[str, str] = ("old", "new")) -> str:
    """The difference for people, most important first; ends with a line feed."""
    if diff.is_empty:
        return f"{names[0]} and {names[1]} are the same\n"
    lines = [f"memory map: {names[0]} -> {names[1]}"]
    for key, (a, b) in diff.facts.items():
        lines.append(f"{key}: {a} -> {b}")
    for what, ranks in (("only in the old map", diff.missing_ranks), ("new", diff.new_ranks)):
        lines += [f"rank {rank}: {what}" for rank in ranks]
    lines += _row_table(diff)
    if diff.tokens is not None:
        lines.append(f"KV tokens at an equal budget: {diff.tokens:+,}")
    elif any(rank.rows for rank in diff.ranks):
        lines.append("KV tokens at an equal budget: not comparable, KV bytes per token differ")
    by_text: dict[tuple[str, ...], list[int]] = {}
    for rank in diff.ranks:
        by_text.setdefault(tuple(_rank_lines(rank)), []).append(rank.rank)
    for told, numbers in by_text.items():
        if told:
            plural = "s" if len(numbers) > 1 else ""
            lines += ["", f"rank{plural} {', '.join(map(str, numbers))}", *told]
    return "\n".join(lines) + "\n"


def _row_table(diff: MapDiff) -> list[str]:
    rows = [row for row in INVENTORY_ROWS if any(row in rank.rows for rank in diff.ranks)]
    if not rows:
        return ["inventory: the same on all ranks"]
    lines = [
        "",
        f"{'inventory, change in MiB':32}" + "".join(f"{f'rank {r.rank}':>14}" for r in diff.ranks),
    ]
    for row in rows:
        cells = []
        for rank in diff.ranks:
            a, b = rank.rows.get(row, (0, 0))
            cells.append(f"{(b - a) / MIB:>+14,.3f}" if a != b else f"{'.':>14}")
        lines.append(f"{row:32}" + "".join(cells))
    return lines


def _rank_lines(rank: RankDiff) -> list[str]:
    lines = _change_lines("allocations", rank.allocations)
    for graph in sorted(rank.graphs.keys() | rank.peaks.keys()):
        if graph in rank.peaks:
            a, b = rank.peaks[graph]
            lines.append(f"  graph {graph}: highest byte {a} -> {b} ({signed_mib(b - a)})")
        lines += _change_lines(f"graph {graph}", rank.graphs.get(graph, ()))
    return lines


def _change_lines(title: str, changes: Sequence[Change]) -> list[str]:
    if not changes:
        return []
    counts = {how: sum(c.how == how for c in changes) for how in HOW}
    told = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
    lines = [f"  {title}: {told}"]
    kinds = folded(changes, lambda c: c.name, lambda c: (c.how, c.nbytes, c.detail))
    lines += [f"    {_told(kind)}" for kind in kinds[:LISTED_MAX]]
    if len(kinds) > LISTED_MAX:
        rest = sum(len(kind.items) for kind in kinds[LISTED_MAX:])
        lines.append(f"    and {rest} more")
    return lines
