"""Rates from token time stamps and usage counts; it does not know whether the tokens are right."""

from collections.abc import Callable
from dataclasses import dataclass

from suites.perf.cells import Cell, Kind
from suites.perf.errors import TraceError

WINDOWS_AGREEING = 3
WINDOW_TOLERANCE = 0.02


@dataclass(frozen=True)
class StreamEvent:
    """One chunk of a stream: when it came, its text, and its token ids where the server says them.

    `tokens` None means that the server does not say; an empty tuple means no token.
    """

    at_s: float
    text: str = ""
    tokens: tuple[int, ...] | None = None

    @property
    def carries_token(self) -> bool:
        return bool(self.tokens) if self.tokens is not None else bool(self.text)


@dataclass(frozen=True)
class StreamTrace:
    """One request as the client saw it; counts come from the final `usage`, never from chunks."""

    sent_s: float
    events: tuple[StreamEvent, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What a session returns for one window of a cell: its streams, or the value of a gauge."""

    prompt_sha256: str
    traces: tuple[StreamTrace, ...] = ()
    gauge: float | None = None


@dataclass(frozen=True)
class StreamSample:
    """The raw figures of one stream that its rate is computed from; times in seconds."""

    sent_s: float
    first_s: float
    last_s: float
    first_tokens: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    chunks: int
    empty_chunks_first: int


@dataclass(frozen=True)
class Sample:
    """One window of a cell, kept raw."""

    prompt_sha256: str
    streams: tuple[StreamSample, ...] = ()
    gauge: float | None = None


def condense(trace: StreamTrace) -> StreamSample:
    """The raw figures of one stream.

    Raises TraceError: `usage-missing`, `usage-mismatch` (ids streamed and usage disagree),
    `time-order`, `no-token`.
    """
    if trace.prompt_tokens is None or trace.completion_tokens is None:
        raise TraceError(
            "usage-missing",
            f"{len(trace.events)} chunks came without usage; chunks are not tokens: ask the server"
            ' for usage (stream_options {"include_usage": true})',
        )
    stamps = [trace.sent_s, *(event.at_s for event in trace.events)]
    if any(later < earlier for earlier, later in zip(stamps, stamps[1:], strict=False)):
        raise TraceError("time-order", "time stamps go backwards; a monotonic clock is accepted")
    bearing = [index for index, event in enumerate(trace.events) if event.carries_token]
    if not bearing or trace.completion_tokens < 1:
        raise TraceError(
            "no-token",
            f"{len(trace.events)} chunks, usage {trace.completion_tokens}: no token came",
        )
    _check_ids(trace)
    first, last = trace.events[bearing[0]], trace.events[bearing[-1]]
    return StreamSample(
        trace.sent_s,
        first.at_s,
        last.at_s,
        len(first.tokens) if first.tokens else 1,
        trace.prompt_tokens,
        trace.completion_tokens,
        trace.cached_tokens,
        len(bearing),
        bearing[0],
    )


def _check_ids(trace: StreamTrace) -> None:
    if any(event.tokens is None for event in trace.events):
        return
    streamed = sum(len(event.tokens or ()) for event in trace.events)
    if streamed != trace.completion_tokens:
        raise TraceError(
            "usage-mismatch",
            f"{streamed} token ids streamed, usage says {trace.completion_tokens}; both must agree",
        )


def ttft_s(stream: StreamSample) -> float:
    """Seconds from sending to the first token (an empty first chunk is not a token)."""
    return stream.first_s - stream.sent_s


def prefill_rate(streams: tuple[StreamSample, ...]) -> float:
    """Prompt tokens per second: tokens of all streams / (last first token - first send)."""
    span_s = max(s.first_s for s in streams) - min(s.sent_s for s in streams)
    if span_s <= 0:
        raise TraceError("no-span", f"first token {span_s} s after sending; above 0 is accepted")
    return sum(s.prompt_tokens for s in streams) / span_s


def decode_rate(streams: tuple[StreamSample, ...]) -> float:
    """Tokens per second over all streams, counted after each stream's first arrival.

    One stream: (n - 1) / (t_last - t_first); a first chunk that carries k tokens counts as k, since
    all of them were there at t_first. Several: the sum of the counts over the time from the first
    stream's t_first to the last stream's t_last, so that streams served one after another do not
    add up to a rate that nobody saw.
    """
    span_s = max(s.last_s for s in streams) - min(s.first_s for s in streams)
    counted = sum(s.completion_tokens - s.first_tokens for s in streams)
    if span_s <= 0 or counted < 1:
        raise TraceError(
            "no-span",
            f"{counted} tokens after the first arrival in {span_s} s: the stream is buffered or"
            " ended at once; two or more arrivals are accepted",
        )
    return counted / span_s


def overlap_share(streams: tuple[StreamSample, ...]) -> float:
    """Share (0..1) of the decode span in which every stream was decoding; 1 for one stream."""
    span_s = max(s.last_s for s in streams) - min(s.first_s for s in streams)
    common_s = min(s.last_s for s in streams) - max(s.first_s for s in streams)
    return max(0.0, common_s) / span_s if span_s > 0 else 0.0


def sample_of(cell: Cell, measurement: Measurement) -> Sample:
    """The raw sample of a window; TraceError when streams are missing or say no rate."""
    if cell.kind is Kind.GAUGE:
        if measurement.gauge is None:
            raise TraceError("no-gauge", f"{cell.name}: no value; a number is accepted")
        return Sample(measurement.prompt_sha256, gauge=float(measurement.gauge))
    if len(measurement.traces) != cell.streams:
        raise TraceError(
            "streams", f"{cell.name}: {len(measurement.traces)} streams came, {cell.streams} asked"
        )
    return Sample(measurement.prompt_sha256, tuple(map(condense, measurement.traces)))


def value_of(cell: Cell, sample: Sample) -> float:
    """The cell's figure for one sample, in the cell's unit."""
    if cell.kind is Kind.GAUGE:
        if sample.gauge is None or sample.gauge <= 0:
            raise TraceError("no-gauge", f"{cell.name}: {sample.gauge}; more than 0 is accepted")
        return sample.gauge
    if cell.kind is Kind.PREFILL:
        return prefill_rate(sample.streams)
    return decode_rate(sample.streams)


@dataclass(frozen=True)
class WarmUp:
    """How a warm-up ended: the values of its windows and whether the last three agreed."""

    values: tuple[float, ...]
    settled: bool


def windows_agree(values: tuple[float, ...], tolerance: float = WINDOW_TOLERANCE) -> bool:
    """True when the last three windows lie within `tolerance` (a fraction) of the lowest one."""
    last = values[-WINDOWS_AGREEING:]
    return len(last) == WINDOWS_AGREEING and max(last) <= min(last) * (1 + tolerance)


def warm_up(
    window: Callable[[int], float], windows_max: int, tolerance: float = WINDOW_TOLERANCE
) -> WarmUp:
    """Call `window(index)` until three values agree, at most `windows_max` times.

    Giving up is an answer (`settled` False), not an error: the pair is matched on it.
    """
    values: tuple[float, ...] = ()
    while len(values) < windows_max:
        values = (*values, window(len(values)))
        if windows_agree(values, tolerance):
            return WarmUp(values, settled=True)
    return WarmUp(values, settled=False)
