"""The writer of a package: a rank's weights streamed into its file, sealed once all ranks are done.

Each rank streams on its own (`RankWriter.stream`), the ranks exchange what they wrote
(`RankContent`), then each seals its file; rank 0 seals last, so a package with `model.safetensors`
is complete. Until it is sealed a file exists under a temporary name only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from engine.checkpoint import Checkpoint
from engine.errors import PackageError
from engine.package_format import (
    Manifest,
    RankContent,
    blank_header,
    encode_header,
    file_name,
    file_order,
    package_hash,
)
from engine.shard import Weight
from engine.tensorfile import NUMPY_DTYPES, Progress, drops_cache, listed, no_progress
from engine.units import GIB

_FLUSH_BYTES = GIB
_TEMPORARY_SUFFIX = ".partial"


class RankWriter:
    """Writes one rank's file; a context manager that leaves nothing behind unless sealed."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        rank: int,
        constants: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        assert 0 <= rank < manifest.recipe.ranks == len(manifest.deals), f"rank {rank}"
        self.path = Path(directory) / file_name(rank)
        self.manifest = manifest
        self.rank = rank
        self.content: RankContent | None = None
        self._temporary = self.path.with_name(self.path.name + _TEMPORARY_SUFFIX)
        self._constants = constants or {}
        self._weights = file_order(manifest.weights(rank))
        self._head_bytes = 0
        self._fd: int | None = None
        for name, (dtype, shape) in manifest.constants.items():
            array = self._constants[name]
            fits = array.dtype == NUMPY_DTYPES[dtype] and array.shape == shape
            assert fits, f"constant {name} is {array.dtype} {array.shape}, not {dtype} {shape}"

    def __enter__(self) -> RankWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._temporary, flags, 0o644)
        except OSError as error:
            raise self._cannot_write(error) from error
        if not self._claim():
            self._close()
            raise PackageError(f"{self._temporary} is being written by another export")
        os.truncate(self._fd, 0)
        return self

    def _claim(self) -> bool:
        """Lock the temporary; False where another writer has it or has just given it its name."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._fd), os.stat(self._temporary))
        except (BlockingIOError, FileNotFoundError):
            return False

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            self._temporary.unlink(missing_ok=True)
            self._close()

    def stream(self, checkpoint: Checkpoint, progress: Progress = no_progress) -> RankContent:
        """Write every array after room for the head; returns what the other ranks must know."""
        head = blank_header(self.manifest, self.rank)
        self._head_bytes = len(head)
        size_bytes = len(head) + sum(weight.nbytes for weight in self._weights)
        self._check_room(size_bytes)
        hashes, written = {}, _Written(self._fd, drops_cache(size_bytes))
        try:
            written.append(np.frombuffer(head, np.uint8))
            for weight in self._weights:
                digest = hashlib.sha256()
                for block in self._blocks(checkpoint, weight):
                    digest.update(block)
                    written.append(block)
                    progress(written.size_bytes, size_bytes)
                hashes[weight.name] = digest.hexdigest()
        except OSError as error:
            raise self._cannot_write(error) from error
        assert written.size_bytes == size_bytes, f"{written.size_bytes} of {size_bytes} bytes"
        self.content = RankContent(self.rank, size_bytes, self.manifest.digest, hashes)
        return self.content

    def _blocks(self, checkpoint: Checkpoint, weight: Weight) -> Iterator[np.ndarray]:
        if weight.name in self.manifest.constants:
            array = np.ascontiguousarray(self._constants[weight.name])
            return iter([array.reshape(-1).view(np.uint8)])
        return checkpoint.stream(weight)

    def seal(self, contents: Sequence[RankContent]) -> str:
        """Write the head, flush, and give the file its name; returns the package hash.

        contents: those of all ranks, this one's included. Raises PackageError where a rank is
        missing or doubled, was given another manifest, or read another checkpoint.
        """
        assert self.content is not None, "seal before stream"
        _check_contents(self.manifest, contents)
        entries = [c.entry for c in sorted(contents, key=lambda content: content.rank)]
        hashes = self.content.tensors
        head = encode_header(self.manifest, self.rank, entries, hashes, self._head_bytes)
        try:
            os.pwrite(self._fd, head, 0)
            os.fsync(self._fd)
            os.replace(self._temporary, self.path)
            _flush_directory(self.path.parent)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._close()
        return package_hash(self.manifest, entries)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = None

    def _check_room(self, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.path.parent).free
        if free_bytes < size_bytes:
            raise PackageError(
                f"{self.path} needs {size_bytes} bytes; {free_bytes} are free on its disk"
            )

    def _cannot_write(self, error: OSError) -> PackageError:
        return PackageError(f"cannot write {self._temporary}: {error.strerror}")


class _Written:
    """Appends blocks to a file, and keeps a large one from filling the page cache."""

    def __init__(self, fd: int, drop_cache: bool) -> None:
        self.size_bytes = 0
        self._fd = fd
        self._drop_cache = drop_cache
        self._flushed_bytes = 0

    def append(self, block: np.ndarray) -> None:
        view = memoryview(block)
        while view:
            count = os.pwrite(self._fd, view, self.size_bytes)
            self.size_bytes += count
            view = view[count:]
        if self._drop_cache and self.size_bytes - self._flushed_bytes >= _FLUSH_BYTES:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, self.size_bytes, os.POSIX_FADV_DONTNEED)
            self._flushed_bytes = self.size_bytes


def _flush_directory(directory: Path) -> None:
    """Make a rename in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_contents(manifest: Manifest, contents: Sequence[RankContent]) -> None:
    ranks = sorted(content.rank for content in contents)
    if ranks != list(range(manifest.recipe.ranks)):
        raise PackageError(
            f"contents of ranks 0..{manifest.recipe.ranks - 1} are expected, those of {ranks} came"
        )
    for content in contents:
        if content.manifest_sha256 != manifest.digest:
            raise PackageError(
                f"rank {content.rank} exports by another manifest: SHA-256 {manifest.digest} "
                f"expected, {content.manifest_sha256} found; recipe, checkpoint, plan and code "
                "must be the same on all ranks"
            )
    _check_shared_tensors(manifest, contents)


def _check_shared_tensors(manifest: Manifest, contents: Sequence[RankContent]) -> None:
    """Arrays that two ranks cut in the same way must have come out with the same bytes."""
    seen: dict[Weight, RankContent] = {}
    for content in contents:
        for weight in manifest.weights(content.rank):
            first = seen.setdefault(weight, content)
            if first.tensors[weight.name] != content.tensors[weight.name]:
                raise PackageError(
                    f"ranks {first.rank} and {content.rank} read other bytes for {weight.name}: "
                    f"SHA-256 {first.tensors[weight.name]} and {content.tensors[weight.name]}; "
                    "their checkpoints differ"
                )


def write_package(
    directory: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    constants: Mapping[str, np.ndarray] | None = None,
    progress: Progress = no_progress,
) -> str:
    """Write the files of all ranks from one process; returns the package hash."""
    ranks = range(manifest.recipe.ranks)
    totals = [sum(weight.nbytes for weight in manifest.weights(rank)) for rank in ranks]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(RankWriter(directory, manifest, rank, constants)) for rank in ranks
        ]
        contents = []
        for writer in writers:
            before, rest = sum(c.size_bytes for c in contents), sum(totals[writer.rank + 1 :])
            contents.append(writer.stream(checkpoint, _part_of(progress, before, rest)))
        return [writer.seal(contents) for writer in reversed(writers)][-1]


def _part_of(progress: Progress, before: int, rest: int) -> Callable[[int, int], None]:
    return lambda done, total: progress(before + done, before + total + rest)


def copy_side_files(source: Path, directory: Path, names: Sequence[str]) -> dict[str, dict]:
    """Copy files such as a tokenizer beside the package; returns `Manifest.side_files`.

    Raises PackageError for names that are missing or would hide a rank's file.
    """
    source, directory = Path(source), Path(directory)
    absent = [name for name in names if not (source / name).is_file()]
    if absent:
        raise PackageError(f"{source} lacks {listed(absent)}")
    taken = [name for name in names if name.endswith(".safetensors") or Path(name).name != name]
    if taken:
        raise PackageError(f"{listed(taken)} cannot lie beside a package under that name")
    directory.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in names:
        data = (source / name).read_bytes()
        temporary = directory / (name + _TEMPORARY_SUFFIX)
        temporary.write_bytes(data)
        os.replace(temporary, directory / name)
        found[name] = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    return found
