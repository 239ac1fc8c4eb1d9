"""`flare run`: one rank of a server, or with --local all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from engine.cli.common import Grace, Size, exit_codes_help
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
)
from engine.errors import PackageError, PeerLostError, UsageError
from engine.hostmem import check_floor, read_host_memory
from engine.launch import LocalRanks, bind_to_parent, share_threads
from engine.mapping import digests_over_ranks
from engine.meeting import ends_with
from engine.model import build_graphs
from engine.package import Package, check_graphs, locate, open_package
from engine.package_format import PackageHeader, code_version, file_name, read_header
from engine.rendezvous import Meeting, meet
from engine.server import ServeOptions, Service
from engine.start import HostTerms, agree_on_pages, host_id, plan_cache

STUCK_GRACE_S = 8.0
"""How long a rank may take to end by itself after another is lost."""
_DEFAULTS = ServeOptions()


class KvLimit(click.ParamType):
    """`memory`, or a size."""

    name = "memory|size"

    def convert(self, value, param, ctx) -> int | str:
        """Bytes, or `memory` for all that memory allows."""
        return value if value == "memory" else Size().convert(value, param, ctx)


@dataclass(frozen=True)
class RunOptions:
    """What was asked for."""

    package: Path
    rank: int
    gpus: str
    kv_cache_limit: int | str
    scheduler_policy: str
    mtp_draft_tokens: int | None
    prefix_cache_memory: int
    prefix_cache_disk: Path | None
    prefix_cache_disk_limit: int
    host_memory_floor: int | None
    host: str
    port: int
    model_name: str | None
    threads: int | None
    api_key_file: Path | None
    drain_s: float
    unverified: bool

    @property
    def compared(self) -> dict[str, object]:
        """What must be equal on all ranks, by its name on the command line."""
        return {
            "kv-cache-limit": self.kv_cache_limit,
            "scheduler-policy": self.scheduler_policy,
            "mtp-draft-tokens": self.mtp_draft_tokens,
            "prefix-cache-memory": self.prefix_cache_memory,
            "prefix-cache-disk-limit": self.prefix_cache_disk_limit,
            "host-memory-floor": self.host_memory_floor,
            "unverified": self.unverified,
        }

    def limit_bytes(self) -> int | None:
        """The cache size that was asked for, if one was."""
        return self.kv_cache_limit if isinstance(self.kv_cache_limit, int) else None


def start_options(options: RunOptions, header: PackageHeader) -> dict[str, object]:
    """Everything that the ranks compare when they meet."""
    recipe = header.manifest.recipe.identity
    return {
        "command": "run",
        **options.compared,
        **{f"recipe.{name}": value for name, value in recipe.items()},
        "package": header.package_hash,
        "code_version": code_version(),
    }


@click.command(epilog=exit_codes_help())
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--rank", type=int, default=0, show_default=True, help="Number of this rank.")
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
@click.option("--unverified", is_flag=True, help="Do not hash the package's contents.")
@meeting_options
@click.pass_obj
def run(
    grace: Grace,
    rendezvous: str | None,
    local: bool,
    rendezvous_timeout_s: float,
    secret_file: Path | None,
    parent_pid: int | None,
    **given,
) -> None:
    """Serve a package: rank 0 answers HTTP, every other rank is started with its --rank.

    Rank 0 prints one line, `ready http://HOST:PORT`, on standard output when it answers.
    """
    if parent_pid is not None:
        bind_to_parent(parent_pid)
    options = RunOptions(**given)
    header = read_own_header(options.package, options.rank)
    ranks = header.manifest.recipe.ranks
    check_device(options.gpus, header)
    if local and options.rank:
        raise UsageError(f"--local starts all ranks; --rank is {options.rank}, 0 is accepted")
    check_rendezvous(rendezvous, ranks, local)
    # Before the libraries that read them are loaded.
    os.environ.update(share_threads(ranks if local or parent_pid is not None else 1))
    address = rendezvous or free_address()
    secret = find_secret(secret_file, rendezvous, local)
    if options.rank == 0:
        grace.seconds += options.drain_s
    others = followers(options, ranks, address, secret) if local else LocalRanks({}, {})
    with Journal(options.rank) as journal, ExitStack() as stack:
        journal.enter("start", package=str(options.package), package_hash=header.package_hash)
        floor_bytes = options.host_memory_floor
        if floor_bytes is None:
            floor_bytes = header.manifest.recipe.host_memory_floor_bytes
        check_floor(read_host_memory().available_bytes, floor_bytes, "before the start")
        stack.enter_context(others)

        def progress(phase: str, done: int, total: int) -> None:
            others.check()
            journal.progress(phase, done, total)

        offered = start_options(options, header)
        meeting = stack.enter_context(
            meet(options.rank, ranks, address, offered, secret, rendezvous_timeout_s, progress)
        )
        stack.enter_context(ends_with(meeting, _cut_off, STUCK_GRACE_S))
        run_rank(options, meeting, journal, floor_bytes)
        meeting.close()
        others.wait(STUCK_GRACE_S)


def _cut_off(code: int) -> None:
    print("error: still busy long after a rank was lost; ending", file=sys.stderr, flush=True)
    os._exit(code)


def read_own_header(package: Path, rank: int) -> PackageHeader:
    """The head of this rank's file. Raises PackageError, also for a rank it does not have."""
    directory = locate(package)
    file = directory / file_name(rank)
    if rank < 0 or not file.exists():
        held = ", ".join(sorted(p.name for p in directory.glob("*.safetensors"))) or "none"
        raise PackageError(f"{file} expected for rank {rank}; files here: {held}")
    return read_header(file)


def check_device(gpus: str, header: PackageHeader) -> None:
    """Refuse to run a package on another kind of device than it was exported for."""
    made_for = header.manifest.recipe.device
    if device_of(gpus) != made_for:
        wanted = "cpu" if made_for == "cpu" else "the number of a GPU"
        raise UsageError(
            f"--gpus is {gpus!r}, but {header.path} was exported for {made_for}; accepted: {wanted}"
        )


def followers(options: RunOptions, ranks: int, address: str, secret: str) -> LocalRanks:
    """The other ranks of --local, with the same options."""
    shared = ["--rendezvous", address, "--gpus", options.gpus, "--parent", str(os.getpid())]
    for name, value in options.compared.items():
        if value is True:
            shared.append(f"--{name}")
        elif value not in (None, False):
            shared += [f"--{name}", str(value)]
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


def run_rank(options: RunOptions, meeting: Meeting, journal: Journal, floor_bytes: int) -> None:
    """Bring one rank up and keep it running until it is told to end."""
    from engine.core import LeadCore, follow
    from engine.mesh import build_mesh
    from engine.residence import build_rank, fold_of, rank_map_of

    journal.enter("communication")
    mesh = build_mesh(meeting)
    package = open_package(
        options.package,
        options.rank,
        verify=not options.unverified,
        on_read=True,
        progress=journal.part("verify"),
    )
    with package:
        graphs = own_graphs(package)
        fixed_bytes = rank_map_of(package).fixed_bytes
        pages = cache_pages(options, package, meeting, journal, fixed_bytes, floor_bytes)
        journal.enter("load", fixed_mib=fixed_bytes // 2**20)
        threads = options.threads or int(os.environ["OMP_NUM_THREADS"])
        model = build_rank(package, graphs, pages, mesh, threads, journal.progress)
        if options.rank:
            journal.enter("follow")
            follow(model, mesh)
            return
        core = LeadCore(model, mesh, fold_of(package))
        try:
            journal.enter("warm up")
            core.warm_up()
            serve_core(options, core, package, meeting, journal)
        finally:
            core.close()


def own_graphs(package: Package):
    """This rank's graphs, after a look that the package was made for the same ones."""
    manifest = package.manifest
    of_all = [
        build_graphs(manifest.config, manifest.recipe, manifest.deals, rank)
        for rank in range(manifest.recipe.ranks)
    ]
    check_graphs(package, digests_over_ranks(of_all))
    return of_all[package.rank]


def cache_pages(
    options: RunOptions,
    package: Package,
    meeting: Meeting,
    journal: Journal,
    fixed_bytes: int,
    floor_bytes: int,
) -> int:
    """Size the KV cache with all ranks, and say how."""
    manifest = package.manifest
    journal.enter("cache")
    available = read_host_memory().available_bytes
    own = HostTerms(options.rank, available, fixed_bytes, host_id())
    pages, found = agree_on_pages(
        meeting,
        own,
        lambda terms: plan_cache(
            terms,
            floor_bytes,
            manifest.memory_map["kv"],
            manifest.config,
            manifest.recipe,
            options.limit_bytes(),
        ),
    )
    if found is not None:
        found.log(journal.log)
    return pages


def serve_core(
    options: RunOptions, core, package: Package, meeting: Meeting, journal: Journal
) -> None:
    """Answer HTTP until told to stop or a rank is gone; then raise PeerLostError."""
    directory = locate(options.package)
    tokenizer, chat = directory / "tokenizer.json", directory / "chat_format.json"
    service = Service(
        core,
        package.manifest.config,
        package.manifest.recipe,
        host=options.host,
        port=options.port,
        model_name=options.model_name or directory.resolve().name,
        tokenizer_path=tokenizer if tokenizer.exists() else None,
        options=ServeOptions(
            scheduler_policy=options.scheduler_policy,
            draft_tokens=options.mtp_draft_tokens,
            package_hash=package.package_hash,
            prefix_cache_memory_bytes=options.prefix_cache_memory,
            prefix_cache_disk=options.prefix_cache_disk,
            prefix_cache_disk_limit_bytes=options.prefix_cache_disk_limit,
            chat_format=chat if chat.exists() else None,
            api_key=_api_key(options.api_key_file),
            drain_seconds_max=options.drain_s,
        ),
    )

    def gone(error: PeerLostError) -> None:
        journal.log("a rank is gone", reason=str(error))
        service.stop()

    meeting.on_lost(gone)
    journal.enter("serve")

    def ready(url: str) -> None:
        journal.log("ready", url=url, tokens=core.pages * core.page_tokens)
        print(f"ready {url}", flush=True)

    service.run(ready)
    meeting.check()


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the key {file}: {error.strerror}") from error
    if not key:
        raise UsageError(f"{file} is empty; it must hold the key")
    return key
