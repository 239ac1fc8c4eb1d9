"""Bringing ranks together: rank 0 listens, the others call, and nobody starts unless all agree.

Every caller proves that it knows the secret before it is heard, and options, versions and recipe
are compared by name before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.errors import RendezvousError
from engine.link import receive_frame, send_frame
from engine.meeting import Meeting
from engine.recipe import RANKS_MAX

PROTOCOL = "sparkproof-rendezvous/1"
Progress = Callable[[str, int, int], None]
"""Called with a phase, the part done and the whole; the unit is the phase's own."""

ANY = "(as rank 0)"
"""Value of an option on which a rank has no opinion: it takes what rank 0 has."""

_CONTROL = 255
_GREETING_BYTES_MAX = 4096
_OPTIONS_BYTES_MAX = 2**20
_GREETING_S = 5.0
_RETRY_S = 0.2
_GREETERS_MAX = 64


@dataclass(frozen=True)
class Address:
    """HOST:PORT as the commands take it; an IPv6 host stands in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read HOST:PORT. Raises RendezvousError with what is accepted."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RendezvousError(
            f"rendezvous is {text!r}; accepted: HOST:PORT with a port from 1 to 65535"
        )
    return Address(host, int(port))


def meet(
    rank: int,
    ranks: int,
    address: str,
    options: Mapping[str, object],
    secret: str,
    timeout_s: float = 60.0,
    on_progress: Progress | None = None,
) -> Meeting:
    """Bring `ranks` processes together at `address` and compare their options by name.

    options: everything that must be equal on all ranks, as JSON values (or ANY).
    Raises RendezvousError on every rank that can be reached, within `timeout_s` and a few
    seconds: ranks missing, one number twice, a number out of range, another secret or protocol,
    or options that differ.
    """
    where = parse_address(address)
    if not 1 <= ranks <= RANKS_MAX:
        raise RendezvousError(f"ranks is {ranks}; accepted: 1 to {RANKS_MAX}")
    if not 0 <= rank < ranks:
        raise RendezvousError(f"rank is {rank}; accepted: 0 to {ranks - 1} of {ranks} ranks")
    if not secret:
        raise RendezvousError("the secret is empty; ranks need one to know each other")
    plain = json.loads(json.dumps(dict(options)))
    if ranks == 1:
        return Meeting(rank, ranks, {}, where.host)
    party = _Party(rank, ranks, where, plain, secret, time.monotonic() + timeout_s, timeout_s)
    report = on_progress or (lambda phase, done, total: None)
    return _gather(party, report) if rank == 0 else _join(party, report)


@dataclass(frozen=True)
class _Party:
    """What one rank brings to the meeting."""

    rank: int
    ranks: int
    address: Address
    options: Mapping[str, object]
    secret: str
    deadline: float
    timeout_s: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True)
class _Guest:
    """A rank that has proved itself and told its options; it waits for the verdict."""

    rank: int
    ranks: int
    options: Mapping[str, object]
    sock: socket.socket
    origin: str = field(default="")

    @property
    def gone(self) -> bool:
        """Whether it has hung up; a waiting guest sends nothing."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _say(sock: socket.socket, message: Mapping[str, object]) -> None:
    send_frame(sock, _CONTROL, json.dumps(message).encode())


def _hear(sock: socket.socket, bytes_max: int = _GREETING_BYTES_MAX) -> dict:
    """One control message. Raises EOFError, OSError or ValueError; a refusal RendezvousError."""
    kind, payload = receive_frame(sock, bytes_max)
    message = json.loads(payload) if kind == _CONTROL else None
    if not isinstance(message, dict):
        raise ValueError("no control message")
    if "refused" in message:
        raise RendezvousError(str(message["refused"]))
    return message


def _proof(secret: str, side: str, own: str, other: str) -> str:
    text = "\n".join((PROTOCOL, side, own, other))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


# --- rank 0 ---------------------------------------------------------------------------------


def _gather(party: _Party, report: Progress) -> Meeting:
    guests: dict[int, _Guest] = {}
    with _listening(party.address) as listener:
        try:
            _wait_for_all(party, listener, guests, report)
            problem = _difference({0: party.options} | {g.rank: g.options for g in guests.values()})
            if problem:
                raise RendezvousError(problem)
            for guest in guests.values():
                _say(guest.sock, {"welcome": True})
        except RendezvousError as error:
            _refuse_all(guests.values(), str(error))
            raise
        except OSError as error:
            _refuse_all(guests.values(), "another rank left while ranks met")
            raise RendezvousError(f"a rank left while ranks met: {error}") from error
        except BaseException:
            _refuse_all(guests.values(), "rank 0 was stopped while ranks met")
            raise
    return Meeting(
        0, party.ranks, {rank: guests[rank].sock for rank in sorted(guests)}, party.address.host
    )


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise RendezvousError(f"rank 0 cannot listen on {address}: {why}") from error
    with listener:
        yield listener


def _wait_for_all(
    party: _Party, listener: socket.socket, guests: dict[int, _Guest], report: Progress
) -> None:
    """Fill `guests` until every rank is there; raises RendezvousError naming those missing."""
    arrivals: queue.Queue[_Guest | str] = queue.Queue()
    greeters: list[threading.Thread] = []
    refused: list[str] = []
    listener.settimeout(0.1)
    while len(guests) < party.ranks - 1:
        report("rendezvous", 1 + len(guests), party.ranks)
        if party.left_s == 0:
            raise RendezvousError(_missing(party, guests, refused))
        greeters = [thread for thread in greeters if thread.is_alive()]
        with contextlib.suppress(TimeoutError):
            sock, origin = listener.accept()
            if len(greeters) >= _GREETERS_MAX:
                sock.close()
            else:
                greeters.append(_greeter(party, sock, f"{origin[0]}:{origin[1]}", arrivals))
        while not arrivals.empty():
            arrival = arrivals.get()
            if isinstance(arrival, str):
                refused.append(arrival)
            else:
                _seat(party, arrival, guests)
        for rank in [rank for rank, guest in guests.items() if guest.gone]:
            guests.pop(rank).sock.close()
    report("rendezvous", party.ranks, party.ranks)


def _greeter(
    party: _Party, sock: socket.socket, origin: str, arrivals: queue.Queue
) -> threading.Thread:
    """Greet one caller in a thread of its own, so that a mute one holds nobody up."""

    def work() -> None:
        try:
            arrivals.put(_greet(party, sock, origin))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            sock.close()
            arrivals.put(f"{origin} ({error or type(error).__name__})")
        except RendezvousError as error:
            _refuse(sock, str(error))
            arrivals.put(f"{origin} ({error})")

    thread = threading.Thread(target=work, name=f"greet {origin}", daemon=True)
    thread.start()
    return thread


def _greet(party: _Party, sock: socket.socket, origin: str) -> _Guest:
    sock.settimeout(_GREETING_S)
    own = secrets.token_hex(16)
    _say(sock, {"protocol": PROTOCOL, "nonce": own})
    hello = _hear(sock)
    if hello["protocol"] != PROTOCOL:
        raise RendezvousError(f"protocol is {hello['protocol']!r}; rank 0 speaks {PROTOCOL}")
    other = str(hello["nonce"])
    if not hmac.compare_digest(str(hello["proof"]), _proof(party.secret, "caller", other, own)):
        raise RendezvousError("the secret is not that of rank 0 (SPARKPROOF_SECRET)")
    _say(sock, {"proof": _proof(party.secret, "host", own, other)})
    card = _hear(sock, _OPTIONS_BYTES_MAX)
    # With a timeout set, even a read that must not wait would wait for it.
    sock.settimeout(None)
    return _Guest(int(card["rank"]), int(card["ranks"]), dict(card["options"]), sock, origin)


def _seat(party: _Party, guest: _Guest, guests: dict[int, _Guest]) -> None:
    """Give a guest its place, or raise what is wrong with its number (telling it, too)."""
    problem = ""
    if guest.ranks != party.ranks:
        problem = (
            f"option ranks differs: {party.ranks} on rank 0, "
            f"{guest.ranks} on rank {guest.rank} ({guest.origin})"
        )
    elif guest.rank == 0:
        problem = f"two ranks have number 0: the one listening and {guest.origin}"
    elif not 0 < guest.rank < party.ranks:
        problem = f"rank {guest.rank} ({guest.origin}) is out of range 0 to {party.ranks - 1}"
    elif guest.rank in guests and not guests[guest.rank].gone:
        first = guests[guest.rank].origin
        problem = f"two ranks have number {guest.rank}: {first} and {guest.origin}"
    if problem:
        _refuse(guest.sock, problem)
        raise RendezvousError(problem)
    if guest.rank in guests:
        guests[guest.rank].sock.close()
    guests[guest.rank] = guest


def _missing(party: _Party, guests: Mapping[int, _Guest], refused: list[str]) -> str:
    absent = [rank for rank in range(1, party.ranks) if rank not in guests]
    named = "rank " + str(absent[0]) if len(absent) == 1 else f"ranks {_listed(absent)}"
    text = f"{named} did not come to {party.address} within {party.timeout_s:g} s"
    if refused:
        text += f"; refused callers: {', '.join(refused[:4])}"
    return text


def _listed(numbers: list[int]) -> str:
    return (
        ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if numbers[1:] else str(*numbers)
    )


def _difference(options: Mapping[int, Mapping[str, object]]) -> str:
    """A sentence with every option that is not the same on all ranks, empty if there is none."""
    sentences = []
    for name in sorted({name for own in options.values() for name in own}):
        holders: dict[str, list[int]] = {}
        for rank, own in sorted(options.items()):
            value = json.dumps(own[name]) if name in own else "not given"
            if own.get(name) != ANY:
                holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            parts = (
                f"{value} on rank{'s' * (len(who) > 1)} {_listed(who)}"
                for value, who in holders.items()
            )
            sentences.append(f"option {name} differs: {'; '.join(parts)}")
    return ". ".join(sentences)


def _refuse(sock: socket.socket, reason: str) -> None:
    with contextlib.suppress(OSError):
        # It may have hung up; then there is nobody left to tell.
        _say(sock, {"refused": reason})
    sock.close()


def _refuse_all(guests: Iterable[_Guest], reason: str) -> None:
    for guest in guests:
        _refuse(guest.sock, reason)


# --- the other ranks ------------------------------------------------------------------------


def _join(party: _Party, report: Progress) -> Meeting:
    report("rendezvous", 0, party.ranks)
    sock = _call(party)
    try:
        _introduce(party, sock)
        sock.settimeout(party.left_s + _GREETING_S)
        _hear(sock)
    except TimeoutError as error:
        sock.close()
        raise RendezvousError(
            f"rank 0 at {party.address} did not answer within {party.timeout_s:g} s"
        ) from error
    except (OSError, EOFError, ValueError, KeyError) as error:
        sock.close()
        raise RendezvousError(
            f"rank 0 at {party.address} hung up before all ranks had met: {error}"
        ) from error
    except BaseException:
        sock.close()
        raise
    report("rendezvous", party.ranks, party.ranks)
    return Meeting(party.rank, party.ranks, {0: sock}, party.address.host)


def _call(party: _Party) -> socket.socket:
    reason = "no attempt was made"
    while party.left_s > 0:
        try:
            return socket.create_connection(
                (party.address.host, party.address.port), timeout=min(_GREETING_S, party.left_s)
            )
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_S, party.left_s))
    raise RendezvousError(
        f"rank 0 is missing: nobody answered at {party.address} within {party.timeout_s:g} s "
        f"({reason})"
    )


def _introduce(party: _Party, sock: socket.socket) -> None:
    sock.settimeout(_GREETING_S)
    hello = _hear(sock)
    if hello["protocol"] != PROTOCOL:
        raise RendezvousError(f"rank 0 speaks {hello['protocol']!r}; this rank {PROTOCOL}")
    own, other = secrets.token_hex(16), str(hello["nonce"])
    proof = _proof(party.secret, "caller", own, other)
    _say(sock, {"protocol": PROTOCOL, "nonce": own, "proof": proof})
    answer = _hear(sock)
    if not hmac.compare_digest(str(answer["proof"]), _proof(party.secret, "host", other, own)):
        raise RendezvousError(f"whoever listens at {party.address} does not know the secret")
    _say(sock, {"rank": party.rank, "ranks": party.ranks, "options": dict(party.options)})
