"""P01 to P07 planted: the named detectors ring and no other, naive is fooled, clean is silent."""

from dataclasses import replace

import pytest

from suites.perf import planted, traps
from suites.perf.double import Faults
from suites.perf.gate_result import Exit
from suites.perf.judging import pairs_of
from suites.perf.traps import count_slow


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return planted.bench_records(tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("plant", planted.PLANTS, ids=lambda plant: f"{plant.fault} {plant.what}")
def test_planted_fault_rings_exactly_its_detectors(plant, tmp_path):
    rung = plant.run(tmp_path)
    assert rung.codes == plant.detectors
    assert plant.fooled(rung.naive), "the fault was not active: a naive reading is not fooled"
    # Only the plant that does not touch a count taken from usage may pass: its verdict is right.
    notes_only = plant.detectors == {"chunks-not-tokens", "empty-first-chunk"}
    assert (rung.exit is Exit.SAME_OR_BETTER) == notes_only


def test_every_measurement_fault_is_planted():
    assert {plant.fault for plant in planted.PLANTS} == {f"P0{n}" for n in range(1, 8)}


def test_clean_run_rings_nothing(tmp_path):
    rung = planted.clean_run(tmp_path)
    assert (rung.codes, rung.exit) == (frozenset(), Exit.SAME_OR_BETTER)


def test_findings_carry_the_fault_they_detect(tmp_path):
    records = planted.bench_records(tmp_path, Faults(cached_share=0.5))
    assert {f.fault for f in traps.trap_findings(*records)} == {"P03"}


def test_prefix_of_a_template_is_no_prefix_cache_hit(tmp_path):
    records = planted.bench_records(tmp_path, Faults(cached_share=0.009))
    assert traps.trap_findings(*records) == ()


def test_different_prompts_within_a_pair_are_void(clean):
    base, head = clean
    other = tuple(replace(c, samples=tuple(
        replace(s, prompt_sha256=f"{i:064x}") for i, s in enumerate(c.samples)))
        for c in head.starts[0].cells)  # fmt: skip
    changed = replace(head, starts=(replace(head.starts[0], cells=other), *head.starts[1:]))
    codes = {f.code for f in traps.prefix_cache(base, changed, pairs_of(base, changed))}
    assert codes == {"prompts-differ"}


def test_balanced_flips_are_noted_but_do_not_hold(tmp_path):
    records = planted.bench_records(tmp_path, state=lambda i: 0.7 if 9 <= i < 11 else 1.0)
    assert [f.code for f in traps.trap_findings(*records)] == ["state-flip"]


def test_streams_served_in_turn_are_noted(clean):
    base, head = clean

    def in_turn(samples):
        streams = tuple(
            replace(x, first_s=x.first_s + 100 * i, last_s=x.last_s + 100 * i)
            for i, x in enumerate(samples.streams)
        )
        return replace(samples, streams=streams)

    starts = tuple(
        replace(s, cells=tuple(
            replace(c, samples=tuple(map(in_turn, c.samples))) if c.cell.endswith("x4") else c
            for c in s.cells))
        for s in head.starts
    )  # fmt: skip
    codes = [f.code for f in traps.bookkeeping(base, replace(head, starts=starts))]
    assert codes == ["streams-serialised"]


def test_slow_figures_are_counted_against_their_own_median():
    assert str(count_slow([[10.0, 10.0, 8.0], [5.0, 5.0, 5.0]], 1)) == "1 of 6"
    assert count_slow([[10.0, 10.0, 12.5]], -1).slow == 1
    assert count_slow([[10.0], []], 1).slow == 0


def test_slow_requests_in_both_arms_are_the_hosts_and_ring_nothing(tmp_path):
    slow = Faults(slow_requests=0.25)
    records = planted.bench_records(tmp_path, slow, slow, cells=planted.MANY, pairs_max=5)
    assert "hidden-slow" not in {f.code for f in traps.trap_findings(*records)}


def test_detector_table_says_what_rang_and_what_was_fooled(tmp_path, monkeypatch):
    monkeypatch.setattr(planted, "PLANTS", planted.PLANTS[2:5])
    lines = planted.detector_table(tmp_path).splitlines()
    assert len(lines) == 6 and "NOT ACTIVE" not in "".join(lines)
    assert (
        "| P02 | 2x slower in parallel workers | parallel-workers | parallel-workers |" in lines[3]
    )
