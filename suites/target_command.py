"""A target that is driven by commands: templates per task, run on hosts by their prefixes."""

from __future__ import annotations

import json
import os
import shlex
import socket
import string
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import UsageError, must_be_one_of
from suites.target_http import NotSupportedError, TargetError, answers, served_model, until
from suites.target_shared import Running, Shared, with_root

if TYPE_CHECKING:
    from suites.target import Export

TASKS: Mapping[str, frozenset[str]] = {
    "export": frozenset({"export"}),
    "join": frozenset(),
    "inspect": frozenset({"inspect"}),
    "check": frozenset({"check"}),
    "run": frozenset({"start"}),
    "stop": frozenset(),
}
"""Every task that a template may be given for, with the capabilities that it brings."""
PLACES = (
    *("checkpoint", "package", "ranks", "rank", "rendezvous", "gpus", "host", "address"),
    *("options", "python"),
)
READY = "ready "
LAST_LINES = 12


@dataclass(frozen=True)
class Host:
    """One host.

    prefix   what comes before a command to run it there; nothing for this host
    quote    hand the command over as one argument, quoted for a shell: what ssh needs
    address  where others reach it
    """

    name: str
    prefix: tuple[str, ...] = ()
    quote: bool = False
    address: str = "127.0.0.1"
    gpus: str = "0"

    def command(self, words: Sequence[str]) -> list[str]:
        """The words of a command, to be run on this host."""
        return [*self.prefix, shlex.join(words)] if self.quote else [*self.prefix, *words]


@dataclass(frozen=True)
class Spec:
    """How an engine is driven.

    hosts            in the order of ranks
    commands         a template (words with {places}) per task of TASKS
    ranks_per_host   more than one where a command starts all ranks by itself
    rendezvous       HOST:PORT for {rendezvous}; port 0 takes a free one of this host each time
    url              where it answers; without, it prints `ready URL` on a line
    """

    name: str
    hosts: tuple[Host, ...]
    commands: Mapping[str, tuple[str, ...]]
    capabilities: tuple[str, ...] = ()
    ranks_per_host: int = 1
    rendezvous: str = ""
    url: str = ""
    ready_s: float = 120.0
    command_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)


def read_spec(path: Path) -> Spec:
    """Read a TOML file. Raises UsageError naming the key, the value and what is accepted."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the target {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    return spec_from(document, str(path))


def spec_from(document: Mapping, where: str) -> Spec:
    """A spec from the values of a TOML document. Raises UsageError."""
    _known(document, [f.name for f in fields(Spec)], where)
    for key, kind in (("name", str), ("hosts", list), ("commands", dict)):
        if not isinstance(document.get(key), kind) or not document[key]:
            found = document.get(key)
            raise UsageError(f"{where}: {key} is {found!r}; a {kind.__name__} is needed")
    hosts = []
    for entry in document["hosts"]:
        _known(entry, [f.name for f in fields(Host)], f"{where}: hosts")
        if not entry.get("name"):
            raise UsageError(f"{where}: a host has no name: {entry}")
        hosts.append(Host(**{**entry, "prefix": tuple(_words(entry.get("prefix", []), where))}))
    commands = {}
    for task, words in document["commands"].items():
        if task not in TASKS:
            raise UsageError(must_be_one_of(f"{where}: command", task, TASKS))
        commands[task] = tuple(_template(words, f"{where}: {task}"))
    given = {**document, "hosts": tuple(hosts), "commands": commands}
    given["capabilities"] = tuple(_words(document.get("capabilities", []), where))
    return Spec(**given)


def _known(document: Mapping, names: Iterable[str], where: str) -> None:
    names = list(names)
    for key in document:
        if key not in names:
            raise UsageError(f"{where}: unknown key {key!r}; accepted: {', '.join(names)}")


def _words(words: object, where: str) -> list[str]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where}: {words!r} where a list of words is needed")
    return words


def _template(words: object, where: str) -> list[str]:
    for word in _words(words, where):
        for _, place, _, _ in string.Formatter().parse(word):
            if place is not None and place not in PLACES:
                raise UsageError(must_be_one_of(f"{where}: place", f"{{{place}}}", PLACES))
    return list(words)


def filled(template: Sequence[str], values: Mapping[str, object], options: Mapping) -> list[str]:
    """The words of a template with its places filled; `{options}` becomes as many as there are."""
    words: list[str] = []
    for word in template:
        if word == "{options}":
            words += option_words(options)
        else:
            words.append(word.format(**values))
    return words


def option_words(options: Mapping[str, object]) -> list[str]:
    """`{"prefill-chunk": 64}` as `--prefill-chunk 64`; True is a flag."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def last_lines(text: str) -> str:
    """The end of a log, for an error."""
    return "\n".join(text.strip().splitlines()[-LAST_LINES:]) or "(no output)"


class CommandTarget:
    """An engine driven by a spec's commands; see `suites.target.Target`."""

    def __init__(self, spec: Spec, model: str | None = None) -> None:
        self.spec = spec
        self.model = model
        self.name = spec.name

    @property
    def capabilities(self) -> frozenset[str]:
        """Those that the file states, and those that its commands bring."""
        brought = [TASKS[task] for task in self.spec.commands]
        return frozenset(self.spec.capabilities).union(*brought)

    def export(self, export: Export, package: Path) -> None:
        """Run `export` on the first host and `join` on the others."""
        hosts = self._hosts(export.ranks)
        commands = []
        for rank, host in enumerate(hosts):
            task = "export" if rank == 0 else "join"
            values = {"checkpoint": export.checkpoint, "package": package, "ranks": export.ranks}
            commands.append((host, task, values | {"rank": rank}, export.options))
        self._run_together(commands)

    def inspect(self, package: Path) -> Mapping:
        """The document that `inspect` prints."""
        return self._printed("inspect", package, (0,))

    def check(self, package: Path) -> Mapping:
        """The findings that `check` prints; exit code 1 says that there are some."""
        return self._printed("check", package, (0, 1))

    def start(
        self, package: Path, options: Mapping[str, object], shared: Shared, logs: Path
    ) -> Running:
        """Run `run` on every host and wait until the first answers."""
        guards, files = [], []
        meet = self._rendezvous()
        try:
            for rank, host in enumerate(self.spec.hosts):
                values = {"package": package, "ranks": len(self.spec.hosts), "rank": rank}
                values["rendezvous"] = meet
                words = self._filled("run", host, values, options)
                log = logs.with_name(f"{logs.name}-{time.time_ns()}.{rank}.log")
                files.append(log)
                guards.append(shared.guard(words, self._environ(), log))
            running = Running("", tuple(guards), tuple(map(str, files)))
            url = self._await(running, files[0])
        except BaseException:
            Running("", tuple(guards), ()).stop()
            raise
        return Running(url, running.guards, running.logs, {"model": served_model(url, self.model)})

    def stop(self, running: Running) -> None:
        """End the commands, and run `stop` on every host where there is one."""
        running.stop()
        if "stop" in self.spec.commands:
            self._run_together([(host, "stop", {}, {}) for host in self.spec.hosts])

    def _hosts(self, ranks: int) -> Sequence[Host]:
        have = len(self.spec.hosts) * self.spec.ranks_per_host
        if ranks > have:
            raise NotSupportedError("export", f"{self.name} has {have} hosts, {ranks} are needed")
        return self.spec.hosts if self.spec.ranks_per_host > 1 else self.spec.hosts[:ranks]

    def _filled(self, task: str, host: Host, values: Mapping, options: Mapping) -> list[str]:
        if task not in self.spec.commands:
            raise NotSupportedError(task, f"{self.name} has no command for {task}")
        known = {"host": host.name, "address": host.address, "gpus": host.gpus}
        known |= {"python": sys.executable, "rendezvous": ""} | values
        return host.command(filled(self.spec.commands[task], known, options))

    def _rendezvous(self) -> str:
        host, _, port = self.spec.rendezvous.rpartition(":")
        if port != "0":
            return self.spec.rendezvous
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"

    def _environ(self) -> dict[str, str]:
        return with_root({**os.environ, **self.spec.environment})

    def _run_together(self, commands: Sequence[tuple[Host, str, Mapping, Mapping]]) -> list[str]:
        """Run commands side by side; what each printed. Raises TargetError if one fails."""
        meet = self._rendezvous()
        with tempfile.TemporaryDirectory() as logs:
            running = []
            try:
                for number, (host, task, values, options) in enumerate(commands):
                    words = self._filled(task, host, {"rendezvous": meet} | values, options)
                    output, log = (Path(logs) / f"{number}.{kind}" for kind in ("out", "log"))
                    running.append((words, self._child(words, output, log), output, log))
                return [self._finished(*entry) for entry in running]
            finally:
                for _, process, _, _ in running:
                    if process.poll() is None:
                        process.terminate()
                    process.wait()

    def _child(self, words: Sequence[str], output: Path, log: Path) -> subprocess.Popen:
        with output.open("wb") as out, log.open("wb") as errors:
            try:
                return subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=self._environ()
                )
            except OSError as error:
                raise TargetError(f"cannot run {words[0]}: {error.strerror}") from error

    def _finished(
        self,
        words: Sequence[str],
        process: subprocess.Popen,
        output: Path,
        log: Path,
        accepted: Sequence[int] = (0,),
    ) -> str:
        try:
            code = process.wait(self.spec.command_s)
        except subprocess.TimeoutExpired as error:
            raise TargetError(
                f"{shlex.join(words)} did not end within {self.spec.command_s:g} s"
            ) from error
        if code not in accepted:
            said = last_lines(log.read_text(errors="replace") + output.read_text(errors="replace"))
            raise TargetError(f"{shlex.join(words)} ended with {code}:\n{said}")
        return output.read_text()

    def _printed(self, task: str, package: Path, accepted: Sequence[int]) -> Mapping:
        host = self.spec.hosts[0]
        words = self._filled(task, host, {"package": package}, {})
        with tempfile.TemporaryDirectory() as logs:
            output, log = Path(logs) / "out", Path(logs) / "log"
            text = self._finished(words, self._child(words, output, log), output, log, accepted)
        try:
            return json.loads(text)
        except ValueError as error:
            raise TargetError(f"{shlex.join(words)} printed no JSON: {text[:200]!r}") from error

    def _await(self, running: Running, first_log: Path) -> str:
        """The URL, once it answers. Raises TargetError if a command ends, or after `ready_s`."""

        def alive() -> None:
            for guard, log in zip(running.guards, running.logs, strict=True):
                if not guard.is_running:
                    raise TargetError(f"ended before it was ready:\n{_tail(Path(log))}")

        found: list[str] = []

        def ready() -> bool:
            found[:] = [self.spec.url] if self.spec.url else _ready_urls(first_log)
            return bool(found) and (not self.spec.url or answers(found[0]))

        if not until(ready, self.spec.ready_s, alive):
            logs = "\n".join(_tail(Path(log)) for log in running.logs)
            raise TargetError(f"not ready after {self.spec.ready_s:g} s:\n{logs}")
        return found[0]


def _ready_urls(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line.removeprefix(READY).strip() for line in lines if line.startswith(READY)]


def _tail(log: Path) -> str:
    return f"{log.name}:\n{last_lines(log.read_text(errors='replace'))}"
