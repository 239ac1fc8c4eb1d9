"""What is judged: an engine, reached only as a user reaches it: commands, package files, HTTP.

Three kinds. The reference engine runs as processes of this host; a command target is any engine,
described by command templates per host in a TOML file; an endpoint is the URL of a server that
somebody else has started. What a target cannot do is reported as not supported, never as passed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from engine.errors import UsageError, must_be_one_of
from suites.target_command import CommandTarget, Host, Spec, read_spec
from suites.target_http import NotSupportedError, Server, TargetError, served_model
from suites.target_shared import Running, Shared

__all__ = [
    "CAPABILITIES",
    "EndpointTarget",
    "Engines",
    "Export",
    "NotSupportedError",
    "Server",
    "Target",
    "TargetError",
    "open_target",
    "reference_spec",
    "require",
]

CAPABILITIES: Mapping[str, str] = {
    "plan": "is planned by the engine of this repository, without weights",
    "export": "makes a package from a checkpoint",
    "scratch-strategies": "exports with --scratch none, pools and planned",
    "inspect": "tells a package's memory map",
    "check": "judges a package's map against the graphs it was planned for",
    "start": "is started and stopped by the suites",
    "token-ids": "takes prompts as token ids",
    "top-20": "gives the twenty best log-probabilities",
    "exact-logprobs": "prints log-probabilities so that the bits of fp32 survive",
    "metrics": "counts its steps on /metrics",
    "canonical-numerics": "computes the bits of the specification's canonical numerics",
}
KINDS = ("reference", "command:FILE", "openai:URL")


@dataclass(frozen=True)
class Export:
    """One package that is wanted.

    options  by their words on the command line, without dashes: {"prefill-chunk": 64}
    """

    checkpoint: Path
    ranks: int = 3
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> list:
        """Equal for equal packages."""
        return [str(self.checkpoint), self.ranks, sorted(self.options.items())]


class Target(Protocol):
    """An engine. Methods raise NotSupportedError for what it cannot do, TargetError on failure."""

    name: str

    @property
    def capabilities(self) -> frozenset[str]:
        """What it can do, of CAPABILITIES."""

    def export(self, export: Export, package: Path) -> None:
        """Make a package in the directory `package`."""

    def inspect(self, package: Path) -> Mapping:
        """The package's `memmap/1` document."""

    def check(self, package: Path) -> Mapping:
        """Findings about the package's map, as `flare inspect --check --json` prints them."""

    def start(
        self, package: Path, options: Mapping[str, object], shared: Shared, logs: Path
    ) -> Running:
        """Start it on a package and wait until it answers; its processes end with the run."""

    def stop(self, running: Running) -> None:
        """End what `start` has started."""


def require(target: Target, *capabilities: str) -> None:
    """Raise NotSupportedError unless the target can do all of this."""
    for capability in capabilities:
        assert capability in CAPABILITIES, f"unknown capability {capability!r}"
        if capability not in target.capabilities:
            raise NotSupportedError(capability, f"{target.name}: {CAPABILITIES[capability]}: no")


def open_target(text: str, model: str | None = None) -> Target:
    """The target of `--target TEXT`. Raises UsageError with what would be accepted."""
    kind, _, rest = text.partition(":")
    if text == "reference":
        return CommandTarget(reference_spec(), model)
    if kind == "command" and rest:
        spec = read_spec(Path(rest))
        unknown = set(spec.capabilities) - set(CAPABILITIES)
        if unknown:
            raise UsageError(must_be_one_of(f"{rest}: capability", unknown.pop(), CAPABILITIES))
        return CommandTarget(spec, model)
    if kind == "openai" and rest.startswith(("http://", "https://")):
        return EndpointTarget(rest.rstrip("/").removesuffix("/v1"), model)
    raise UsageError(must_be_one_of("--target", text, KINDS))


def reference_spec(python: str = sys.executable) -> Spec:
    """The engine of this repository, all ranks on this host's CPU.

    The first start on a machine compiles the kernels, hence the long wait.
    """
    ignition = [python, "-m", "engine.cli.ignition"]
    flare = [python, "-m", "engine.cli.flare"]
    # The miniatures need little, and a default floor of 8 GiB would keep small machines out.
    local = ["--gpus", "cpu", "--local", "--host-memory-floor", "256MiB"]
    return Spec(
        name="reference engine",
        hosts=(Host("local"),),
        capabilities=tuple(CAPABILITIES),
        commands={
            "export": tuple(
                [*ignition, "export", "{checkpoint}", "--ranks", "{ranks}", *local]
                + ["-o", "{package}", "{options}"]
            ),
            "inspect": tuple([*flare, "inspect", "--memory-map", "--json", "{package}"]),
            "check": tuple([*flare, "inspect", "--check", "--json", "{package}"]),
            "run": tuple(
                [*flare, "run", "{package}", *local, "--port", "0", "--drain", "2", "{options}"]
            ),
        },
        ranks_per_host=8,
        ready_s=900.0,
    )


@dataclass(frozen=True)
class EndpointTarget:
    """A server that is already there: nothing can be made, looked into or restarted."""

    url: str
    model: str | None = None

    @property
    def name(self) -> str:
        """For reports."""
        return f"endpoint {self.url}"

    @cached_property
    def server(self) -> Server:
        """The server, once it has said what it serves."""
        return Server(self.url, served_model(self.url, self.model))

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Found out by asking: what the server answers to, it can do."""
        probes = {
            "token-ids": lambda: self.server.complete([1], logprobs=None),
            "top-20": lambda: self.server.complete("a", logprobs=20),
            "metrics": self.server.metrics,
        }
        found = set()
        for name, probe in probes.items():
            with contextlib.suppress(TargetError, NotSupportedError):
                probe()
                found.add(name)
        # Whether bits survive is seen on the values themselves, by the check that compares them.
        return frozenset(found | {"exact-logprobs"} if "top-20" in found else found)

    def export(self, export: Export, package: Path) -> None:
        """Not supported."""
        require(self, "export")

    def inspect(self, package: Path) -> Mapping:
        """Not supported."""
        require(self, "inspect")
        raise AssertionError("an endpoint has no package")

    def check(self, package: Path) -> Mapping:
        """Not supported."""
        require(self, "check")
        raise AssertionError("an endpoint has no package")

    def start(
        self, package: Path, options: Mapping[str, object], shared: Shared, logs: Path
    ) -> Running:
        """Not supported."""
        require(self, "start")
        raise AssertionError("an endpoint is not started")

    def stop(self, running: Running) -> None:
        """Not supported: it was not started here."""
        require(self, "start")


@dataclass(frozen=True)
class Engines:
    """A target with what the run shares: packages and running engines, each made once."""

    target: Target
    shared: Shared

    def package(self, export: Export) -> Path:
        """The directory of a package, made by the first test that asks for it."""
        require(self.target, "export")
        return self.shared.once(
            "packages", export.key, lambda path: self.target.export(export, path)
        )

    @contextlib.contextmanager
    def serve(
        self, package: Path, options: Iterable[tuple[str, object]] = (), instance: str = "first"
    ) -> Iterator[Server]:
        """A server of a package, shared by all who ask for it with the same options.

        instance  another name for another start of the same package
        """
        require(self.target, "start")
        given = dict(options)
        key = [str(package), sorted(given.items()), instance]

        def start() -> Running:
            logs = self.shared.directory / "logs" / f"{package.name}-{instance}"
            return self.target.start(package, given, self.shared, logs)

        running = self.shared.acquire(key, start)
        try:
            yield Server(running.url, str(running.facts["model"]))
        finally:
            self.shared.release(key)

    @contextlib.contextmanager
    def any_server(self, export: Export) -> Iterator[Server]:
        """The server of an endpoint, which is simply there, or one of a package made for it."""
        if isinstance(self.target, EndpointTarget):
            yield self.target.server
            return
        with self.serve(self.package(export)) as server:
            yield server


