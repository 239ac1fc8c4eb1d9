"""Prefix blocks on disk: checked on reading, written atomically, the oldest dropped first."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import queue
import socket
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import UsageError
from engine.units import MIB, format_size

_MAGIC = b"sparkpfx"
_VERSION = 1
_SUFFIX = ".block"
_PART = ".part"
_HEADER_BYTES_MAX = 1 << 16
_PENDING_BYTES_MAX = 64 * MIB
"""Blocks that wait for the disk hold host memory; beyond this, new ones are skipped."""
EVENTS = ("read", "written", "dropped", "skipped")
ERRORS = ("corrupt", "foreign", "unreadable", "unwritable", "full")


@dataclass
class DiskStats:
    """What the cache did; all counters exist from the start.

    `skipped` counts blocks not written because the writer lagged behind or the limit is smaller
    than the block; `dropped` those removed to stay within the limit.
    """

    size_bytes: int = 0
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ERRORS, 0))


class PrefixDisk:
    """Blocks of one package in one directory, which no other process may use meanwhile.

    A block is `MAGIC, header length, header JSON, content, SHA-256 of all before`; the header
    repeats kind, key and identity (model, recipe, ranks, version), so that a block which was
    renamed, copied from another package, cut off or altered is found out and removed. Trouble
    with the disk costs hits, never a token: `get` then gives None and `put` does nothing.
    """

    def __init__(self, directory: Path, limit_bytes: int, identity: str):
        self._directory = Path(directory)
        self._limit_bytes = limit_bytes
        self._identity = identity
        self.stats = DiskStats()
        self._lock_file = _lock(self._directory)
        self._guard = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._pending: dict[str, bytes] = {}
        self._scan()
        self._pending_bytes = 0
        self._jobs: queue.Queue = queue.Queue()
        self._writer = threading.Thread(target=self._write_all, name="prefix-disk", daemon=True)
        self._writer.start()

    def _scan(self) -> None:
        """Take over what earlier processes left, oldest first; unfinished files go."""
        found = []
        for entry in os.scandir(self._directory):
            try:
                if entry.name.endswith(_PART):
                    os.unlink(entry.path)
                elif entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, entry.name, status.st_size))
            except OSError:
                self.stats.errors["unreadable"] += 1
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.stats.size_bytes += size
        self._drop_oldest(0)

    def has(self, kind: str, key: bytes) -> bool:
        """Whether the block is believed to be there (or on its way)."""
        name = _name(kind, key)
        with self._guard:
            return name in self._sizes or name in self._pending

    def get(self, kind: str, key: bytes) -> bytes | None:
        """The content of a block, verified; None (and forgotten) if it cannot be had."""
        name = _name(kind, key)
        with self._guard:
            if name in self._pending:
                return self._pending[name]
        path = self._directory / name
        try:
            block = path.read_bytes()
            # The order of use survives a restart in the files' times.
            os.utime(path)
        except OSError:
            self._lose(name, "unreadable")
            return None
        content, trouble = _opened(block, kind, key, self._identity)
        if content is None:
            self._lose(name, trouble)
            return None
        with self._guard:
            if name in self._sizes:
                self._sizes.move_to_end(name)
            self.stats.blocks["read"] += 1
        return content

    def put(self, kind: str, key: bytes, content: bytes) -> None:
        """Write a block soon; given up when the writer lags or the disk refuses."""
        name = _name(kind, key)
        with self._guard:
            if self._pending and self._pending_bytes + len(content) > _PENDING_BYTES_MAX:
                self.stats.blocks["skipped"] += 1
                return
            self._pending[name] = content
            self._pending_bytes += len(content)
        self._jobs.put((name, kind, key))

    def flush(self) -> None:
        """Wait until everything put so far is written or given up."""
        self._jobs.join()

    def close(self) -> None:
        """Write what is pending, and let others have the directory."""
        self._jobs.put(None)
        self._writer.join()
        self._lock_file.close()

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            name, kind, key = job
            try:
                self._write(name, _sealed(self._pending[name], kind, key, self._identity))
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self.stats.errors["full" if full else "unwritable"] += 1
            finally:
                with self._guard:
                    self._pending_bytes -= len(self._pending.pop(name))
                self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, name: str, block: bytes) -> None:
        if len(block) > self._limit_bytes:
            self.stats.blocks["skipped"] += 1
            return
        self._drop_oldest(len(block))
        part = self._directory / (name + _PART)
        try:
            # Not synced: after a power cut the checksum tells a torn block from a whole one.
            part.write_bytes(block)
            os.replace(part, self._directory / name)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._guard:
            self._sizes[name] = len(block)
            self.stats.size_bytes += len(block)
            self.stats.blocks["written"] += 1

    def _drop_oldest(self, room_bytes: int) -> None:
        while self._sizes and self.stats.size_bytes + room_bytes > self._limit_bytes:
            with self._guard:
                name = next(iter(self._sizes), None)
            if name is not None:
                self._remove(name)
                self.stats.blocks["dropped"] += 1

    def _lose(self, name: str, trouble: str) -> None:
        self.stats.errors[trouble] += 1
        self._remove(name)

    def _remove(self, name: str) -> None:
        with self._guard:
            size = self._sizes.pop(name, None)
            if size is not None:
                self.stats.size_bytes -= size
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError:
            # It stays on disk unseen; a later start counts it again.
            self.stats.errors["unwritable"] += 1


def _lock(directory: Path):
    """Create the directory and hold its lock file open. Raises UsageError if another has it."""
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.scandir(directory).close()
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (held for life)
    except OSError as error:
        raise UsageError(
            f"prefix-cache-disk is {str(directory)!r}, which cannot be used: {error.strerror}; "
            "a directory that can be listed and written is needed"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UsageError(
            f"prefix-cache-disk is {str(directory)!r}, which {owner} is using; each server needs "
            "a directory of its own"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def _name(kind: str, key: bytes) -> str:
    return f"{key.hex()}.{kind}{_SUFFIX}"


def _header(kind: str, key: bytes, identity: str, size: int) -> bytes:
    fields = {
        "version": _VERSION,
        "kind": kind,
        "key": key.hex(),
        "identity": identity,
        "nbytes": size,
    }
    return json.dumps(fields, sort_keys=True).encode()


def _sealed(content: bytes, kind: str, key: bytes, identity: str) -> bytes:
    """The block that holds `content`."""
    header = _header(kind, key, identity, len(content))
    assert len(header) <= _HEADER_BYTES_MAX, f"a block header of {format_size(len(header))}"
    body = _MAGIC + struct.pack("<I", len(header)) + header + content
    return body + hashlib.sha256(body).digest()


def _opened(block: bytes, kind: str, key: bytes, identity: str) -> tuple[bytes | None, str]:
    """The content of a block, or None and what is wrong with it."""
    body, checksum = block[:-32], block[-32:]
    if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != checksum:
        return None, "corrupt"
    begin = len(_MAGIC) + 4
    (length,) = struct.unpack("<I", body[len(_MAGIC) : begin])
    content = body[begin + length :]
    if body[begin : begin + length] != _header(kind, key, identity, len(content)):
        return None, "foreign"
    return content, ""
