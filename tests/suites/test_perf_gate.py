"""The gate: exit codes, every refusal shown red by one change to a clean pair of records."""

import json
from dataclasses import replace

import pytest

from suites.perf import traps
from suites.perf.codec import to_data
from suites.perf.double import Faults
from suites.perf.findings import Severity
from suites.perf.gate import gate, gate_records
from suites.perf.gate_result import Exit, GateOptions
from suites.perf.ledger import LedgerEntry, append_entry, read_ledger
from suites.perf.planted import bench_records
from suites.perf.run_record import save_record
from suites.perf.stats import Policy

BASE_COMMIT, HEAD_COMMIT = "0572fd12", "bbad44fe"


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return bench_records(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    return bench_records(tmp_path_factory.mktemp("slower"), Faults(speed=0.9))


def stored(folder, records):
    paths = folder / "base.json", folder / "head.json"
    for record, path in zip(records, paths, strict=True):
        save_record(record, path)
    return paths


def starts(record, change):
    return replace(record, starts=tuple(map(change, record.starts)))


def cell_samples(start, change):
    return replace(start, cells=tuple(map(change, start.cells)))


def test_clean_pair_passes_without_findings(clean):
    result = gate_records(*clean, GateOptions(BASE_COMMIT, HEAD_COMMIT))
    assert (result.exit, result.findings) == (Exit.SAME_OR_BETTER, ())
    assert result.pairs >= 5 and len(result.verdicts) == 4


def test_slower_head_exits_with_one(slower):
    assert gate_records(*slower).exit is Exit.WORSE


def test_too_few_pairs_exit_with_two(clean):
    few = [replace(record, starts=record.starts[:3]) for record in clean]
    result = gate_records(*few)
    assert result.exit is Exit.INCONCLUSIVE
    assert all(verdict.pairs_more == 2 for verdict in result.verdicts)


def test_cell_that_does_not_gate_decides_nothing(slower):
    cells = tuple(replace(c, gates=c.name == "kv_tokens") for c in slower[0].cells)
    alone = [replace(record, cells=cells) for record in slower]
    assert gate_records(*alone).exit is Exit.WORSE
    cells = tuple(replace(c, gates=c.name == "prefill_300") for c in slower[0].cells)
    verdicts = gate_records(*[replace(r, cells=cells) for r in slower]).verdicts
    assert {v.cell for v in verdicts} == {c.name for c in cells}


def test_wider_margin_may_be_stated(slower):
    assert gate_records(*slower, GateOptions(margin=0.2)).exit is Exit.SAME_OR_BETTER


REFUSALS = {
    "other host": (
        lambda b, h: (b, replace(h, facts=replace(h.facts, fingerprint=replace(
            h.facts.fingerprint, kernel="7.0.0-1019")))),
        {"fingerprint"},
    ),
    "base from another commit than stated": (
        lambda b, h: (replace(b, facts=replace(b.facts, commit="deadbeef")), h),
        {"base-commit"},
    ),
    "base of an unknown commit": (
        lambda b, h: (replace(b, facts=replace(b.facts, commit="")), h), {"base-commit"},
    ),
    "head from another commit than stated": (
        lambda b, h: (b, replace(h, facts=replace(h.facts, commit="deadbeef"))),
        {"head-commit"},
    ),
    "base with uncommitted changes": (
        lambda b, h: (replace(b, facts=replace(b.facts, dirty=True)), h), {"base-dirty"},
    ),
    "arms exchanged": (lambda b, h: (h, b), {"arms", "base-commit", "head-commit"}),
    "record against itself": (lambda b, h: (b, b), {"arms", "head-commit", "not-alternating"}),
    "renamed cell": (
        lambda b, h: (b, replace(h, cells=(replace(h.cells[0], name="other"), *h.cells[1:]))),
        {"cells-renamed", "cells-missing"},
    ),
    "missing cell": (
        lambda b, h: (b, replace(h, cells=h.cells[1:])), {"cells-missing"},
    ),
    "start without a cell": (
        lambda b, h: (b, starts(h, lambda s: replace(s, cells=s.cells[1:]))), {"cells-missing"},
    ),
    "no cell gates": (
        lambda b, h: tuple(
            replace(r, cells=tuple(replace(c, gates=False) for c in r.cells)) for r in (b, h)),
        {"cells-missing"},
    ),
    "cell measured differently": (
        lambda b, h: (b, replace(h, cells=(replace(h.cells[0], streams=2), *h.cells[1:]))),
        {"rules-differ"},
    ),
    "fewer samples than planned": (
        lambda b, h: (b, starts(h, lambda s: cell_samples(
            s, lambda c: replace(c, samples=c.samples[:1])))),
        {"samples-missing"},
    ),
    "other policy": (
        lambda b, h: (b, replace(h, policy=Policy(margin=0.1))), {"rules-differ"},
    ),
    "other idle time": (lambda b, h: (b, replace(h, idle_s=0.0)), {"rules-differ"}),
    "other sessions": (lambda b, h: (b, replace(h, session="other")), {"no-pairs"}),
    "no start in one arm": (lambda b, h: (b, replace(h, starts=())), {"no-pairs"}),
    "pairs that never meet": (
        lambda b, h: (b, starts(h, lambda s: replace(s, pair=s.pair + 100))), {"no-pairs"},
    ),
    "two starts in one pair": (
        lambda b, h: (b, starts(h, lambda s: replace(s, pair=0))), {"no-pairs"},
    ),
    "all of one arm first": (
        lambda b, h: (starts(b, lambda s: replace(s, slot=s.pair)),
                      starts(h, lambda s: replace(s, slot=100 + s.pair))),
        {"not-alternating"},
    ),
    "always the same arm first": (
        lambda b, h: (starts(b, lambda s: replace(s, slot=2 * s.pair)),
                      starts(h, lambda s: replace(s, slot=2 * s.pair + 1))),
        {"not-alternating"},
    ),
    "more pairs than planned": (
        lambda b, h: tuple(
            replace(r, policy=Policy(pairs_max=5), starts=tuple(
                replace(s, pair=s.pair + 10 * k, slot=s.slot + 20 * k)
                for k in range(2) for s in r.starts)) for r in (b, h)),
        {"pairs-over-max"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_incomparable_records_are_refused_by_code(clean, name):
    change, codes = REFUSALS[name]
    result = gate_records(*change(*clean), GateOptions(BASE_COMMIT, HEAD_COMMIT))
    assert result.exit is Exit.INVALID and result.verdicts == ()
    assert {f.code for f in result.findings if f.severity is Severity.VOID} == codes


def needle_lost(start):
    return replace(start, outputs=replace(start.outputs, needle_found=False))


def other_hash(start):
    return replace(start, outputs=replace(start.outputs, logprob_sha256=f"{start.slot:064x}"))


def copied(record):
    return replace(
        record, starts=tuple(replace(s, cells=record.starts[0].cells) for s in record.starts)
    )


VOIDS = {
    "needle lost in one start": (
        lambda b, h: (b, replace(h, starts=(needle_lost(h.starts[0]), *h.starts[1:]))),
        {"outputs-void"},
    ),
    "logprobs differ between starts": (lambda b, h: (b, starts(h, other_hash)), {"outputs-void"}),
    "one process counted as several starts": (
        lambda b, h: (b, starts(h, lambda s: replace(s, identity="pid 1"))), {"start-reused"},
    ),
    "samples copied from start to start": (
        lambda b, h: (b, copied(h)), {"start-copied", "prompt-repeated", "prompts-differ"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VOIDS)
def test_void_runs_are_invalid_and_never_better(clean, name):
    change, codes = VOIDS[name]
    result = gate_records(*change(*clean))
    assert result.exit is Exit.INVALID and result.verdicts == ()
    assert set(result.codes) == codes


def test_void_outputs_are_void_under_the_needle_rule_as_well(clean):
    base, head = (replace(record, outputs_rule="needle") for record in clean)
    assert gate_records(base, starts(head, other_hash)).exit is Exit.SAME_OR_BETTER
    assert gate_records(base, starts(head, needle_lost)).codes == ("outputs-void",)


def test_late_first_slow_start_of_the_head_is_held_back(clean):
    """A pass would hide it: the finding alone turns the exit code."""
    base, head = clean
    held = tuple(traps.hidden_slow(base, traps.pairs_of(base, head)))
    assert held == ()
    slow = tuple(
        replace(s, cells=tuple(_slower(c) if s.pair == 2 else c for c in s.cells))
        for s in head.starts
    )
    codes = gate_records(base, replace(head, starts=slow))
    assert "hidden-slow" in codes.codes and codes.exit is Exit.INCONCLUSIVE


def _slower(cell):
    def stretch(x):
        later = {n: x.sent_s + 1.2 * (getattr(x, n) - x.sent_s) for n in ("first_s", "last_s")}
        return replace(x, **later)

    samples = tuple(replace(s, streams=tuple(map(stretch, s.streams))) for s in cell.samples)
    return replace(cell, samples=samples)


def test_stored_files_are_judged_like_records(clean, tmp_path):
    result = gate(*stored(tmp_path, clean), GateOptions(BASE_COMMIT))
    assert result.exit is Exit.SAME_OR_BETTER and result.has_records
    assert len(result.head_sha256) == 64
    assert json.loads(json.dumps(result.data()))["outcome"] == "same_or_better"


def test_damaged_file_is_invalid_with_its_name(clean, tmp_path):
    base, head = stored(tmp_path, clean)
    head.write_text(head.read_text()[:-100])
    result = gate(base, head)
    assert result.exit is Exit.INVALID and "head.json" in str(result.findings[0])


def test_missing_head_is_invalid_with_its_name(clean, tmp_path):
    base, head = stored(tmp_path, clean)
    head.unlink()
    assert gate(base, head).codes == ("missing",)


def test_foreign_file_is_invalid(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"speed": 1}')
    assert gate(tmp_path / "a.json", tmp_path / "b.json").codes == ("format",)


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda kept: kept, ()),
        (lambda kept: replace(kept, facts=replace(kept.facts, commit="cafecafe")),
         ("base-commit",)),
        (lambda kept: replace(kept, cells=kept.cells[1:]), ("cells-new",)),
        (lambda kept: replace(kept, cells=(*kept.cells, replace(kept.cells[0], name="more"))),
         ("cells-missing",)),
        (lambda kept: replace(kept, facts=replace(kept.facts, fingerprint=replace(
            kept.facts.fingerprint, driver="590"))), ("fingerprint",)),
    ],
)  # fmt: skip
def test_kept_baseline_must_agree_with_the_base(clean, tmp_path, change, codes):
    save_record(change(clean[0]), tmp_path / "kept.json")
    result = gate_records(*clean, GateOptions(baseline=tmp_path / "kept.json"))
    assert result.codes == codes
    assert (result.exit is Exit.INVALID) == bool(set(codes) - {"cells-new"})


def red_entry(**changes):
    return replace(LedgerEntry("0" * 64, BASE_COMMIT, "older", int(Exit.WORSE), 1.0), **changes)


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ((), False),
        ((red_entry(),), True),
        ((red_entry(accepted="needed for correctness"),), False),
        ((red_entry(), red_entry(exit_code=0)), False),
        ((red_entry(exit_code=0), red_entry()), True),
        ((red_entry(head_commit="another"),), False),
        ((red_entry(exit_code=2),), False),
    ],
)
def test_commit_that_was_red_is_no_baseline(clean, tmp_path, entries, refused):
    result = gate(*stored(tmp_path, clean), GateOptions(ledger=entries))
    assert (result.exit is Exit.INVALID) == refused == ("baseline-red" in result.codes)


def test_file_that_was_red_is_no_baseline(clean, tmp_path):
    base, head = stored(tmp_path, clean)
    first = gate(base, head)
    red = replace(first.entry(0.0), exit_code=1, head_commit="")
    copy = tmp_path / "next.json"
    copy.write_bytes(head.read_bytes())
    assert "baseline-red" in gate(copy, head, GateOptions(ledger=(red,))).codes


def test_ledger_keeps_entries_in_order_and_refuses_damage(tmp_path):
    path = tmp_path / "folder" / "ledger.jsonl"
    assert read_ledger(path) == ()
    for at_s in (1.0, 2.0):
        append_entry(path, red_entry(at_s=at_s))
    assert [entry.at_s for entry in read_ledger(path)] == [1.0, 2.0]
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(Exception, match="ledger.jsonl:3"):
        read_ledger(path)


def test_result_is_plain_data(clean):
    data = to_data(gate_records(*clean))
    assert json.loads(json.dumps(data))["pairs"] == gate_records(*clean).pairs
