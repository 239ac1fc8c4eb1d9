"""The data path between ranks: bytes arrive whole whatever their size, the dead are named."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from engine import mesh as mesh_module
from engine.errors import PeerLostError, RendezvousError
from engine.meeting import Meeting
from engine.mesh import Mesh, build_mesh
from fixtures.local_ranks import socket_meshes


@pytest.fixture
def meshes():
    opened: list[Mesh] = []

    def get(ranks: int) -> list[Mesh]:
        opened.extend(socket_meshes(ranks))
        return opened[-ranks:]

    yield get
    for mesh in opened:
        mesh.close()


@pytest.fixture
def short(monkeypatch):
    """Patience and silence in tenths of a second."""
    monkeypatch.setattr(mesh_module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(mesh_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(mesh_module, "CONNECT_TIMEOUT_S", 10.0)
    monkeypatch.setattr(mesh_module, "GREETING_TIMEOUT_S", 0.5)


@pytest.fixture
def longer(short, monkeypatch):
    """A silence that no busy machine keeps a running thread from breaking."""
    monkeypatch.setattr(mesh_module, "SILENCE_S", 1.5)


def side_by_side(*works: Callable[[], object]) -> list[object]:
    """What each work gives or raises, run in threads."""
    found: list[object] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except (PeerLostError, RendezvousError, AssertionError) as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    return found


def pattern(rank: int, size: int) -> torch.Tensor:
    """Bytes that differ between ranks and places."""
    period = (torch.arange(251) * (rank + 3) + rank).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size].contiguous()


def gathered(mesh: Mesh, size: int) -> torch.Tensor:
    received = torch.zeros(size * mesh.ranks, dtype=torch.uint8)
    mesh.all_gather(received, pattern(mesh.rank, size)).wait()
    return received


# 24 MiB a piece do not fit into the buffers of the sockets: both directions must move at once.
@pytest.mark.parametrize(("ranks", "size"), [(1, 5), (2, 0), (2, 1), (3, 1000), (3, 24 * 2**20)])
def test_a_gather_brings_everyones_bytes_in_rank_order(meshes, ranks, size):
    expected = torch.cat([pattern(rank, size) for rank in range(ranks)])
    for found in side_by_side(*(lambda m=m: gathered(m, size) for m in meshes(ranks))):
        assert torch.equal(found, expected)


def exchanged(mesh: Mesh, sizes: list[list[int]]) -> torch.Tensor:
    sent_sizes = sizes[mesh.rank]
    received_sizes = [row[mesh.rank] for row in sizes]
    received = torch.zeros(sum(received_sizes), dtype=torch.uint8)
    sent = torch.cat([pattern(10 * mesh.rank + q, size) for q, size in enumerate(sent_sizes)])
    mesh.all_to_all(received, sent, received_sizes, sent_sizes).wait()
    return received


@pytest.mark.parametrize("large", [7, 16 * 2**20])
def test_unequal_pieces_reach_their_ranks(meshes, large):
    sizes = [[3, 0, large], [5, 1, 0], [large, 2, 4]]
    found = side_by_side(*(lambda m=m: exchanged(m, sizes) for m in meshes(3)))
    for rank, received in enumerate(found):
        pieces = [pattern(10 * q + rank, sizes[q][rank]) for q in range(3)]
        assert torch.equal(received, torch.cat(pieces)), f"rank {rank}"


def test_exchanges_follow_each_other_without_mixing(meshes):
    def work(mesh: Mesh) -> list[torch.Tensor]:
        return [gathered(mesh, size) for size in (1, 100, 10**6, 3)]

    for found in side_by_side(*(lambda m=m: work(m) for m in meshes(2))):
        for size, received in zip((1, 100, 10**6, 3), found, strict=True):
            assert torch.equal(received, torch.cat([pattern(0, size), pattern(1, size)]))


@pytest.mark.parametrize("message", [b"", b"step", bytes(range(256)) * 2**17])
def test_a_broadcast_reaches_all_others_whole(meshes, message):
    lead, *rest = meshes(3)
    works = [lambda m=m: m.receive_message(0) for m in rest]
    assert side_by_side(lambda: lead.broadcast(message), *works)[1:] == [message, message]


@pytest.mark.parametrize("size", [10, 24 * 2**20])
def test_a_rank_that_closed_is_named(meshes, size):
    first, dead, last = meshes(3)
    dead.close()
    for found in side_by_side(lambda: gathered(first, size), lambda: gathered(last, size)):
        assert isinstance(found, PeerLostError)
    # The survivors that close in turn may be named too; the first to notice names the dead one.
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        first.receive(1, memoryview(bytearray(1)))


def test_a_silent_rank_is_named_when_all_is_sent(meshes, short):
    first, _, last = meshes(3)
    last.send(0, bytes(10))
    with pytest.raises(PeerLostError, match=r"rank 1 is gone: nothing came for 0.2 s"):
        gathered(first, 10)


def test_a_silent_rank_is_named_in_the_middle_of_a_large_exchange(meshes, longer):
    size = 24 * 2**20
    first, second, _ = meshes(3)
    errors = side_by_side(lambda: gathered(first, size), lambda: gathered(second, size))
    for error in errors:
        assert str(error) == "rank 2 is gone: nothing moved for 1.5 s"


def test_a_rank_that_takes_nothing_is_named(meshes, short):
    first, _ = meshes(2)
    with pytest.raises(PeerLostError, match=r"rank 1 is gone: it took nothing for 0.2 s"):
        first.send(1, bytes(64 * 2**20))


def test_a_slow_rank_is_not_lost_while_bytes_move(meshes, longer):
    first, second = meshes(2)
    message = bytes(range(256)) * 2**17
    pieces = 20

    def slowly() -> bytes:
        found, size = bytearray(len(message)), -(-len(message) // pieces)
        for start in range(0, len(found), size):
            time.sleep(0.1)
            second.receive(0, memoryview(found)[start : start + size])
        return bytes(found)

    began = time.monotonic()
    assert side_by_side(lambda: first.send(1, message), slowly) == [None, message]
    assert time.monotonic() - began > mesh_module.SILENCE_S


def test_waiting_for_a_message_is_patient(meshes, short):
    first, second = meshes(2)

    def late() -> None:
        time.sleep(0.5)
        first.broadcast(b"now")

    assert side_by_side(late, lambda: second.receive_message(0))[1] == b"now"


def test_what_the_watch_knows_is_said_instead(meshes, short):
    first, _ = meshes(2)

    def check() -> None:
        raise PeerLostError("rank 1 is gone: it gave no sign of life")

    first._check = check
    with pytest.raises(PeerLostError, match="no sign of life"):
        first.receive_message(1)


# Connecting ---------------------------------------------------------------------------------------


@pytest.fixture
def meetings():
    """Three ranks that have met on this host."""
    ends: list[dict[int, socket.socket]] = [{}, {}, {}]
    for other in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends[other][0] = socket.create_connection(listener.getsockname())
            ends[0][other] = listener.accept()[0]
    met = [Meeting(rank, 3, ends[rank], "127.0.0.1") for rank in range(3)]
    yield met
    for meeting in met:
        meeting.close()


def test_ranks_that_have_met_connect_every_pair(meetings):
    found = side_by_side(*(lambda m=m: build_mesh(m) for m in meetings))
    assert [mesh.rank for mesh in found] == [0, 1, 2]
    expected = torch.cat([pattern(rank, 50) for rank in range(3)])
    for received in side_by_side(*(lambda m=m: gathered(m, 50) for m in found)):
        assert torch.equal(received, expected)
    for mesh in found:
        mesh.close()


@pytest.fixture
def strangers(monkeypatch):
    """Before any rank calls, someone else connects to every port and behaves in some way."""
    kept: list[socket.socket] = []
    call = mesh_module._call

    def install(behave: Callable[[socket.socket, bytes], None]) -> None:
        def called_first(address, token, rank):
            stranger = socket.create_connection(tuple(address))
            kept.append(stranger)
            behave(stranger, token)
            return call(address, token, rank)

        monkeypatch.setattr(mesh_module, "_call", called_first)

    yield install
    for stranger in kept:
        stranger.close()


def reset(sock: socket.socket, _token: bytes) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()


BEHAVIOURS = {
    "says nothing": lambda sock, token: None,
    "goes at once": lambda sock, token: sock.close(),
    "resets": reset,
    "guesses": lambda sock, token: sock.sendall(bytes(32) + b"\x02"),
    "stops half way": lambda sock, token: sock.sendall(token[:20]),
    "says a rank that there is not": lambda sock, token: sock.sendall(token + b"\x07"),
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_stranger_is_turned_away_and_holds_nobody_up(meetings, short, strangers, behaviour):
    strangers(BEHAVIOURS[behaviour])
    found = side_by_side(*(lambda m=m: build_mesh(m) for m in meetings))
    assert all(isinstance(mesh, Mesh) for mesh in found), found
    for received in side_by_side(*(lambda m=m: gathered(m, 5) for m in found)):
        assert torch.equal(received, torch.cat([pattern(rank, 5) for rank in range(3)]))
    for mesh in found:
        mesh.close()


def test_a_rank_that_does_not_call_is_named_after_a_bounded_wait(meetings, short, monkeypatch):
    exchange = mesh_module._exchange_addresses

    def only_rank_2_stays_away(meeting, port):
        found = exchange(meeting, port)
        if meeting.rank == 2:
            raise RendezvousError("this rank stays away")
        return found

    monkeypatch.setattr(mesh_module, "_exchange_addresses", only_rank_2_stays_away)
    monkeypatch.setattr(mesh_module, "CONNECT_TIMEOUT_S", 2.0)
    found = side_by_side(*(lambda m=m: build_mesh(m) for m in meetings))
    assert str(found[0]) == "rank 0: no data connection from rank 2 within 2 s"
    assert str(found[1]) == "rank 1: no data connection from rank 2 within 2 s"


def test_a_port_where_nobody_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(RendezvousError, match=rf"no data connection to 127.0.0.1:{address[1]}: "):
        mesh_module._call(address, b"t" * 32, 1)
