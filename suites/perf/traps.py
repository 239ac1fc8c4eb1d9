"""Detectors of the measurement faults P01 and P03 to P07 in two stored arms (P02: `bench_json.py`).

What they do not know: whether the difference is real (`stats.py`), and faults that leave no trace
in prompts, counts, canaries, outputs or raw samples.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from scipy.stats import fisher_exact

from suites.perf.cells import Cell, Kind
from suites.perf.findings import Finding, hold, note, void
from suites.perf.judging import Pair, pairs_of
from suites.perf.rates import Sample, StreamSample, overlap_share
from suites.perf.run_record import RunRecord, Start

CACHED_SHARE_MAX = 0.01
SLOW_DEPTH = 0.10
FISHER_P_MAX = 0.01
FLIPS_ONE_SIDED_MIN = 6
OVERLAP_MIN = 0.5


def trap_findings(base: RunRecord, head: RunRecord) -> tuple[Finding, ...]:
    """Everything the detectors say, in the order of the fault classes; empty on a clean run."""
    pairs = pairs_of(base, head)
    return (
        *independence(base, head),
        *prefix_cache(base, head, pairs),
        *state_flips(base, pairs),
        *token_counts(base, head),
        *outputs(base, head),
        *hidden_slow(base, pairs),
        *bookkeeping(base, head),
    )


def independence(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    """P01: starts that are no starts, so that the spread between starts is missing."""
    identities = Counter(start.identity for start in (*base.starts, *head.starts))
    for identity, count in identities.items():
        if count > 1:
            yield void(
                "start-reused",
                f"{count} starts are one process ({identity}); requests of one start are not"
                " replicates, each start must be its own process",
                "P01",
            )
    for cell in base.cells:
        if cell.kind is not Kind.GAUGE and _has_copies(cell, base, head):
            yield void(
                "start-copied",
                "two starts hold the same raw samples to the last bit",
                "P01",
                cell.name,
            )


def _has_copies(cell: Cell, base: RunRecord, head: RunRecord) -> bool:
    starts = [s.samples(cell.name) for s in (*base.starts, *head.starts)]
    spans = [
        tuple((x.first_s - x.sent_s, x.last_s - x.sent_s) for s in c.samples for x in s.streams)
        for c in starts
    ]
    return len(set(spans)) < len(spans)


def prefix_cache(base: RunRecord, head: RunRecord, pairs: tuple[Pair, ...]) -> Iterator[Finding]:
    """P03: prompts that were seen before, so that the prefix cache is measured."""
    for cell in base.cells:
        if cell.kind is Kind.GAUGE:
            continue
        for record in (base, head):
            yield from _cached(cell, record)
            yield from _repeated(cell, record)
        for pair in pairs:
            if _prompts(cell, pair.base) != _prompts(cell, pair.head):
                yield void(
                    "prompts-differ",
                    f"pair {pair.index}: the arms got different prompts",
                    "P03",
                    cell.name,
                )


def _cached(cell: Cell, record: RunRecord) -> Iterator[Finding]:
    streams = [x for start in record.starts for s in _samples(cell, start) for x in s.streams]
    cached = sum(x.cached_tokens or 0 for x in streams)
    prompt = sum(x.prompt_tokens for x in streams)
    if prompt and cached > CACHED_SHARE_MAX * prompt:
        yield void(
            "prefix-cache",
            f"arm {record.arm}: {cached} of {prompt} prompt tokens came from the prefix cache;"
            f" at most {CACHED_SHARE_MAX:.0%} is accepted",
            "P03",
            cell.name,
        )


def _repeated(cell: Cell, record: RunRecord) -> Iterator[Finding]:
    counts = Counter(prompt for start in record.starts for prompt in _prompts(cell, start))
    repeated = sum(count > 1 for count in counts.values())
    if repeated:
        yield void(
            "prompt-repeated",
            f"arm {record.arm}: {repeated} prompts were sent more than once;"
            " each window needs its own seed",
            "P03",
            cell.name,
        )


def _prompts(cell: Cell, start: Start) -> tuple[str, ...]:
    return tuple(sample.prompt_sha256 for sample in _samples(cell, start))


def _samples(cell: Cell, start: Start) -> tuple[Sample, ...]:
    return start.samples(cell.name).samples


def state_flips(base: RunRecord, pairs: tuple[Pair, ...]) -> Iterator[Finding]:
    """P04: pairs across host states, and states that follow one of the arms."""
    flips = [pair for pair in pairs if pair.excluded.startswith(("state-flip", "capped"))]
    if not flips:
        return
    yield note(
        "state-flip",
        f"{len(flips)} of {len(pairs)} pairs lie across host states and do not count;"
        f" first: pair {flips[0].index}, {flips[0].excluded}",
        "P04",
    )
    head_slower = sum(_speed(pair.head) < _speed(pair.base) for pair in flips)
    if len(flips) >= FLIPS_ONE_SIDED_MIN and head_slower in (0, len(flips)):
        arm = "B" if head_slower else base.arm
        yield hold(
            "state-follows-arm",
            f"in all {len(flips)} excluded pairs arm {arm} met the slower host: it may itself heat"
            " or throttle the host, and excluding these pairs would hide that",
            "P04",
        )


def _speed(start: Start) -> float:
    canaries = (start.canary_before, start.canary_after)
    return sum(c.matmul_gflop_s * c.bandwidth_gb_s for c in canaries)


def token_counts(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    """P05: chunks that are not tokens, first chunks without a token, outputs cut short."""
    for record in (base, head):
        streams = {
            cell: [x for s in record.starts for w in _samples(cell, s) for x in w.streams]
            for cell in base.cells
            if cell.kind is not Kind.GAUGE
        }
        for cell, of_cell in streams.items():
            yield from _cut_short(cell, record, of_cell)
        yield from _chunks(record, [x for of_cell in streams.values() for x in of_cell])


def _cut_short(cell: Cell, record: RunRecord, streams: list[StreamSample]) -> Iterator[Finding]:
    short = sum(x.completion_tokens < cell.new_tokens for x in streams)
    if short:
        yield void(
            "tokens-missing",
            f"arm {record.arm}: {short} of {len(streams)} streams have fewer than"
            f" {cell.new_tokens} tokens; chunks counted as tokens, or the output ended early",
            "P05",
            cell.name,
        )


def _chunks(record: RunRecord, streams: list[StreamSample]) -> Iterator[Finding]:
    tokens, chunks = sum(x.completion_tokens for x in streams), sum(x.chunks for x in streams)
    if chunks != tokens:
        yield note(
            "chunks-not-tokens",
            f"arm {record.arm}: {tokens} tokens came in {chunks} chunks; counting chunks would be"
            f" off by {chunks / tokens - 1:+.0%}",
            "P05",
        )
    empty = sum(x.empty_chunks_first > 0 for x in streams)
    if empty:
        yield note(
            "empty-first-chunk",
            f"arm {record.arm}: {empty} of {len(streams)} streams open with a chunk without a"
            " token, which is no first token",
            "P05",
        )


def outputs(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    """P06: speed of outputs that are wrong, or that are not those of the other arm."""
    for record in (base, head):
        lost = [start.slot for start in record.starts if not start.outputs.needle_found]
        if lost:
            yield void(
                "outputs-void",
                f"arm {record.arm}: the needle was not found in starts {lost}",
                "P06",
            )
    if base.outputs_rule != "identical":
        return
    hashes = [{start.outputs.logprob_sha256 for start in r.starts} for r in (base, head)]
    for record, found in zip((base, head), hashes, strict=True):
        if len(found) > 1:
            yield void(
                "outputs-void",
                f"arm {record.arm}: {len(found)} different logprob hashes over its starts; one is"
                " accepted, or `--outputs needle` for engines that are not bit-stable",
                "P06",
            )
    if all(len(found) == 1 for found in hashes) and hashes[0] != hashes[1]:
        yield void(
            "outputs-void",
            "the arms' logprob hashes differ: a speed of other outputs is no comparison; state"
            " `--outputs needle` where the change is meant to alter numerics",
            "P06",
        )


@dataclass(frozen=True)
class SlowCount:
    """How many of how many figures lie more than SLOW_DEPTH below their own median."""

    slow: int
    total: int

    def __str__(self) -> str:
        return f"{self.slow} of {self.total}"


def count_slow(groups: list[list[float]], sign: int) -> SlowCount:
    """Slow figures, each against the median of its group; `sign` -1 where smaller is better."""
    speeds = [[value**sign for value in group] for group in groups if group]
    slow = sum(v < (1 - SLOW_DEPTH) * median(group) for group in speeds for v in group)
    return SlowCount(slow, sum(map(len, speeds)))


def hidden_slow(base: RunRecord, pairs: tuple[Pair, ...]) -> Iterator[Finding]:
    """P07: a share of slow requests or starts in the head that an average or median hides."""
    kept = [pair for pair in pairs if pair.kept]
    for cell in base.cells if kept else ():
        if cell.kind is Kind.GAUGE:
            continue
        requests = [
            count_slow([list(s.samples(cell.name).values(cell)) for s in arm], cell.sign)
            for arm in _arms(kept)
        ]
        starts = [count_slow([[s.value(cell) for s in arm]], cell.sign) for arm in _arms(kept)]
        if _significant(*requests):
            yield hold("hidden-slow", _slow_text("requests", *requests), "P07", cell.name)
        elif starts[1].slow > 0 and starts[0].slow == 0:
            yield hold("hidden-slow", _slow_text("starts", *starts), "P07", cell.name)


def _arms(pairs: list[Pair]) -> tuple[list[Start], list[Start]]:
    return [pair.base for pair in pairs], [pair.head for pair in pairs]


def _slow_text(what: str, base: SlowCount, head: SlowCount) -> str:
    return (
        f"{head} {what} of the head are more than {SLOW_DEPTH:.0%} slower than their median,"
        f" {base} of the base: the mean hides them"
    )


def _significant(base: SlowCount, head: SlowCount) -> bool:
    table = [[head.slow, head.total - head.slow], [base.slow, base.total - base.slow]]
    return fisher_exact(table, alternative="greater").pvalue <= FISHER_P_MAX


def bookkeeping(base: RunRecord, head: RunRecord) -> Iterator[Finding]:
    """Failed starts, warm-ups that never settled and streams served one after another."""
    for record in (base, head):
        if record.failed:
            yield note(
                "start-failed",
                f"arm {record.arm}: {len(record.failed)} starts failed; last: "
                f"{record.failed[-1].reason}",
            )
        unsettled = sum(not start.state.settled for start in record.starts)
        if unsettled:
            yield note(
                "not-warm",
                f"arm {record.arm}: {unsettled} of {len(record.starts)} starts never had three"
                " windows within 2 %",
            )
    for cell in base.cells:
        if cell.streams > 1 and cell.kind is Kind.DECODE:
            samples = [w for r in (base, head) for s in r.starts for w in _samples(cell, s)]
            apart = sum(overlap_share(sample.streams) < OVERLAP_MIN for sample in samples)
            if apart:
                yield note(
                    "streams-serialised",
                    f"in {apart} of {len(samples)} samples the streams overlap less than"
                    f" {OVERLAP_MIN:.0%}",
                    cell=cell.name,
                )
