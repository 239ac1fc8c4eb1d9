"""Reasons why two stored arms may not be compared at all; it does not look at their figures."""

from collections.abc import Iterator
from pathlib import Path

from suites.perf.bench_json import name_findings, same_commit
from suites.perf.findings import Finding, void
from suites.perf.gate_result import GateOptions
from suites.perf.judging import pairs_of
from suites.perf.run_record import RunRecord, Start, load_record

SHARED_RULES = ("policy", "limits", "reference", "outputs_rule", "idle_s")


def refuse_records(base: RunRecord, head: RunRecord, options: GateOptions) -> Iterator[Finding]:
    """Every refusal, one finding each; `base` and `head` are the arms of one session."""
    if (base.arm, head.arm) != ("A", "B"):
        yield void("arms", f"base is arm {base.arm}, head is arm {head.arm}; A and B are accepted")
    for difference in base.facts.fingerprint.differences(head.facts.fingerprint):
        yield void("fingerprint", f"not comparable: {difference}")
    yield from _commits(base, head, options)
    yield from _cells(base, head)
    for name in SHARED_RULES:
        if getattr(base, name) != getattr(head, name):
            yield void("rules-differ", f"the arms were measured under different {name}")
    yield from _pairs(base, head)
    if options.baseline is not None:
        yield from _stored_baseline(base, options.baseline)


def _commits(base: RunRecord, head: RunRecord, options: GateOptions) -> Iterator[Finding]:
    stated = options.base_commit or base.base_commit
    if stated and not same_commit(base.facts.commit, stated):
        yield void("base-commit", f"base is of {base.facts.commit!r}, stated is {stated!r}", "P02")
    if options.head_commit and not same_commit(head.facts.commit, options.head_commit):
        yield void(
            "head-commit",
            f"head is of {head.facts.commit!r}, stated is {options.head_commit!r}",
            "P02",
        )
    if base.facts.dirty:
        yield void("base-dirty", "the base was built with uncommitted changes", "P02")


def _cells(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    yield from name_findings(set(base.cell_names), set(head.cell_names))
    if set(base.cell_names) == set(head.cell_names) and base.cells != head.cells:
        yield void("rules-differ", "the arms were measured under different cells")
    if not any(cell.gates for cell in base.cells):
        yield void("cells-missing", "no cell gates; at least one is needed")
    for record in (base, head):
        for start in record.starts:
            have = {samples.cell for samples in start.cells}
            if lost := sorted(set(record.cell_names) - have):
                yield void(
                    "cells-missing", f"arm {record.arm}, start {start.slot} lacks {lost}", "P02"
                )
            yield from _sample_counts(record, start)


def _sample_counts(record: RunRecord, start: Start) -> Iterator[Finding]:
    planned = {cell.name: cell.samples for cell in record.cells}
    for cell in start.cells:
        if cell.cell in planned and len(cell.samples) != planned[cell.cell]:
            yield void(
                "samples-missing",
                f"arm {record.arm}, start {start.slot}: {len(cell.samples)} samples,"
                f" {planned[cell.cell]} planned",
                cell=cell.cell,
            )


def _pairs(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    if base.session != head.session:
        yield void(
            "no-pairs",
            f"sessions {base.session} and {head.session}: starts of different sessions are no"
            " pairs; run `sparkproof bench A B` and gate its two files",
            "P01",
        )
        return
    for record in (base, head):
        if len({start.pair for start in record.starts}) < len(record.starts):
            yield void("no-pairs", f"arm {record.arm} has two starts in one pair", "P01")
            return
    yield from _order(base, head)


def _order(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    pairs = pairs_of(base, head)
    if not pairs:
        yield void(
            "no-pairs",
            f"{len(base.starts)} base and {len(head.starts)} head starts form no pair",
            "P01",
        )
    kept = sum(pair.kept for pair in pairs)
    if kept > base.policy.pairs_max:
        yield void(
            "pairs-over-max",
            f"{kept} pairs, planned were {base.policy.pairs_max}: the levels no longer hold",
        )
    slots = {start.slot for start in (*base.starts, *head.starts)}
    apart = [p.index for p in pairs if _between(slots, p.base.slot, p.head.slot)]
    if apart:
        yield void("not-alternating", f"other starts lie between the arms of pairs {apart}", "P04")
    if len(pairs) >= base.policy.pairs_min and len({pair.base_first for pair in pairs}) == 1:
        yield void(
            "not-alternating",
            "one arm always went first, so any drift favours it; A B B A is accepted",
            "P04",
        )


def _between(slots: set[int], one: int, two: int) -> bool:
    return any(min(one, two) < slot < max(one, two) for slot in slots)


def _stored_baseline(base: RunRecord, path: Path) -> Iterator[Finding]:
    stored = load_record(path)
    if not same_commit(stored.facts.commit, base.facts.commit):
        yield void(
            "base-commit",
            f"the stored baseline is of {stored.facts.commit!r}, the base of {base.facts.commit!r}",
            "P02",
        )
    yield from name_findings(set(stored.cell_names), set(base.cell_names))
    for difference in stored.facts.fingerprint.differences(base.facts.fingerprint):
        yield void("fingerprint", f"the stored baseline is not comparable: {difference}")
