"""`flare run`: one rank of a server, or with --local all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import click

from engine.cli.common import Grace, Size, exit_codes_help
from engine.cli.console import Journal
from engine.cli.options import (
    SECRET_VARIABLE,
    check_rendezvous,
    find_secret,
    free_address,
    gpus_option,
    local_option,
    meeting_options,
)
from engine.cli.rank import run_rank
from engine.cli.run_options import (
    RunOptions,
    check_device,
    check_service,
    check_start_floor,
    number_of_ranks,
    read_own_header,
    start_options,
)
from engine.errors import PeerLostError, UsageError
from engine.launch import LocalRanks, bind_to_parent, share_threads
from engine.meeting import ends_with
from engine.rendezvous import meet
from engine.server import ServeOptions

STUCK_GRACE_S = 8.0
"""How long a rank may take to end by itself after another is lost."""
_DEFAULTS = ServeOptions()


class KvLimit(click.ParamType):
    """`memory`, or a size."""

    name = "memory|size"

    def convert(self, value, param, ctx) -> int | str:
        """Bytes, or `memory` for all that memory allows."""
        return value if value == "memory" else Size().convert(value, param, ctx)


@click.command(epilog=exit_codes_help())
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--rank", type=int, default=0, show_default=True, help="Number of this rank.")
@click.option(
    "--ranks", type=int, help="Number of ranks; needed where the package is not here yet."
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the ranks meet; rank 0 listens.")
@gpus_option
@local_option
@click.option(
    "--scheduler-policy",
    type=click.Choice(["throughput", "latency"]),
    default=_DEFAULTS.scheduler_policy,
    show_default=True,
    help="Whom a step serves first.",
)
@click.option(
    "--kv-cache-limit",
    type=KvLimit(),
    default="memory",
    show_default=True,
    help="Size of the KV cache of each rank: granted exactly or refused.",
)
@click.option(
    "--prefix-cache-memory",
    type=Size(),
    default=_DEFAULTS.prefix_cache_memory_bytes,
    show_default=True,
    help="Bytes of finished prefixes kept in the KV cache; 0 for none.",
)
@click.option(
    "--prefix-cache-disk",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for prefixes that outlive the server.",
)
@click.option(
    "--prefix-cache-disk-limit",
    type=Size(),
    default=_DEFAULTS.prefix_cache_disk_limit_bytes,
    show_default=True,
    help="Bytes that directory may hold.",
)
@click.option("--mtp-draft-tokens", type=int, help="Drafts per step, at most the package's.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the server.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port of the server; 0 for any free one.",
)
@click.option("--model-name", help="Name of the model for clients; by default the package's.")
@click.option(
    "--host-memory-floor", type=Size(), help="MemAvailable to leave; by default the recipe's."
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of this rank.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with a key clients must send."
)
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(0, 3600),
    default=_DEFAULTS.drain_seconds_max,
    show_default=True,
    metavar="SECONDS",
    help="What running requests are given after SIGTERM.",
)
@click.option(
    "--package-cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where a rank keeps the file that rank 0 sends it; by default PACKAGE.",
)
@click.option("--unverified", is_flag=True, help="Do not hash the package's contents.")
@meeting_options
@click.pass_obj
def run(
    grace: Grace,
    ranks: int | None,
    rendezvous: str | None,
    local: bool,
    rendezvous_timeout_s: float,
    secret_file: Path | None,
    parent_pid: int | None,
    **given,
) -> None:
    """Serve a package: rank 0 answers HTTP, every other rank is started with its --rank.

    A rank that does not have its file of the package gets it from rank 0. Rank 0 prints one line,
    `ready http://HOST:PORT`, on standard output when it answers.
    """
    if parent_pid is not None:
        bind_to_parent(parent_pid)
    options = RunOptions(**given)
    header = read_own_header(options)
    ranks = number_of_ranks(options, header, ranks)
    if header is not None:
        check_device(options.gpus, header)
    if options.rank == 0:
        assert header is not None, "rank 0 has its package"
        check_service(options, header)
    if local and options.rank:
        raise UsageError(f"--local starts all ranks; --rank is {options.rank}, 0 is accepted")
    check_rendezvous(rendezvous, ranks, local)
    # Before the libraries that read them are loaded.
    os.environ.update(share_threads(ranks if local or parent_pid is not None else 1))
    address = rendezvous or free_address()
    secret = find_secret(secret_file, rendezvous, local)
    if options.rank == 0:
        grace.seconds += options.drain_s
    with Journal(options.rank) as journal, ExitStack() as stack:
        journal.enter("start", package=str(options.package), ranks=ranks)
        check_start_floor(options, header)
        prepare_kernels(options, journal)
        others = followers(options, ranks, address, secret) if local else LocalRanks({}, {})
        stack.enter_context(others)

        def progress(phase: str, done: int, total: int) -> None:
            others.check()
            journal.progress(phase, done, total)

        offered = start_options(options, header)
        meeting = stack.enter_context(
            meet(options.rank, ranks, address, offered, secret, rendezvous_timeout_s, progress)
        )
        stack.enter_context(ends_with(meeting, _cut_off, STUCK_GRACE_S))
        run_rank(options, header, meeting, journal)
        meeting.close()
        others.wait(STUCK_GRACE_S)


def prepare_kernels(options: RunOptions, journal: Journal) -> None:
    """Compile before the ranks meet: none of them then waits for another's compiler."""
    if options.gpus != "cpu":
        return
    from engine.warm import compile_kernels

    compile_kernels(lambda text: journal.log(text))


def _cut_off(error: PeerLostError) -> None:
    print(f"error: {error} (cut off while busy)", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def followers(options: RunOptions, ranks: int, address: str, secret: str) -> LocalRanks:
    """The other ranks of --local, with the same options."""
    shared = ["--rendezvous", address, "--gpus", options.gpus, "--parent", str(os.getpid())]
    shared += ["--ranks", str(ranks)]
    for name, value in options.compared.items():
        if value is True:
            shared.append(f"--{name}")
        elif value not in (None, False):
            shared += [f"--{name}", str(value)]
    if options.package_cache is not None:
        shared += ["--package-cache", str(options.package_cache)]
    if options.threads is not None:
        shared += ["--threads", str(options.threads)]
    head = ["engine.cli.flare", "run", str(options.package)]
    commands = {rank: [*head, "--rank", str(rank), *shared] for rank in range(1, ranks)}
    environ: Mapping[str, str] = {
        **os.environ,
        **share_threads(ranks),
        SECRET_VARIABLE: secret,
    }
    return LocalRanks(commands, environ)
