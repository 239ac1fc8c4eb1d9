"""An engine and a host in memory, on a virtual clock, with measurement faults to plant.

It serves tests and demonstrations: everything is drawn from a seed, no process is started.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from suites.perf.arms import Host
from suites.perf.cells import Cell, Kind
from suites.perf.errors import ArmError
from suites.perf.rates import Measurement, StreamEvent, StreamTrace
from suites.perf.run_record import ArmFacts, CacheDrop, Fingerprint, OutputCheck
from suites.perf.states import Canary

FINGERPRINT = Fingerprint(("spark1", "spark2", "spark3"), "6.14", "580.95", "GB10", 20, 128 << 30)
DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S, KV_TOKENS = 45.0, 3000.0, 7_700_000.0
START_S, CANARY_S = 400.0, 2.0


@dataclass
class VirtualClock:
    """Epoch seconds that move only when something sleeps."""

    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += float(seconds)


def always_healthy(_: int) -> float:
    """Speed of a host that keeps its state."""
    return 1.0


@dataclass
class DoubleHost:
    """A host whose speed at the start of its n-th canary is `state(n)` (1 is healthy)."""

    clock: VirtualClock
    rng: np.random.Generator
    state: Callable[[int], float] = always_healthy
    clock_share: Callable[[int], float] = always_healthy
    drop: CacheDrop = CacheDrop(True, "virtual")
    canaries: int = 0

    @property
    def speed(self) -> float:
        """Speed while an engine runs: that of the canary before its start."""
        return self.state(max(0, self.canaries - 1))

    def canary(self) -> Canary:
        share, mhz = self.state(self.canaries), 2281.0 * self.clock_share(self.canaries)
        self.canaries += 1
        self.clock.sleep(CANARY_S)
        noise = self.rng.normal(1, 0.004, 2).tolist()
        return Canary(self.clock(), 240.0 * share * noise[0], 90e3 * share * noise[1], mhz, 2281.0)

    def host(self) -> Host:
        return Host(self.clock, self.clock.sleep, self.canary, lambda: self.drop)


@dataclass(frozen=True)
class Faults:
    """What may be wrong with an arm; the defaults are an arm with nothing wrong.

    Speeds are factors (1 is nominal), spreads standard deviations of log speed, shares fractions.
    `slow_requests` of the requests run at 0.8 while the others are sped up by `hide_slow`.
    """

    speed: float = 1.0
    start_sd: float = 0.005
    sample_sd: float = 0.003
    slow_starts: tuple[int, ...] = ()
    slow_requests: float = 0.0
    hide_slow: float = 1.0
    needle_found: bool = True
    logprobs: str = "right"
    cached_share: float = 0.0
    fixed_seed: bool = False
    chunk_tokens: int = 1
    empty_first_chunk: bool = False
    usage: bool = True
    usage_counts_chunks: bool = False
    one_process: bool = False
    failing_starts: tuple[int, ...] = ()
    interrupt_at: int | None = None


CLEAN = Faults()


@dataclass
class DoubleArm:
    """An arm of the double; `starts` counts its starts, failed ones included."""

    name: str
    host: DoubleHost
    rng: np.random.Generator
    faults: Faults = CLEAN
    commit: str = "0572fd12"
    starts: int = 0
    stopped: int = 0
    measured: list[str] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)

    def spread(self) -> float:
        """The speed factor of the next start; one and the same when all are one process."""
        if not (self.faults.one_process and self.spreads):
            self.spreads.append(float(np.exp(self.rng.normal(0, self.faults.start_sd))))
        return self.spreads[-1]

    def facts(self) -> ArmFacts:
        package = hashlib.sha256(self.name.encode()).hexdigest()
        return ArmFacts(self.name, self.commit, package, "released-tp3", FINGERPRINT)

    def start(self) -> "DoubleSession":
        index, self.starts = self.starts, self.starts + 1
        self.host.clock.sleep(START_S)
        if index in self.faults.failing_starts:
            raise ArmError("start", f"{self.name}: failed to fill whole buffer")
        if index == self.faults.interrupt_at:
            raise KeyboardInterrupt
        return DoubleSession(self, index)


class DoubleSession:
    """One start of the double."""

    def __init__(self, arm: DoubleArm, index: int) -> None:
        faults = arm.faults
        slow = 0.8 if index in faults.slow_starts else 1.0
        self.arm = arm
        self.identity = f"{arm.name}-{0 if faults.one_process else index}"
        self.speed = arm.host.speed * faults.speed * slow * arm.spread()

    def measure(self, cell: Cell, prompt_seed: int) -> Measurement:
        faults = self.arm.faults
        seed = 4711 if faults.fixed_seed else prompt_seed
        prompt = hashlib.sha256(f"{cell.name}/{seed}".encode()).hexdigest()
        self.arm.measured.append(cell.name)
        if cell.kind is Kind.GAUGE:
            return Measurement(prompt, gauge=round(KV_TOKENS * self.speed / 128) * 128)
        speed = self.speed * self._request_speed()
        traces = tuple(self._trace(cell, speed) for _ in range(cell.streams))
        self.arm.host.clock.sleep(max(t.events[-1].at_s for t in traces) - traces[0].sent_s)
        return Measurement(prompt, traces)

    def _request_speed(self) -> float:
        faults, rng = self.arm.faults, self.arm.rng
        slow = rng.random() < faults.slow_requests
        return (0.8 if slow else faults.hide_slow) * float(np.exp(rng.normal(0, faults.sample_sd)))

    def _trace(self, cell: Cell, speed: float) -> StreamTrace:
        faults, sent_s = self.arm.faults, self.arm.host.clock()
        cached = int(faults.cached_share * cell.prompt_tokens)
        first_s = sent_s + (cell.prompt_tokens - cached) / (PREFILL_TOKENS_PER_S * speed)
        tokens, chunk = max(1, cell.new_tokens), faults.chunk_tokens
        token_s = 1 / (DECODE_TOKENS_PER_S * speed)
        # The first token comes alone, from the prefill; later chunks carry what a step accepted.
        chunks = 1 + -(-(tokens - 1) // chunk)
        events = [
            StreamEvent(first_s + min(index * chunk, tokens - 1) * token_s, "word")
            for index in range(chunks)
        ]
        if faults.empty_first_chunk:
            events.insert(0, StreamEvent(sent_s + 0.002, ""))
        counted = chunks if faults.usage_counts_chunks else tokens
        usage = (cell.prompt_tokens, counted) if faults.usage else (None, None)
        return StreamTrace(sent_s, tuple(events), *usage, cached_tokens=cached)

    def check_outputs(self, prompt_seed: int) -> OutputCheck:
        faults = self.arm.faults
        return OutputCheck(
            faults.needle_found, hashlib.sha256(faults.logprobs.encode()).hexdigest()
        )

    def stop(self) -> None:
        self.arm.stopped += 1


def double_arms(
    seed: int,
    base: Faults = CLEAN,
    head: Faults = CLEAN,
    state: Callable[[int], float] = always_healthy,
) -> tuple[tuple[DoubleArm, DoubleArm], DoubleHost]:
    """Two arms on one host, all drawn from `seed`."""
    streams = [np.random.default_rng([seed, part]) for part in range(3)]
    host = DoubleHost(VirtualClock(), streams[0], state)
    arms = (
        DoubleArm("base", host, streams[1], base),
        DoubleArm("head", host, streams[2], head, commit="bbad44fe"),
    )
    return arms, host
