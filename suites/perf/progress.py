"""How far a bench is and how long it may still take."""

from dataclasses import dataclass

import numpy as np

from suites.perf import stats
from suites.perf.judging import Pair, pairs_of
from suites.perf.run_record import RunRecord


@dataclass(frozen=True)
class Forecast:
    """Pairs done and to come, and seconds left: likely, and at most.

    Seconds are None before the first start is over.
    """

    pairs_kept: int
    pairs_excluded: int
    pairs_likely: int
    pairs_max: int
    left_s_likely: float | None
    left_s_max: float | None

    def __str__(self) -> str:
        counted = f"{self.pairs_kept} pairs"
        if self.pairs_excluded:
            counted += f" (+{self.pairs_excluded} excluded)"
        if self.left_s_likely is None or self.left_s_max is None:
            return f"{counted} of about {self.pairs_likely}"
        return (
            f"{counted} of about {self.pairs_likely} (at most {self.pairs_max}), about"
            f" {duration(self.left_s_likely)} left, at most {duration(self.left_s_max)}"
        )


@dataclass(frozen=True)
class Progress:
    """One step of a bench for whoever watches."""

    event: str
    text: str
    forecast: Forecast | None


def duration(seconds: float) -> str:
    """Seconds for people: 95 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def forecast(base: RunRecord, head: RunRecord) -> Forecast:
    """Expected end of the session, from the spread so far and the mean time of a start."""
    pairs = pairs_of(base, head)
    kept = tuple(pair for pair in pairs if pair.kept)
    likely = _pairs_likely(base, kept)
    started = len(base.starts) + len(head.starts)
    per_start_s = _start_s(base, head)
    # Excluded pairs cost time too: the share seen so far goes on.
    waste = len(pairs) / len(kept) if kept else 1.0
    half_done = started - 2 * len(pairs)
    starts_likely = 2 * (likely - len(kept)) * waste - half_done
    starts_max = 2 * (base.policy.attempts_max - len(pairs)) - half_done
    return Forecast(
        len(kept),
        len(pairs) - len(kept),
        likely,
        base.policy.pairs_max,
        None if per_start_s is None else max(0.0, starts_likely * per_start_s),
        None if per_start_s is None else max(0.0, starts_max * per_start_s),
    )


def _start_s(base: RunRecord, head: RunRecord) -> float | None:
    spans = [start.ended_s - start.began_s for start in (*base.starts, *head.starts)]
    return sum(spans) / len(spans) + base.idle_s if spans else None


def _pairs_likely(base: RunRecord, kept: tuple[Pair, ...]) -> int:
    policy = base.policy
    gating = [cell for cell in base.cells if cell.gates]
    if len(kept) < 2:
        return policy.pairs_min
    totals = []
    for cell in gating:
        delta = stats.differences(
            [pair.base.value(cell) for pair in kept], [pair.head.value(cell) for pair in kept]
        )
        mean, sd = float(np.mean(delta)), float(np.std(delta, ddof=1))
        totals.append(stats.pairs_total(len(kept), mean, sd, policy, len(gating), cell.margin))
    return min(max(totals, default=policy.pairs_min), policy.pairs_max)
