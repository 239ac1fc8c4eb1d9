"""Work that all tests of a run share: done once, whichever xdist worker comes first, and undone.

A directory holds what was made (plans, packages, logs) and which engines run; locks are files in
it. Engines that nobody uses stay up for the next test, up to a number, and end with the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from suites.target_http import TargetError

ROOT = Path(__file__).resolve().parents[1]
"""Where the packages engine, suites and fixtures lie, for children that start elsewhere."""
IDLE_MAX = 3
"""Engines without users that stay up all the same: a start costs seconds, each rank 400 MB."""
STOP_S = 30.0
"""How long a guard may take to end its command; it kills after its own, shorter, grace."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one of the same number."""

    pid: int
    created_s: float

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process that has this number now."""
        return cls(pid, psutil.Process(pid).create_time())

    @property
    def is_running(self) -> bool:
        """True until it has ended; a zombie has."""
        try:
            process = psutil.Process(self.pid)
            same = process.create_time() == self.created_s
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class Running:
    """An engine that was started: the guards of its commands, where it answers, its logs."""

    url: str
    guards: tuple[Process, ...]
    logs: tuple[str, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    users: int = 0
    used_s: float = 0.0

    @classmethod
    def from_json(cls, document: Mapping) -> Running:
        """Read what `dataclasses.asdict` wrote."""
        guards = tuple(Process(**guard) for guard in document["guards"])
        return cls(**{**document, "guards": guards, "logs": tuple(document["logs"])})

    @property
    def is_running(self) -> bool:
        """True while none of its commands has ended."""
        return all(guard.is_running for guard in self.guards)

    def stop(self, limit_s: float = STOP_S) -> None:
        """End all its commands and wait for it."""
        for guard in self.guards:
            _signal(guard, "terminate")
        deadline = time.monotonic() + limit_s
        while any(guard.is_running for guard in self.guards):
            _reap(self.guards)
            if time.monotonic() > deadline:
                for guard in self.guards:
                    _signal(guard, "kill")
                deadline = float("inf")
            time.sleep(_POLL_S)
        _reap(self.guards)


def _signal(process: Process, how: str) -> None:
    if process.is_running:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(psutil.Process(process.pid), how)()


def _reap(guards: Sequence[Process]) -> None:
    """Take the exit codes of guards that are our children; those of other workers are theirs."""
    for guard in guards:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(guard.pid, os.WNOHANG)


@dataclass(frozen=True)
class Shared:
    """The directory of a run.

    directory  made by the process that leads the run, and removed by it
    owner_pid  that process; when it is gone, the guards end what they guard
    idle_max   engines without users that may stay up
    """

    directory: Path
    owner_pid: int
    idle_max: int = IDLE_MAX

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a lock among all processes of the run; it falls with the process that holds it."""
        with (self.directory / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def once(self, kind: str, key: object, make: Callable[[Path], None]) -> Path:
        """The path that `make(path)` filled, made by the first who asks; others wait for it.

        What failed is not tried again in the same run: the others fail with the same words.
        Raises TargetError for them, and whatever `make` raises for the first.
        """
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        final = self.directory / kind / digest
        if final.exists():
            return final
        final.parent.mkdir(exist_ok=True)
        failed = final.with_name(f"{digest}.failed")
        with self.lock(f"{kind}-{digest}"):
            if failed.exists():
                raise TargetError(f"failed before in this run: {failed.read_text()}")
            if not final.exists():
                made = final.with_name(f"{digest}.part")
                try:
                    make(made)
                except TargetError as error:
                    failed.write_text(str(error))
                    raise
                made.rename(final)
        return final

    def guard(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Process:
        """Start a command under a guard; its output, both kinds, goes to `log`."""
        watch = ["-m", "suites.target_guard", "--owner", str(self.owner_pid)]
        watch += ["--remove", str(self.directory), "--", *command]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *watch],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=with_root(environ),
                start_new_session=True,
            )
        return Process.of(process.pid)

    def acquire(self, key: object, start: Callable[[], Running]) -> Running:
        """The engine of this key: one that runs, or a new one. Give it back with `release`."""
        name = json.dumps(key, sort_keys=True)
        with self._engines() as engines:
            found = engines.get(name)
            if found is None or not found.is_running:
                self._make_room(engines)
                found = start()
            engines[name] = replace(found, users=found.users + 1, used_s=time.time())
            return engines[name]

    def release(self, key: object) -> None:
        """The caller needs the engine no longer; it stays up while there is room."""
        name = json.dumps(key, sort_keys=True)
        with self._engines() as engines:
            if found := engines.get(name):
                engines[name] = replace(found, users=found.users - 1, used_s=time.time())

    def discard(self, key: object) -> None:
        """End the engine of this key, if there is one."""
        with self._engines() as engines:
            if found := engines.pop(json.dumps(key, sort_keys=True), None):
                found.stop()

    def end_all(self) -> None:
        """End every engine of the run."""
        with self._engines() as engines:
            for found in engines.values():
                found.stop()
            engines.clear()

    def remove(self) -> None:
        """End every engine and remove the directory."""
        if self.directory.exists():
            self.end_all()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _make_room(self, engines: dict[str, Running]) -> None:
        idle = sorted((e.used_s, name) for name, e in engines.items() if e.users <= 0)
        for _, name in idle[: max(0, len(idle) - self.idle_max + 1)]:
            engines.pop(name).stop()

    @contextlib.contextmanager
    def _engines(self) -> Iterator[dict[str, Running]]:
        """The engines that run, by key; changes are kept, also when the body raises."""
        with self.lock("engines"):
            file = self.directory / "engines.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            engines = {name: Running.from_json(document) for name, document in known.items()}
            try:
                yield engines
            finally:
                kept = {name: asdict(found) for name, found in engines.items()}
                part = file.with_suffix(".part")
                part.write_text(json.dumps(kept))
                part.rename(file)


def with_root(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `python -m engine...` finds this engine from any directory."""
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
