"""Three-state verdicts from paired intervals over starts; it does not know where numbers are from.

What it does not know: whether the pairs were measured under equal conditions (`states.py`), whether
the outputs were right, and whether the figures are independent. It takes each pair's difference
as one observation, so requests of one start must be averaged before they come here.

Method. A pair's difference is d = log(head / base); a cell says which sign is better. After n
pairs the interval is mean(d) +- t * sd(d) / sqrt(n) with Student's t for n - 1 degrees of freedom.
Looking after every pair spends the error: look n gets alpha * (s(n) - s(n - 1)) with s(n) =
(n / pairs_max) ** k from `pairs_min` on, so the parts add up to alpha, and by the union bound the
whole procedure rings falsely with probability <= alpha whatever rule stops it (the power family of
alpha spending, Lan and DeMets 1983). Several cells divide each part (Bonferroni, any dependence).
"Same" is two one-sided tests at the part of beta (Schuirmann's TOST): the interval of that level
lies wholly inside +-margin. It needs no division: a pass needs every cell to be the same (or
better), which is an intersection-union test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np
from scipy.stats import t as student

from suites.perf.errors import PerfError

PAIRS_FLOOR = 5
FORECAST_PAIRS_MAX = 400
INCONCLUSIVE, SAME, DIFFERENT = 0, 1, 2
# Exponents of the spending functions: late looks get more of alpha, for noisy hosts get there; beta
# goes evenly, since a healthy host says "same" after the first look.
ALPHA_EXP, BETA_EXP = 2.0, 1.0


@dataclass(frozen=True)
class Policy:
    """What counts as the same, how sure to be, and how many pairs may be spent.

    `margin`, `alpha`, `beta` are fractions: 0.02 is 2 %. `pairs_max` bounds the pairs that count;
    `attempts_max` the pairs tried, since pairs across host states are excluded. `stop_at_worse`
    ends a bench when one gating cell is worse: the exit code is settled then.
    """

    margin: float = 0.02
    alpha: float = 0.01
    beta: float = 0.05
    pairs_min: int = 5
    pairs_max: int = 12
    stop_at_worse: bool = True

    def __post_init__(self) -> None:
        for name in ("margin", "alpha", "beta"):
            if not 0 < getattr(self, name) < 0.5:
                raise PerfError("policy", f"{name} is {getattr(self, name)}; above 0, below 0.5")
        if not PAIRS_FLOOR <= self.pairs_min <= self.pairs_max:
            raise PerfError(
                "policy",
                f"pairs_min {self.pairs_min}, pairs_max {self.pairs_max};"
                f" {PAIRS_FLOOR} <= pairs_min <= pairs_max is accepted",
            )

    @property
    def attempts_max(self) -> int:
        return 2 * self.pairs_max

    def spent(self, pairs: int, exponent: float) -> float:
        """Share (0..1) of an error that is spent once `pairs` pairs have been looked at."""
        if pairs < self.pairs_min:
            return 0.0
        return (min(pairs, self.pairs_max) / self.pairs_max) ** exponent

    def alpha_at(self, pairs: int) -> float:
        """Error that "different" may use at the look after `pairs` pairs; sums to alpha."""
        return self.alpha * (self.spent(pairs, ALPHA_EXP) - self.spent(pairs - 1, ALPHA_EXP))

    def beta_at(self, pairs: int) -> float:
        """Error that "same" may use at the look after `pairs` pairs; sums to beta."""
        return self.beta * (self.spent(pairs, BETA_EXP) - self.spent(pairs - 1, BETA_EXP))

    def margins_log(self, margin: float | None = None) -> tuple[float, float]:
        """(low, high) of the margin on the log scale; half open ends do not matter here."""
        width = self.margin if margin is None else margin
        return math.log1p(-width), math.log1p(width)


class Outcome(StrEnum):
    """The three states."""

    DIFFERENT = "different"
    SAME = "same within margin"
    INCONCLUSIVE = "inconclusive"


class Direction(StrEnum):
    """Which way a difference goes, in the sense of better or worse and not of larger or smaller."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "-"


@dataclass(frozen=True)
class Interval:
    """A closed interval of a change as fractions: -0.05 is 5 % less."""

    low: float
    high: float

    def inside(self, low: float, high: float) -> bool:
        return low < self.low and self.high < high

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Verdict:
    """What the pairs say about one cell.

    `change` and the intervals are fractions of the base in the cell's own direction (+ is larger).
    `interval` has the level of "different", `interval_same` that of "same". `pairs_more` is a
    forecast at today's mean and spread; None says that no number up to FORECAST_PAIRS_MAX decides.
    """

    cell: str
    outcome: Outcome
    direction: Direction
    pairs: int
    change: float | None
    interval: Interval | None
    interval_same: Interval | None
    margin: float
    pairs_more: int | None
    reason: str

    @property
    def decided(self) -> bool:
        return self.outcome is not Outcome.INCONCLUSIVE

    @property
    def worse(self) -> bool:
        return self.outcome is Outcome.DIFFERENT and self.direction is Direction.WORSE

    @property
    def rare_fault_excluded(self) -> float:
        """Rate of an intermittent fault that this many clean starts exclude with 95 % certainty.

        From n = ln(0.05) / ln(1 - p): p = 1 - 0.05 ** (1 / n).
        """
        return 1.0 if self.pairs == 0 else 1 - 0.05 ** (1 / self.pairs)


@lru_cache(maxsize=64)
def critical_values(policy: Policy, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """(different, same): t values indexed by the pairs 0..pairs_max; inf before the floor.

    Shapes (pairs_max + 1,), float64.
    """
    different = np.full(policy.pairs_max + 1, np.inf)
    same = np.full(policy.pairs_max + 1, np.inf)
    for pairs in range(policy.pairs_min, policy.pairs_max + 1):
        different[pairs] = student.isf(policy.alpha_at(pairs) / (2 * cells), pairs - 1)
        same[pairs] = student.isf(policy.beta_at(pairs), pairs - 1)
    return different, same


def decide(
    pairs: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray,
    policy: Policy,
    cells: int = 1,
    margin: float | None = None,
) -> np.ndarray:
    """Outcome codes (INCONCLUSIVE, SAME, DIFFERENT) for arrays of one shape; the sign is mean's.

    `pairs` int, at most policy.pairs_max; `mean` and `sd` (ddof 1) of the signed log differences.
    The one place where a verdict is made: judged runs and simulated ones both come through here.
    """
    different, same = critical_values(policy, cells)
    low, high = policy.margins_log(margin)
    enough = pairs >= policy.pairs_min
    error = np.where(enough, sd, 0.0) / np.sqrt(np.maximum(pairs, 1))
    half = np.where(enough, different[pairs], 0.0) * error
    half_same = np.where(enough, same[pairs], 0.0) * error
    is_same = enough & (mean - half_same > low) & (mean + half_same < high)
    is_different = enough & (np.abs(mean) > half) & ~is_same
    return np.where(is_same, SAME, np.where(is_different, DIFFERENT, INCONCLUSIVE))


def differences(base: Sequence[float], head: Sequence[float]) -> np.ndarray:
    """log(head / base) pair by pair, shape (pairs,); refuses values that are not positive."""
    pair_values = np.array([base, head], dtype=float)
    if not np.isfinite(pair_values).all() or (pair_values <= 0).any():
        raise PerfError("values", f"pairs {list(base)} {list(head)}; finite values above 0")
    return np.log(pair_values[1] / pair_values[0])


def judge(
    cell: str,
    base: Sequence[float],
    head: Sequence[float],
    policy: Policy,
    *,
    cells: int = 1,
    higher_is_better: bool = True,
    margin: float | None = None,
) -> Verdict:
    """Verdict over paired starts: base[i] and head[i] are the means of the two starts of pair i.

    `cells` is how many cells are judged together. More pairs than policy.pairs_max are refused:
    the error would no longer be what the policy says.
    """
    if len(base) != len(head):
        raise PerfError("pairs", f"{cell}: {len(base)} base and {len(head)} head starts; as many")
    if len(base) > policy.pairs_max:
        raise PerfError(
            "pairs-over-max",
            f"{cell}: {len(base)} pairs, the run was planned for at most {policy.pairs_max}",
        )
    delta = differences(base, head)
    width = policy.margin if margin is None else margin
    if len(delta) < policy.pairs_min:
        return _too_few(cell, delta, policy, width)
    return _judged(cell, delta, policy, cells, 1 if higher_is_better else -1, width)


def _too_few(cell: str, delta: np.ndarray, policy: Policy, margin: float) -> Verdict:
    more = policy.pairs_min - len(delta)
    return Verdict(
        cell,
        Outcome.INCONCLUSIVE,
        Direction.NONE,
        len(delta),
        math.expm1(float(delta.mean())) if len(delta) else None,
        None,
        None,
        margin,
        more,
        f"{len(delta)} pairs; a verdict needs at least {policy.pairs_min}, {more} more",
    )


def _judged(
    cell: str, delta: np.ndarray, policy: Policy, cells: int, sign: int, margin: float
) -> Verdict:
    pairs, mean, sd = len(delta), float(delta.mean()), float(delta.std(ddof=1))
    code = int(decide(np.int64(pairs), np.float64(mean), np.float64(sd), policy, cells, margin))
    outcome = (Outcome.INCONCLUSIVE, Outcome.SAME, Outcome.DIFFERENT)[code]
    different, same = critical_values(policy, cells)
    interval = _interval(mean, different[pairs] * sd / math.sqrt(pairs))
    interval_same = _interval(mean, same[pairs] * sd / math.sqrt(pairs))
    direction = Direction.NONE
    if code == DIFFERENT:
        direction = Direction.BETTER if mean * sign > 0 else Direction.WORSE
    more = 0 if code else forecast(pairs, mean, sd, policy, cells, margin)
    reason = _reason(outcome, interval, interval_same, margin, more)
    return Verdict(
        cell,
        outcome,
        direction,
        pairs,
        math.expm1(mean),
        interval,
        interval_same,
        margin,
        more,
        reason,
    )


def _interval(mean: float, half: float) -> Interval:
    return Interval(math.expm1(mean - half), math.expm1(mean + half))


def _reason(
    outcome: Outcome, wide: Interval, narrow: Interval, margin: float, more: int | None
) -> str:
    if outcome is Outcome.SAME:
        return f"{percent(narrow)} lies inside +-{margin:.1%}"
    if outcome is Outcome.DIFFERENT:
        return f"{percent(wide)} excludes 0"
    needs = (
        f"no number of pairs up to {FORECAST_PAIRS_MAX} is likely to decide"
        if more is None
        else f"about {more} more pairs"
    )
    return f"{percent(wide)} contains 0 and exceeds +-{margin:.1%}; {needs}"


def percent(interval: Interval) -> str:
    """An interval in percent, as tables and messages print it."""
    return f"[{interval.low:+.1%}, {interval.high:+.1%}]"


@lru_cache(maxsize=64)
def _forecast_values(policy: Policy, cells: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(totals, different, same): t values at each total number of pairs, shape (totals,).

    Beyond pairs_max they are those of the last look of a run planned for so many pairs.
    """
    totals = np.arange(policy.pairs_min, FORECAST_PAIRS_MAX + 1)
    planned = [policy if n <= policy.pairs_max else replace(policy, pairs_max=n) for n in totals]
    alphas = np.array([p.alpha_at(n) for p, n in zip(planned, totals, strict=True)])
    betas = np.array([p.beta_at(n) for p, n in zip(planned, totals, strict=True)])
    return totals, student.isf(alphas / (2 * cells), totals - 1), student.isf(betas, totals - 1)


def forecast(
    pairs: int, mean: float, sd: float, policy: Policy, cells: int = 1, margin: float | None = None
) -> int | None:
    """About how many more pairs decide the cell if mean and spread stay as they are.

    Beyond policy.pairs_max the count is that of a new run planned for so many pairs. None when
    FORECAST_PAIRS_MAX pairs would not do: the change then sits at the margin or the host is noisy.
    """
    totals, different, same = _forecast_values(policy, cells)
    error = sd / np.sqrt(totals)
    low, high = policy.margins_log(margin)
    decides = (mean - same * error > low) & (mean + same * error < high)
    decides |= abs(mean) > different * error
    decides &= totals > pairs
    return int(totals[decides.argmax()]) - pairs if decides.any() else None


def pairs_total(
    pairs: int, mean: float, sd: float, policy: Policy, cells: int = 1, margin: float | None = None
) -> int:
    """Pairs at which the cell is likely decided, counting those there are; capped by the plan."""
    more = forecast(max(0, pairs - 1), mean, sd, policy, cells, margin)
    return policy.pairs_max if more is None else min(max(0, pairs - 1) + more, policy.pairs_max)


def judge_one_process(
    cell: str,
    base: float,
    head: float,
    policy: Policy,
    spread: float,
    *,
    cells: int = 1,
    higher_is_better: bool = False,
) -> Verdict:
    """What one process per side can say when starts are assumed to spread by `spread` (sd, log).

    Never "same": one start cannot show it. "Different" needs a change beyond
    z(alpha / 2 / cells) * spread * sqrt(2), so that a 2x slowdown is red and a 5 % one asks for
    pairs.
    """
    mean = float(differences([base], [head])[0])
    half = float(student.isf(policy.alpha / (2 * cells), math.inf)) * spread * math.sqrt(2)
    interval = _interval(mean, half)
    different = abs(mean) > half
    better = (mean > 0) == higher_is_better
    return Verdict(
        cell,
        Outcome.DIFFERENT if different else Outcome.INCONCLUSIVE,
        (Direction.BETTER if better else Direction.WORSE) if different else Direction.NONE,
        1,
        math.expm1(mean),
        interval,
        None,
        policy.margin,
        0 if different else policy.pairs_min - 1,
        f"one process per side, starts assumed to spread by {spread:.0%}: "
        + (
            f"{percent(interval)} excludes 0"
            if different
            else f"no verdict below {math.expm1(half):+.0%}; {policy.pairs_min - 1} more pairs"
        ),
    )
