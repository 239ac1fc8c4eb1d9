"""Simulated hosts: the paired verdict keeps its levels where other rules do not."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import verdicts
from suites.perf import simulate
from suites.perf.simulate import MODELS, PASS, RULES, UNDECIDED, WORSE, NoiseModel, Scenario, score
from suites.perf.stats import Outcome, Policy, judge

TRIALS = 500
OURS = verdicts.OURS
BY_NAME = {model.name: model for model in MODELS}
MEDIAN, COMPARE_FAIL, RANK = list(RULES)[1:]


def ours(name: str, effect: float, trials: int = TRIALS):
    return score(BY_NAME[name], OURS, Scenario(effect), trials, 7)


@pytest.mark.parametrize("model", BY_NAME)
def test_false_alarms_are_rare_in_every_noise_model(model):
    assert ours(model, 0.0).alarms <= 0.01


@pytest.mark.parametrize("model", BY_NAME)
@pytest.mark.parametrize("effect", [-0.05, -0.10])
def test_real_slowdowns_are_never_called_the_same(model, effect):
    assert ours(model, effect).missed <= 0.002


def test_five_percent_is_found_in_the_healthy_model():
    healthy = ours("healthy", -0.05)
    assert healthy.found_of_decided >= 0.95 and healthy.found >= 0.95
    assert healthy.starts <= 24


def test_healthy_host_decides_quickly_that_nothing_changed():
    healthy = ours("healthy", 0.0)
    assert healthy.inconclusive <= 0.02 and healthy.starts < 15


def test_noisy_host_is_inconclusive_rather_than_wrong():
    busy = ours("busy machine", 0.0)
    assert busy.inconclusive > 0.9 and busy.alarms <= 0.01


def test_other_rules_ring_falsely_or_miss():
    """The canary: the models are hard enough to break what people use."""
    flips, wide = BY_NAME["state flips"], BY_NAME["wide start-to-start spread"]
    assert score(flips, MEDIAN, Scenario(0.0), TRIALS, 7).alarms > 0.25
    assert score(flips, MEDIAN, Scenario(-0.10), TRIALS, 7).missed > 0.1
    assert score(wide, COMPARE_FAIL, Scenario(0.0), TRIALS, 7).alarms > 0.25
    assert score(flips, RANK, Scenario(-0.10), TRIALS, 7).missed > 0.5


def test_matching_by_canary_is_what_decides_under_flips():
    seen = ours("state flips", -0.05)
    unseen = ours("state flips no canary shows", -0.05)
    assert seen.found > 0.95 > 0.6 > unseen.found
    assert unseen.missed <= 0.002


def test_same_seed_gives_the_same_figures_and_another_seed_others():
    model = BY_NAME["wide start-to-start spread"]
    one, two, other = (score(model, OURS, Scenario(-0.05), 200, seed) for seed in (1, 1, 2))
    assert one == two and one.found != other.found


def test_simulated_verdict_is_the_verdict_of_the_gate():
    """The vectorised procedure stops where pair by pair judging stops, with the same outcome."""
    model, scenario = NoiseModel("plain", start_sd=0.012, cell_sd=0.004), Scenario(-0.03, cells=2)
    rng = np.random.default_rng(5)
    said = simulate.paired_verdict(model, scenario, rng, 40)
    host = simulate.draw(model, np.random.default_rng(5), 40, 48, 2)
    kept = simulate.matched(host)
    for trial in range(40):
        codes, starts = _pair_by_pair(host, kept, scenario, trial)
        assert (list(said.codes[trial]), said.starts[trial]) == (codes, starts)


def _pair_by_pair(host, kept, scenario, trial):
    base, head = [], []
    for pair in range(24):
        slots = np.exp(host.speed[trial, 2 * pair : 2 * pair + 2])
        first, second = slots[::-1] if simulate.head_first(pair) else slots
        if kept[trial, pair]:
            base.append(first)
            head.append(second * np.exp(scenario.effects))
        judged = [
            judge(str(c), [b[c] for b in base], [h[c] for h in head], Policy(), cells=2)
            for c in range(2)
        ]
        done = all(v.decided for v in judged) or any(v.worse for v in judged)
        if done or len(base) == 12:
            break
    names = {Outcome.SAME: PASS, Outcome.INCONCLUSIVE: UNDECIDED}
    return [WORSE if v.worse else names.get(v.outcome, 2) for v in judged], 2 * (pair + 1)


def test_matched_pairs_have_canaries_close_to_each_other():
    host = simulate.draw(BY_NAME["state flips"], np.random.default_rng(0), 200, 20, 1)
    kept = simulate.matched(host)
    assert 0.4 < kept.mean() < 0.95
    gaps = np.abs(host.speed[:, 0::2, 0] - host.speed[:, 1::2, 0])
    assert gaps[kept].max() < 0.1 < gaps[~kept].max()


def test_missed_targets_are_named():
    fine = [
        replace(ours(model.name, effect, 20), trials=2000, alarms=0.0)
        for model in MODELS[:1]
        for effect in (0.0, -0.05)
    ]
    assert verdicts.missed_targets(fine) == []
    broken = [fine[0], replace(fine[1], found=0.5, missed=0.5, alarms=0.02, trials=10)]
    assert len(verdicts.missed_targets(broken)) == 3


def test_table_has_a_row_for_every_model_and_rule():
    scores = [
        score(model, rule, Scenario(effect), 20, 1)
        for model in MODELS
        for rule in RULES
        for effect in verdicts.EFFECTS
    ]
    text = verdicts.table(scores)
    assert text.count("\n") == 2 + len(MODELS) * len(RULES)
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_published_table_is_of_these_models_and_rules():
    published = verdicts.DOCUMENT.read_text()
    for model in MODELS:
        assert verdicts.describe(model) in published
        assert all(f"| {model.name} | {rule} |" in published for rule in RULES)
    assert "NOT ACTIVE" not in published


@pytest.mark.slow
def test_full_table_meets_every_target():
    assert verdicts.missed_targets(list(verdicts.all_scores(2000, 1))) == []
