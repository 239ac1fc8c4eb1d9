"""Rank files sent at a start: whole or not at all, resumed, never short, named when they stop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine import distribution
from engine.cli.options import free_address
from engine.distribution import distribute, receive_own
from engine.errors import PackageError, PeerLostError, SparkproofError
from engine.export import export_options, export_package
from engine.package import open_package
from engine.package_format import read_header
from engine.recipe import Recipe
from engine.rendezvous import meet
from engine.units import GIB

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "goldens" / "mini"
RANKS = 2
CHUNK = 2**20


def silent(phase, done, total):
    return


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package of two ranks whose files all lie on rank 0's host."""
    output = tmp_path_factory.mktemp("package")
    recipe = Recipe(
        ranks=RANKS, max_concurrency=1, mtp_draft_tokens=0, prefill_chunk=4, scratch="none"
    )
    address = free_address()
    threads = []

    def join():
        from engine.export import join_export

        with meet(1, RANKS, address, export_options("cpu", RANKS, "t"), "s", 20) as meeting:
            join_export(meeting, silent, read_memory=lambda: 100 * GIB)

    threads.append(threading.Thread(target=join))
    threads[0].start()
    export_package(
        GOLDEN,
        recipe,
        output,
        lambda: meet(0, RANKS, address, export_options("cpu", RANKS, "t"), "s", 20),
        silent,
        lambda: 100 * GIB,
    )
    threads[0].join()
    return output


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(distribution, "CHUNK_BYTES", CHUNK)


def transfer(source, target, needs=True, spoil=None, told=None):
    """Both halves in threads; what each returned or raised, rank 0 first.

    spoil: called with the link of rank 0 before it sends.
    """
    address, results = free_address(), [None, None]

    def work(rank):
        try:
            with meet(rank, RANKS, address, {}, "s", 20) as meeting:
                if rank == 0:
                    if spoil is not None:
                        spoil(meeting.links[1])
                    header = read_header(source / "model.safetensors")
                    results[0] = distribute(source, header, meeting, silent)
                else:
                    report = silent if told is None else (lambda *step: told.append(step))
                    results[1] = receive_own(target, meeting, report, needs)
        except SparkproofError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def after(count, act):
    """A spoiler that lets `count` chunks pass and does `act(link, message)` with the next."""

    def spoil(link):
        real, passed = link.send, [0]

        def send(message):
            if message[:1] == b"{":
                return real(message)
            passed[0] += 1
            return real(message) if passed[0] <= count else act(real, message)

        link.send = send

    return spoil


def stop(real, message):
    raise PeerLostError("rank 1 is gone: its cable was pulled")


def flip(real, message):
    return real(message[:-1] + bytes([message[-1] ^ 1]))


def shorten(real, message):
    return real(message[:-1])


def test_a_rank_without_its_file_gets_it_whole_and_verified(package, tmp_path):
    told = []
    sent, path = transfer(package, tmp_path / "new", told=told)
    assert sent == [1]
    assert path == tmp_path / "new" / "rank-1.safetensors"
    assert path.read_bytes() == (package / path.name).read_bytes()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    size = path.stat().st_size
    assert told[0] == (distribution.PHASE, 0, size) and told[-1][1:] == (size, size)
    open_package(path.parent, 1).close()


def test_a_rank_that_has_its_file_is_sent_nothing(package, tmp_path):
    assert transfer(package, tmp_path, needs=False) == [[], None]
    assert list(tmp_path.iterdir()) == []


def test_a_transfer_that_stops_names_file_offset_and_peer_and_leaves_no_short_file(
    package, tmp_path
):
    sender, receiver = transfer(package, tmp_path, spoil=after(2, stop))
    size = (package / "rank-1.safetensors").stat().st_size
    for error, peer in ((sender, "to rank 1"), (receiver, "from rank 0")):
        assert isinstance(error, PeerLostError)
        expected = (
            f"transfer of rank-1.safetensors {peer} stopped at byte {2 * CHUNK:,} of {size:,}"
        )
        assert expected in str(error)
    assert not (tmp_path / "rank-1.safetensors").exists()


def test_the_next_start_goes_on_where_the_transfer_stopped(package, tmp_path):
    transfer(package, tmp_path, spoil=after(3, stop))
    (left,) = tmp_path.iterdir()
    left.write_bytes(left.read_bytes() + b"torn tail")
    told = []
    assert transfer(package, tmp_path, told=told)[1] == tmp_path / "rank-1.safetensors"
    assert told[0][1] == 3 * CHUNK
    assert [p.name for p in tmp_path.iterdir()] == ["rank-1.safetensors"]
    open_package(tmp_path, 1).close()


def test_what_was_left_of_another_package_is_not_resumed(package, tmp_path):
    stale = tmp_path / f"rank-1.safetensors.{'0' * 64}.incoming"
    stale.write_bytes(bytes(3 * CHUNK))
    told = []
    transfer(package, tmp_path, told=told)
    assert told[0][1] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["rank-1.safetensors"]
    open_package(tmp_path, 1).close()


@pytest.mark.parametrize("harm", [flip, shorten])
def test_an_altered_or_short_chunk_is_refused_with_its_place(package, tmp_path, harm):
    _, receiver = transfer(package, tmp_path, spoil=after(1, harm))
    assert isinstance(receiver, PackageError)
    assert f"the chunk at byte {CHUNK:,} is altered" in str(receiver)
    assert not (tmp_path / "rank-1.safetensors").exists()


def test_a_file_that_rank_0_does_not_hold_is_named(package, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.safetensors").write_bytes((package / "model.safetensors").read_bytes())
    sender, receiver = transfer(alone, tmp_path / "new")
    assert isinstance(sender, PackageError) and "rank-1.safetensors is not here" in str(sender)
    assert "rank 0 is gone: PackageError" in str(receiver)


def test_the_file_of_another_rank_is_not_sent(package, tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name in ("model.safetensors", "rank-1.safetensors"):
        (mixed / name).write_bytes((package / "model.safetensors").read_bytes())
    sender, receiver = transfer(mixed, tmp_path / "new")
    assert isinstance(sender, PackageError)
    assert "rank 1 of package" in str(sender) and "expected, rank 0 of" in str(sender)
    assert isinstance(receiver, PeerLostError)
    assert not (tmp_path / "new" / "rank-1.safetensors").exists()


def test_what_arrived_is_looked_at_before_it_gets_its_name(package, tmp_path, monkeypatch):
    real = distribution._check_head

    def only_receiver(header, rank, package_hash):
        if header.path.suffix == ".incoming":
            real(header, rank, "0" * 64)

    monkeypatch.setattr(distribution, "_check_head", only_receiver)
    _, receiver = transfer(package, tmp_path)
    assert isinstance(receiver, PackageError) and f"package {'0' * 64} expected" in str(receiver)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_sent(package, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(distribution.shutil, "disk_usage", lambda path: usage)
    _, receiver = transfer(package, tmp_path)
    assert isinstance(receiver, PackageError) and "1,000 are free on its disk" in str(receiver)
