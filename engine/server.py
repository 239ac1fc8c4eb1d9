"""The HTTP server of rank 0: OpenAI's endpoints over one engine thread, until told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from engine.app import App
from engine.calls import Limits
from engine.chat import ChatFormat, read_chat_format
from engine.config import ModelConfig
from engine.engine_loop import EngineLoop
from engine.errors import UsageError
from engine.kvcache import PagePool
from engine.metrics import EngineCollector, Metrics
from engine.prefix import PrefixCache
from engine.prefix_disk import DiskStats, PrefixDisk
from engine.recipe import Recipe
from engine.request import Core
from engine.scheduler import Scheduler
from engine.text import Text
from engine.units import GIB, MIB

_log = logging.getLogger("flare.server")


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; nothing here changes a token.

    max_concurrency, draft_tokens   None for all that the package has
    package_hash                    identifies weights, recipe and version; a disk cache needs it
    prefix_cache_memory_bytes       pages and windows kept for reuse (0: none); pages of it are
                                    given up whenever sequences need them
    waiting_max                     sequences that may queue before 429
    stall_seconds_max               a step that lasts longer turns /health red
    probe_seconds                   /health runs a step of its own if none ran for this long
    drain_seconds_max               what running requests are given after SIGTERM
    seed                            for requests that name none; None draws one from the system
    """

    scheduler_policy: str = "throughput"
    max_concurrency: int | None = None
    draft_tokens: int | None = None
    package_hash: str = ""
    prefix_cache_memory_bytes: int = GIB
    prefix_cache_disk: Path | None = None
    prefix_cache_disk_limit_bytes: int = 50 * GIB
    chat_format: Path | None = None
    api_key: str | None = None
    waiting_max: int = 1024
    body_bytes_max: int = 16 * MIB
    body_seconds_max: float = 30.0
    stall_seconds_max: float = 30.0
    probe_seconds: float = 30.0
    drain_seconds_max: float = 30.0
    seed: int | None = None


def serve(
    core: Core,
    config: ModelConfig,
    recipe: Recipe,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str = "model",
    tokenizer_path: Path | None = None,
    options: ServeOptions = ServeOptions(),
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests end; port 0 takes any free port.

    `on_ready` is called with the URL once requests are answered. The core stays the caller's to
    close. Raises UsageError for options that cannot be served, and whatever ended the core.
    """
    service = Service(
        core,
        config,
        recipe,
        host=host,
        port=port,
        model_name=model_name,
        tokenizer_path=tokenizer_path,
        options=options,
    )
    service.run(on_ready)


class Service:
    """A server with everything behind it; `run` blocks, `stop` may come from any thread."""

    def __init__(
        self,
        core: Core,
        config: ModelConfig,
        recipe: Recipe,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "model",
        tokenizer_path: Path | None = None,
        options: ServeOptions = ServeOptions(),
    ):
        self._options = options
        text = Text(tokenizer_path)
        form = read_chat_format(options.chat_format) if options.chat_format else ChatFormat()
        self._socket = _listen(host, port)
        self._host = host
        self.disk = None
        try:
            self._build(core, config, recipe, model_name, text, form)
        except BaseException:
            self._socket.close()
            raise

    def _build(self, core, config, recipe, model_name, text, form) -> None:
        options = self._options
        identity = cache_identity(config, recipe, options.package_hash, core)
        self.disk = _open_disk(options, identity)
        pool = PagePool(core.pages)
        self.prefix = PrefixCache(
            core, pool, options.prefix_cache_memory_bytes, identity, self.disk
        )
        self.scheduler = Scheduler(
            core,
            self.prefix,
            policy=options.scheduler_policy,
            max_concurrency=options.max_concurrency,
            draft_tokens=options.draft_tokens,
            prefill_chunk=recipe.prefill_chunk,
            history_tokens=max(1, config.engram_max_ngram_size - 1),
        )
        self.metrics = Metrics()
        self.loop = EngineLoop(
            self.scheduler,
            waiting_max=options.waiting_max,
            stall_seconds_max=options.stall_seconds_max,
            on_step=self.metrics.observe_step,
            on_failure=self.stop,
        )
        disk_stats = self.disk.stats if self.disk is not None else DiskStats()
        self.metrics.registry.register(
            EngineCollector(self.loop, self.prefix, disk_stats, core.page_tokens, self.metrics)
        )
        limits = Limits(model_name, core.vocab_size, self.scheduler.tokens_max, config.eos_token_id)
        self.app = App(self.loop, self.metrics, text, form, limits, options)
        self._server = _Server(self.app.routes(), options.drain_seconds_max)

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    def run(self, on_ready: Callable[[str], None] = lambda url: None) -> None:
        """Serve until stopped; raises what ended the engine, if that is why."""
        url = self.url
        self.loop.start()
        try:
            self._server.run_until_stopped(self._socket, lambda: on_ready(url), self.app.drain)
        finally:
            if not self.loop.stop():
                _log.warning("the step in progress did not end; leaving it behind")
            if self.disk is not None:
                self.disk.close()
        if self.loop.failure is not None:
            raise self.loop.failure

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn that reports when it is ready and returns after a signal instead of dying of it."""

    def __init__(self, asgi, drain_seconds_max: float):
        super().__init__(
            uvicorn.Config(
                asgi,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=max(1, round(drain_seconds_max)),
            )
        )
        self._on_ready = self._on_drain = lambda: None

    def run_until_stopped(self, listening: socket.socket, on_ready, on_drain) -> None:
        self._on_ready, self._on_drain = on_ready, on_drain
        asyncio.run(self.serve(sockets=[listening]))

    async def startup(self, sockets=None) -> None:
        """See uvicorn.Server."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets=None) -> None:
        """See uvicorn.Server."""
        self._on_drain()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first SIGTERM or SIGINT drains, the next one ends at once; neither is raised again,
        since the ranks still have to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises UsageError if the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"host is {host!r}, which is no address here: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; a free port is needed "
            "(0 takes any)"
        ) from error
    return listening


def _open_disk(options: ServeOptions, identity: str) -> PrefixDisk | None:
    if options.prefix_cache_disk is None:
        return None
    assert options.package_hash, "a disk prefix cache needs the package's hash"
    return PrefixDisk(options.prefix_cache_disk, options.prefix_cache_disk_limit_bytes, identity)


def cache_identity(config: ModelConfig, recipe: Recipe, package_hash: str, core: Core) -> str:
    """Everything on which the bytes of a cached page depend, as text."""
    identity = {
        "package": package_hash,
        "model": config.to_json(),
        "recipe": recipe.identity,
        "page_tokens": core.page_tokens,
    }
    return json.dumps(identity, sort_keys=True)
