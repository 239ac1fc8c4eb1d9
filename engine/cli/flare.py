"""`flare`: what a package or a map holds, and serving a package over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import click

from engine.cli.common import Commands, exit_codes_help, run
from engine.cli.inspect import inspect
from engine.cli.serve import run as run_command
from engine.package_format import code_version


@click.group("flare", cls=Commands, epilog=exit_codes_help())
@click.version_option(code_version(), prog_name="flare")
def cli() -> None:
    """Inspect packages and memory maps, and serve a package."""


cli.add_command(inspect)
cli.add_command(run_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    run(cli, arguments)


if __name__ == "__main__":
    main()
