"""`sparkproof`: the suites' tools outside pytest."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console

from engine.cli.common import Commands, run
from engine.package_format import code_version
from suites.demo import run_demo
from suites.perf.cli_bench import gate_command


@click.group("sparkproof", cls=Commands)
@click.version_option(code_version(), prog_name="sparkproof")
def cli() -> None:
    """Judge an engine: its memory, its numbers, its speed."""


@cli.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Of the random checkpoint.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep checkpoint, package and log in this new directory.",
)
def demo(seed: int, output: Path | None) -> None:
    """Do the main job on a miniature model: checkpoint, export, inspect, serve, judge.

    Exit code 0 if the suites accept the package, that of pytest if they refuse it.
    """
    console, progress = Console(), Console(stderr=True)
    with ExitStack() as stack:
        if output is None:
            output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparkproof-")))
        elif output.exists() and any(output.iterdir()):
            raise click.UsageError(f"--output {output} is not empty")
        output.mkdir(parents=True, exist_ok=True)
        verdict = run_demo(output, seed, console, lambda text: progress.print(text, style="dim"))
    raise SystemExit(verdict)


cli.add_command(gate_command, "gate")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    run(cli, arguments)


if __name__ == "__main__":
    main()
