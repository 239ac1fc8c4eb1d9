"""Verdicts over pairs: levels that hold over the whole procedure, three states, forecasts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suites.perf import stats
from suites.perf.errors import PerfError
from suites.perf.stats import Direction, Outcome, Policy, judge

# The machine is shared, so a slow example is no failure.
CALM = settings(deadline=None, max_examples=50)
POLICY = Policy()
values = st.floats(10.0, 1000.0)


def pairs_of(change: float, spread: float, pairs: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    base = 100 * np.exp(rng.normal(0, spread, pairs))
    return base, 100 * (1 + change) * np.exp(rng.normal(0, spread, pairs))


def test_parts_of_the_error_add_up_to_the_error():
    for policy in (POLICY, Policy(pairs_min=6, pairs_max=40), Policy(pairs_min=5, pairs_max=5)):
        looks = range(policy.pairs_max + 5)
        assert math.isclose(sum(map(policy.alpha_at, looks)), policy.alpha)
        assert math.isclose(sum(map(policy.beta_at, looks)), policy.beta)


@pytest.mark.parametrize("pairs", range(5))
def test_fewer_than_five_pairs_are_inconclusive_and_say_how_many_are_missing(pairs):
    verdict = judge("c", [100.0] * pairs, [50.0] * pairs, POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.pairs_more == 5 - pairs
    assert f"{5 - pairs} more" in verdict.reason


def test_equal_arms_of_a_healthy_host_are_the_same():
    verdict = judge("c", *pairs_of(0.0, 0.004, 6), POLICY, cells=6)
    assert verdict.outcome is Outcome.SAME
    assert verdict.interval_same is not None and verdict.interval_same.inside(-0.02, 0.02)
    assert verdict.direction is Direction.NONE and verdict.pairs_more == 0


def test_five_percent_less_is_worse_with_an_interval_around_it():
    verdict = judge("c", *pairs_of(-0.05, 0.004, 6), POLICY, cells=6)
    assert verdict.worse and verdict.interval is not None
    assert verdict.interval.low < -0.05 < verdict.interval.high < 0


def test_direction_follows_what_is_better_for_the_cell():
    base, head = pairs_of(-0.05, 0.004, 6)
    latency = judge("c", base, head, POLICY, higher_is_better=False)
    assert latency.direction is Direction.BETTER and latency.change is not None
    assert latency.change < 0


def test_noisy_pairs_are_inconclusive_with_a_forecast():
    verdict = judge("c", *pairs_of(0.0, 0.02, 8, seed=2), POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.pairs_more and str(verdict.pairs_more) in verdict.reason


def test_forecast_is_about_what_deciding_takes():
    base, head = pairs_of(-0.05, 0.03, 400, seed=5)
    delta = stats.differences(base, head)
    more = stats.forecast(12, float(delta[:12].mean()), float(delta[:12].std(ddof=1)), POLICY)
    assert more is not None
    planned = Policy(pairs_max=12 + 3 * more)
    needed = next(
        n for n in range(5, 13 + 3 * more) if judge("c", base[:n], head[:n], planned).decided
    )
    assert needed / 3 <= 12 + more <= 3 * needed


def test_change_at_the_margin_is_never_forecast_to_end():
    assert stats.forecast(6, math.log1p(-0.02), 1e-1, Policy(alpha=1e-9)) is None


def test_more_pairs_than_planned_are_refused():
    with pytest.raises(PerfError, match="pairs-over-max.*13 pairs.*12"):
        judge("c", *pairs_of(0.0, 0.01, 13), POLICY)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_figures_are_refused(bad):
    with pytest.raises(PerfError, match="values"):
        judge("c", [1.0] * 5, [1.0, 1.0, bad, 1.0, 1.0], POLICY)


def test_unequal_arms_are_refused():
    with pytest.raises(PerfError, match="3 base and 4 head"):
        judge("c", [1.0] * 3, [1.0] * 4, POLICY)


@pytest.mark.parametrize(
    "wrong",
    [{"margin": 0.0}, {"alpha": 0.6}, {"pairs_min": 4}, {"pairs_max": 4}, {"beta": -0.1}],
)
def test_policy_out_of_range_is_refused(wrong):
    with pytest.raises(PerfError, match="policy"):
        Policy(**wrong)


@CALM
@given(st.lists(st.tuples(values, values), min_size=5, max_size=12), st.floats(0.01, 100.0))
def test_verdict_does_not_depend_on_the_unit(pairs, factor):
    base, head = [p[0] for p in pairs], [p[1] for p in pairs]
    one = judge("c", base, head, POLICY)
    two = judge("c", [b * factor for b in base], [h * factor for h in head], POLICY)
    assert (one.outcome, one.direction) == (two.outcome, two.direction)


@CALM
@given(st.lists(st.tuples(values, values), min_size=5, max_size=12))
def test_exchanged_arms_exchange_better_and_worse(pairs):
    base, head = [p[0] for p in pairs], [p[1] for p in pairs]
    one, two = judge("c", base, head, POLICY), judge("c", head, base, POLICY)
    opposite = {Direction.BETTER: Direction.WORSE, Direction.WORSE: Direction.BETTER}
    if Outcome.SAME not in (one.outcome, two.outcome):
        assert two.direction is opposite.get(one.direction, Direction.NONE)


@CALM
@given(st.lists(st.tuples(values, values), min_size=5, max_size=12), st.integers(2, 40))
def test_more_cells_never_turn_a_verdict_into_different(pairs, cells):
    base, head = [p[0] for p in pairs], [p[1] for p in pairs]
    alone = judge("c", base, head, POLICY)
    among = judge("c", base, head, POLICY, cells=cells)
    assert among.outcome is not Outcome.DIFFERENT or alone.outcome is Outcome.DIFFERENT


@CALM
@given(st.lists(values, min_size=5, max_size=12))
def test_identical_pairs_are_the_same(base):
    assert judge("c", base, base, POLICY).outcome is Outcome.SAME


@CALM
@given(st.integers(0, 10_000), st.floats(-0.1, 0.1), st.floats(0.001, 0.05))
def test_verdict_agrees_with_its_own_intervals(seed, change, spread):
    verdict = judge("c", *pairs_of(change, spread, 8, seed), POLICY, cells=3)
    assert verdict.interval is not None and verdict.interval_same is not None
    same = verdict.interval_same.inside(-0.02, 0.02)
    assert (verdict.outcome is Outcome.SAME) == same
    assert (verdict.outcome is Outcome.DIFFERENT) == (verdict.interval.excludes_zero and not same)


def rung_over_the_procedure(delta: np.ndarray, policy: Policy, code: int) -> float:
    """Share of rows that show `code` at any look, which is worse than any stopping rule."""
    rung = np.zeros(len(delta), bool)
    for pairs in range(policy.pairs_min, policy.pairs_max + 1):
        seen = delta[:, :pairs]
        n = np.full(len(delta), pairs)
        rung |= stats.decide(n, seen.mean(axis=1), seen.std(axis=1, ddof=1), policy) == code
    return float(rung.mean())


def test_false_alarms_over_all_looks_stay_below_alpha():
    delta = np.random.default_rng(1).normal(0, 0.05, (40_000, 12))
    alarms = rung_over_the_procedure(delta, POLICY, stats.DIFFERENT)
    assert 0.002 < alarms <= 0.01


def test_false_same_at_the_margin_over_all_looks_stays_below_beta():
    delta = np.random.default_rng(2).normal(math.log1p(-0.02), 0.008, (40_000, 12))
    assert 0.01 < rung_over_the_procedure(delta, POLICY, stats.SAME) <= 0.05


def test_plain_test_after_every_pair_rings_too_often():
    """The canary of the two tests above: without spending, looking eight times breaks the level."""
    delta = np.random.default_rng(1).normal(0, 0.05, (40_000, 12))
    one_look = [Policy(pairs_min=n, pairs_max=n) for n in range(5, 13)]
    rung = np.zeros(len(delta), bool)
    for policy in one_look:
        seen, n = delta[:, : policy.pairs_max], np.full(len(delta), policy.pairs_max)
        codes = stats.decide(n, seen.mean(axis=1), seen.std(axis=1, ddof=1), policy)
        rung |= codes == stats.DIFFERENT
    assert rung.mean() > 0.02


def test_one_process_per_side_shows_a_doubling_and_nothing_small():
    slow = stats.judge_one_process("c", 1.0, 2.0, POLICY, 0.10, cells=300)
    small = stats.judge_one_process("c", 1.0, 1.05, POLICY, 0.10)
    equal = stats.judge_one_process("c", 1.0, 1.0, POLICY, 0.10)
    assert slow.worse
    assert small.outcome is equal.outcome is Outcome.INCONCLUSIVE
    assert equal.pairs_more == 4


def test_clean_starts_say_which_rare_faults_they_exclude():
    verdict = judge("c", [100.0] * 11, [100.0] * 11, POLICY)
    assert 0.23 < verdict.rare_fault_excluded < 0.25
