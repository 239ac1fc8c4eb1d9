"""Rates come from token time stamps and usage; chunks and empty chunks fool nobody (P05)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suites.perf import rates
from suites.perf.cells import KV_TOKENS, MINI_CELLS, Cell, Kind, prompt_seed
from suites.perf.errors import PerfError, TraceError
from suites.perf.rates import Measurement, StreamEvent, StreamTrace

# The machine is shared, so a slow example is no failure.
CALM = settings(deadline=None, max_examples=50)
DECODE, DECODE_X4, PREFILL = MINI_CELLS[:3]
HASH = "0" * 64


def trace(stamps, tokens=None, prompt=100, texts=None, sent_s=0.0, **more) -> StreamTrace:
    texts = texts or ["x"] * len(stamps)
    events = tuple(StreamEvent(t, text) for t, text in zip(stamps, texts, strict=True))
    return StreamTrace(sent_s, events, prompt, len(stamps) if tokens is None else tokens, **more)


def test_decode_rate_is_tokens_after_the_first_over_their_time():
    stream = rates.condense(trace([1.0, 1.5, 2.0]))
    assert rates.decode_rate((stream,)) == pytest.approx(2.0)


def test_prefill_rate_is_prompt_tokens_over_time_to_first_token():
    stream = rates.condense(trace([0.5, 0.6], sent_s=0.25))
    assert rates.prefill_rate((stream,)) == pytest.approx(100 / 0.25)


def test_empty_first_chunk_is_no_first_token():
    stream = rates.condense(trace([0.01, 1.0, 2.0], tokens=2, texts=["", "a", "b"]))
    assert rates.ttft_s(stream) == 1.0
    assert stream.empty_chunks_first == 1
    naive_ttft_s = 0.01
    assert rates.ttft_s(stream) > 50 * naive_ttft_s


def test_tokens_are_counted_from_usage_not_from_chunks():
    stream = rates.condense(trace([1.0, 2.0, 3.0], tokens=11))
    assert rates.decode_rate((stream,)) == pytest.approx(10 / 2)
    assert stream.chunks == 3


def test_token_with_empty_text_counts_when_ids_are_streamed():
    events = (StreamEvent(1.0, "", ()), StreamEvent(2.0, "", (7,)), StreamEvent(3.0, "b", (8,)))
    stream = rates.condense(StreamTrace(0.0, events, 10, 2))
    assert (stream.first_s, stream.chunks) == (2.0, 2)


def test_first_chunk_of_several_tokens_is_not_counted_as_decoded():
    events = (StreamEvent(1.0, "abc", (1, 2, 3)), StreamEvent(2.0, "d", (4,)))
    stream = rates.condense(StreamTrace(0.0, events, 10, 4))
    assert rates.decode_rate((stream,)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (StreamTrace(0.0, (StreamEvent(1.0, "a"),), None, None), "usage-missing"),
        (StreamTrace(0.0, (StreamEvent(1.0, "a"),), 5, None), "usage-missing"),
        (trace([1.0, 0.5]), "time-order"),
        (trace([1.0], sent_s=2.0), "time-order"),
        (trace([1.0], texts=[""], tokens=1), "no-token"),
        (trace([1.0], tokens=0), "no-token"),
        (StreamTrace(0.0, (StreamEvent(1.0, "a", (1,)),), 5, 2), "usage-mismatch"),
    ],
)
def test_stream_without_a_rate_is_refused_by_code(wrong, code):
    with pytest.raises(TraceError) as error:
        rates.condense(wrong)
    assert error.value.code == code


def test_buffered_stream_has_no_decode_rate():
    stream = rates.condense(trace([1.0, 1.0, 1.0]))
    with pytest.raises(TraceError, match="no-span"):
        rates.decode_rate((stream,))


def test_streams_served_one_after_another_do_not_add_up():
    one = rates.condense(trace([0.0, 1.0]))
    two = rates.condense(trace([1.0, 2.0]))
    assert rates.decode_rate((one, two)) == pytest.approx(1.0)
    assert rates.overlap_share((one, two)) == 0.0
    assert rates.decode_rate((one, one)) == pytest.approx(2.0)
    assert rates.overlap_share((one, one)) == 1.0


def test_wrong_number_of_streams_is_refused():
    with pytest.raises(TraceError, match="1 streams came, 4 asked"):
        rates.sample_of(DECODE_X4, Measurement(HASH, (trace([1.0, 2.0]),)))


@pytest.mark.parametrize("gauge", [None, 0.0, -1.0])
def test_gauge_without_a_value_is_refused(gauge):
    with pytest.raises(TraceError, match="no-gauge"):
        rates.value_of(KV_TOKENS, rates.sample_of(KV_TOKENS, Measurement(HASH, gauge=gauge)))


@CALM
@given(
    st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=30),
    st.integers(1, 5),
    st.floats(0.1, 10.0),
)
def test_rates_scale_with_time_and_ignore_how_tokens_are_chunked(steps, group, factor):
    stamps = [sum(steps[: i + 1]) for i in range(len(steps))]
    # The first token alone, later ones in chunks that arrive with their last token.
    ends = [0, *range(group, len(stamps), group)]
    ends = ends if ends[-1] == len(stamps) - 1 else [*ends, len(stamps) - 1]
    plain = rates.condense(trace(stamps))
    chunked = rates.condense(trace([stamps[i] for i in ends], tokens=len(stamps)))
    slower = rates.condense(trace([t * factor for t in stamps]))
    assert rates.decode_rate((chunked,)) == pytest.approx(rates.decode_rate((plain,)))
    assert rates.decode_rate((slower,)) == pytest.approx(rates.decode_rate((plain,)) / factor)
    assert rates.prefill_rate((slower,)) == pytest.approx(rates.prefill_rate((plain,)) / factor)


def test_warm_up_ends_when_three_windows_agree():
    speeds = [58.0, 70.0, 80.0, 82.5, 83.0, 83.2, 99.0]
    warm = rates.warm_up(lambda index: speeds[index], 12)
    assert warm.settled and warm.values == (58.0, 70.0, 80.0, 82.5, 83.0, 83.2)


def test_warm_up_gives_up_at_its_bound_and_says_so():
    warm = rates.warm_up(lambda index: 50.0 * (1 + index), 7)
    assert not warm.settled and len(warm.values) == 7


def test_two_windows_agree_with_nobody():
    assert not rates.windows_agree((80.0, 80.0))
    assert rates.windows_agree((1.0, 80.0, 81.0, 81.5))
    assert not rates.windows_agree((80.0, 81.0, 82.0))


def test_prompts_are_equal_over_arms_and_differ_otherwise():
    seeds = {
        prompt_seed(session, pair, cell, phase, window)
        for session in ("s", "t")
        for pair in range(3)
        for cell in (DECODE, PREFILL)
        for phase in ("warm", "measure")
        for window in range(3)
    }
    assert len(seeds) == 72
    assert prompt_seed("s", 0, DECODE, "warm", 0) == prompt_seed("s", 0, DECODE, "warm", 0)


@pytest.mark.parametrize("wrong", [{"streams": 0}, {"samples": 0}, {"new_tokens": 1}])
def test_impossible_cell_is_refused(wrong):
    with pytest.raises(PerfError, match="cell"):
        Cell("c", Kind.DECODE, "tok/s", **{"new_tokens": 32, **wrong})
