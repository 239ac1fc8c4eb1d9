"""What a kernel needs when it is bound: arrays at their planned places, counts, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from engine.config import ModelConfig
from engine.ir import Graph, Op, Tensor
from engine.ops.rows import Workers
from engine.shard import Deal

NUMPY_DTYPE = {
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
TORCH_DTYPE = {
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}

Run = Callable[[], None]
Array = np.ndarray | torch.Tensor
Add = Callable[[Array, Array], None]
"""add(parts [ranks, rows, width], out [rows, width]): the sum in rank order, rounded once."""


class Streams(Protocol):
    """Issues the ops of a graph on a device's own streams, without waiting for their results."""

    def program(self, graph: Graph, runs: Mapping[str, Sequence[Run]]) -> list[Run]:
        """What issues every op at its place; `runs` holds the parts of each op by its name."""
        ...


class Backend(Protocol):
    """Where a rank's bytes live and which kernels work on them; nothing else tells devices apart.

    accumulation   dtype inside an op
    binders        kernel table
    reads_on_host  inputs, by kind of op, that stay arrays of the host (mapped files)
    threads        whether kernels may be shared among worker threads
    streams        None where this thread itself runs every op in issue order
    """

    accumulation: str
    binders: Mapping[str, Callable[[Binding, Op], Run]]
    reads_on_host: Mapping[str, tuple[int, ...]]
    threads: bool
    streams: Streams | None

    def zeros(self, size_bytes: int) -> Array:
        """New bytes, all zero."""
        ...

    def place(self, content: Array) -> Array:
        """These bytes where kernels read them: the same memory if it is there already."""
        ...

    def write(self, target: Array, values: np.ndarray) -> None:
        """Copy values of the host into an array of the same shape and dtype."""
        ...

    def host(self, array: Array) -> np.ndarray:
        """An array's values on the host when all that was issued is done; maybe the same memory."""
        ...

    def bind_add(self, b: Binding, op: Op, pair: int = 0) -> Add:
        """What adds the ranks' partials of the `pair`-th input into the `pair`-th output."""
        ...


@dataclass(frozen=True)
class Binding:
    """One graph under one set of counts on one rank.

    bytes_of gives the bytes of a root tensor under these counts (its planned or allocated place).
    """

    graph: Graph
    counts: Mapping[str, int]
    bytes_of: Callable[[str], Array]
    config: ModelConfig
    rank: int
    deals: Sequence[Deal]
    workers: Workers
    backend: Backend
    _arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.deals)

    def tensor(self, name: str) -> Tensor:
        """The declaration."""
        return self.graph.tensors[name]

    def array(self, name: str) -> Array:
        """The tensor as an array of the backend's library (numpy has bf16 as uint16)."""
        if name not in self._arrays:
            tensor = self.graph.tensors[name]
            assert tensor.strides is None, f"{name}: kernels take row-major tensors"
            start = self.graph.root_offset_bytes(name)
            size = tensor.size_bytes(self.counts)
            raw = self.bytes_of(self.graph.root(name))[start : start + size]
            self._arrays[name] = shaped(raw, tensor, self.counts)
        return self._arrays[name]

    def arrays(self, names: Sequence[str]) -> list[Array]:
        """Several arrays."""
        return [self.array(name) for name in names]

    def own_rows(self, of_rank: int | None = None) -> tuple[int, int]:
        """The rows of a step that a rank owns when rows are split."""
        rank = self.rank if of_rank is None else of_rank
        rows, share = self.counts["T"], -(-self.counts["T"] // self.ranks)
        return min(rows, rank * share), min(rows, (rank + 1) * share)

    def rows_of(self, op: Op) -> tuple[int, int]:
        """The rows an op works on: this rank's or all."""
        return self.own_rows() if op.params.get("rows") == "own" else (0, self.counts["T"])

    def tile_of(self, op: Op) -> tuple[int, int]:
        """The rows of the op's tile, or all rows."""
        if "tile" not in op.params:
            return 0, self.counts["T"]
        size = op.params["tile_rows"]
        first = min(op.params["tile"] * size, self.counts["T"])
        return first, min(first + size, self.counts["T"])


def shaped(raw: Array, tensor: Tensor, counts: Mapping[str, int]) -> Array:
    """Bytes as the tensor's dtype and shape: the same memory, of the same library."""
    dtypes = NUMPY_DTYPE if isinstance(raw, np.ndarray) else TORCH_DTYPE
    return raw.view(dtypes[tensor.dtype]).reshape(tensor.dims(counts))


def as_bytes(array: Array) -> Array:
    """The bytes of a contiguous array, flat; the same memory, of the same library."""
    return array.reshape(-1).view(np.uint8 if isinstance(array, np.ndarray) else torch.uint8)


def as_torch(array: Array) -> torch.Tensor:
    """The same memory as a torch tensor; uint16 stays bits."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def rope_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """fp32 [pairs] rotary frequencies: plain, or YaRN-scaled for layers with a compressed part."""
    width = config.qk_rope_head_dim
    index = np.arange(width // 2, dtype=np.float64)
    theta = config.compress_rope_theta if compressed else config.rope_theta
    plain = theta ** (-2.0 * index / width)
    if not compressed:
        return plain.astype(np.float32)
    yarn = config.rope_scaling

    def corrected(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return width * np.log(length / (2 * np.pi * rotations)) / (2 * np.log(theta))

    low = max(np.floor(corrected(yarn.beta_fast)), 0)
    high = min(np.ceil(corrected(yarn.beta_slow)), width - 1)
    ramp = np.clip((index - low) / max(high - low, 1e-3), 0, 1)
    return (plain / yarn.factor * ramp + plain * (1 - ramp)).astype(np.float32)
