"""Further ranks as processes of this host: started, listened to, and ended with certainty.

A child is bound to its parent twice: it runs in a session of its own that the parent ends, and
the kernel kills it should the parent vanish without doing so (see `bind_to_parent`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import engine
from engine.errors import PeerLostError, SparkproofError

GRACE_S = 10.0
_LAST_WORDS_S = 2.0
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


def bind_to_parent(parent_pid: int) -> None:
    """Called by a child first of all: end when `parent_pid` ends, at once if it has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise PeerLostError(f"the process that started this rank (pid {parent_pid}) has ended")


def share_threads(processes: int) -> dict[str, str]:
    """Thread counts for one of `processes` on this host; what the user has set stays."""
    count = str(max(1, len(os.sched_getaffinity(0)) // processes))
    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ.get(name, count) for name in names}


class LocalRanks:
    """The other ranks of `--local`: a context that never leaves a process behind.

    commands: per rank, the arguments after `python -m`. log: standard error if None.
    Raises nothing on leaving; `check` and `wait` raise for a rank that failed.
    """

    def __init__(
        self,
        commands: Mapping[int, Sequence[str]],
        environ: Mapping[str, str],
        log: TextIO | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._commands = commands
        self._environ = environ
        self._log = log
        self._grace_s = grace_s
        self._processes: dict[int, subprocess.Popen] = {}
        self._readers: list[threading.Thread] = []
        self._last_line: dict[int, str] = {}

    def __enter__(self) -> LocalRanks:
        try:
            for rank, command in self._commands.items():
                self._start(rank, command)
        except BaseException:
            self.end(grace_s=0)
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, SparkproofError):
            # The others hear of it over their links, and say more than that they were ended.
            self._linger(_LAST_WORDS_S)
        self.end()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def check(self) -> None:
        """Raise, with the exit code and the last words, if a rank has failed."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code:
                raise self._failure(rank, code)

    def wait(self, timeout_s: float) -> None:
        """Wait for all ranks to end well; raise for a failure or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while running := [r for r, p in self._processes.items() if p.poll() is None]:
            self.check()
            if time.monotonic() > deadline:
                raise PeerLostError(f"ranks {running} did not end within {timeout_s:g} s")
            time.sleep(_POLL_S)
        self.check()

    def end(self, grace_s: float | None = None) -> None:
        """End every rank: ask, wait `grace_s`, kill; afterwards no process is left."""
        processes = list(self._processes.values())
        for process in processes:
            if process.poll() is None:
                process.terminate()
                # One that is stopped takes no signal before it goes on.
                process.send_signal(signal.SIGCONT)
        self._linger(self._grace_s if grace_s is None else grace_s)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def _linger(self, limit_s: float) -> None:
        """Wait for all to end by themselves, at most so long."""
        deadline = time.monotonic() + limit_s
        while any(p.poll() is None for p in self._processes.values()):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _start(self, rank: int, command: Sequence[str]) -> None:
        root = str(Path(engine.__file__).resolve().parents[1])
        paths = [root, *filter(None, [self._environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**self._environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._processes[rank] = process
        reader = threading.Thread(
            target=self._copy, args=(rank, process), name=f"log of rank {rank}", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def _copy(self, rank: int, process: subprocess.Popen) -> None:
        with process.stdout as lines:
            for line in lines:
                self._last_line[rank] = line.strip() or self._last_line.get(rank, "")
                # Looked up each time: bars on a terminal put themselves in place of the stream.
                log = sys.stderr if self._log is None else self._log
                log.write(f"[rank {rank}] {line.rstrip()}\n")
                log.flush()

    def _failure(self, rank: int, code: int) -> SparkproofError:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._readers[list(self._processes).index(rank)].join(1.0)
        words = self._last_line.get(rank, "")
        error = PeerLostError(f"rank {rank} ended with {how}" + (f": {words}" if words else ""))
        if code > 0:
            # The reason is the child's, so the command ends with the child's code.
            error.exit_code = code
        return error
