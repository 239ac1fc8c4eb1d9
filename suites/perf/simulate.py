"""Simulated hosts and the rules that judge them: how often each rule is wrong, seeded.

What it does not know: noise that no model here has. All speeds are logs (0 is nominal); a slot is
one engine start on one host, a pair is two slots. Ours is judged by `stats.decide`, the same
function that judges real runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import mannwhitneyu

from suites.perf.order import head_first
from suites.perf.stats import DIFFERENT, INCONCLUSIVE, SAME, Policy, decide

# What a rule says about a trial.
WORSE, UNDECIDED, PASS, BETTER = -1, 0, 1, 2
FIXED_STARTS = 12
FIXED_THRESHOLD = 0.05
RANK_ALPHA = 0.01
MATCH_TOLERANCE = 0.05


@dataclass(frozen=True)
class NoiseModel:
    """A host's noise; standard deviations and depths are in log speed (0.01 is about 1 %).

    `start_sd`: start to start, common to all cells; `cell_sd`: start to start per cell.
    `flip`: probability that the host's state changes within one slot; the other state runs at
    `flip_speed`. `canary_sees`: whether canaries show states and ramps. `drift`: per slot.
    `ramp` and `ramp_slots`: heating loses `ramp` with that time constant. `slow_share` of starts
    are slower by `slow_depth`. `bursts`: scale of one-sided slow-downs by other work (exponential).
    `memory`: correlation of neighbouring starts' noise.
    """

    name: str
    start_sd: float = 0.005
    cell_sd: float = 0.004
    flip: float = 0.0
    flip_speed: float = 63 / 94
    canary_sees: bool = True
    canary_sd: float = 0.008
    drift: float = 0.0
    ramp: float = 0.0
    ramp_slots: float = 4.0
    slow_share: float = 0.0
    slow_depth: float = 0.20
    bursts: float = 0.0
    memory: float = 0.0


MODELS = (
    NoiseModel("healthy"),
    NoiseModel("wide start-to-start spread", start_sd=0.03, cell_sd=0.01),
    NoiseModel("state flips", flip=0.15),
    NoiseModel("state flips no canary shows", flip=0.15, canary_sees=False),
    NoiseModel("drift 0.5 % a start", drift=-0.005),
    NoiseModel("thermal ramp 15 %", ramp=0.15),
    NoiseModel("slow one in four", slow_share=0.25),
    NoiseModel("busy machine", start_sd=0.01, cell_sd=0.01, bursts=0.06, canary_sees=False),
    NoiseModel("noise with memory", start_sd=0.02, memory=0.8),
)


@dataclass(frozen=True)
class Draw:
    """Drawn slots: `speed` (trials, slots, cells), canaries `before`, `after` (trials, slots)."""

    speed: np.ndarray
    before: np.ndarray
    after: np.ndarray


def draw(model: NoiseModel, rng: np.random.Generator, trials: int, slots: int, cells: int) -> Draw:
    """Log speeds of `slots` starts in a row on `trials` independent hosts, without any effect."""
    state_before, state_after = _states(model, rng, trials, slots)
    index = np.arange(slots)
    ramp = -model.ramp * (1 - np.exp(-index / model.ramp_slots)) + model.drift * index
    speed = (
        _remembered(rng.normal(0, model.start_sd, (trials, slots)), model.memory)[:, :, None]
        + rng.normal(0, model.cell_sd, (trials, slots, cells))
        + ((state_before + state_after) / 2 + ramp)[:, :, None]
        + _slow(model, rng, trials, slots)[:, :, None]
        - rng.exponential(1.0, (trials, slots, cells)) * model.bursts
    )
    seen = 1.0 if model.canary_sees else 0.0
    noise = rng.normal(0, model.canary_sd, (2, trials, slots))
    return Draw(
        speed,
        seen * (state_before + ramp) + noise[0],
        seen * (state_after + ramp) + noise[1],
    )


def _states(
    model: NoiseModel, rng: np.random.Generator, trials: int, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log speed of the host state before and after each slot; flips fall in a slot or between."""
    flips = rng.random((trials, 2 * slots)) < model.flip / 2
    slow = np.cumsum(flips, axis=1) % 2
    level = slow * np.log(model.flip_speed)
    return level[:, 0::2], level[:, 1::2]


def _remembered(noise: np.ndarray, memory: float) -> np.ndarray:
    """First-order autoregression over slots with the same standard deviation."""
    out = noise.copy()
    for slot in range(1, noise.shape[1]):
        out[:, slot] = memory * out[:, slot - 1] + np.sqrt(1 - memory**2) * noise[:, slot]
    return out


def _slow(model: NoiseModel, rng: np.random.Generator, trials: int, slots: int) -> np.ndarray:
    hit = rng.random((trials, slots)) < model.slow_share
    return np.where(hit, np.log1p(-model.slow_depth), 0.0)


@dataclass(frozen=True)
class Scenario:
    """`effect` (a fraction, -0.05 is 5 % slower) changes the first of `cells` cells in the head."""

    effect: float
    cells: int = 6
    policy: Policy = Policy()

    @property
    def effects(self) -> np.ndarray:
        return np.log1p(self.effect) * (np.arange(self.cells) == 0)


@dataclass(frozen=True)
class Said:
    """What a rule said: `codes` (trials, cells) of WORSE..BETTER, and `starts` used (trials,)."""

    codes: np.ndarray
    starts: np.ndarray


Rule = Callable[[NoiseModel, Scenario, np.random.Generator, int], Said]


def paired_verdict(
    model: NoiseModel, scenario: Scenario, rng: np.random.Generator, trials: int
) -> Said:
    """Ours: alternating pairs, matched by canaries, added until every cell is decided."""
    policy, attempts = scenario.policy, scenario.policy.attempts_max
    host = draw(model, rng, trials, 2 * attempts, scenario.cells)
    first, second = host.speed[:, 0::2], host.speed[:, 1::2]
    flipped = np.array([head_first(pair) for pair in range(attempts)])[None, :, None]
    delta = np.where(flipped, first - second, second - first) + scenario.effects
    kept = matched(host)
    count = np.cumsum(kept, axis=1)
    kept &= count <= policy.pairs_max
    count = np.minimum(count, policy.pairs_max)
    codes, decided_at = _sequential(delta, kept, count, scenario)
    return Said(codes, 2 * decided_at)


def matched(host: Draw) -> np.ndarray:
    """Which pairs of neighbouring slots may be compared: all four canaries within tolerance."""
    canaries = np.stack([host.before[:, 0::2], host.after[:, 0::2], host.before[:, 1::2],
                         host.after[:, 1::2]])  # fmt: skip
    return np.ptp(canaries, axis=0) <= -np.log1p(-MATCH_TOLERANCE)


def _sequential(
    delta: np.ndarray, kept: np.ndarray, count: np.ndarray, scenario: Scenario
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (trials, cells) at the pair where a trial stops, and that pair's number (from 1).

    A trial stops when all cells are decided or one is worse, at pairs_max kept pairs, or when
    attempts run out.
    """
    policy = scenario.policy
    weights = kept[:, :, None]
    total = np.cumsum(delta * weights, axis=1)
    squares = np.cumsum(delta**2 * weights, axis=1)
    n = np.maximum(count, 1)[:, :, None]
    mean = total / n
    variance = np.maximum(squares - n * mean**2, 0.0) / np.maximum(n - 1, 1)
    pairs = np.broadcast_to(count[:, :, None], mean.shape)
    outcome = decide(pairs, mean, np.sqrt(variance), policy, scenario.cells)
    worse = (outcome == DIFFERENT) & (mean < 0)
    stop = (outcome != INCONCLUSIVE).all(axis=2) | (count >= policy.pairs_max)
    if policy.stop_at_worse:
        stop |= worse.any(axis=2)
    stop[:, -1] = True
    at = stop.argmax(axis=1)
    chosen = np.arange(len(at)), at
    different = np.where(mean[chosen] < 0, WORSE, BETTER)
    codes = np.select([outcome[chosen] == SAME, outcome[chosen] == DIFFERENT], [PASS, different])
    return codes, at + 1


def _in_sequence(
    model: NoiseModel, scenario: Scenario, rng: np.random.Generator, trials: int, starts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log speeds (trials, starts, cells) of all base starts, then all head starts."""
    host = draw(model, rng, trials, 2 * starts, scenario.cells)
    return host.speed[:, :starts], host.speed[:, starts:] + scenario.effects


def _beyond(change: np.ndarray) -> np.ndarray:
    """WORSE, BETTER or PASS by a fixed threshold on the change of a log speed."""
    limit = np.log1p(FIXED_THRESHOLD)
    return np.select([change < -limit, change > limit], [WORSE, BETTER], PASS)


def median_in_sequence(
    model: NoiseModel, scenario: Scenario, rng: np.random.Generator, trials: int
) -> Said:
    """Median of FIXED_STARTS starts per arm, one arm after the other, red beyond 5 %."""
    base, head = _in_sequence(model, scenario, rng, trials, FIXED_STARTS)
    change = np.median(head, axis=1) - np.median(base, axis=1)
    return Said(_beyond(change), np.full(trials, 2 * FIXED_STARTS))


def compare_fail(
    model: NoiseModel, scenario: Scenario, rng: np.random.Generator, trials: int
) -> Said:
    """pytest-benchmark's compare-fail mean:5%: one process per arm, the mean of its rounds.

    Rounds of one process average their own noise away and leave the start's.
    """
    base, head = _in_sequence(model, scenario, rng, trials, 1)
    return Said(_beyond(head[:, 0] - base[:, 0]), np.full(trials, 2))


def rank_test(model: NoiseModel, scenario: Scenario, rng: np.random.Generator, trials: int) -> Said:
    """Mann-Whitney over FIXED_STARTS alternating starts per arm, p < 1 % divided by the cells."""
    host = draw(model, rng, trials, 2 * FIXED_STARTS, scenario.cells)
    flipped = np.array([head_first(pair) for pair in range(FIXED_STARTS)])[None, :, None]
    first, second = host.speed[:, 0::2], host.speed[:, 1::2]
    base = np.where(flipped, second, first)
    head = np.where(flipped, first, second) + scenario.effects
    p = mannwhitneyu(base, head, axis=1, method="asymptotic").pvalue
    red = p < RANK_ALPHA / scenario.cells
    worse = np.median(head, axis=1) < np.median(base, axis=1)
    codes = np.where(red, np.where(worse, WORSE, BETTER), PASS)
    return Said(codes, np.full(trials, 2 * FIXED_STARTS))


RULES: dict[str, Rule] = {
    "paired three-state (ours)": paired_verdict,
    "median of 12 in sequence, 5 %": median_in_sequence,
    "pytest-benchmark compare-fail mean:5%": compare_fail,
    "rank test, 12 + 12 alternating": rank_test,
}


@dataclass(frozen=True)
class Score:
    """Shares of trials (0..1) for one model, effect and rule; `starts` is the mean number used."""

    model: str
    rule: str
    effect: float
    trials: int
    alarms: float
    found: float
    missed: float
    inconclusive: float
    starts: float

    @property
    def found_of_decided(self) -> float:
        """Share found among the runs that were decided; 1 when none was (nothing was wrong)."""
        decided = self.found + self.missed
        return self.found / decided if decided else 1.0


def score(model: NoiseModel, rule: str, scenario: Scenario, trials: int, seed: int) -> Score:
    """Run one rule on one model; trials use the same seed for every rule and effect.

    Without an effect, an alarm is any cell called different. With one, the changed cell is found
    (worse), missed (same or better) or inconclusive, and alarms count the unchanged cells.
    """
    said = RULES[rule](model, scenario, np.random.default_rng([seed, _key(model.name)]), trials)
    differs = (said.codes == WORSE) | (said.codes == BETTER)
    changed = said.codes[:, 0]
    if scenario.effect == 0:
        alarms, undecided = differs.any(axis=1), (said.codes == UNDECIDED).any(axis=1)
        return Score(
            model.name, rule, 0.0, trials, float(alarms.mean()), 0.0, 0.0,
            float((undecided & ~alarms).mean()), float(said.starts.mean()),
        )  # fmt: skip
    return Score(
        model.name, rule, scenario.effect, trials, float(differs[:, 1:].any(axis=1).mean()),
        float((changed == WORSE).mean()), float((changed > UNDECIDED).mean()),
        float((changed == UNDECIDED).mean()), float(said.starts.mean()),
    )  # fmt: skip


def _key(name: str) -> int:
    return int.from_bytes(name.encode()[:6], "big")
