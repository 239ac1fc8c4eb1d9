"""The reader of a package: files checked against their own hashes, arrays mapped or read."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import PackageError
from engine.package_format import Manifest, PackageHeader, file_name, read_header
from engine.recipe import Recipe
from engine.shard import Weight
from engine.tensorfile import NUMPY_DTYPES, Progress, drops_cache, no_progress, read_at
from engine.units import MIB

BLOCK_BYTES = 16 * MIB


class Package(Mapping[str, np.ndarray]):
    """One rank's file, open for reading.

    `package[name]` is a read-only array mapped from the file, formats unknown to numpy as bit
    patterns; `read_into` reads an array with explicit reads and checks its hash on the way.
    """

    def __init__(self, header: PackageHeader, verify: bool) -> None:
        self.header = header
        self.verify = verify
        self.weights: Mapping[str, Weight] = {w.name: w for w in self.manifest.weights(self.rank)}
        size_bytes = header.path.stat().st_size
        self._drop_cache = drops_cache(size_bytes)
        self._fd = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        # Table rows are looked up one by one; reading ahead would only fill the page cache.
        self._map.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self.header.container.tensors[name]
        flat = self._bytes[stored.offset : stored.offset + stored.nbytes]
        return flat.view(NUMPY_DTYPES[stored.dtype]).reshape(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays handed out before keep their mapping alive."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def manifest(self) -> Manifest:
        """What the package was made from and for."""
        return self.header.manifest

    @property
    def rank(self) -> int:
        """The rank whose file this is."""
        return self.header.rank

    @property
    def package_hash(self) -> str:
        """The hash that every report about this package carries."""
        return self.header.package_hash

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arrays that belong into device memory."""
        return sum(weight.nbytes for weight in self.weights.values() if weight.resident)

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Read an array into `out`, contiguous uint8 of its size; refuses altered bytes."""
        stored = self.header.container.tensors[name]
        assert out.dtype == np.uint8 and out.size == stored.nbytes, f"{out.size} for {name}"
        flat, digest = out.reshape(-1), hashlib.sha256()
        for first in range(0, flat.size, BLOCK_BYTES):
            block = flat[first : first + BLOCK_BYTES]
            self._read(stored.offset + first, block)
            if self.verify:
                digest.update(block)
        if self.verify:
            self._compare(name, digest.hexdigest())

    def check(self, names: Iterable[str] | None = None, progress: Progress = no_progress) -> None:
        """Hash the named arrays, or all, where they lie; refuses altered bytes."""
        names = list(self if names is None else names)
        total = sum(self.weights[name].nbytes for name in names)
        block, done = np.empty(min(BLOCK_BYTES, max(total, 1)), np.uint8), 0
        for name in names:
            stored, digest = self.header.container.tensors[name], hashlib.sha256()
            for first in range(0, stored.nbytes, block.size):
                part = block[: min(block.size, stored.nbytes - first)]
                self._read(stored.offset + first, part)
                digest.update(part)
                done += part.size
                progress(done, total)
            self._compare(name, digest.hexdigest())

    def _read(self, offset: int, out: np.ndarray) -> None:
        read_at(self._fd, out, offset, self.header.path, PackageError)
        if self._drop_cache:
            os.posix_fadvise(self._fd, offset, out.size, os.POSIX_FADV_DONTNEED)

    def _compare(self, name: str, found: str) -> None:
        expected = self.header.hashes[name]
        if found != expected:
            raise PackageError(
                f"{self.header.path}: {name} is altered: SHA-256 {expected} expected, {found} found"
            )


def locate(path: Path) -> Path:
    """The package directory, given it or its `model.safetensors`."""
    path = Path(path)
    if path.is_dir():
        return path
    if path.name == file_name(0) and path.exists():
        return path.parent
    raise PackageError(f"{path}: a package directory or its {file_name(0)} expected")


def open_package(
    path: Path,
    rank: int,
    *,
    verify: bool = True,
    on_read: bool = False,
    recipe: Recipe | None = None,
    progress: Progress = no_progress,
) -> Package:
    """Open one rank's file of a package.

    verify   hash every array; the header and the file's length are checked in any case
    on_read  leave resident arrays to `read_into`, which hashes them while it reads; the tables
             that stay on disk are hashed now
    recipe   refuse a package of another one
    Raises PackageError naming the file, the expectation and the finding.
    """
    directory = locate(path)
    file = directory / file_name(rank)
    if not file.exists():
        raise PackageError(f"{file} expected for rank {rank}; {directory} holds {_held(directory)}")
    header = read_header(file)
    if header.rank != rank:
        raise PackageError(f"{file}: rank {rank} expected, rank {header.rank} found")
    _check_siblings(directory, header)
    if recipe is not None:
        _check_recipe(header, recipe)
    package = Package(header, verify)
    try:
        if verify:
            _check_side_files(directory, header)
            names = [
                n for n, weight in package.weights.items() if not (on_read and weight.resident)
            ]
            package.check(names, progress)
    except BaseException:
        package.close()
        raise
    return package


def _held(directory: Path) -> str:
    return ", ".join(sorted(p.name for p in directory.glob("*.safetensors"))) or "no such file"


def _check_siblings(directory: Path, header: PackageHeader) -> None:
    """A rank's file beside the first one of another export is a mixture."""
    first = directory / file_name(0)
    if header.rank and first.exists():
        expected = read_header(first).package_hash
        if header.package_hash != expected:
            raise PackageError(
                f"{header.path}: package {expected} expected as in {first.name}, "
                f"{header.package_hash} found"
            )


def _check_recipe(header: PackageHeader, recipe: Recipe) -> None:
    found = header.manifest.recipe.identity
    for key, expected in recipe.identity.items():
        if found[key] != expected:
            raise PackageError(
                f"{header.path}: recipe {key} {expected!r} expected, {found[key]!r} found"
            )


def _check_side_files(directory: Path, header: PackageHeader) -> None:
    """Further files; only rank 0's host has to have them."""
    for name, expected in header.manifest.side_files.items():
        file = directory / name
        if not file.exists():
            if header.rank == 0:
                raise PackageError(f"{file} expected, it is missing")
            continue
        data = file.read_bytes()
        if len(data) != expected["size_bytes"]:
            raise PackageError(
                f"{file}: {expected['size_bytes']} bytes expected, {len(data)} found"
            )
        found = hashlib.sha256(data).hexdigest()
        if found != expected["sha256"]:
            raise PackageError(
                f"{file} is altered: SHA-256 {expected['sha256']} expected, {found} found"
            )


def check_graphs(package: Package, digests: Mapping[str, str]) -> None:
    """Refuse a package whose graphs are not those that this engine builds for its recipe."""
    for name in sorted({*package.manifest.graphs, *digests}):
        expected, found = digests.get(name), package.manifest.graphs.get(name)
        if expected != found:
            raise PackageError(
                f"{package.header.path}: graph {name} {expected} expected, {found} found; "
                "export the package again with this engine"
            )


@dataclass(frozen=True)
class Verified:
    """The outcome of a check of a whole directory: files `checked` and files kept elsewhere."""

    manifest: Manifest
    package_hash: str
    checked: tuple[str, ...]
    elsewhere: tuple[str, ...]


def read_manifest(path: Path) -> Manifest:
    """The manifest of a package, from the header of `model.safetensors` alone."""
    return read_header(locate(path) / file_name(0)).manifest


def verify_package(path: Path, progress: Progress = no_progress) -> Verified:
    """Check every byte of every file of a package that is in the directory."""
    directory = locate(path)
    first = read_header(directory / file_name(0))
    names = [entry["file"] for entry in first.contents]
    present = [rank for rank, name in enumerate(names) if (directory / name).exists()]
    total, done = sum(first.contents[rank]["size_bytes"] for rank in present), 0
    for rank in present:
        before = done
        open_package(
            directory, rank, progress=lambda part, _, at=before: progress(at + part, total)
        ).close()
        done += first.contents[rank]["size_bytes"]
        progress(done, total)
    checked = tuple(names[rank] for rank in present)
    elsewhere = tuple(name for name in names if name not in checked)
    return Verified(first.manifest, first.package_hash, checked, elsewhere)
