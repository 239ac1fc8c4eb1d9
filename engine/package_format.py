"""What a package file says about itself: manifest, hashes, and the header that carries them.

A package is one safetensors file per rank. The header of each holds, as metadata, the manifest
(the same in every file), the SHA-256 of each of its tensors, a content hash per rank, the package
hash over all of them, and a hash of the header itself; so every byte of every file is covered
without a second pass over the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import engine
from engine.config import ModelConfig, parse_config
from engine.errors import PackageError, SparkproofError
from engine.recipe import Recipe, recipe_from_json
from engine.shard import Deal, Weight, rank_weights
from engine.tensorfile import DTYPE_BYTES, LENGTH_BYTES, Container, read_container
from engine.units import round_up

FORMAT = "package/1"
ALIGNMENT_BYTES = 256
DATA_ALIGNMENT_BYTES = 4096

_BLANK = "0" * 64
_OPENING = b'{"__metadata__":{"header_sha256":"'
_KEYS = ("header_sha256", "format", "rank", "package_hash", "contents", "tensors", "manifest")
_ENTRY = ("file", "size_bytes", "content_sha256")
_SIZE_BYTES_MAX = 10**16


def file_name(rank: int) -> str:
    """The file of a rank inside the package directory."""
    return "model.safetensors" if rank == 0 else f"rank-{rank}.safetensors"


def sha256_of(value: object) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """The engine's version with a digest of its sources, which decide plans and bits."""
    root, digest = Path(engine.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return f"{engine.__version__}+{digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class Constant(Weight):
    """An array that the exporter computed, kept on disk; its dtype may be an integer type."""

    pieces: tuple[()] = ()
    resident: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a package was made from and for; equal in the files of all ranks.

    checkpoint  fingerprint of the checkpoint
    graphs      digest of each graph by name
    memory_map  the `memmap/1` document
    left_out    tensors of the checkpoint that were not used, with the reason (`Ledger.summary`)
    constants   dtype and shape of arrays that the exporter computed, by name
    side_files  `{"sha256", "size_bytes"}` of further files in the directory, by name
    """

    recipe: Recipe
    config: ModelConfig
    deals: tuple[Deal, ...]
    checkpoint: str
    graphs: Mapping[str, str] = field(default_factory=dict)
    memory_map: Mapping[str, object] = field(default_factory=dict)
    left_out: Sequence[Mapping] = ()
    constants: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    side_files: Mapping[str, Mapping] = field(default_factory=dict)
    code_version: str = field(default_factory=code_version)

    def weights(self, rank: int) -> list[Weight]:
        """The arrays of a rank's file: its weights, then the constants."""
        constants = [Constant(name, *spec) for name, spec in self.constants.items()]
        return rank_weights(self.config, self.recipe, self.deals[rank]) + constants

    def to_json(self) -> dict:
        """The JSON value that `manifest_from_json` reads back."""
        return {
            **{name: getattr(self, name) for name in ("checkpoint", "code_version", "graphs")},
            "recipe": self.recipe.to_json(),
            "config": self.config.to_json(),
            "deals": [asdict(deal) for deal in self.deals],
            "memory_map": self.memory_map,
            "left_out": list(self.left_out),
            "constants": {n: [dtype, list(shape)] for n, (dtype, shape) in self.constants.items()},
            "side_files": self.side_files,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole manifest."""
        return sha256_of(self.to_json())


def manifest_from_json(document: Mapping) -> Manifest:
    """The manifest that `Manifest.to_json` wrote; raises KeyError, TypeError or user errors."""
    values = dict(document)
    values["recipe"] = recipe_from_json(values["recipe"], "recipe of the package")
    values["config"] = parse_config(values["config"], "config of the package")
    values["deals"] = tuple(
        Deal(**{part: tuple(span) for part, span in deal.items()}) for deal in values["deals"]
    )
    values["constants"] = {n: (dtype, tuple(s)) for n, (dtype, s) in values["constants"].items()}
    return Manifest(**values)


@dataclass(frozen=True)
class RankContent:
    """What one rank has streamed: the size of its file and the SHA-256 of each of its tensors."""

    rank: int
    size_bytes: int
    manifest_sha256: str
    tensors: Mapping[str, str]

    def to_json(self) -> dict:
        """A JSON value, to travel to the other ranks."""
        return asdict(self)

    @cached_property
    def sha256(self) -> str:
        """The content hash of the rank's file."""
        return sha256_of(self.tensors)

    @property
    def entry(self) -> dict:
        """The rank's line in every header."""
        return {
            "file": file_name(self.rank),
            "size_bytes": self.size_bytes,
            "content_sha256": self.sha256,
        }


def content_from_json(document: Mapping) -> RankContent:
    """The content that `RankContent.to_json` wrote."""
    return RankContent(**document)


def package_hash(manifest: Manifest, contents: Sequence[Mapping]) -> str:
    """SHA-256 over recipe identity, checkpoint fingerprint, code version and all contents."""
    return sha256_of(
        {
            "recipe": manifest.recipe.identity,
            "checkpoint": manifest.checkpoint,
            "code": manifest.code_version,
            "contents": [entry["content_sha256"] for entry in contents],
        }
    )


def file_order(weights: Sequence[Weight]) -> list[Weight]:
    """The order in a file that aligns without gaps, which the container does not allow.

    Arrays whose size is a multiple of 256 bytes come first and so all begin at one; the rest follow
    by the largest power of two that divides their size, so each is aligned to its items.
    """

    def power_of_two(weight: Weight) -> int:
        return min(weight.nbytes & -weight.nbytes or ALIGNMENT_BYTES, ALIGNMENT_BYTES)

    return sorted(weights, key=power_of_two, reverse=True)


def encode_header(
    manifest: Manifest,
    rank: int,
    contents: Sequence[Mapping],
    hashes: Mapping[str, str],
    length: int | None = None,
) -> bytes:
    """The head of a rank's file, length field included, padded with spaces.

    length: bytes of the whole head; by default the least multiple of 4096 that holds it.
    """
    weights = manifest.weights(rank)
    tensors = {w.name: {"sha256": hashes[w.name], "resident": w.resident} for w in weights}
    metadata = {
        "header_sha256": _BLANK,
        "format": FORMAT,
        "rank": str(rank),
        "package_hash": package_hash(manifest, contents),
        "contents": _compact(contents),
        "tensors": _compact(tensors),
        "manifest": _compact(manifest.to_json()),
    }
    document, at = {"__metadata__": metadata}, 0
    for weight in file_order(weights):
        offsets = [at, at + weight.nbytes]
        document[weight.name] = {
            "dtype": weight.dtype,
            "shape": list(weight.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = _compact(document).encode("ascii")
    length = length or round_up(LENGTH_BYTES + len(text), DATA_ALIGNMENT_BYTES)
    assert LENGTH_BYTES + len(text) <= length, f"{len(text)} header bytes for {length}"
    text = text.ljust(length - LENGTH_BYTES)
    return _with_digest(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def blank_header(manifest: Manifest, rank: int) -> bytes:
    """A head as long as the final one, with zeros for all that is only known after streaming."""
    entries = [
        {"file": file_name(r), "size_bytes": _SIZE_BYTES_MAX, "content_sha256": _BLANK}
        for r in range(manifest.recipe.ranks)
    ]
    blanks = {weight.name: _BLANK for weight in manifest.weights(rank)}
    return encode_header(manifest, rank, entries, blanks)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _digest_span() -> slice:
    first = LENGTH_BYTES + len(_OPENING)
    return slice(first, first + len(_BLANK))


def header_sha256(head: bytes) -> str:
    """SHA-256 of a head in which its own hash reads as zeros."""
    span = _digest_span()
    return hashlib.sha256(head[: span.start] + _BLANK.encode() + head[span.stop :]).hexdigest()


def _with_digest(head: bytes) -> bytes:
    span = _digest_span()
    return head[: span.start] + header_sha256(head).encode() + head[span.stop :]


@dataclass(frozen=True)
class PackageHeader:
    """The head of one rank's file, read and checked."""

    container: Container
    manifest: Manifest
    rank: int
    package_hash: str
    contents: Sequence[Mapping]
    hashes: Mapping[str, str]

    @property
    def path(self) -> Path:
        """The file."""
        return self.container.path


def read_header(path: Path) -> PackageHeader:
    """Read the head of a package file and check that it is whole and agrees with itself.

    Raises PackageError, naming the file, the expectation and the finding.
    """
    container = read_container(path, PackageError)
    metadata = container.metadata
    if metadata.get("format") != FORMAT:
        raise PackageError(f"{path}: format {FORMAT!r} expected, {metadata.get('format')!r} found")
    head = len(container.header).to_bytes(LENGTH_BYTES, "little") + container.header
    expected, found = metadata.get("header_sha256"), header_sha256(head)
    if expected != found or not container.header.startswith(_OPENING):
        raise PackageError(
            f"{path}: the header is altered: SHA-256 {expected} expected, {found} found"
        )
    if tuple(metadata) != _KEYS:
        raise PackageError(f"{path}: metadata {list(_KEYS)} expected, {list(metadata)} found")
    try:
        manifest = manifest_from_json(json.loads(metadata["manifest"]))
        contents = [{key: e[key] for key in _ENTRY} for e in json.loads(metadata["contents"])]
        hashes = {n: t["sha256"] for n, t in json.loads(metadata["tensors"]).items()}
        rank = int(metadata["rank"])
    except (KeyError, TypeError, ValueError, SparkproofError) as error:
        raise PackageError(f"{path}: the manifest cannot be read: {error!r}") from error
    header = PackageHeader(container, manifest, rank, metadata["package_hash"], contents, hashes)
    _check_consistent(header)
    return header


def _check_consistent(header: PackageHeader) -> None:
    """Hashes recomputed from what they cover, and the tensors that the manifest calls for."""
    path, manifest = header.path, header.manifest
    version = manifest.code_version.partition("+")[0]
    if version != engine.__version__:
        raise PackageError(
            f"{path}: written by engine {version}; this is {engine.__version__}, export it again"
        )
    _same(path, "package hash", package_hash(manifest, header.contents), header.package_hash)
    files = [file_name(rank) for rank in range(manifest.recipe.ranks)]
    _same(path, "files", files, [entry["file"] for entry in header.contents])
    if header.rank not in range(len(files)):
        raise PackageError(f"{path}: rank 0..{len(files) - 1} expected, {header.rank} found")
    own = header.contents[header.rank]
    _same(path, "size in bytes", own["size_bytes"], path.stat().st_size)
    _same(path, "content hash", own["content_sha256"], sha256_of(header.hashes))
    found = {t.name: (t.dtype, t.shape) for t in header.container.tensors.values()}
    expected = {w.name: (w.dtype, w.shape) for w in manifest.weights(header.rank)}
    for name in [*expected, *found]:
        _same(path, f"tensor {name}", expected.get(name), found.get(name))
    _same(path, "hashed tensors", sorted(expected), sorted(header.hashes))


def _same(path: Path, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise PackageError(f"{path}: {what} {expected} expected, {found} found")
