"""Mini checkpoints on disk for tests: copied, taken apart, and written back with a change."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "fixtures" / "goldens" / "mini"
INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4, "F16": 2}

Tensors = dict[str, tuple[str, list[int], bytes]]
"""Dtype, shape and bytes by name, in file order."""


def copy_golden(directory: Path) -> Path:
    """A writable copy of the golden checkpoint."""
    directory.mkdir(parents=True)
    for name in ("config.json", INDEX, *SHARDS):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def read_file(path: Path) -> Tensors:
    """All tensors of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (e["dtype"], e["shape"], data[start + e["data_offsets"][0] :][: _span(e)])
        for name, e in header.items()
    }


def _span(entry: dict) -> int:
    return entry["data_offsets"][1] - entry["data_offsets"][0]


def write_file(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file, whatever its tensors claim about themselves."""
    entries, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    write_raw(path, json.dumps(entries).encode(), b"".join(t[2] for t in tensors.values()))


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    """Write a file with this header text and data."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def zeros(dtype: str, *shape: int) -> tuple[str, list[int], bytes]:
    """A tensor of zero bytes."""
    return dtype, list(shape), bytes(math.prod(shape) * ITEM_BYTES[dtype])


def shard_of(directory: Path, name: str) -> Path:
    """The shard that the index names for a tensor."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def edit_shard(path: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite a shard after `change` has altered its tensors in place."""
    tensors = read_file(path)
    change(tensors)
    write_file(path, tensors)


def edit_index(directory: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the index after `change` has altered its weight map in place."""
    document = json.loads((directory / INDEX).read_text())
    change(document["weight_map"])
    (directory / INDEX).write_text(json.dumps(document))


def set_tensor(directory: Path, name: str, tensor: tuple[str, list[int], bytes]) -> None:
    """Put a tensor in place of the one of that name."""
    edit_shard(shard_of(directory, name), lambda tensors: tensors.update({name: tensor}))


def set_byte(directory: Path, name: str, position: int, value: int) -> None:
    """Set one byte of a tensor."""

    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, data[:position] + bytes([value]) + data[position + 1 :]

    edit_shard(shard_of(directory, name), change)


def flip_byte(path: Path, position: int, mask: int = 0x01) -> None:
    """Flip bits of one byte of a file; a second call restores it."""
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ mask]))
