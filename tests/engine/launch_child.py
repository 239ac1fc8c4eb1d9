"""A rank for the launch tests; the first argument says how it behaves."""

from __future__ import annotations

import os
import signal
import sys
import time

from engine.launch import LocalRanks, bind_to_parent


def hello() -> None:
    """Say two things and end well."""
    print("hello", flush=True)
    print("over stderr", file=sys.stderr)


def fail() -> None:
    """End as a command does after a user error."""
    print("error: the package is torn")
    sys.exit(5)


def slowly() -> None:
    """End a moment later, as a rank does that hears of a loss over its link."""
    time.sleep(0.5)
    print("error: rank 2 is gone", flush=True)
    sys.exit(9)


def sleep() -> None:
    """Stay until ended."""
    bind_to_parent(os.getppid())
    print("ready", flush=True)
    time.sleep(60)


def stubborn() -> None:
    """Stay even when asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()


def parent() -> None:
    """Start two ranks, print their pids and stay."""
    commands = {rank: ["tests.engine.launch_child", "sleep"] for rank in (1, 2)}

    class Log:
        """Count the ranks that are ready, then print all pids."""

        ready = 0

        def write(self, line: str) -> None:
            self.ready += "ready" in line

        def flush(self) -> None:
            return

    log = Log()
    with LocalRanks(commands, os.environ, log) as ranks:
        while log.ready < 2:
            time.sleep(0.01)
        print(*ranks.pids.values(), sep="\n", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
