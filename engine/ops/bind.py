"""What a kernel needs when it is bound: arrays at their planned places, counts, threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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

Run = Callable[[], None]


@dataclass(frozen=True)
class Binding:
    """One graph under one set of counts on one rank.

    bytes_of gives the bytes of a root tensor under these counts (its planned or allocated place).
    """

    graph: Graph
    counts: Mapping[str, int]
    bytes_of: Callable[[str], np.ndarray]
    config: ModelConfig
    rank: int
    deals: Sequence[Deal]
    workers: Workers
    _arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.deals)

    def tensor(self, name: str) -> Tensor:
        """The declaration."""
        return self.graph.tensors[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor as a numpy array (bf16 as uint16), shaped by the counts."""
        if name not in self._arrays:
            tensor = self.graph.tensors[name]
            assert tensor.strides is None, f"{name}: kernels take row-major tensors"
            start = self.graph.root_offset_bytes(name)
            size = tensor.size_bytes(self.counts)
            raw = self.bytes_of(self.graph.root(name))[start : start + size]
            shaped = raw.view(NUMPY_DTYPE[tensor.dtype]).reshape(tensor.dims(self.counts))
            self._arrays[name] = shaped
        return self._arrays[name]

    def arrays(self, names: Sequence[str]) -> list[np.ndarray]:
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


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The same memory as a torch tensor; uint16 stays bits."""
    return torch.from_numpy(array)


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
