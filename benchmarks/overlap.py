"""How long the overlap sweep takes for a million buffers: python benchmarks/overlap.py [COUNT]."""

from __future__ import annotations

import random
import sys
import time

from suites.memory.overlap import Spans, overlap_plain, overlap_sweep

SECONDS_MAX = 15.0


def packed_spans(count: int, seed: int) -> Spans:
    """A dense layout without offences: first fit of random sizes and lives into free lanes."""
    random_source = random.Random(seed)
    lanes = 2000
    edges = [0]
    for _ in range(lanes):
        edges.append(edges[-1] + random_source.randrange(1, 64) * 256)
    clock = [0] * lanes
    start, end, first, last = [], [], [], []
    for number in range(count):
        lane = number % lanes
        width = random_source.randrange(1, 4)
        lane_end = min(lane + width, lanes)
        begin = max(clock[lane:lane_end])
        life = random_source.randrange(1, 40)
        start.append(edges[lane])
        end.append(edges[lane_end])
        first.append(begin)
        last.append(begin + life - 1)
        clock[lane:lane_end] = [begin + life] * (lane_end - lane)
    return Spans(start, end, first, last, range(count))


def with_offences(spans: Spans, count: int, seed: int) -> Spans:
    """The same spans with `count` lives prolonged by some ops."""
    last = list(spans.last)
    for number in random.Random(seed).sample(range(len(spans)), count):
        last[number] += 60
    return Spans(spans.start, spans.end, spans.first, last, spans.owner)


def main(count: int) -> int:
    """Time both ways; the plain one on a small layout only."""
    spans = packed_spans(count, seed=1)
    began = time.perf_counter()
    clean = overlap_sweep(spans)
    seconds = time.perf_counter() - began
    print(f"sweep, {count:,} buffers, none offending: {seconds:.2f} s, {len(clean)} pairs")
    began = time.perf_counter()
    found = overlap_sweep(with_offences(spans, count // 1000, seed=2))
    dirty_seconds = time.perf_counter() - began
    print(f"sweep, {count:,} buffers, 0.1 % offending: {dirty_seconds:.2f} s, {len(found)} pairs")
    small = with_offences(packed_spans(5000, seed=3), 50, seed=4)
    began = time.perf_counter()
    pairs = overlap_plain(small)
    print(f"plain, 5,000 buffers: {time.perf_counter() - began:.2f} s, {len(pairs)} pairs")
    same = pairs == overlap_sweep(small)
    print(
        f"both agree: {same}; limit {SECONDS_MAX} s: {'met' if seconds < SECONDS_MAX else 'missed'}"
    )
    return 0 if same and not clean and max(seconds, dirty_seconds) < SECONDS_MAX else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
