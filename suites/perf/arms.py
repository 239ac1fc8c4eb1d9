"""The seam to engines: what a bench needs of an arm, a session and a host, and who makes arms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from suites.perf.cells import Cell
from suites.perf.errors import PerfError
from suites.perf.rates import Measurement
from suites.perf.run_record import ArmFacts, CacheDrop, OutputCheck
from suites.perf.states import Canary


class Session(Protocol):
    """One started engine, from ready to stopped."""

    @property
    def identity(self) -> str:
        """Unique per process start (host, pid and start time, say): two starts never share it."""
        ...

    def measure(self, cell: Cell, prompt_seed: int) -> Measurement:
        """One window of a cell on prompts drawn from `prompt_seed`.

        Prompts must differ from their first token on where seeds differ, and each stream must bring
        `cell.new_tokens` tokens (ask the server to ignore its end token). ArmError when the engine
        fails; TraceError is raised later, from the figures.
        """
        ...

    def check_outputs(self, prompt_seed: int) -> OutputCheck:
        """A needle looked up and the logprobs hashed, on the very process that is being timed."""
        ...

    def stop(self) -> None:
        """End all ranks and return when their memory is free again."""
        ...


class Arm(Protocol):
    """One side of a comparison: a package, a commit or an endpoint that can be started afresh."""

    def facts(self) -> ArmFacts:
        """Target, commit, package hash, recipe and host fingerprint; needs no start."""
        ...

    def start(self) -> Session:
        """Start and return when the engine answers; ArmError when it does not come up."""
        ...


@dataclass(frozen=True)
class Host:
    """The host as the bench uses it; time and measurements are arguments, so tests have their own.

    `clock` gives epoch seconds that go on after an interruption. Where several hosts serve one
    engine, `canary` gives the worst of each measure: the slowest host sets the pace.
    """

    clock: Callable[[], float]
    sleep: Callable[[float], None]
    canary: Callable[[], Canary]
    drop_cache: Callable[[], CacheDrop]


ArmFactory = Callable[[str], Arm]
HostFactory = Callable[[], Host]


@dataclass(frozen=True)
class Adapter:
    """Who makes arms from target strings, and the host that both run on."""

    arm: ArmFactory
    host: HostFactory


_registered: list[Adapter] = []


def register_adapter(adapter: Adapter | None) -> None:
    """Say how target strings become arms; a target adapter calls this when it is imported.

    None forgets the registered one. The latest registration holds.
    """
    _registered.clear()
    if adapter is not None:
        _registered.append(adapter)


def registered_adapter() -> Adapter:
    """The registered adapter; PerfError `no-adapter` when there is none."""
    if not _registered:
        raise PerfError(
            "no-adapter",
            "nothing here can start an engine; a target adapter registers itself with"
            " suites.perf.arms.register_adapter",
        )
    return _registered[0]
