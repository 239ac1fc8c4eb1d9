"""The only file that touches torch.cuda: whether a device can be used, its memory, its streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.errors import UsageError
from engine.hostmem import COUNTER, HostMemory, read_host_memory
from engine.ir import Graph, Op
from engine.ops.bind import Run
from engine.ops.reference.backend import TorchBackend

DEVICE_COUNTER = "cudaMemGetInfo"


@dataclass(frozen=True)
class CudaFacts:
    """What this process's torch says about CUDA.

    build     CUDA version that torch was built for, None for a CPU build
    devices   names of the devices that the driver shows, in order
    nccl      whether torch was built with NCCL
    """

    torch_version: str
    build: str | None
    devices: tuple[str, ...]
    nccl: bool


def read_cuda() -> CudaFacts:
    """The facts of this process."""
    # A CPU build and a host without a driver both count zero devices.
    count = torch.cuda.device_count()
    return CudaFacts(
        torch_version=torch.__version__,
        build=torch.version.cuda,
        devices=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        nccl=dist.is_available() and dist.is_nccl_available(),
    )


def check_cuda(facts: CudaFacts, index: int, ranks: int = 1) -> None:
    """Refuse a GPU that cannot be used, naming what is missing. Raises UsageError."""
    asked = f"--gpus {index}"
    if facts.build is None:
        raise UsageError(
            f"{asked}: torch {facts.torch_version} is built without CUDA; "
            "install its CUDA build (see the README), or ask for --gpus cpu"
        )
    if not facts.devices:
        raise UsageError(
            f"{asked}: torch {facts.torch_version} for CUDA {facts.build} finds no device; a "
            "driver for that CUDA version and a visible GPU are needed, or ask for --gpus cpu"
        )
    if not 0 <= index < len(facts.devices):
        held = ", ".join(f"{i} ({name})" for i, name in enumerate(facts.devices))
        raise UsageError(f"{asked}: no such device; accepted: {held}, or cpu")
    if ranks > 1 and not facts.nccl:
        raise UsageError(
            f"{asked}: torch {facts.torch_version} is built without NCCL, which {ranks} ranks on "
            "GPUs need"
        )


def probe(index: int) -> None:
    """Run the dtypes that the kernels use once. Raises UsageError where the device has no code."""
    device = torch.device("cuda", index)
    try:
        for dtype in (torch.float64, torch.float32):
            square = torch.full((2, 2), 2.0, dtype=dtype, device=device)
            codes = (square @ square).to(torch.float32).to(torch.float8_e4m3fn)
            found = codes.to(torch.float32).sum().to(torch.bfloat16).item()
            assert found == 32, f"{device} adds up 4 x 8 to {found} in {dtype}"
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(index)
        raise UsageError(
            f"--gpus {index}: {torch.cuda.get_device_name(index)} (sm_{major}{minor}) runs no "
            f"kernels of this torch, built for {', '.join(torch.cuda.get_arch_list())}: {error}"
        ) from error


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device; `source` names the counter that `available_bytes` was read from."""

    total_bytes: int
    available_bytes: int
    source: str


def device_memory(
    index: int = 0, read_host: Callable[[], HostMemory] = read_host_memory
) -> DeviceMemory:
    """What a device has left.

    An integrated GPU (GB10) lives in host memory, where MemAvailable counts: the CUDA call takes
    the page cache for used. Raises MemoryReadingError.
    """
    if torch.cuda.get_device_properties(index).is_integrated:
        host = read_host()
        return DeviceMemory(host.total_bytes, host.available_bytes, COUNTER)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return DeviceMemory(total_bytes, free_bytes, DEVICE_COUNTER)


class CudaStreams:
    """Each stream of a graph is a stream of the device; `Op.waits` are events.

    Compute runs on the default stream, on which inputs are written and outputs read. The others
    begin behind it and are joined at the end of every run, so runs never overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {"compute": torch.cuda.default_stream(device)}

    def stream(self, name: str) -> torch.cuda.Stream:
        """The device's stream of that name."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device)
        return self._streams[name]

    def program(self, graph: Graph, runs: Mapping[str, Sequence[Run]]) -> list[Run]:
        """What issues every op of the graph in order; nothing here waits for the device."""
        compute = self.stream("compute")
        names = {op.stream for op in graph.ops} - {"compute"}
        sides = [self.stream(name) for name in sorted(names)]
        awaited = {name for op in graph.ops for name in op.waits}
        events = {name: torch.cuda.Event() for name in awaited}

        def begin() -> None:
            for side in sides:
                side.wait_stream(compute)

        def join() -> None:
            for side in sides:
                compute.wait_stream(side)

        issued = [self._issue(op, runs[op.name], events) for op in graph.ops]
        return [begin, *issued, join]

    def _issue(self, op: Op, parts: Sequence[Run], events: Mapping[str, torch.cuda.Event]) -> Run:
        stream, done = self.stream(op.stream), events.get(op.name)
        waits = [events[name] for name in op.waits]

        def go() -> None:
            with torch.cuda.stream(stream):
                for event in waits:
                    stream.wait_event(event)
                for part in parts:
                    part()
                if done is not None:
                    done.record(stream)

        return go


class CudaBackend(TorchBackend):
    """The reference kernels on one CUDA device, each graph stream on a stream of its own."""

    def __init__(self, accumulation: str, index: int) -> None:
        super().__init__(f"cuda:{index}", accumulation)
        self.streams = CudaStreams(self.device)
        # Products accumulate in the dtype the recipe names, not in shortened tensor-core floats.
        torch.set_float32_matmul_precision("highest")


def cuda_backend(accumulation: str, index: int = 0, ranks: int = 1) -> CudaBackend:
    """The backend of a CUDA device, checked first. Raises UsageError naming what is missing."""
    check_cuda(read_cuda(), index, ranks)
    probe(index)
    return CudaBackend(accumulation, index)
