"""The safetensors container: one file's header, read and checked, and reads of its bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.errors import SparkproofError, must_be_one_of
from engine.shard import ITEM_BYTES

DTYPE_BYTES: Mapping[str, int] = {**ITEM_BYTES, "U8": 1, "I32": 4, "I64": 8}
NUMPY_DTYPES: Mapping[str, str] = {
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "I8": "u1",
    "U8": "u1",
    "BF16": "<u2",
    "F32": "<f4",
    "I32": "<i4",
    "I64": "<i8",
}
"""How numpy holds each stored dtype: formats that it lacks appear as their bit patterns."""

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

HEADER_BYTES_MAX = 100_000_000
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Stored:
    """One tensor in a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Container:
    """A file's header: `tensors` in file order, `metadata` as written, the raw bytes of both."""

    path: Path
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    header: bytes


def read_container(path: Path, error: type[SparkproofError]) -> Container:
    """Read and check the header of a safetensors file; its data is not touched.

    Raises `error` naming the file, what was expected and what was found: a header that is no
    safetensors header, tensors that overlap or leave gaps, a file longer or shorter than they need.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header = _read_header(file, size_bytes, path, error)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror}") from failure
    try:
        document = parse_json(header)
    except ValueError as failure:
        raise error(f"{path}: the header is not a JSON object: {failure}") from failure
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(f"{path}: __metadata__ in the header is no object of texts")
    data_at = LENGTH_BYTES + len(header)
    found = [_stored(name, entry, path, data_at, error) for name, entry in document.items()]
    tensors = {t.name: t for t in sorted(found, key=lambda t: (t.offset, t.nbytes))}
    _check_extent(tensors.values(), path, data_at, size_bytes, error)
    return Container(path, tensors, metadata, header)


def _read_header(file, size_bytes: int, path: Path, error: type[SparkproofError]) -> bytes:
    if size_bytes < LENGTH_BYTES:
        raise error(
            f"{path} is truncated: at least {LENGTH_BYTES} bytes expected, {size_bytes} found"
        )
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > HEADER_BYTES_MAX:
        raise error(
            f"{path}: the header length reads {length}; at most {HEADER_BYTES_MAX} is accepted"
        )
    if size_bytes < LENGTH_BYTES + length:
        raise error(
            f"{path} is truncated: at least {LENGTH_BYTES + length} bytes expected "
            f"for the header, {size_bytes} found"
        )
    return file.read(length)


def parse_json(text: bytes | str) -> dict:
    """A JSON object in which no key appears twice; anything else raises ValueError."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{twice!r} appears twice")
        return found

    try:
        document = json.loads(text, object_pairs_hook=unique)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    if not isinstance(document, dict):
        raise ValueError(f"it holds {type(document).__name__}")
    return document


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _stored(
    name: str, entry: object, path: Path, data_at: int, error: type[SparkproofError]
) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error(
            f"{path}: the header's entry of {name} is {entry!r}; dtype, shape and "
            "data_offsets are expected"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise error(f"{path}: {must_be_one_of(f'dtype of {name}', dtype, DTYPE_BYTES)}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise error(
            f"{path}: {name} has shape {shape!r} and data_offsets {offsets!r}; "
            "lists of counts are expected"
        )
    stored = Stored(name, dtype, tuple(shape), path, data_at + offsets[0])
    if offsets[1] - offsets[0] != stored.nbytes:
        raise error(
            f"{path}: {name} is {dtype} {list(shape)}, {stored.nbytes} bytes; "
            f"its data_offsets hold {offsets[1] - offsets[0]}"
        )
    return stored


def _check_extent(
    tensors: Iterable[Stored],
    path: Path,
    data_at: int,
    size_bytes: int,
    error: type[SparkproofError],
) -> None:
    at = data_at
    for tensor in tensors:
        if tensor.offset != at:
            raise error(
                f"{path}: {tensor.name} begins at byte {tensor.offset}; {at} is expected, "
                "directly after the tensor before it"
            )
        at += tensor.nbytes
    if size_bytes != at:
        kind = "truncated" if size_bytes < at else "too long"
        raise error(f"{path} is {kind}: {at} bytes expected, {size_bytes} found")


def read_at(
    fd: int, out: np.ndarray, offset: int, path: Path, error: type[SparkproofError]
) -> None:
    """Fill the contiguous uint8 array `out` from byte `offset` of an open file."""
    view, done = memoryview(out), 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as failure:
            raise error(
                f"cannot read {path} at byte {offset + done}: {failure.strerror}"
            ) from failure
        if count == 0:
            raise error(
                f"{path} is truncated: byte {offset + len(view)} expected, "
                f"it ends at {offset + done}"
            )
        done += count


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """A Progress that says nothing."""


def drops_cache(size_bytes: int) -> bool:
    """Whether files of that size would fill over a quarter of the host's memory with page cache."""
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return size_bytes > host_bytes // 4


def listed(names: Iterable[str], shown_max: int = 5) -> str:
    """Names for an error message: the first few, and how many more there are."""
    names = list(names)
    more = len(names) - shown_max
    return ", ".join(names[:shown_max]) + (f" and {more} more" if more > 0 else "")
