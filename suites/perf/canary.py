"""Canaries: memory bandwidth, matmul rate and clock of a host before and after each start.

Run as a program (`python -m suites.perf.canary`) it prints one JSON line, so that a command prefix
such as `ssh spark2` measures another host.
"""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from suites.perf.errors import PerfError
from suites.perf.files import read_json_text
from suites.perf.states import Canary

Clock = Callable[[], float]
Runner = Callable[[tuple[str, ...]], str]
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=clocks.sm,clocks.max.sm,temperature.gpu",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True)
class CanarySize:
    """How much work a CPU canary does; the default takes about a second.

    `gemv_rows` x `gemv_columns` float32 must not fit into the last-level cache. Each measure is
    repeated `rounds_min` times and until `budget_s` is over.
    """

    gemv_rows: int = 4096
    gemv_columns: int = 8192
    matmul_side: int = 512
    rounds_min: int = 5
    budget_s: float = 0.4


def cpu_canary(
    clock: Clock = time.perf_counter,
    epoch: Clock = time.time,
    size: CanarySize = CanarySize(),  # noqa: B008 - frozen, so one shared default is safe
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> Canary:
    """Bandwidth of a float32 GEMV (GB/s), rate of a float32 matmul (GFLOP/s), clock (MHz).

    The best round is taken: a canary asks what the host can do, not what others left of it.
    """
    rows, columns, side = size.gemv_rows, size.gemv_columns, size.matmul_side
    matrix, vector = np.ones((rows, columns), np.float32), np.ones(columns, np.float32)
    square = np.full((side, side), 0.5, np.float32)
    gemv_s = _best_s(lambda: matrix @ vector, clock, size)
    matmul_s = _best_s(lambda: square @ square, clock, size)
    return Canary(
        epoch(),
        matrix.nbytes / gemv_s / 1e9,
        2 * side**3 / matmul_s / 1e9,
        clock_mhz(cpuinfo),
    )


def _best_s(work: Callable[[], object], clock: Clock, size: CanarySize) -> float:
    work()
    best_s, rounds, first_s = float("inf"), 0, clock()
    while rounds < size.rounds_min or best_s > 0 and clock() - first_s < size.budget_s:
        began_s = clock()
        work()
        best_s, rounds = min(best_s, clock() - began_s), rounds + 1
    if best_s <= 0:
        raise PerfError("canary", f"a canary took {best_s} s; a clock that moves is accepted")
    return best_s


def clock_mhz(cpuinfo: Path) -> float | None:
    """The fastest core's clock right after load; None where the system does not say."""
    if not cpuinfo.is_file():
        return None
    lines = cpuinfo.read_text().splitlines()
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return max(clocks, default=None)


def run_command(argv: tuple[str, ...]) -> str:
    """The standard output of a command; PerfError with its words when it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PerfError("canary", f"{' '.join(argv)} did not run: {error}") from error
    if done.returncode != 0:
        raise PerfError("canary", f"{' '.join(argv)} exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def command_canary(argv: tuple[str, ...], run: Runner = run_command) -> Canary:
    """A canary measured by another program, which prints one JSON object with Canary's fields."""
    lines = run(argv).strip().splitlines()
    if not lines:
        raise PerfError("canary", f"{' '.join(argv)} printed nothing; one JSON line is accepted")
    return read_json_text(Canary, lines[-1], " ".join(argv))


def with_gpu_clock(canary: Canary, run: Runner = run_command) -> Canary:
    """The canary with clock, rated clock and temperature of the first GPU, as nvidia-smi says."""
    fields = [field.strip() for field in run(GPU_QUERY).strip().splitlines()[0].split(",")]
    now_mhz, max_mhz, temperature_c = (_number_or_none(field) for field in fields)
    return Canary(
        canary.at_s, canary.bandwidth_gb_s, canary.matmul_gflop_s, now_mhz, max_mhz, temperature_c
    )


def _number_or_none(field: str) -> float | None:
    """A field of nvidia-smi; GB10 answers some of them with [N/A]."""
    return None if field in ("[N/A]", "N/A", "[Not Supported]") else float(field)


def main() -> None:
    """Print this host's canary as one JSON line."""
    print(json.dumps(asdict(cpu_canary())))


if __name__ == "__main__":
    main()
