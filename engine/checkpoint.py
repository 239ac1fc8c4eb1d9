"""The reader of a checkpoint in the release format: checked on opening, then streamed by slices."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from engine.config import ModelConfig, read_config
from engine.engram import bucket_primes
from engine.errors import CheckpointError, ConfigError
from engine.shard import Piece, Range, Weight
from engine.tensorfile import (
    DTYPE_BYTES,
    NUMPY_DTYPES,
    Container,
    Stored,
    drops_cache,
    listed,
    parse_json,
    read_at,
    read_container,
)
from engine.tensors import Ledger, account_for, expected_tensors, optional_tensors
from engine.units import MIB

BLOCK_BYTES = 64 * MIB
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
E8M0_NAN = 0xFF

_SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Window:
    """The bytes of a piece in its file: `rows` of `row_bytes`, of each the bytes `columns`."""

    stored: Stored
    rows: Range
    row_bytes: int
    columns: Range

    @property
    def whole_rows(self) -> bool:
        """True when the piece is one run of bytes in the file."""
        return self.columns == (0, self.row_bytes)


def window_of(stored: Stored, piece: Piece) -> Window:
    """Where a piece lies in its tensor; rows and columns of the piece count items."""
    assert len(stored.shape) in (1, 2), f"{stored.name} has shape {stored.shape}"
    item_bytes = DTYPE_BYTES[stored.dtype]
    height, width = stored.shape[0], math.prod(stored.shape[1:])
    rows, columns = piece.rows or (0, height), piece.columns or (0, width)
    assert 0 <= rows[0] <= rows[1] <= height, f"{piece} reaches past {stored.shape}"
    assert 0 <= columns[0] <= columns[1] <= width, f"{piece} reaches past {stored.shape}"
    column_bytes = columns[0] * item_bytes, columns[1] * item_bytes
    return Window(stored, rows, width * item_bytes, column_bytes)


class Checkpoint:
    """An open checkpoint: `config`, `tensors` by name, and reads of slices of them.

    Reads are explicit, so memory in use stays at one block however large the tensor is.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tensors: Mapping[str, Stored],
        drop_cache: bool = False,
    ) -> None:
        self.directory = directory
        self.config = config
        self.tensors = tensors
        self._drop_cache = drop_cache
        self._files: dict[Path, int] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards."""
        while self._files:
            os.close(self._files.popitem()[1])

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the configuration, every tensor's name, dtype and shape, and a sample.

        The sample is the first 4096 bytes of every tensor that belongs to no routed expert: enough
        to tell two checkpoints of one configuration apart without reading 475 GiB. How the tensors
        are spread over shards does not enter.
        """
        digest = hashlib.sha256(json.dumps(self.config.to_json(), sort_keys=True).encode())
        for name in sorted(self.tensors):
            stored = self.tensors[name]
            digest.update(json.dumps([name, stored.dtype, list(stored.shape)]).encode())
            if ".experts." not in name:
                sample = np.empty(min(stored.nbytes, _SAMPLE_BYTES), np.uint8)
                self._read(stored, 0, sample)
                digest.update(sample)
        return digest.hexdigest()

    def ledger(self, draft_tokens: int) -> Ledger:
        """What a recipe with that many draft tokens uses and leaves out, with the reasons."""
        return account_for(self.tensors, self.config, draft_tokens)

    def read_piece(self, piece: Piece) -> np.ndarray:
        """One piece as an array of its own shape; formats unknown to numpy as bit patterns."""
        stored = self.tensors[piece.source]
        window = window_of(stored, piece)
        item_bytes = DTYPE_BYTES[stored.dtype]
        width = (window.columns[1] - window.columns[0]) // item_bytes
        shape = (window.rows[1] - window.rows[0], width)[: len(stored.shape)]
        out = np.empty(math.prod(shape) * item_bytes, np.uint8)
        weight = Weight(piece.source, stored.dtype, shape, (replace(piece, index=None),))
        self.fill(weight, out)
        return out.view(NUMPY_DTYPES[stored.dtype]).reshape(shape)

    def fill(self, weight: Weight, out: np.ndarray) -> None:
        """Read a weight into `out`, contiguous uint8 of `weight.nbytes` bytes."""
        assert out.dtype == np.uint8 and out.size == weight.nbytes, f"{out.size} for {weight.name}"
        flat, at = out.reshape(-1), 0
        for block in self.stream(weight):
            flat[at : at + block.size] = block
            at += block.size

    def stream(self, weight: Weight, block_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
        """The bytes of a weight in order, in flat uint8 blocks of at most `block_bytes`.

        A block is valid until the next one is asked for. Raises CheckpointError for a scale that
        is NaN, with its tensor and position, and for a file that has become shorter.
        """
        windows = self._windows(weight)
        row_bytes_max = max((w.row_bytes for w in windows), default=1)
        needed = max((w.row_bytes * (w.rows[1] - w.rows[0]) for w in windows), default=0)
        buffer = np.empty(max(row_bytes_max, min(block_bytes, needed)), np.uint8)
        for window in windows:
            yield from self._blocks(window, buffer)

    def _windows(self, weight: Weight) -> list[Window]:
        windows = []
        for slot, piece in enumerate(weight.pieces):
            stored = self.tensors[piece.source]
            assert stored.dtype == weight.dtype, f"{weight.name} {weight.dtype} from {stored.dtype}"
            assert piece.index in (None, slot), f"{weight.name}: pieces are out of order"
            windows.append(window_of(stored, piece))
        size_bytes = sum((w.rows[1] - w.rows[0]) * (w.columns[1] - w.columns[0]) for w in windows)
        assert size_bytes == weight.nbytes, f"{weight.name}: {size_bytes} for {weight.nbytes} bytes"
        return windows

    def _blocks(self, window: Window, buffer: np.ndarray) -> Iterator[np.ndarray]:
        rows_max = max(1, buffer.size // window.row_bytes) if window.row_bytes else 1
        for first in range(window.rows[0], window.rows[1], rows_max):
            count = min(rows_max, window.rows[1] - first)
            block = buffer[: count * window.row_bytes]
            self._read(window.stored, first * window.row_bytes, block)
            block = block.reshape(count, window.row_bytes)
            if not window.whole_rows:
                block = np.ascontiguousarray(block[:, slice(*window.columns)])
            if window.stored.dtype == "F8_E8M0":
                _refuse_nan(block, window, first)
            if block.size:
                yield block.reshape(-1)

    def _read(self, stored: Stored, offset: int, out: np.ndarray) -> None:
        fd = self._files.get(stored.path)
        if fd is None:
            try:
                fd = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot read {stored.path}: {error.strerror}") from error
            self._files[stored.path] = fd
        read_at(fd, out, stored.offset + offset, stored.path, CheckpointError)
        if self._drop_cache and out.size:
            os.posix_fadvise(fd, stored.offset + offset, out.size, os.POSIX_FADV_DONTNEED)


def _refuse_nan(block: np.ndarray, window: Window, first_row: int) -> None:
    bad = np.argwhere(block == E8M0_NAN)
    if len(bad):
        row, column = int(bad[0][0]) + first_row, int(bad[0][1]) + window.columns[0]
        at = [row, column][: len(window.stored.shape)]
        raise CheckpointError(
            f"{window.stored.path}: the scale {window.stored.name}{at} is NaN (0xFF); "
            "a power of two (0x00..0xFE) is expected"
        )


def open_checkpoint(directory: Path, drop_cache: bool | None = None) -> Checkpoint:
    """Open a checkpoint directory and check its files against its configuration.

    drop_cache: tell the kernel to forget what has been read; by default for checkpoints that would
    fill more than a quarter of the host's memory with page cache.
    Raises ConfigError for `config.json`, CheckpointError for everything else: missing, truncated,
    doubled, unknown or wrongly shaped tensors, each named with what was expected and found.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; a checkpoint directory is needed")
    config = read_config(directory)
    _check_engram_rows(config, directory)
    index = _read_index(directory)
    tensors = _collect(directory, index) if index is not None else _single(directory)
    account_for(tensors, config, draft_tokens=1)
    _check_specs(tensors, config)
    size_bytes = sum(stored.nbytes for stored in tensors.values())
    drop = drops_cache(size_bytes) if drop_cache is None else drop_cache
    return Checkpoint(directory, config, tensors, drop)


def _check_engram_rows(config: ModelConfig, directory: Path) -> None:
    """The tables hold one bucket after the other, so their rows are the sum of the primes."""
    rows = [sum(primes) for primes in bucket_primes(config)]
    if rows != list(config.engram_num_embeddings):
        raise ConfigError(
            f"{directory / 'config.json'}: engram_num_embeddings is "
            f"{list(config.engram_num_embeddings)}; the buckets of engram_vocab_size "
            f"{config.engram_vocab_size} need {rows}"
        )


def _single(directory: Path) -> Mapping[str, Stored]:
    path = directory / SINGLE_NAME
    if not path.exists():
        raise CheckpointError(f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}")
    return read_container(path, CheckpointError).tensors


def _read_index(directory: Path) -> dict[str, str] | None:
    """File name of every tensor, or None where there is no index."""
    path = directory / INDEX_NAME
    if not path.exists():
        return None
    try:
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    files = document.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map from tensor names to files")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: the file of {name} is {file!r}; a plain file name is expected"
            )
    return files


def _collect(directory: Path, index: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of all shards; each must lie where the index says, and nowhere else."""
    file_names = sorted(set(index.values()))
    absent = [name for name in file_names if not (directory / name).exists()]
    if absent:
        raise CheckpointError(
            f"{directory} lacks {len(absent)} files of the index: {listed(absent)}"
        )
    strange = {p.name for p in directory.iterdir() if _SHARD_NAME.fullmatch(p.name)}
    strange -= set(file_names)
    if strange:
        raise CheckpointError(
            f"{directory} holds shards that its index does not name: {listed(sorted(strange))}"
        )
    found: dict[str, Stored] = {}
    for file_name in file_names:
        _merge(found, read_container(directory / file_name, CheckpointError))
    missing = [n for n, file in index.items() if n not in found or found[n].path.name != file]
    if missing:
        named = [f"{name} (in {index[name]})" for name in missing]
        raise CheckpointError(
            f"{len(missing)} tensors of the index are not in the file that it names: "
            f"{listed(named)}"
        )
    extra = [f"{name} (in {s.path.name})" for name, s in found.items() if name not in index]
    if extra:
        raise CheckpointError(f"{len(extra)} tensors are not in the index: {listed(extra)}")
    return found


def _merge(found: dict[str, Stored], container: Container) -> None:
    for name, stored in container.tensors.items():
        if name in found:
            raise CheckpointError(
                f"{name} is in two shards: {found[name].path.name} and {stored.path.name}"
            )
        found[name] = stored


def _check_specs(tensors: Mapping[str, Stored], config: ModelConfig) -> None:
    specs = {**expected_tensors(config), **optional_tensors(config)}
    for name, stored in tensors.items():
        spec = specs.get(name)
        if spec is None:
            continue
        if stored.dtype != spec.dtype:
            raise CheckpointError(
                f"{name} is {stored.dtype} in {stored.path.name}; {spec.dtype} is expected"
            )
        if stored.shape != spec.shape:
            raise CheckpointError(
                f"{name} has shape {list(stored.shape)} in {stored.path.name}; "
                f"{list(spec.shape)} is expected"
            )
