"""The backend of the reference kernels: torch tensors on one device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from engine.ir import Op
from engine.ops.bind import Add, Array, Binding, Streams
from engine.ops.reference.numbers import WORK, store
from engine.ops.reference.table import BINDERS


class TorchBackend:
    """Torch kernels over tensors of a device; on the CPU this thread runs them in issue order."""

    binders = BINDERS
    reads_on_host: Mapping[str, tuple[int, ...]] = {"engram_lookup": (1, 2)}
    """The Engram tables stay mapped files; only looked-up rows travel."""
    threads = False
    streams: Streams | None = None

    def __init__(self, device: str = "cpu", accumulation: str = "float64") -> None:
        assert accumulation in WORK, f"accumulation is {accumulation!r}"
        self.device = torch.device(device)
        self.accumulation = accumulation

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """New bytes, all zero."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)

    def place(self, content: Array) -> torch.Tensor:
        """These bytes on the device; those of the host are used where they lie if it is the CPU."""
        if not content.nbytes:
            return self.zeros(0)  # Empty arrays of numpy have strides that torch cannot view.
        tensor = torch.from_numpy(content) if isinstance(content, np.ndarray) else content
        return tensor.to(self.device)

    def write(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Copy values of the host into a tensor of the same shape."""
        assert target.shape == values.shape, f"{values.shape} for {tuple(target.shape)}"
        target.copy_(torch.tensor(values))

    def host(self, array: torch.Tensor) -> np.ndarray:
        """A tensor's values as a numpy array, bf16 as uint16; shares the memory of a CPU tensor."""
        if array.dtype == torch.bfloat16:
            array = array.view(torch.uint16)
        return array.cpu().numpy()

    def bind_add(self, b: Binding, op: Op, pair: int = 0) -> Add:
        """Sums over the ranks' parts, in rank order."""
        work = WORK[self.accumulation]

        def add(parts: torch.Tensor, out: torch.Tensor) -> None:
            total = torch.zeros(out.shape, dtype=work, device=out.device)
            for part in parts:
                total += part.to(work)
            store(out, total)

        return add
