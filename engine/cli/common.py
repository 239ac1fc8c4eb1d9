"""What all commands share: exit codes, strict options and environment, and ending in time."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from engine import errors
from engine.errors import SparkproofError, UsageError
from engine.packing.errors import DoesNotFitError, GaveUpError
from engine.units import parse_size

INTERNAL_ERROR = 70
INTERRUPTED = 130
TERMINATED = 143
END_GRACE_S = 15.0
"""How long a command may take to end after SIGTERM or a lost rank before it is cut off."""

EXIT_CODES: Mapping[int, str] = {
    0: "done as asked",
    1: "a check found something, or two maps differ; findings are on the output",
    errors.UsageError.exit_code: "unknown or unacceptable option, argument or environment variable",
    errors.ConfigError.exit_code: "the model configuration is incomplete, unknown or contradictory",
    errors.CheckpointError.exit_code: "the checkpoint does not hold what its configuration needs",
    errors.PackageError.exit_code: "the package is truncated, altered, or of another version, "
    "rank or recipe",
    errors.RendezvousError.exit_code: "ranks did not come together: missing, doubled, strange or "
    "differently configured",
    errors.MemoryFloorError.exit_code: "too little host memory",
    errors.RequestError.exit_code: "a request that is malformed or over a limit",
    errors.PeerLostError.exit_code: "a rank ended or fell silent while it was needed",
    DoesNotFitError.exit_code: "`ignition pack`: proven that the buffers do not fit",
    GaveUpError.exit_code: "`ignition pack`: no packing found within the budget",
    INTERNAL_ERROR: "a bug of ours; a traceback is on standard error",
    INTERRUPTED: "interrupted (Ctrl-C)",
    TERMINATED: "ended by SIGTERM",
}

ENVIRONMENT: Mapping[str, str] = {
    "SPARKPROOF_SECRET": "the secret by which the ranks of one run know each other",
    "SPARKPROOF_KERNEL_CACHE": "directory for compiled kernels, instead of ~/.cache/sparkproof",
}
_OUR_PREFIXES = ("SPARKPROOF_", "IGNITION_", "FLARE_")


def exit_codes_help() -> str:
    """The table of exit codes and environment variables, for the end of `--help`."""
    lines = ["\b", "Exit codes:"]
    lines += [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    lines += ["", "\b", "Environment (any other variable with our prefixes is an error):"]
    lines += [f"  {name}  {meaning}" for name, meaning in ENVIRONMENT.items()]
    return "\n".join(lines)


@dataclass
class Grace:
    """How long the command may take to end after SIGTERM; one that drains asks for more."""

    seconds: float = END_GRACE_S


class Terminated(BaseException):
    """SIGTERM arrived; raised in the main thread so that everything open is closed."""


class Commands(click.Group):
    """A group that suggests what an unknown command may have meant."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        """Find the command, or say which ones come close."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            raise click.UsageError(unknown("command", name, self.list_commands(ctx)), ctx)
        return super().resolve_command(ctx, args)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with near ones or all that do."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"accepted: {', '.join(known)}"
    return f"unknown {what} {name!r}; {hint}"


def check_environment(environ: Mapping[str, str], known: Iterable[str] = ENVIRONMENT) -> None:
    """Refuse variables with our prefixes that nothing reads: a misspelt one would be ignored."""
    known = list(known)
    for name in sorted(environ):
        if name.startswith(_OUR_PREFIXES) and name not in known:
            raise UsageError(unknown("environment variable", name, known))


class Size(click.ParamType):
    """A size option: 8GiB, 50G, 500MB or a plain number of bytes."""

    name = "size"

    def convert(self, value, param, ctx) -> int:
        """Bytes of the text."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value, param.opts[0] if param is not None else "size")
        except UsageError as error:
            self.fail(str(error), param, ctx)


def run(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code; what is wrong is said in one line."""
    sys.exit(outcome(command, arguments))


def outcome(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    try:
        grace = Grace()
        with end_on_sigterm(grace):
            check_environment(os.environ)
            given = list(sys.argv[1:] if arguments is None else arguments)
            with command.make_context(command.name, given, obj=grace) as context:
                result = command.invoke(context)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except SparkproofError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except Terminated:
        return _say("ended by SIGTERM", TERMINATED)
    except BrokenPipeError:
        # Whoever read our output has gone; what is left has no reader, which is no error.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return _say("this is a bug of ours; the traceback above says where", INTERNAL_ERROR)


def _usage(error: click.UsageError) -> int:
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
        print(f"Try '{error.ctx.command_path} --help' for help.", file=sys.stderr)
    return _say(error.format_message(), UsageError.exit_code)


def _say(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def end_on_sigterm(grace: Grace) -> Iterator[None]:
    """Turn SIGTERM into `Terminated`, and cut the process off if that does not end it in time.

    Python runs a handler only between its own instructions; a main thread inside a collective
    does not come back for it. A second thread hears of the signal at once and keeps the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handler = signal.signal(signal.SIGTERM, _raise_terminated)
    done = threading.Event()
    args = (reader, done, grace)
    threading.Thread(target=_cut_off_later, args=args, name="sigterm", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.signal(signal.SIGTERM, old_handler)
        signal.set_wakeup_fd(old_fd)
        os.close(writer)


def _raise_terminated(number: int, frame: object) -> None:
    # A second SIGTERM must not break into the closing that the first one has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _cut_off_later(reader: int, done: threading.Event, grace: Grace) -> None:
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] == signal.SIGTERM and not done.wait(grace.seconds):
                print(f"error: still running {grace.seconds:g} s after SIGTERM", file=sys.stderr)
                os._exit(TERMINATED)
