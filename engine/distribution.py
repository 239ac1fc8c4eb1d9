"""Rank packages on their way from rank 0 to ranks that do not have theirs: hashed, resumable.

The file travels in chunks over the authenticated link, each with its SHA-256. What has arrived is
kept under a temporary name when a transfer stops, and the next start goes on behind it. A file
gets its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import PackageError, PeerLostError, SparkproofError
from engine.link import Link
from engine.meeting import Meeting
from engine.package_format import PackageHeader, file_name, read_header
from engine.units import MIB

CHUNK_BYTES = 8 * MIB
_DIGEST_BYTES = 32
_SUFFIX = ".incoming"

Progress = Callable[[str, int, int], None]
PHASE = "Distribute rank packages"


@dataclass(frozen=True)
class Offer:
    """What rank 0 says about a rank's file before it sends it, from byte `first` on."""

    file: str
    package_hash: str
    size_bytes: int
    chunk_bytes: int
    first: int


def distribute(
    directory: Path, header: PackageHeader, meeting: Meeting, report: Progress
) -> list[int]:
    """Rank 0: send their files to all ranks that ask; the ranks that got one.

    All transfers run at the same time. Raises PackageError where a file is not here to be sent.
    """
    asked = {}
    for rank, link in meeting.links.items():
        wish = json.loads(link.receive())
        if wish["needs"]:
            asked[rank] = wish["held"]
    done = dict.fromkeys(asked, 0)
    sizes = {rank: header.contents[rank]["size_bytes"] for rank in asked}
    failures: dict[int, SparkproofError] = {}

    def send(rank: int) -> None:
        def sent(count: int) -> None:
            done[rank] = count
            report(PHASE, sum(done.values()), sum(sizes.values()))

        try:
            _send_file(directory, header, rank, asked[rank], meeting.links[rank], sent)
        except SparkproofError as error:
            failures[rank] = error

    threads = [threading.Thread(target=send, args=(rank,), name=f"send {rank}") for rank in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(failures):
        raise failures[rank]
    return sorted(asked)


def _send_file(
    directory: Path,
    header: PackageHeader,
    rank: int,
    held: dict,
    link: Link,
    sent: Callable[[int], None],
) -> None:
    path = directory / file_name(rank)
    if not path.exists():
        raise PackageError(
            f"rank {rank} has no package, and {path} is not here to be sent to it; it lies where "
            f"rank {rank} exported it"
        )
    own = read_header(path)
    _check_head(own, rank, header.package_hash)
    size_bytes = path.stat().st_size
    same = held.get("package_hash") == header.package_hash
    first = min(int(held.get("bytes", 0)), size_bytes) // CHUNK_BYTES * CHUNK_BYTES if same else 0
    offer = Offer(path.name, header.package_hash, size_bytes, CHUNK_BYTES, first)
    link.send(json.dumps(vars(offer)).encode())
    at = first
    with path.open("rb") as file:
        file.seek(first)
        while at < size_bytes:
            chunk = file.read(min(CHUNK_BYTES, size_bytes - at))
            if not chunk:
                raise PackageError(f"{path} ended at byte {at} of {size_bytes} while it was sent")
            try:
                link.send(hashlib.sha256(chunk).digest() + chunk)
            except PeerLostError as error:
                raise _stopped(path.name, at, size_bytes, f"to rank {rank}", error) from error
            at += len(chunk)
            sent(at)
    answer = link.receive()
    assert answer == b"whole", f"rank {rank} answered {answer!r}"


def _stopped(file: str, at: int, size_bytes: int, peer: str, error: PeerLostError) -> PeerLostError:
    return PeerLostError(
        f"the transfer of {file} {peer} stopped at byte {at:,} of {size_bytes:,}: {error}; "
        "started again, it goes on there"
    )


def receive_own(directory: Path, meeting: Meeting, report: Progress, needs: bool) -> Path | None:
    """Another rank: take its file from rank 0 if it `needs` one; the file.

    Raises PackageError for a chunk that arrives altered and a full disk, PeerLostError with file,
    offset and peer where the transfer stops. What has arrived is kept for the next attempt.
    """
    link = meeting.links[0]
    path = Path(directory) / file_name(meeting.rank)
    held = _held(path) if needs else None
    link.send(json.dumps({"needs": needs, "held": held or {}}).encode())
    if not needs:
        return None
    offer = Offer(**json.loads(link.receive()))
    if offer.file != path.name:
        raise PackageError(f"{path.name} expected from rank 0, {offer.file} was sent")
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(path, offer)
    incoming = _incoming(path, offer.package_hash)
    for stale in path.parent.glob(f"{path.name}.*{_SUFFIX}"):
        if stale != incoming:
            stale.unlink()
    with incoming.open("ab") as file:
        file.truncate(offer.first)
        _receive_chunks(file, offer, link, report)
        file.flush()
        os.fsync(file.fileno())
    try:
        _check_head(read_header(incoming), meeting.rank, offer.package_hash)
    except PackageError:
        incoming.unlink()
        raise
    os.replace(incoming, path)
    link.send(b"whole")
    return path


def _check_head(header: PackageHeader, rank: int, package_hash: str) -> None:
    if header.package_hash != package_hash or header.rank != rank:
        raise PackageError(
            f"{header.path}: rank {rank} of package {package_hash} expected, rank "
            f"{header.rank} of {header.package_hash} found"
        )


def _receive_chunks(file, offer: Offer, link: Link, report: Progress) -> None:
    at = offer.first
    report(PHASE, at, offer.size_bytes)
    while at < offer.size_bytes:
        try:
            message = link.receive()
        except PeerLostError as error:
            raise _stopped(offer.file, at, offer.size_bytes, "from rank 0", error) from error
        digest, chunk = message[:_DIGEST_BYTES], message[_DIGEST_BYTES:]
        expected = min(offer.chunk_bytes, offer.size_bytes - at)
        if len(chunk) != expected or hashlib.sha256(chunk).digest() != digest:
            raise PackageError(
                f"{offer.file} from rank 0: the chunk at byte {at:,} is altered "
                f"({len(chunk):,} bytes came, {expected:,} expected)"
            )
        try:
            file.write(chunk)
        except OSError as error:
            raise PackageError(
                f"cannot write {offer.file} at byte {at:,}: {error.strerror}"
            ) from error
        at += len(chunk)
        report(PHASE, at, offer.size_bytes)


def _incoming(path: Path, package_hash: str) -> Path:
    return path.with_name(f"{path.name}.{package_hash}{_SUFFIX}")


def _held(path: Path) -> dict | None:
    """What an earlier transfer has left: the package it belongs to and its bytes."""
    for incoming in sorted(path.parent.glob(f"{path.name}.*{_SUFFIX}")):
        package_hash = incoming.name.removeprefix(f"{path.name}.").removesuffix(_SUFFIX)
        return {"package_hash": package_hash, "bytes": incoming.stat().st_size}
    return None


def _check_room(path: Path, offer: Offer) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    needed = offer.size_bytes - offer.first
    if free_bytes < needed:
        raise PackageError(f"{path} needs {needed:,} bytes; {free_bytes:,} are free on its disk")
