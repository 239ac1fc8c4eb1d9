"""Tokens and log-probabilities follow the definition, to the bit and in distribution."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.sampler import BrokenLogitsError, Sampling, check_logits, choose, logprobs, top

ROW = np.array([0.5, 3.0, -1.0, 3.0, 2.0, -np.inf], dtype=np.float32)
rows = st.lists(st.integers(-40, 40), min_size=1, max_size=60).map(
    lambda values: np.array(values, dtype=np.float32) / 8
)


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert choose(ROW, Sampling(temperature=0), 0) == 1


def test_logprobs_are_float64_log_softmax_rounded_once():
    rng = np.random.default_rng(5)
    row = rng.normal(0, 8, 3000).astype(np.float32)
    total = math.fsum(math.exp(float(v) - float(row.max())) for v in row)
    exact = [float(v) - float(row.max()) - math.log(total) for v in row]
    assert (sampler.log_softmax(row) == np.array(exact).astype(np.float32)).all()


def test_a_rounding_to_fp32_inside_would_be_noticed():
    row = np.random.default_rng(5).normal(0, 8, 3000).astype(np.float32)
    inside = row - row.max()
    hasty = inside - np.log(np.exp(inside).sum())
    assert (hasty != sampler.log_softmax(row)).any()


def test_logprob_bits_survive_printing():
    found = logprobs(ROW, 4, 3)
    for value in (found.chosen, *found.top):
        assert np.float32(float(repr(value))) == np.float32(value)
        assert float(np.float32(value)) == value


def test_an_impossible_id_is_reported_as_the_lowest_finite_number():
    assert logprobs(ROW, 5, 0).chosen == float(np.finfo(np.float32).min)


@given(rows, st.integers(0, 25))
def test_top_orders_by_value_then_id_also_at_the_cut(row, count):
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert top(row, count).tolist() == expected


@given(rows, st.integers(1, 70))
def test_top_k_never_leaves_the_best_k(row, k):
    best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    for index in range(20):
        assert choose(row, Sampling(top_k=k, seed=3), index) in best


@settings(max_examples=40)
@given(rows, st.floats(0.01, 1, exclude_max=True))
def test_top_p_keeps_the_smallest_set_that_reaches_it(row, top_p):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weights = np.exp(row.astype(np.float64) - row.max())[order]
    kept = next(k for k in range(1, len(row) + 1) if weights[:k].sum() >= top_p * weights.sum())
    drawn = {choose(row, Sampling(top_p=top_p), index) for index in range(60)}
    assert drawn <= set(order[: kept + 1])


def test_top_p_over_a_flat_vocabulary_keeps_the_lowest_ids():
    row = np.zeros(5000, dtype=np.float32)
    drawn = [choose(row, Sampling(top_p=0.9), index) for index in range(500)]
    assert max(drawn) < 4501 and max(drawn) > 4200


def test_frequencies_follow_the_tempered_distribution():
    row = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    weights = np.exp(row.astype(np.float64) / 0.7)
    expected = weights / weights.sum()
    count = 20_000
    found = Counter(choose(row, Sampling(temperature=0.7, seed=9), i) for i in range(count))
    chi2 = sum((found[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected))
    assert chi2 < 16.27  # 0.1 % of a chi-square with 3 degrees of freedom


def test_a_seed_fixes_every_draw_and_choices_differ():
    row = np.zeros(50, dtype=np.float32)

    def draws(sampling):
        return [choose(row, sampling, index) for index in range(30)]

    assert draws(Sampling(seed=4)) == draws(Sampling(seed=4))
    assert draws(Sampling(seed=4)) != draws(Sampling(seed=5))
    assert draws(Sampling(seed=4)) != draws(Sampling(seed=4).for_choice(1))


def test_draws_are_the_same_on_every_machine():
    assert sampler.draw(0, 0, 0) == 0.08234954794796834
    assert sampler.draw(-5, 3, 77) == 0.11121706644577589


def test_a_temperature_near_zero_is_greedy_and_does_not_overflow():
    assert choose(ROW[:2], Sampling(temperature=1e-300), 0) == 1


def test_impossible_ids_are_never_drawn():
    row = np.array([-np.inf, 0.0, -np.inf], dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_p=0.99), Sampling(top_k=3)):
        assert {choose(row, sampling, i) for i in range(100)} == {1}


def test_a_draw_that_rounds_up_to_the_sum_takes_the_last_possible_id():
    assert sampler._pick(np.arange(3), np.array([1.0, 1.0, 0.0]), 1.0) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error_not_a_token(bad):
    row = ROW.copy()
    row[2] = bad
    with pytest.raises(BrokenLogitsError, match="a finite number is needed"):
        check_logits(row)


def test_a_row_without_any_possible_id_is_an_error():
    with pytest.raises(BrokenLogitsError):
        check_logits(np.full(4, -np.inf, dtype=np.float32))
