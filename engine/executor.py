"""Runs graphs of one rank inside one arena: tensors are views at planned offsets.

Compute runs in issue order on this thread. A comm op is started at its place and finished before
the first op that waits for it, or before the next comm op, so the stream keeps its order. A backend
with streams of its own takes over both: there every op is issued at its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine import exchange
from engine.comm import Communicator
from engine.config import ModelConfig
from engine.exchange import TRANSFERS
from engine.ir import Graph, Op
from engine.ops.bind import Add, Array, Backend, Binding, Run
from engine.ops.rows import Workers
from engine.ops.table import BINDERS
from engine.shard import Deal

PROGRAMS_MAX = 64
"""Bound programs kept: one per graph and set of counts."""

Observer = Callable[[Op, Binding], None]


class NativeBackend:
    """Compiled kernels over numpy arrays of the host."""

    accumulation = "float64"
    binders = BINDERS
    reads_on_host: Mapping[str, tuple[int, ...]] = {}
    threads = True
    streams = None

    def zeros(self, size_bytes: int) -> np.ndarray:
        """New bytes, all zero."""
        return np.zeros(size_bytes, np.uint8)

    def place(self, content: Array) -> Array:
        """The same bytes: kernels read the host's memory."""
        return content

    def write(self, target: np.ndarray, values: np.ndarray) -> None:
        """Copy values into an array of the same shape and dtype."""
        target[...] = values

    def host(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def bind_add(self, b: Binding, op: Op, pair: int = 0) -> Add:
        """Compiled sums over all ranks' parts."""
        return exchange.bind_add(b, op, pair)


NATIVE = NativeBackend()


class Executor:
    """Binds and runs the graphs of one rank.

    persistent  bytes of every weight, state and io tensor by name
    arenas      bytes of the temporaries arena of each graph
    offsets     planned offset of every temporary, per graph
    observer    called after each op with its binding, for traces; None in service
    backend     where the bytes are and the kernels that work on them
    """

    def __init__(
        self,
        graphs: Sequence[Graph],
        persistent: Mapping[str, Array],
        arenas: Mapping[str, Array],
        offsets: Mapping[str, Mapping[str, int]],
        config: ModelConfig,
        deals: Sequence[Deal],
        comm: Communicator,
        workers: Workers,
        observer: Observer | None = None,
        backend: Backend = NATIVE,
    ) -> None:
        self.graphs = {graph.name: graph for graph in graphs}
        self.persistent = persistent
        self.arenas = arenas
        self.offsets = offsets
        self.config = config
        self.deals = deals
        self.comm = comm
        self.workers = workers
        self.observer = observer
        self.backend = backend
        self._programs: OrderedDict[tuple, list[Run]] = OrderedDict()

    def run(self, graph: str, counts: Mapping[str, int]) -> None:
        """Run a graph under some counts; its io tensors must be filled before."""
        for run in self._program(graph, counts):
            run()

    def binding(self, graph: str, counts: Mapping[str, int]) -> Binding:
        """The graph's arrays under some counts."""
        return Binding(
            self.graphs[graph],
            counts,
            self._bytes_in(self.graphs[graph], counts),
            self.config,
            self.comm.rank,
            self.deals,
            self.workers,
            self.backend,
        )

    def _bytes_in(self, graph: Graph, counts: Mapping[str, int]) -> Callable[[str], Array]:
        offsets, arena = self.offsets[graph.name], self.arenas[graph.name]

        def bytes_of(name: str) -> Array:
            tensor = graph.tensors[name]
            size = tensor.size_bytes(counts)
            if tensor.kind != "temp":
                held = self.persistent[name]
                assert size <= held.nbytes, f"{name} has {held.nbytes} bytes, {size} are needed"
                return held[:size]
            assert size <= tensor.size_bytes(graph.limits), f"{name} is over its planned size"
            return arena[offsets[name] : offsets[name] + size]

        return bytes_of

    def _program(self, graph: str, counts: Mapping[str, int]) -> list[Run]:
        key = graph, *counts.values()
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        self._check(graph, counts)
        bind = self._bind if self.backend.streams is None else self._bind_on_streams
        program = bind(graph, counts)
        self._programs[key] = program
        if len(self._programs) > PROGRAMS_MAX:
            self._programs.popitem(last=False)
        return program

    def _check(self, graph: str, counts: Mapping[str, int]) -> None:
        limits = self.graphs[graph].limits
        assert set(counts) == set(limits), f"{graph}: counts {sorted(counts)}, not {sorted(limits)}"
        over = {k: v for k, v in counts.items() if k != "P" and v > limits[k]}
        assert not over, f"{graph}: counts {over} over the limits {dict(limits)}"

    def _bind(self, name: str, counts: Mapping[str, int]) -> list[Run]:
        binding = self.binding(name, counts)
        program: list[Run] = []
        pending: list[tuple[Op, Run]] = []

        def finish() -> None:
            for op, run in pending:
                program.append(run)
                self._observe(program, op, binding)
            pending.clear()

        for op in self.graphs[name].ops:
            if any(waited.name in op.waits for waited, _ in pending):
                finish()
            if op.kind in TRANSFERS:
                finish()
                transfer = TRANSFERS[op.kind](binding, op, self.comm)
                program.append(transfer.start)
                pending.append((op, transfer.finish))
            else:
                program.append(self.backend.binders[op.kind](binding, op))
                self._observe(program, op, binding)
        finish()
        return program

    def _bind_on_streams(self, name: str, counts: Mapping[str, int]) -> list[Run]:
        binding, runs = self.binding(name, counts), {}
        for op in self.graphs[name].ops:
            if op.kind in TRANSFERS:
                transfer = TRANSFERS[op.kind](binding, op, self.comm)
                runs[op.name] = [transfer.start, transfer.finish]
            else:
                runs[op.name] = [self.backend.binders[op.kind](binding, op)]
            self._observe(runs[op.name], op, binding)
        return self.backend.streams.program(self.graphs[name], runs)

    def _observe(self, program: list[Run], op: Op, binding: Binding) -> None:
        if (observer := self.observer) is not None:
            program.append(lambda: observer(op, binding))
