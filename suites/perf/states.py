"""Host states from canaries, and which pairs may be compared; it knows no engine figures.

What it does not know: states that no canary shows. Their effect stays in the spread of the pairs.
"""

from dataclasses import dataclass
from enum import StrEnum

from suites.perf.errors import HostCappedError

MEASURES = ("bandwidth_gb_s", "matmul_gflop_s", "clock_mhz")


@dataclass(frozen=True)
class Canary:
    """A short measurement of the host without the engine; None where the host does not say."""

    at_s: float
    bandwidth_gb_s: float
    matmul_gflop_s: float
    clock_mhz: float | None = None
    clock_mhz_max: float | None = None
    temperature_c: float | None = None


class HostState(StrEnum):
    """FAST and SLOW against the reference, CAPPED by its clock, HOT by its temperature."""

    FAST = "fast"
    SLOW = "slow"
    CAPPED = "capped"
    HOT = "hot"
    CHANGED = "changed during the start"


@dataclass(frozen=True)
class StateLimits:
    """Thresholds of the states: shares of the reference (fractions), degrees Celsius.

    capped: 799 of 2281 MHz is 0.35. slow: 63 against 94 ms a step is 0.67. `match` is how far two
    canaries of one pair may differ; on a host that other work shares it must be wider.
    `gap_s_max` bounds the time between the two starts of a pair (an interruption lies there).
    """

    capped_clock_share: float = 0.6
    slow_share: float = 0.85
    hot_c: float = 88.0
    match: float = 0.05
    gap_s_max: float = 3600.0


def classify(canary: Canary, reference: Canary, limits: StateLimits) -> HostState:
    """The state one canary shows; `reference` is what this host does in its healthy state."""
    if _clock_share(canary, reference) < limits.capped_clock_share:
        return HostState.CAPPED
    if canary.temperature_c is not None and canary.temperature_c >= limits.hot_c:
        return HostState.HOT
    shares = [
        canary.bandwidth_gb_s / reference.bandwidth_gb_s,
        canary.matmul_gflop_s / reference.matmul_gflop_s,
    ]
    return HostState.SLOW if min(shares) < limits.slow_share else HostState.FAST


def _clock_share(canary: Canary, reference: Canary) -> float:
    # The rated maximum counts beside the reference: a reference taken on a capped host is capped.
    best = max(reference.clock_mhz or 0.0, canary.clock_mhz_max or 0.0)
    return canary.clock_mhz / best if canary.clock_mhz is not None and best else 1.0


def classify_start(
    before: Canary, after: Canary, reference: Canary, limits: StateLimits
) -> HostState:
    """The state of a whole start: that of both canaries, or CHANGED when they disagree."""
    first, last = (classify(c, reference, limits) for c in (before, after))
    if HostState.CAPPED in (first, last):
        return HostState.CAPPED
    if first is not last or distance(before, after) > limits.match:
        return HostState.CHANGED
    return first


def distance(one: Canary, two: Canary) -> float:
    """The largest relative difference of the measures that both canaries have (a fraction)."""
    gaps = [0.0]
    for measure in MEASURES:
        a, b = getattr(one, measure), getattr(two, measure)
        if a is not None and b is not None:
            gaps.append(abs(a - b) / max(a, b))
    return max(gaps)


def reference_of(canaries: tuple[Canary, ...]) -> Canary:
    """The healthy reference out of several canaries: the best of each measure."""
    assert canaries, "a reference needs at least one canary"
    clocks = [c.clock_mhz for c in canaries if c.clock_mhz is not None]
    return Canary(
        canaries[0].at_s,
        max(c.bandwidth_gb_s for c in canaries),
        max(c.matmul_gflop_s for c in canaries),
        max(clocks, default=None),
        canaries[0].clock_mhz_max,
    )


def refuse_capped(canary: Canary, reference: Canary, limits: StateLimits) -> None:
    """Raise HostCappedError on a host whose clock is stuck; nothing measured there counts."""
    if classify(canary, reference, limits) is HostState.CAPPED:
        raise HostCappedError(
            "host-capped",
            f"{canary.clock_mhz:.0f} MHz under load, {_clock_share(canary, reference):.0%} of what"
            f" it can; at least {limits.capped_clock_share:.0%} is accepted."
            " On GB10 cut the mains power for a minute, then run again: finished starts are kept.",
        )


@dataclass(frozen=True)
class StartState:
    """What of a start decides whether it may be compared with its partner."""

    before: Canary
    after: Canary
    settled: bool
    cache_dropped: bool


def mismatch(one: StartState, two: StartState, reference: Canary, limits: StateLimits) -> str:
    """Why the two starts of a pair may not be compared; empty when they may.

    The reason opens with a fixed word (`capped`, `state-flip`, `warm-up`, `page-cache`).
    """
    states = [classify_start(s.before, s.after, reference, limits) for s in (one, two)]
    if HostState.CAPPED in states:
        return f"capped: {states[0]} and {states[1]}"
    if HostState.CHANGED in states or states[0] is not states[1]:
        return f"state-flip: {states[0]} and {states[1]}"
    gap = max(distance(a, b) for a in (one.before, one.after) for b in (two.before, two.after))
    if gap > limits.match:
        return f"state-flip: canaries {gap:.1%} apart, {limits.match:.1%} accepted"
    if one.settled is not two.settled:
        return "warm-up: only one of the two starts settled"
    if one.cache_dropped is not two.cache_dropped:
        return "page-cache: dropped before one of the two starts only"
    return ""
