"""Ranks that have met: the links between them, the watch over who is well, the process group."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from engine.errors import PeerLostError, RendezvousError
from engine.link import Link, Loss, Watch

HEARTBEAT_S = 1.0
SILENCE_S = 15.0
"""A rank that gives no sign of life for this long is lost; all must have ended within 30 s."""
COLLECTIVE_TIMEOUT_S = 120.0
STORE_TIMEOUT_S = 60.0


class Meeting:
    """All ranks, connected: rank 0 has a link to each other rank, the others one to rank 0.

    A rank that ends, stops or leaves with a reason is named to all others: every later `send`
    and `receive` raises PeerLostError, and the callbacks given to `on_lost` are called.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        socks: Mapping[int, socket.socket],
        host: str,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.host = host
        self.silence_s = silence_s
        self._watch = Watch()
        self.links: Mapping[int, Link] = {
            other: Link(sock, other, self._watch, f"link to rank {other}")
            for other, sock in socks.items()
        }
        self._stop = threading.Event()
        self._closed = False
        self._group = False
        self._watch.tell(self._spread)
        self._pulse = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        if self.links:
            self._pulse.start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close("" if error is None else f"{kind.__name__}: {error}")

    @property
    def loss(self) -> Loss | None:
        """The first rank known to be gone, if any."""
        return self._watch.loss

    def check(self) -> None:
        """Raise PeerLostError if a rank is gone."""
        self._watch.check()

    def on_lost(self, callback: Callable[[PeerLostError], None]) -> None:
        """Call back once, from a thread of the meeting, when a rank is gone."""
        self._watch.tell(lambda loss: callback(loss.error))

    def init_process_group(
        self, backend: str = "gloo", timeout_s: float = COLLECTIVE_TIMEOUT_S
    ) -> None:
        """Set up torch.distributed among the ranks; a collective may take `timeout_s` at most.

        The port of the store is chosen by rank 0's kernel and told over the links.
        """
        import torch.distributed as dist

        assert not self._group, "the process group is set up twice"
        store = self._lead_store(dist) if self.rank == 0 else self._follow_store(dist)
        self._choose_interface()
        limit = datetime.timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.ranks, timeout=limit
            )
        except RuntimeError as error:
            self.check()
            raise RendezvousError(f"the {backend} process group did not form: {error}") from error
        self._group = True

    def close(self, reason: str = "") -> None:
        """Leave: with a reason this rank failed and the others hear it. Frees ports and threads."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        if self._group:
            import torch.distributed as dist

            dist.destroy_process_group()
            self._group = False
        if self._pulse.is_alive() and self._pulse is not threading.current_thread():
            self._pulse.join()
        for link in self.links.values():
            link.close(reason)

    def _spread(self, loss: Loss) -> None:
        for link in self.links.values():
            if self.rank == 0:
                link.tell_gone(loss)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(min(HEARTBEAT_S, self.silence_s / 4)):
            now = time.monotonic()
            overslept = now - last > self.silence_s / 2
            last = now
            for link in self.links.values():
                link.pulse(self.silence_s, overslept)

    def _lead_store(self, dist):
        hosts = {link.local_host for link in self.links.values()} or {"127.0.0.1"}
        # Where each pair of hosts has a link of its own, only the wildcard serves all of them.
        host = hosts.pop() if len(hosts) == 1 else "0.0.0.0"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                host,
                port,
                self.ranks,
                is_master=True,
                timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
                # The store takes over a socket that is bound already: no port can be lost between.
                master_listen_fd=os.dup(listener.fileno()),
            )
        for link in self.links.values():
            link.send(json.dumps({"store": port}).encode())
        return store

    def _follow_store(self, dist):
        message = json.loads(self.links[0].receive(STORE_TIMEOUT_S))
        assert set(message) == {"store"}, f"rank 0 sent {message} instead of its store's port"
        limit = datetime.timedelta(seconds=STORE_TIMEOUT_S)
        host = self.links[0].peer_host
        try:
            return dist.TCPStore(host, message["store"], self.ranks, False, limit, False)
        except RuntimeError as error:
            self.check()
            raise RendezvousError(f"rank 0's store cannot be reached: {error}") from error

    @property
    def _local_host(self) -> str:
        """The address of this host on the network over which the ranks have met."""
        return next((link.local_host for link in self.links.values()), "127.0.0.1")

    def _choose_interface(self) -> None:
        """Let collectives use the interface of the links unless the user has chosen another."""
        import psutil

        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.split("%")[0] == self._local_host for entry in addresses):
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(variable, name)
                return


@contextlib.contextmanager
def ends_with(meeting: Meeting, end: Callable[[PeerLostError], None], grace_s: float = 10.0):
    """While inside, make sure that the process ends `grace_s` after a rank is gone.

    A thread that waits inside a collective cannot be interrupted; `end` (os._exit in a command)
    is called with the loss when it has not come back by then.
    """
    done = threading.Event()

    def watch(error: PeerLostError) -> None:
        def wait() -> None:
            if not done.wait(grace_s):
                end(error)

        threading.Thread(target=wait, name="end after a loss", daemon=True).start()

    meeting.on_lost(watch)
    try:
        yield
    finally:
        done.set()
