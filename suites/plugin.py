"""The pytest plugin of the suites: which engine is judged, and how a run is reported.

It reports and refuses; it does not judge.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from engine.errors import UsageError
from suites.target import KINDS, Engines, NotSupportedError, Target, open_target
from suites.target_command import read_spec
from suites.target_plan import mini_export
from suites.target_shared import Shared

NOT_SUPPORTED = "not supported"
SLOWEST_SHOWN = 5
GB10_FILE = "gb10.toml"
GB10_HOSTS = 3
MARKERS = (
    "slow: takes more than some seconds; run with -m slow",
    f"gb10: needs three GB10 hosts described by {GB10_FILE}",
    "cuda: needs a CUDA GPU",
)
_FALSE = ("", "0", "false", "no")
_SHARED = pytest.StashKey[Shared]()


@dataclass(frozen=True)
class Asked:
    """What was said on the command line."""

    target: str
    model: str | None
    package: Path | None
    checkpoint: Path | None
    seed: int


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suites."""
    group = parser.getgroup("sparkproof", "sparkproof: the engine under test")
    group.addoption(
        "--target",
        default="reference",
        metavar="|".join(KINDS),
        help="The engine to judge: the reference engine on this host's CPU, one that the "
        "commands of a TOML file drive, or a server that is already there.",
    )
    group.addoption("--model", help="The model to ask for where a server has several.")
    group.addoption("--package", type=Path, help="Judge this package as well.")
    group.addoption(
        "--checkpoint", type=Path, help="The checkpoint that --package was exported from."
    )
    group.addoption("--seed", type=int, default=0, help="Seed of all that is drawn.")


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, refuse what must not be combined, and show the slowest tests."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not is_worker(config):
        refuse_update(config, os.environ)
        refuse_gb10(config, Path.cwd())
    if config.option.durations is None:
        config.option.durations = SLOWEST_SHOWN


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of xdist, whose controller has looked already."""
    return hasattr(config, "workerinput")


def refuse_update(config: pytest.Config, environ: Mapping[str, str]) -> None:
    """Snapshots are accepted by a person, and by one process at a time."""
    option = config.option
    updates = [
        flag
        for flag, name in (
            ("--snapshot-update", "update_snapshots"),
            ("--snapshot-update-new-only", "update_new_snapshots_only"),
        )
        if getattr(option, name, False)
    ]
    in_ci = environ.get("CI", "").lower() not in _FALSE
    if updates and in_ci:
        raise pytest.UsageError(
            f"{updates[0]} is refused in CI (CI={environ['CI']}): a snapshot is accepted by whoever"
            " has read the difference. Update it on your machine and commit the file."
        )
    if updates and (getattr(option, "numprocesses", None) or getattr(option, "tx", None)):
        raise pytest.UsageError(
            f"{updates[0]} is refused with -n: workers that write side by side lose snapshots. "
            "Run it without -n."
        )
    for flag, name in (
        ("--snapshot-warn-unused", "warn_unused_snapshots"),
        ("--snapshot-disable-unused", "disable_unused_snapshots"),
    ):
        if in_ci and getattr(option, name, False):
            raise pytest.UsageError(f"{flag} is refused in CI: unused snapshots fail the run")


def refuse_gb10(config: pytest.Config, directory: Path) -> None:
    """`-m gb10` without a description of the hosts is a mistake, not a reason to skip."""
    if not selects(config.option.markexpr, "gb10"):
        return
    kind, _, rest = config.option.target.partition(":")
    file = Path(rest) if kind == "command" else directory / GB10_FILE
    if not file.is_file():
        raise pytest.UsageError(
            f"-m gb10 needs {GB10_HOSTS} GB10 hosts, and nothing says which: {file} does not exist "
            "and --target is no command:FILE. The file must hold: name, three [[hosts]] (name, "
            "address, gpus and a prefix such as [\"ssh\", \"spark2\"]), and [commands] export, "
            "join, inspect and run as lists of words."
        )
    try:
        spec = read_spec(file)
    except UsageError as error:
        raise pytest.UsageError(f"-m gb10: {error}") from error
    missing = [task for task in ("export", "inspect", "run") if task not in spec.commands]
    if missing:
        raise pytest.UsageError(f"-m gb10: {file} lacks the commands {', '.join(missing)}")
    if len(spec.hosts) < GB10_HOSTS:
        names = ", ".join(host.name for host in spec.hosts)
        raise pytest.UsageError(
            f"-m gb10: {file} has {len(spec.hosts)} hosts ({names}); {GB10_HOSTS} are needed"
        )
    config.option.target = f"command:{file}"


def selects(expression: str, marker: str) -> bool:
    """Whether a test with this marker alone passes a `-m` expression that mentions it."""
    if marker not in expression:
        return False
    return Expression.compile(expression).evaluate(lambda name, /, **_: name == marker)


# The run's directory ------------------------------------------------------------------------------


def shared_of(config: pytest.Config) -> Shared:
    """What all processes of this run share; the directory is made when first needed."""
    if _SHARED not in config.stash:
        if is_worker(config):
            given = config.workerinput["sparkproof"]
            config.stash[_SHARED] = Shared(Path(given["directory"]), given["owner_pid"])
        else:
            directory = Path(tempfile.mkdtemp(prefix="sparkproof-"))
            config.stash[_SHARED] = Shared(directory, os.getpid())
    return config.stash[_SHARED]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a worker of xdist where the run's directory is, and who ends it."""
    shared = shared_of(node.config)
    node.workerinput["sparkproof"] = {
        "directory": str(shared.directory),
        "owner_pid": shared.owner_pid,
    }


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every engine of the run; also after Ctrl-C."""
    if _SHARED in config.stash and not is_worker(config):
        config.stash[_SHARED].remove()


# Outcomes -----------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A check that the target cannot be put to is told apart from one that was passed over."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(NotSupportedError):
        path, line, _ = item.location
        report.outcome = "skipped"
        report.not_supported = str(call.excinfo.value)
        report.longrepr = (path, (line or 0) + 1, f"{NOT_SUPPORTED}: {call.excinfo.value}")
    return report


def pytest_report_teststatus(report) -> tuple | None:
    """Counts under a name of its own."""
    if getattr(report, "not_supported", None) is None:
        return None
    return NOT_SUPPORTED, "N", ("NOT SUPPORTED", {"yellow": True})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which every check was not supported has judged nothing."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or is_worker(session.config):
        return
    judged = any(reporter.stats.get(kind) for kind in ("passed", "failed", "error"))
    if reporter.stats.get(NOT_SUPPORTED) and not judged and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_report_header(config: pytest.Config) -> str:
    """Which engine is judged, and how to draw the same again."""
    asked = asked_of(config)
    words = [f"sparkproof: target {asked.target}"]
    words += [f"package {asked.package}"] if asked.package else []
    return ", ".join([*words, f"seed {asked.seed} (the same again: --seed {asked.seed})"])


def pytest_terminal_summary(terminalreporter) -> None:
    """List what was not supported, with the reason."""
    found = terminalreporter.stats.get(NOT_SUPPORTED, [])
    if found:
        terminalreporter.section(f"{NOT_SUPPORTED} by the target: not checked, not passed")
        for report in found:
            terminalreporter.write_line(f"{report.nodeid}: {report.not_supported}")


# Fixtures -----------------------------------------------------------------------------------------


def asked_of(config: pytest.Config) -> Asked:
    """The options of the suites."""
    option = config.option
    return Asked(option.target, option.model, option.package, option.checkpoint, option.seed)


@pytest.fixture(scope="session")
def asked(pytestconfig: pytest.Config) -> Asked:
    """What was said on the command line."""
    return asked_of(pytestconfig)


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Shared:
    """What all tests of the run share."""
    return shared_of(pytestconfig)


@pytest.fixture(scope="session")
def target(asked: Asked) -> Target:
    """The engine under test."""
    try:
        return open_target(asked.target, asked.model)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def engines(target: Target, shared: Shared) -> Engines:
    """The engine under test with its packages and starts, each made once a run."""
    return Engines(target, shared)


@pytest.fixture(scope="session")
def package(asked: Asked, engines: Engines) -> Path:
    """The package of --package, or the golden miniature at three ranks."""
    return asked.package or engines.package(mini_export(3))


@pytest.fixture
def rng(request: pytest.FixtureRequest, asked: Asked) -> random.Random:
    """Random numbers of a test's own: a function of --seed and the test's name."""
    return random.Random(f"{asked.seed}/{request.node.nodeid}")
