"""What `flare run` was asked for, and what of it the ranks must agree on."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from engine.cli.options import device_of
from engine.errors import UsageError
from engine.hostmem import check_floor, read_host_memory
from engine.package import locate
from engine.package_format import PackageHeader, code_version, file_name, read_header
from engine.recipe import Recipe
from engine.rendezvous import ANY


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
    package_cache: Path | None
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

    @property
    def directory(self) -> Path:
        """Where this rank's file lies, or will lie once rank 0 has sent it."""
        here = self.package.parent if self.package.name == file_name(0) else self.package
        if self.rank == 0 or (here / file_name(self.rank)).exists():
            return here
        return self.package_cache or here

    def limit_bytes(self) -> int | None:
        """The cache size that was asked for, if one was."""
        return self.kv_cache_limit if isinstance(self.kv_cache_limit, int) else None


def start_options(options: RunOptions, header: PackageHeader | None) -> dict[str, object]:
    """Everything that the ranks compare when they meet.

    A rank that has no package yet takes the package, and its recipe, that rank 0 has.
    """
    facts: dict[str, object] = {"package": ANY}
    facts |= {f"recipe.{name}": ANY for name in Recipe().identity}
    if header is not None:
        recipe = header.manifest.recipe.identity
        facts = {"package": header.package_hash}
        facts |= {f"recipe.{name}": value for name, value in recipe.items()}
    return {"command": "run", **options.compared, **facts, "code_version": code_version()}


def number_of_ranks(options: RunOptions, header: PackageHeader | None, given: int | None) -> int:
    """From the package, or from --ranks where it is not here yet; both must agree."""
    if header is None:
        if given is None:
            raise UsageError(
                f"{options.directory / file_name(options.rank)} is not here yet; --ranks is needed "
                "to get it from rank 0"
            )
        return given
    ranks = header.manifest.recipe.ranks
    if given not in (None, ranks):
        raise UsageError(f"--ranks is {given}; {header.path} was exported for {ranks}")
    if options.rank >= ranks:
        raise UsageError(f"--rank is {options.rank}; accepted: 0 to {ranks - 1}")
    return ranks


def floor_of(options: RunOptions, header: PackageHeader) -> int:
    """The host-memory floor: what was asked for, else the recipe's."""
    if options.host_memory_floor is not None:
        return options.host_memory_floor
    return header.manifest.recipe.host_memory_floor_bytes


def check_start_floor(options: RunOptions, header: PackageHeader | None) -> None:
    """Refuse to start on a host that is short of memory already."""
    if header is not None:
        available = read_host_memory().available_bytes
        check_floor(available, floor_of(options, header), "before the start")


def read_own_header(options: RunOptions) -> PackageHeader | None:
    """The head of this rank's file, None for another rank whose file rank 0 has to send.

    Raises PackageError for a file that is there and damaged, and if rank 0 has none.
    """
    if options.rank < 0:
        raise UsageError(f"--rank is {options.rank}; accepted: 0 and up")
    if options.rank == 0:
        return read_header(locate(options.package) / file_name(0))
    file = options.directory / file_name(options.rank)
    return read_header(file) if file.exists() else None


def check_service(options: RunOptions, header: PackageHeader) -> None:
    """Refuse now what the server would refuse after the weights are loaded.

    Raises UsageError for drafts that the package has not, a key that cannot be read, and an
    address that is not this host's or in use.
    """
    exported = header.manifest.recipe.mtp_draft_tokens
    wanted = options.mtp_draft_tokens
    if wanted is not None and not 0 <= wanted <= exported:
        raise UsageError(f"--mtp-draft-tokens is {wanted}; accepted: 0 to {exported}")
    api_key(options.api_key_file)
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((options.host, options.port), family=family).close()
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise UsageError(
            f"cannot listen on {options.host} port {options.port}: {why}; "
            "a free port is needed (0 takes any)"
        ) from error


def api_key(file: Path | None) -> str | None:
    """The key that clients must send, if there is one."""
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the key {file}: {error.strerror}") from error
    if not key:
        raise UsageError(f"{file} is empty; it must hold the key")
    return key


def check_device(gpus: str, header: PackageHeader) -> None:
    """Refuse to run a package on another kind of device than it was exported for."""
    made_for = header.manifest.recipe.device
    if device_of(gpus) != made_for:
        wanted = "cpu" if made_for == "cpu" else "the number of a GPU"
        raise UsageError(
            f"--gpus is {gpus!r}, but {header.path} was exported for {made_for}; accepted: {wanted}"
        )
