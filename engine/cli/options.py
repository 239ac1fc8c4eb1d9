"""Options that several commands share: the recipe, the way ranks meet, and who they are."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click

from engine.cli.common import Size
from engine.errors import UsageError
from engine.recipe import ACCUMULATIONS, SCRATCH_STRATEGIES, Recipe, read_recipe
from engine.rendezvous import parse_address
from engine.units import format_size

SECRET_VARIABLE = "SPARKPROOF_SECRET"
_DEFAULTS = Recipe()
_LOOPBACK = ("127.", "::1", "localhost")


def _default(name: str) -> str:
    value = getattr(_DEFAULTS, name)
    return format_size(value) if name.endswith("_bytes") else str(value)


def _recipe_option(flag: str, name: str, kind: object, text: str):
    shown = f"{text}  [default: {_default(name)}]"
    return click.option(flag, name, type=kind, default=None, help=shown)


_RECIPE_OPTIONS = (
    _recipe_option("--ranks", "ranks", int, "Number of ranks."),
    _recipe_option("--max-concurrency", "max_concurrency", int, "Sequences at one time."),
    _recipe_option(
        "--mtp-draft-tokens", "mtp_draft_tokens", int, "Drafts per step; 0 leaves the drafts out."
    ),
    _recipe_option("--prefill-chunk", "prefill_chunk", int, "Tokens of one prefill step."),
    _recipe_option(
        "--scratch", "scratch", click.Choice(SCRATCH_STRATEGIES), "How temporaries get bytes."
    ),
    _recipe_option(
        "--accumulation",
        "accumulation",
        click.Choice(ACCUMULATIONS),
        "Inside an op; float32 is for CUDA.",
    ),
    _recipe_option("--kv-page-tokens", "kv_page_tokens", int, "Tokens of a KV page."),
    _recipe_option(
        "--host-memory-floor",
        "host_memory_floor_bytes",
        Size(),
        "MemAvailable that must be there before the work begins.",
    ),
)


def recipe_options(command: Callable) -> Callable:
    """Add the recipe's options; the command gets one argument, `recipe`."""

    @functools.wraps(command)
    def with_recipe(*args, recipe_file: Path | None, gpus: str, **given):
        names = [name for name in Recipe.__dataclass_fields__ if name in given]
        values = {name: given.pop(name) for name in names}
        recipe = build_recipe(recipe_file, gpus, values)
        return command(*args, recipe=recipe, **given)

    wrapped = with_recipe
    for option in reversed(_RECIPE_OPTIONS):
        wrapped = option(wrapped)
    wrapped = click.option(
        "--recipe",
        "recipe_file",
        type=click.Path(path_type=Path),
        help="TOML file with a [recipe] table; options given here win.",
    )(wrapped)
    return gpus_option(wrapped)


def gpus_option(command: Callable) -> Callable:
    """Add --gpus (and the seed's --gpu for it)."""
    return click.option(
        "--gpus",
        "--gpu",
        "gpus",
        default="0",
        show_default=True,
        metavar="N|cpu",
        help="Number of this host's GPU, or cpu.",
    )(command)


def device_of(gpus: str) -> str:
    """The recipe's device for a --gpus value."""
    if gpus == "cpu":
        return "cpu"
    if gpus.isdecimal():
        return "cuda"
    raise UsageError(
        f"--gpus is {gpus!r}; accepted: the number of one GPU (a rank has one), or cpu"
    )


def build_recipe(file: Path | None, gpus: str, given: Mapping[str, object]) -> Recipe:
    """The recipe of a file (or the defaults) with what was given on the command line."""
    if file is not None and not file.is_file():
        raise UsageError(f"--recipe is {str(file)!r}, which is no file")
    base = read_recipe(file) if file is not None else _DEFAULTS
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(base, **{"device": device_of(gpus), **chosen})


def meeting_options(command: Callable) -> Callable:
    """Add the options by which ranks find and trust each other."""
    options = (
        click.option(
            "--rendezvous-timeout",
            "rendezvous_timeout_s",
            type=click.FloatRange(min=0.1, max=3600),
            default=60.0,
            show_default=True,
            metavar="SECONDS",
            help="How long to wait for the other ranks.",
        ),
        click.option(
            "--secret-file",
            type=click.Path(path_type=Path),
            help=f"File with the ranks' secret, instead of {SECRET_VARIABLE}.",
        ),
        click.option("--parent", "parent_pid", type=int, hidden=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


def local_option(command: Callable) -> Callable:
    """Add --local."""
    return click.option(
        "--local", is_flag=True, help="Start the other ranks on this host as well."
    )(command)


def check_rendezvous(rendezvous: str | None, ranks: int, local: bool) -> None:
    """Refuse a missing or malformed address before any work is done."""
    if rendezvous is not None:
        parse_address(rendezvous)
    elif ranks > 1 and not local:
        raise UsageError(f"{ranks} ranks need --rendezvous HOST:PORT, or --local")


def free_address() -> str:
    """An address on loopback that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def find_secret(
    file: Path | None, address: str | None, local: bool, environ: Mapping[str, str] = os.environ
) -> str:
    """The secret of this run: from a file, from the environment, or on one host a kept one.

    With --local it is made up and handed to the children. For a loopback address, which other
    hosts cannot reach, a secret is kept in a file that only this user can read.
    """
    if file is not None:
        return _read_secret(file)
    if environ.get(SECRET_VARIABLE):
        return environ[SECRET_VARIABLE]
    if local or address is None:
        return secrets.token_hex(32)
    if address.strip("[").startswith(_LOOPBACK):
        return _kept_secret(Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"))
    raise UsageError(
        f"ranks on several hosts need a secret that all of them have: set {SECRET_VARIABLE} or "
        "give --secret-file"
    )


def _read_secret(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        text = file.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the secret {file}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{file} can be read by others (mode {mode & 0o777:o}); 600 is needed")
    if not text:
        raise UsageError(f"{file} is empty; it must hold the ranks' secret")
    return text


def _kept_secret(config_home: Path) -> str:
    file = config_home / "sparkproof" / "secret"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = file.with_name(f"{file.name}.{os.getpid()}")
        made.touch(mode=0o600)
        made.write_text(secrets.token_hex(32) + "\n")
        try:
            os.link(made, file)
        except FileExistsError:
            # Another rank was faster; its secret is the one that counts.
            pass
        finally:
            made.unlink()
    return _read_secret(file)
