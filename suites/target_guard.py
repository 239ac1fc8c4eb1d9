"""Runs one command for a test run and ends it, with all it started, when the run is over.

`python -m suites.target_guard --owner PID [--grace SECONDS] [--remove DIRECTORY] -- COMMAND...`

The command is a group of its own, so a Ctrl-C at the terminal does not reach it; the guard ends
it on SIGTERM, and when the process OWNER is gone, however that one ended. Then DIRECTORY, which
nobody will clear any more, is removed. Only the standard library is imported: a guard is small.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GRACE_S = 20.0
"""How long a command may take to end by itself after SIGTERM."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Watch:
    """What a guard was asked to do."""

    owner_pid: int
    grace_s: float
    remove: str | None
    command: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Watch:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="suites.target_guard", description=__doc__)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--remove")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    return Watch(given.owner, given.grace, given.remove, tuple(given.command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code, or 128 + the number of the signal that ended it."""
    watch = parse(sys.argv[1:] if arguments is None else arguments)
    asked, asks = os.pipe()
    os.set_blocking(asks, False)
    signal.set_wakeup_fd(asks)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        owner = os.pidfd_open(watch.owner_pid)
    except ProcessLookupError:
        print(f"the owner (pid {watch.owner_pid}) has already ended", file=sys.stderr)
        return 1
    try:
        child = start(watch.command)
    except OSError as error:
        print(f"cannot run {watch.command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    owner_is_gone = wait(child, owner, asked)
    end(child, watch.grace_s)
    if owner_is_gone and watch.remove:
        shutil.rmtree(watch.remove, ignore_errors=True)
    code = child.returncode
    return code if code >= 0 else 128 - code


def start(command: Sequence[str]) -> subprocess.Popen:
    """The command in a session of its own, which the kernel kills should we be killed."""
    libc = ctypes.CDLL(None)
    # One thread and no buffers: nothing that must not be done between fork and exec.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )


def wait(child: subprocess.Popen, owner: int, asked: int) -> bool:
    """Wait for the child's end, a signal to us, or the owner's end; True for the last."""
    while child.poll() is None:
        ready, _, _ = select.select([owner, asked], [], [])
        if owner in ready:
            return True
        # A child that ended wakes us too; any other signal is the wish that it end.
        if any(number != signal.SIGCHLD for number in os.read(asked, 64)):
            return False
    return False


def end(child: subprocess.Popen, grace_s: float) -> None:
    """Ask the whole group to end, wait, and kill what is left of it."""
    send(child.pid, signal.SIGTERM)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        print(f"still running {grace_s:g} s after SIGTERM; killed", file=sys.stderr)
    send(child.pid, signal.SIGKILL)
    child.wait()


def send(group: int, number: int) -> None:
    """Send a signal to a group of processes, which may be gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
