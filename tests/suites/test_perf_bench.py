"""The bench on a virtual clock: order, resume, failures, capped hosts, forecasts, early ends."""

from dataclasses import replace

import pytest

from suites.perf import bench, order
from suites.perf.bench import BenchPlan, RunStore, run_bench
from suites.perf.cells import KV_TOKENS, MINI_CELLS, Cell, Kind
from suites.perf.double import CLEAN, Faults, double_arms
from suites.perf.errors import BenchStoppedError, HostCappedError, RecordError, TraceError
from suites.perf.gate_result import Exit
from suites.perf.judging import exclusions, pairs_of
from suites.perf.progress import duration
from suites.perf.run_record import CacheDrop
from suites.perf.stats import Outcome, Policy

FAST_CELLS = (
    Cell("decode_x1", Kind.DECODE, "tok/s", prompt_tokens=8, new_tokens=4, samples=2),
    KV_TOKENS,
)
PLAN = BenchPlan(FAST_CELLS)


def run(folder, plan=PLAN, seed=3, report=lambda _: None, **faults):
    arms, host = double_arms(seed, **faults)
    return run_bench(plan, arms, host.host(), RunStore(folder), report), arms


def test_order_is_a_b_b_a_b_a_a_b():
    assert "".join(arm for pair in range(4) for arm in order.arms_of(pair)) == "ABBABAAB"


@pytest.mark.parametrize("power", [0, 1, 2])
def test_order_cancels_drift_up_to_its_degree(power):
    arms = [arm for pair in range(4) for arm in order.arms_of(pair)]
    drift = {arm: sum(i**power for i, a in enumerate(arms) if a == arm) for arm in "AB"}
    assert drift["A"] == drift["B"]


def test_equal_arms_end_after_few_pairs_with_a_pass(tmp_path):
    result, arms = run(tmp_path)
    assert result.gate.exit is Exit.SAME_OR_BETTER
    assert 5 <= result.gate.pairs <= 8 and result.ended.startswith("decided")
    assert all(arm.stopped == arm.starts == result.gate.pairs for arm in arms)


@pytest.mark.parametrize(("speed", "code"), [(0.95, Exit.WORSE), (1.06, Exit.SAME_OR_BETTER)])
def test_changed_head_is_found(tmp_path, speed, code):
    result, _ = run(tmp_path, head=Faults(speed=speed))
    assert result.gate.exit is code
    assert result.gate.verdicts[0].outcome is Outcome.DIFFERENT


def test_fifteen_percent_faster_with_other_outputs_is_void_after_one_pair(tmp_path):
    result, arms = run(tmp_path, head=Faults(speed=1.15, logprobs="garbage"))
    assert result.gate.exit is Exit.INVALID and result.gate.codes == ("outputs-void",)
    assert result.gate.verdicts == () and arms[0].starts == arms[1].starts == 1


def test_other_outputs_are_accepted_when_the_needle_rule_is_stated(tmp_path):
    plan = replace(PLAN, outputs_rule="needle")
    result, _ = run(tmp_path, plan, head=Faults(speed=1.15, logprobs="meant to change"))
    assert result.gate.exit is Exit.SAME_OR_BETTER


def test_every_start_rests_and_has_canaries_on_both_sides(tmp_path):
    events = []
    result, _ = run(tmp_path, report=lambda progress: events.append(progress.event))
    starts = sorted((*result.base.starts, *result.head.starts), key=lambda start: start.slot)
    for start, later in zip(starts, starts[1:], strict=False):
        assert start.canary_before.at_s <= start.began_s < start.ready_s < start.ended_s
        assert start.canary_after.at_s >= start.ended_s
        assert later.began_s - start.ended_s >= PLAN.idle_s
    assert events.count("idle") == len(starts)


def test_samples_of_a_pair_use_the_same_prompts(tmp_path):
    result, _ = run(tmp_path)
    for pair in pairs_of(result.base, result.head):
        prompts = [
            [s.prompt_sha256 for s in start.samples("decode_x1").samples]
            for start in (pair.base, pair.head)
        ]
        assert prompts[0] == prompts[1] and len(set(prompts[0])) == 2


def test_interrupted_bench_goes_on_where_it_stopped(tmp_path):
    whole, _ = run(tmp_path / "whole")
    arms, host = double_arms(3, head=Faults(interrupt_at=2))
    store = RunStore(tmp_path / "resumed")
    with pytest.raises(KeyboardInterrupt):
        run_bench(PLAN, arms, host.host(), store)
    kept = store.load()
    assert kept is not None and [len(record.starts) for record in kept] == [2, 2]
    arms[1].faults = CLEAN
    arms[1].starts -= 1
    resumed = run_bench(PLAN, arms, host.host(), store)
    assert resumed.base.starts[:2] == kept[0].starts and resumed.head.starts[:2] == kept[1].starts
    assert resumed.gate.exit is whole.gate.exit
    assert [s.slot for s in resumed.base.starts][:4] == [s.slot for s in whole.base.starts][:4]
    assert store.load() == (resumed.base, resumed.head)


def test_long_interruption_within_a_pair_excludes_that_pair(tmp_path):
    arms, host = double_arms(3, head=Faults(interrupt_at=0))
    store = RunStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_bench(PLAN, arms, host.host(), store)
    arms[1].faults = CLEAN
    host.clock.sleep(9 * 3600)
    result = run_bench(PLAN, arms, host.host(), store)
    assert dict(result.gate.excluded) == {"interrupted": 1}
    assert result.gate.exit is Exit.SAME_OR_BETTER


@pytest.mark.parametrize(
    "changed",
    [
        {"cells": MINI_CELLS},
        {"policy": Policy(pairs_max=20)},
        {"idle_s": 1.0},
        {"outputs_rule": "needle"},
        {"base_commit": "0572fd12"},
    ],
)
def test_resuming_under_other_rules_is_refused(tmp_path, changed):
    run(tmp_path)
    with pytest.raises(RecordError, match=f"resume.*{next(iter(changed))}"):
        run(tmp_path, replace(PLAN, **changed))


def test_resuming_with_half_the_session_is_refused(tmp_path):
    run(tmp_path)
    (tmp_path / "head.json").unlink()
    with pytest.raises(RecordError, match="head.json does not exist"):
        run(tmp_path)


def test_finished_bench_starts_nothing_again(tmp_path):
    first, _ = run(tmp_path)
    again, arms = run(tmp_path)
    assert arms[0].starts == arms[1].starts == 0
    assert again.gate == first.gate


def test_failed_start_is_counted_reported_and_repeated(tmp_path):
    result, arms = run(tmp_path, head=Faults(failing_starts=(1,)))
    assert len(result.head.failed) == 1 and "whole buffer" in result.head.failed[0].reason
    assert result.gate.exit is Exit.SAME_OR_BETTER and "start-failed" in result.gate.codes
    assert arms[1].starts == len(result.head.starts) + 1


def test_arm_that_keeps_failing_ends_the_bench(tmp_path):
    with pytest.raises(BenchStoppedError, match="arm B: 3 starts failed"):
        run(tmp_path, head=Faults(failing_starts=tuple(range(9))))
    base, head = RunStore(tmp_path).load() or (None, None)
    assert base is not None and head is not None
    assert len(base.starts) == 1 and len(head.failed) == 3


def test_unusable_stream_ends_the_bench_and_stops_the_engine(tmp_path):
    arms, host = double_arms(3, base=Faults(usage=False))
    with pytest.raises(TraceError, match="usage-missing"):
        run_bench(PLAN, arms, host.host(), RunStore(tmp_path))
    assert arms[0].stopped == 1


@pytest.mark.parametrize("canary", [3, 4, 9])
def test_capped_host_aborts_and_keeps_finished_starts(tmp_path, canary):
    arms, host = double_arms(3)
    host.clock_share = lambda index: 799 / 2281 if index >= canary else 1.0
    with pytest.raises(HostCappedError, match="mains power"):
        run_bench(PLAN, arms, host.host(), RunStore(tmp_path))
    host.clock_share = lambda _: 1.0
    kept = RunStore(tmp_path).load()
    assert kept is not None and sum(len(r.starts) for r in kept) == (canary - 3) // 2
    assert run_bench(PLAN, arms, host.host(), RunStore(tmp_path)).gate.exit is Exit.SAME_OR_BETTER


def flips_twice(index: int) -> float:
    """Slow from the second start of pair 1 to the first of pair 4 (two canaries a start)."""
    return 63 / 94 if 3 + 2 * 3 <= index < 3 + 2 * 9 else 1.0


def test_pairs_across_states_are_excluded_counted_and_replaced(tmp_path):
    result, _ = run(tmp_path, state=flips_twice)
    assert dict(result.gate.excluded) == {"state-flip": 2}
    assert exclusions(pairs_of(result.base, result.head)) == {"state-flip": 2}
    assert result.gate.pairs >= 5 and result.gate.exit is Exit.SAME_OR_BETTER


def test_host_that_always_flips_ends_at_the_bound_of_attempts(tmp_path):
    plan = replace(PLAN, policy=Policy(pairs_max=5))
    result, _ = run(tmp_path, plan, state=lambda index: 1.0 if index // 2 % 2 else 0.7)
    assert result.ended == "10 pairs tried, 10 of them excluded"
    assert result.gate.exit is Exit.INCONCLUSIVE


def test_noisy_host_ends_inconclusive_at_the_planned_pairs(tmp_path):
    result, _ = run(tmp_path, base=Faults(start_sd=0.04), head=Faults(start_sd=0.04))
    assert result.gate.pairs == 12 and result.gate.exit is Exit.INCONCLUSIVE
    assert result.gate.verdicts[0].pairs_more != 0


def test_page_cache_dropped_for_one_start_only_excludes_the_pair(tmp_path):
    arms, host = double_arms(3)
    drops = iter([CacheDrop(False, "no root"), *[CacheDrop(True, "root")] * 60])
    real = replace(host.host(), drop_cache=lambda: next(drops))
    result = run_bench(PLAN, arms, real, RunStore(tmp_path))
    assert dict(result.gate.excluded) == {"page-cache": 1}
    assert result.base.starts[0].cache_drop.how == "no root"


def test_warm_up_that_never_settles_is_reported(tmp_path):
    shaky = Faults(sample_sd=0.3)
    result, _ = run(tmp_path, base=shaky, head=shaky)
    assert "not-warm" in result.gate.codes
    windows = {start.samples("decode_x1").windows for start in result.base.starts}
    assert max(windows) == FAST_CELLS[0].windows_max


def test_forecast_of_time_left_shrinks_to_nothing(tmp_path):
    seen = []
    run(tmp_path, report=lambda progress: seen.append(progress.forecast))
    known = [f for f in seen if f is not None and f.left_s_likely is not None]
    assert seen[0] is None and known[0].left_s_likely > 4800
    assert known[-1].left_s_likely < 1200 and known[-1].pairs_kept >= 5
    assert all(f.left_s_likely <= f.left_s_max for f in known)
    assert "left, at most" in str(known[0]) and "pairs of about" in str(seen[2])


@pytest.mark.parametrize(("seconds", "text"), [(95, "95 s"), (720, "12 min"), (12_600, "3.5 h")])
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


def test_open_half_of_a_pair_comes_before_a_new_pair(tmp_path):
    result, _ = run(tmp_path)
    base, head = result.base, result.head
    assert bench.next_start(replace(base, starts=()), replace(head, starts=())) == (0, "A", 0)
    half = replace(head, starts=head.starts[:1])
    assert bench.next_start(replace(base, starts=base.starts[:2]), half) == (1, "B", 3)
