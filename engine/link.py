"""One connection between two ranks: framed messages, heartbeats, and the word of who is gone.

A link is made after both sides have proved that they know the secret (see `rendezvous`).
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import PeerLostError

_HEADER = struct.Struct("<BQ")
_DATA, _ALIVE, _GONE, _LEAVE = range(4)
FRAME_BYTES_MAX = 2**31
INBOX_BYTES_MAX = 64 * 2**20
"""Bytes that may wait unread; past them the reader stops and TCP holds the sender back."""
_READ_BYTES = 2**20
_LINGER_S = 1.0


def send_frame(sock: socket.socket, kind: int, payload: bytes) -> None:
    """Write one frame: kind (1 byte), length (8 bytes, little endian), payload."""
    header = _HEADER.pack(kind, len(payload))
    if len(payload) <= _READ_BYTES:
        sock.sendall(header + payload)
    else:
        sock.sendall(header)
        sock.sendall(payload)


def receive_frame(
    sock: socket.socket, bytes_max: int, on_bytes: Callable[[], None] | None = None
) -> tuple[int, bytes]:
    """Read one frame. Raises EOFError when the peer has closed, ValueError for one too long."""
    kind, size = _HEADER.unpack(_read(sock, _HEADER.size, on_bytes))
    if size > bytes_max:
        raise ValueError(f"a frame of {size} bytes; at most {bytes_max} are accepted")
    return kind, _read(sock, size, on_bytes)


def _read(sock: socket.socket, size: int, on_bytes: Callable[[], None] | None) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = sock.recv(min(_READ_BYTES, size - len(content)))
        if not chunk:
            raise EOFError("the connection was closed")
        content += chunk
        if on_bytes is not None:
            on_bytes()
    return bytes(content)


@dataclass(frozen=True)
class Loss:
    """A rank that the others can no longer count on, and how they found out."""

    rank: int
    how: str

    @property
    def error(self) -> PeerLostError:
        """What everybody who still needs the rank gets."""
        return PeerLostError(f"rank {self.rank} is gone: {self.how}")


class Watch:
    """The first loss that a rank hears of, told to everyone who asked to know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Loss], None]] = []
        self.loss: Loss | None = None

    def tell(self, listener: Callable[[Loss], None]) -> None:
        """Call `listener` once with the first loss, at once if there was one already."""
        with self._lock:
            loss = self.loss
            if loss is None:
                self._listeners.append(listener)
        if loss is not None:
            listener(loss)

    def report(self, loss: Loss) -> None:
        """Note a loss; only the first counts, since the rest follows from it."""
        with self._lock:
            if self.loss is not None:
                return
            self.loss = loss
            listeners = list(self._listeners)
        for listener in listeners:
            listener(loss)

    def check(self) -> None:
        """Raise PeerLostError if a rank is gone."""
        if self.loss is not None:
            raise self.loss.error


class Link:
    """Messages to and from one rank; `rank` is the other side's number."""

    def __init__(self, sock: socket.socket, rank: int, watch: Watch, name: str) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._sock = sock
        self._watch = watch
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._heard_at = time.monotonic()
        self._full = False
        self._left = False
        self._closing = False
        self._reader = threading.Thread(target=self._read_all, name=name, daemon=True)
        self._reader.start()
        watch.tell(lambda loss: self._wake())

    @property
    def local_host(self) -> str:
        """The address of this side, by which the other side reaches this host."""
        return self._sock.getsockname()[0]

    @property
    def peer_host(self) -> str:
        """The address of the other side."""
        return self._sock.getpeername()[0]

    def send(self, message: bytes) -> None:
        """Hand a message to the other rank. Raises PeerLostError when any rank is gone."""
        if len(message) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(message)} bytes; at most {FRAME_BYTES_MAX} fit")
        self._check()
        try:
            with self._sending:
                send_frame(self._sock, _DATA, message)
        except OSError as error:
            self._lost(f"sending failed: {error}")
            self._check()
            raise Loss(self.rank, f"sending failed: {error}").error from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message, in the order sent; None waits as long as all ranks are well.

        Raises TimeoutError after `timeout_s`, PeerLostError when any rank is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._inbox:
                self._check()
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    raise TimeoutError(f"rank {self.rank} sent nothing within {timeout_s:g} s")
                self._changed.wait(rest)
            message = self._inbox.popleft()
            self._inbox_bytes -= len(message)
            self._changed.notify_all()
            return message

    def pulse(self, silence_s: float, overslept: bool = False) -> None:
        """Give a sign of life, and note the peer as lost after `silence_s` without one.

        overslept: this process itself stood still, so its peers' silence proves nothing.
        """
        if self._left or self._closing:
            return
        if overslept:
            self._heard()
        self._send_now(_ALIVE, b"")
        silent_s = time.monotonic() - self._heard_at
        if silent_s > silence_s and not self._full:
            self._lost(f"no sign of life for {silent_s:.1f} s (stopped, or its link is down)")

    def tell_gone(self, loss: Loss) -> None:
        """Tell the peer that another rank is gone."""
        if loss.rank != self.rank and not self._left:
            self._send_now(_GONE, json.dumps([loss.rank, loss.how]).encode())

    def close(self, reason: str = "") -> None:
        """Say goodbye (with a reason: that this rank failed) and free socket and thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._send_now(_LEAVE, reason.encode())
        self._shut(socket.SHUT_WR)
        # The peer answers a goodbye by ending its side, so that nothing sent is torn up.
        self._reader.join(_LINGER_S)
        self._shut(socket.SHUT_RDWR)
        self._reader.join(_LINGER_S)
        self._sock.close()

    def _check(self) -> None:
        self._watch.check()
        if self._left:
            raise PeerLostError(f"rank {self.rank} has left")
        assert not self._closing, f"the link to rank {self.rank} is used after close()"

    def _send_now(self, kind: int, payload: bytes) -> None:
        """Send if that cannot block; a busy or full connection carries signs of life anyway."""
        if not self._sending.acquire(timeout=0.05):
            return
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            if poll.poll(0):
                send_frame(self._sock, kind, payload)
        except OSError as error:
            self._lost(f"sending failed: {error}")
        finally:
            self._sending.release()

    def _read_all(self) -> None:
        try:
            while True:
                kind, payload = receive_frame(self._sock, FRAME_BYTES_MAX, self._heard)
                if kind == _DATA:
                    self._put(payload)
                elif kind == _GONE:
                    self._watch.report(Loss(*json.loads(payload)))
                elif kind == _LEAVE:
                    self._on_leave(payload.decode())
                elif kind != _ALIVE:
                    raise ValueError(f"a frame of unknown kind {kind}")
        except EOFError:
            self._lost("its connection was closed (the process ended)")
        except OSError as error:
            self._lost(f"its connection broke: {error}")
        except ValueError as error:
            self._lost(f"it sent nonsense: {error}")

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    def _put(self, message: bytes) -> None:
        with self._changed:
            self._full = True
            while self._inbox and self._inbox_bytes + len(message) > INBOX_BYTES_MAX:
                if self._closing or self._watch.loss is not None:
                    break
                self._changed.wait()
            self._full = False
            self._heard()
            if self._closing:
                return
            self._inbox.append(message)
            self._inbox_bytes += len(message)
            self._changed.notify_all()

    def _on_leave(self, reason: str) -> None:
        if reason and not self._closing:
            self._watch.report(Loss(self.rank, reason))
        self._left = True
        self._wake()
        self._shut(socket.SHUT_WR)

    def _lost(self, how: str) -> None:
        if not (self._left or self._closing):
            # Reported first: the reader takes the shutdown for the peer's and would say so.
            self._watch.report(Loss(self.rank, how))
            self._shut(socket.SHUT_RDWR)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            # Already ended by the other side: that is what shutting down is to reach.
            return
