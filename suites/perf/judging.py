"""From two stored arms to pairs and verdicts; what makes a pair unusable is in `states.py`."""

from collections import Counter
from dataclasses import dataclass, replace

from suites.perf.run_record import RunRecord, Start
from suites.perf.states import mismatch
from suites.perf.stats import Policy, Verdict, judge


@dataclass(frozen=True)
class Pair:
    """The two starts of a pair; `excluded` is the reason why they are not compared, or empty."""

    index: int
    base: Start
    head: Start
    excluded: str

    @property
    def kept(self) -> bool:
        return not self.excluded

    @property
    def base_first(self) -> bool:
        return self.base.slot < self.head.slot


def pairs_of(base: RunRecord, head: RunRecord) -> tuple[Pair, ...]:
    """All complete pairs in order of their index, each with the reason it is excluded, if any."""
    heads = {start.pair: start for start in head.starts}
    return tuple(
        Pair(start.pair, start, heads[start.pair], _excluded(base, start, heads[start.pair]))
        for start in sorted(base.starts, key=lambda start: start.pair)
        if start.pair in heads
    )


def _excluded(record: RunRecord, one: Start, two: Start) -> str:
    first, second = sorted((one, two), key=lambda start: start.slot)
    gap_s = second.began_s - first.ended_s
    if gap_s > record.limits.gap_s_max:
        gap_s_max = record.limits.gap_s_max
        return f"interrupted: {gap_s:.0f} s between the starts, {gap_s_max:.0f} at most"
    return mismatch(one.state, two.state, record.reference, record.limits)


def kept_pairs(base: RunRecord, head: RunRecord) -> tuple[Pair, ...]:
    """The pairs that count."""
    return tuple(pair for pair in pairs_of(base, head) if pair.kept)


def exclusions(pairs: tuple[Pair, ...]) -> dict[str, int]:
    """How many pairs were excluded, by the word that opens the reason."""
    return dict(sorted(Counter(p.excluded.split(":")[0] for p in pairs if p.excluded).items()))


def verdicts(base: RunRecord, head: RunRecord, margin: float | None = None) -> tuple[Verdict, ...]:
    """One verdict per cell of the base over the kept pairs, corrected for the cells that gate.

    `margin` replaces the policy's margin (not a cell's own). PerfError `pairs-over-max` when the
    record holds more pairs than its policy planned.
    """
    pairs = kept_pairs(base, head)
    policy = base.policy if margin is None else replace(base.policy, margin=margin)
    gating = max(1, sum(cell.gates for cell in base.cells))
    return tuple(_verdict(cell, pairs, policy, gating) for cell in base.cells)


def _verdict(cell, pairs: tuple[Pair, ...], policy: Policy, gating: int) -> Verdict:
    return judge(
        cell.name,
        [pair.base.value(cell) for pair in pairs],
        [pair.head.value(cell) for pair in pairs],
        policy,
        cells=gating,
        higher_is_better=cell.higher_is_better,
        margin=cell.margin,
    )
