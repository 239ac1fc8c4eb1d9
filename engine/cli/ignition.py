"""`ignition`: from a checkpoint to packages, from a configuration to a memory map, and packing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from engine.cli import tables
from engine.cli.common import Commands, exit_codes_help, run
from engine.cli.console import Journal
from engine.cli.options import (
    SECRET_VARIABLE,
    check_rendezvous,
    device_of,
    find_secret,
    free_address,
    gpus_option,
    local_option,
    meeting_options,
    recipe_options,
)
from engine.config import read_config
from engine.errors import UsageError
from engine.export import (
    Exported,
    export_options,
    export_package,
    find_checkpoint,
    join_export,
    refuse_existing,
)
from engine.launch import GRACE_S, LocalRanks, bind_to_parent, share_threads
from engine.mapping import plan_model
from engine.package_format import code_version
from engine.packing.csvio import read_csv, write_csv
from engine.packing.solve import pack
from engine.recipe import Recipe
from engine.rendezvous import Meeting, meet
from engine.units import format_size


@click.group("ignition", cls=Commands, epilog=exit_codes_help())
@click.version_option(code_version(), prog_name="ignition")
def cli() -> None:
    """Make packages from a checkpoint of DeepSeek V4.1 Flash, or plan them without weights."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    run(cli, arguments)


def default_output(checkpoint: Path, ranks: int) -> Path:
    """Where a package goes when nothing is said: NAME-tpN in the current directory."""
    return Path(f"{checkpoint.resolve().name}-tp{ranks}")


@cli.command(epilog=exit_codes_help())
@click.argument("name_or_dir")
@recipe_options
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the ranks meet; rank 0 listens.")
@local_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory of the package.")
@click.option("--overwrite", is_flag=True, help="Replace a package that is there.")
@meeting_options
def export(
    name_or_dir: str,
    recipe: Recipe,
    rendezvous: str | None,
    local: bool,
    output: Path | None,
    overwrite: bool,
    rendezvous_timeout_s: float,
    secret_file: Path | None,
    parent_pid: int | None,
) -> None:
    """Export a checkpoint (a directory, or ORG/NAME in the local cache) as rank 0.

    Every other rank is started with `ignition join`, or all of them here with --local.
    """
    check_rendezvous(rendezvous, recipe.ranks, local)
    checkpoint = find_checkpoint(name_or_dir)
    output = output or default_output(checkpoint, recipe.ranks)
    refuse_existing(output, overwrite)
    address = rendezvous or free_address()
    secret = find_secret(secret_file, rendezvous, local)
    with Journal() as journal, ExitStack() as stack:
        journal.enter("export", checkpoint=str(checkpoint), output=str(output))

        others = _joiners(recipe, address, secret) if local else LocalRanks({}, {})

        def come_together() -> Meeting:
            stack.enter_context(others)
            return _meet_first(recipe, address, secret, rendezvous_timeout_s, journal, others)

        exported = export_package(checkpoint, recipe, output, come_together, journal.progress)
        others.wait(GRACE_S)
    _print_export(exported)


def _joiners(recipe: Recipe, address: str, secret: str) -> LocalRanks:
    gpus = "cpu" if recipe.device == "cpu" else "0"
    shared = ["--ranks", str(recipe.ranks), "--gpu", gpus, "--parent", str(os.getpid())]
    commands = {
        rank: ["engine.cli.ignition", "join", address, "--rank", str(rank), *shared]
        for rank in range(1, recipe.ranks)
    }
    environ = {**os.environ, **share_threads(recipe.ranks), SECRET_VARIABLE: secret}
    return LocalRanks(commands, environ)


def _meet_first(
    recipe: Recipe,
    address: str,
    secret: str,
    timeout_s: float,
    journal: Journal,
    others: LocalRanks,
) -> Meeting:
    """Meet as rank 0; a local rank that ends early is reported at once, with its reason."""

    def progress(phase: str, done: int, total: int) -> None:
        others.check()
        journal.progress(phase, done, total)

    options = export_options(recipe.device, recipe.ranks, code_version())
    return meet(0, recipe.ranks, address, options, secret, timeout_s, progress)


def _print_export(exported: Exported) -> None:
    out = tables.console()
    out.print(tables.inventory(exported.planned.memory_map))
    for line in tables.kv_lines(exported.planned.memory_map):
        out.print(line)
    for entry in exported.manifest.left_out:
        out.print(f"left out: {entry['count']} tensors {entry['names']}: {entry['reason']}")
    for rank, file in exported.files.items():
        out.print(f"rank {rank}: {file}")
    out.print(f"package {exported.package_hash}")


@cli.command(epilog=exit_codes_help())
@click.argument("rendezvous", metavar="HOST:PORT")
@click.option("--rank", type=int, required=True, help="Number of this rank, from 1.")
@click.option("--ranks", type=int, required=True, help="Number of ranks.")
@gpus_option
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Where this host has the checkpoint, if not where rank 0 has it.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Where this rank's file goes."
)
@meeting_options
def join(
    rendezvous: str,
    rank: int,
    ranks: int,
    gpus: str,
    checkpoint: Path | None,
    output: Path | None,
    rendezvous_timeout_s: float,
    secret_file: Path | None,
    parent_pid: int | None,
) -> None:
    """Take part in an export as rank 1 or higher; rank 0 says what to do."""
    if parent_pid is not None:
        bind_to_parent(parent_pid)
    if rank == 0:
        raise UsageError("--rank is 0; rank 0 is the one that runs `ignition export`")
    secret = find_secret(secret_file, rendezvous, local=False)
    options = export_options(device_of(gpus), ranks, code_version())
    with Journal(rank) as journal:
        journal.enter("join", rendezvous=rendezvous)
        meeting = meet(
            rank, ranks, rendezvous, options, secret, rendezvous_timeout_s, journal.progress
        )
        with meeting:
            joined = join_export(meeting, journal.progress, checkpoint, output)
        if joined.file is None:
            journal.log("left to rank 0", reason=joined.reason)
        else:
            journal.log("written", file=str(joined.file))


@cli.command(epilog=exit_codes_help())
@click.argument("name_or_dir")
@recipe_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the map (JSON).")
@click.option("--json", "as_json", is_flag=True, help="Print the map instead of the tables.")
def plan(name_or_dir: str, recipe: Recipe, output: Path | None, as_json: bool) -> None:
    """Plan the memory of every rank from a configuration alone: no weights, any size.

    NAME_OR_DIR is a checkpoint, a directory with a config.json, or the file itself.
    """
    path = Path(name_or_dir)
    config = read_config(path if path.is_file() else find_checkpoint(name_or_dir))
    with Journal() as journal:
        planned = plan_model(config, recipe, journal.progress)
    memory_map = planned.memory_map
    document = json.dumps(memory_map.to_json(), indent=1)
    if output is not None:
        try:
            output.write_text(document + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
    if as_json:
        click.echo(document)
        return
    out = tables.console()
    out.print(tables.inventory(memory_map))
    for line in tables.kv_lines(memory_map):
        out.print(line)
    if output is not None:
        out.print(f"map written to {output}")


def _positive(kind: Callable[[str], float]) -> Callable:
    def check(ctx: click.Context, param: click.Parameter, value):
        if value is not None and value <= 0:
            raise click.BadParameter(f"{value} is not above 0", ctx, param)
        return value

    return check


@cli.command("pack", epilog=exit_codes_help())
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--capacity",
    type=int,
    callback=_positive(int),
    help="Bytes to fit into; without it, as low as the budget finds.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="CSV with the offsets.")
@click.option(
    "--deadline",
    "deadline_s",
    type=float,
    callback=_positive(float),
    metavar="SECONDS",
    help="Start no further search after this; results repeat only where it is not reached.",
)
@click.option("--nodes", "nodes_max", type=int, callback=_positive(int), help="Choices at most.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pack_command(
    file: Path,
    capacity: int | None,
    output: Path | None,
    deadline_s: float | None,
    nodes_max: int | None,
    as_json: bool,
) -> None:
    """Give the buffers of a MiniMalloc CSV (id, lower, upper, size) their offsets."""
    instance, _ = read_csv(file)
    found = pack(instance.buffers, capacity, deadline_s, nodes_max=nodes_max)
    if output is not None:
        try:
            write_csv(output, instance.buffers, found.by_id)
        except OSError as error:
            raise UsageError(f"cannot write {output}: {error.strerror}") from error
    if as_json:
        document = {
            "offsets": dict(found.by_id),
            "peak_bytes": found.peak_bytes,
            "lower_bound_bytes": found.lower_bound_bytes,
            "strategy": found.strategy,
            "counters": dict(found.counters),
        }
        click.echo(json.dumps(document))
        return
    click.echo(
        f"{file}: {len(found.ids)} buffers, peak {found.peak_bytes:,} bytes "
        f"({format_size(found.peak_bytes)}), lower bound {found.lower_bound_bytes:,}, "
        f"ratio {found.ratio:.4f}, by {found.strategy}"
    )


if __name__ == "__main__":
    main()
