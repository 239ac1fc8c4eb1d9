"""Canaries tell host states apart, and pairs across states do not count (P04)."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suites.perf import canary as canaries
from suites.perf import host, states
from suites.perf.errors import HostCappedError, PerfError
from suites.perf.states import Canary, HostState, StartState, StateLimits

# The machine is shared, so a slow example is no failure.
CALM = settings(deadline=None, max_examples=50)
LIMITS = StateLimits()
HEALTHY = Canary(0.0, 240.0, 90_000.0, 2281.0, 2281.0, 60.0)
SMALL = canaries.CanarySize(64, 64, 16, 2, 0.0)
shares = st.floats(0.2, 1.5)


def _nothing() -> None:
    """Stands in for sync(2), which takes seconds on a busy machine."""


def scaled(share: float) -> Canary:
    return replace(HEALTHY, bandwidth_gb_s=240.0 * share, matmul_gflop_s=90_000.0 * share)


def start(before: Canary = HEALTHY, after: Canary = HEALTHY, settled=True, dropped=True):
    return StartState(before, after, settled, dropped)


@pytest.mark.parametrize(
    ("canary", "state"),
    [
        (HEALTHY, HostState.FAST),
        (scaled(63 / 94), HostState.SLOW),
        (replace(HEALTHY, matmul_gflop_s=40_000.0), HostState.SLOW),
        (replace(HEALTHY, clock_mhz=799.0), HostState.CAPPED),
        (replace(HEALTHY, temperature_c=91.0), HostState.HOT),
        (replace(HEALTHY, clock_mhz=None, clock_mhz_max=None), HostState.FAST),
    ],
)
def test_canary_tells_the_state(canary, state):
    assert states.classify(canary, HEALTHY, LIMITS) is state


def test_capped_reference_does_not_hide_a_capped_host():
    capped = replace(HEALTHY, clock_mhz=799.0)
    assert states.classify(capped, capped, LIMITS) is HostState.CAPPED


def test_state_that_changes_during_a_start_is_named():
    assert states.classify_start(HEALTHY, scaled(0.7), HEALTHY, LIMITS) is HostState.CHANGED
    assert states.classify_start(HEALTHY, scaled(0.9), HEALTHY, LIMITS) is HostState.CHANGED
    assert states.classify_start(HEALTHY, scaled(0.99), HEALTHY, LIMITS) is HostState.FAST


def test_capped_host_is_refused_with_both_clocks():
    with pytest.raises(HostCappedError, match="799 MHz under load, 35%"):
        states.refuse_capped(replace(HEALTHY, clock_mhz=799.0), HEALTHY, LIMITS)
    states.refuse_capped(HEALTHY, HEALTHY, LIMITS)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (start(), ""),
        (start(scaled(0.7), scaled(0.7)), "state-flip"),
        (start(HEALTHY, scaled(0.7)), "state-flip"),
        (start(scaled(0.94), scaled(0.94)), "state-flip"),
        (start(scaled(0.97), scaled(0.97)), ""),
        (start(replace(HEALTHY, clock_mhz=799.0)), "capped"),
        (start(settled=False), "warm-up"),
        (start(dropped=False), "page-cache"),
    ],
)
def test_pair_is_excluded_for_one_named_reason(other, reason):
    for one, two in ((start(), other), (other, start())):
        assert states.mismatch(one, two, HEALTHY, LIMITS).split(":")[0] == reason


@CALM
@given(shares, shares)
def test_distance_is_symmetric_and_zero_only_for_equals(one, two):
    gap = states.distance(scaled(one), scaled(two))
    assert gap == pytest.approx(states.distance(scaled(two), scaled(one)))
    assert gap == pytest.approx(1 - min(one, two) / max(one, two))


def test_reference_is_the_best_of_its_canaries():
    best = states.reference_of((scaled(0.8), HEALTHY, replace(scaled(0.9), clock_mhz=None)))
    assert (best.bandwidth_gb_s, best.clock_mhz) == (240.0, 2281.0)


def test_cpu_canary_measures_something():
    canary = canaries.cpu_canary(size=SMALL)
    assert canary.bandwidth_gb_s > 0 and canary.matmul_gflop_s > 0


def test_canary_with_a_clock_that_stands_still_is_refused():
    with pytest.raises(PerfError, match="took 0.0 s"):
        canaries.cpu_canary(clock=lambda: 1.0, size=SMALL)


def test_clock_is_the_fastest_core_or_unknown(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert canaries.clock_mhz(cpuinfo) is None
    cpuinfo.write_text("cpu MHz\t\t: 800.0\nmodel name: x\ncpu MHz\t\t: 2300.5\n")
    assert canaries.clock_mhz(cpuinfo) == 2300.5


def test_canary_of_another_host_is_read_from_its_last_line():
    said = "warning: noise\n" + json.dumps(asdict(HEALTHY)) + "\n"
    assert canaries.command_canary(("ssh", "spark2"), lambda _: said) == HEALTHY


@pytest.mark.parametrize("said", ["", "no json", '{"at_s": 1}', '{"at_s": NaN}'])
def test_canary_that_says_nothing_usable_is_refused(said):
    with pytest.raises(PerfError):
        canaries.command_canary(("ssh", "spark2"), lambda _: said)


def test_failing_canary_command_is_refused_with_its_words():
    with pytest.raises(PerfError, match="exit 3: no route"):
        canaries.run_command(("sh", "-c", "echo no route >&2; exit 3"))
    with pytest.raises(PerfError, match="did not run"):
        canaries.run_command(("/nonexistent/canary",))


def test_gpu_clock_is_read_where_the_driver_says_it():
    told = canaries.with_gpu_clock(HEALTHY, lambda _: "799, 3003, [N/A]\n")
    assert (told.clock_mhz, told.clock_mhz_max, told.temperature_c) == (799.0, 3003.0, None)
    assert states.classify(told, HEALTHY, LIMITS) is HostState.CAPPED


def test_page_cache_is_dropped_or_the_reason_is_given(tmp_path):
    control, package = tmp_path / "drop_caches", tmp_path / "model.safetensors"
    control.write_text("")
    package.write_bytes(b"x" * 4096)
    assert host.drop_page_cache((), control, _nothing).dropped
    assert control.read_text() == "3\n"
    denied = Path("/nonexistent/drop_caches")
    advised = host.drop_page_cache((package,), denied, _nothing)
    assert advised.dropped and "posix_fadvise" in advised.how
    assert not host.drop_page_cache((), denied, _nothing).dropped
    assert "No such file" in host.drop_page_cache((), denied, _nothing).how


def test_fingerprint_of_this_host_is_complete_and_stable():
    one, two = host.fingerprint_here(), host.fingerprint_here()
    assert one.differences(two) == ()
    assert one.memory_bytes > 0 and one.device and one.kernel
    assert one.differences(replace(two, kernel="7.0.0-1019"))
