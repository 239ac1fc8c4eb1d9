"""One rank's model: its memory laid out as the plan says, and the steps it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.batch import Batch
from engine.comm import Communicator
from engine.config import ModelConfig
from engine.device import cuda_backend
from engine.executor import NATIVE, Executor, Observer
from engine.ir import Graph
from engine.model.graphs import HEAD_ROWS, tile_counts
from engine.model.layout import KV_POOL, CacheLayout
from engine.ops.bind import Array, Backend, shaped
from engine.ops.rows import Workers
from engine.planner import Plan
from engine.recipe import Recipe
from engine.shard import Deal


def backend_of(recipe: Recipe) -> Backend:
    """The backend that a recipe asks for: compiled kernels on the CPU, torch on CUDA.

    Raises UsageError where there is no CUDA device.
    """
    if recipe.device == "cpu":
        return NATIVE
    return cuda_backend(recipe.accumulation, ranks=recipe.ranks)


class RankModel:
    """Weights, states, inputs and temporaries of one rank, and the executor over them.

    weights  bytes (uint8) by name; those of the Engram tables may be memory mapped
    pages    pages of the KV pool
    backend  where the bytes are and the kernels that work on them; as the recipe asks if None
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        deals: Sequence[Deal],
        graphs: Sequence[Graph],
        plan: Plan,
        weights: Mapping[str, np.ndarray],
        pages: int,
        comm: Communicator,
        threads: int,
        observer: Observer | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend_of(recipe) if backend is None else backend
        assert self.backend.accumulation == recipe.accumulation, (
            f"kernels add up in {self.backend.accumulation}, the recipe in {recipe.accumulation}"
        )
        self.config = config
        self.recipe = recipe
        self.pages = pages
        self.layout = CacheLayout(config, recipe)
        self.graphs = {graph.name: graph for graph in graphs}
        self.persistent = self._allocate(graphs, weights)
        arena = self.backend.zeros(plan.size_bytes)
        self.workers = Workers(threads if self.backend.threads else 1)
        self.executor = Executor(
            graphs,
            self.persistent,
            {graph.name: arena for graph in graphs},
            {name: p.offsets for name, p in plan.graphs.items()},
            config,
            deals,
            comm,
            self.workers,
            observer,
            self.backend,
        )

    def _allocate(
        self, graphs: Sequence[Graph], weights: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Bytes of every persistent tensor: weights as given, the rest zeroed at its largest."""
        sizes: dict[str, int] = {}
        for graph in graphs:
            for tensor in graph.tensors.values():
                if tensor.kind == "temp" or tensor.alias_of or tensor.name in weights:
                    continue
                counts = {**graph.limits, "P": self.pages}
                sizes[tensor.name] = max(sizes.get(tensor.name, 0), tensor.size_bytes(counts))
        owned = {name: self.backend.zeros(size) for name, size in sizes.items()}
        on_host = {
            op.inputs[index]
            for graph in graphs
            for op in graph.ops
            for index in self.backend.reads_on_host.get(op.kind, ())
        }
        place = self.backend.place
        placed = {name: w if name in on_host else place(w) for name, w in weights.items()}
        return {**placed, **owned}

    def io(self, graph: str, name: str, counts: Mapping[str, int]) -> Array:
        """An input or output of a graph under some counts."""
        tensor = self.graphs[graph].tensors[name]
        return shaped(self.persistent[name][: tensor.size_bytes(counts)], tensor, counts)

    def counts(self, graph: str, rows: int, sequences: int, logit_rows: int = 0) -> dict[str, int]:
        """The counts of a step."""
        limits = self.graphs[graph].limits
        share = -(-rows // self.recipe.ranks)
        own = max(0, min(share, rows - self.executor.comm.rank * share))
        split = limits["O"] != limits["T"]
        return {
            "T": rows,
            "O": own if split else rows,
            "H": share if split else rows,
            "S": sequences,
            "S1": sequences + 1,
            "L": logit_rows,
            "P": self.pages,
            "slots_max": limits["slots_max"],
            **tile_counts(rows, limits["T"]),
        }

    def _fill(self, batch: Batch, counts: Mapping[str, int]) -> None:
        graph = self.graphs[batch.graph]
        for name, values in batch.inputs.items():
            if name not in graph.tensors:
                continue
            target = self.io(batch.graph, name, counts)
            if name == "pages":
                target = target[:, : values.shape[1]]
            self.backend.write(target, values)

    def step(self, batch: Batch) -> np.ndarray:
        """Run the target on a batch; logits fp32 [wanted rows, vocabulary]."""
        counts = self.counts(batch.graph, batch.rows, batch.sequences)
        self._fill(batch, counts)
        self.executor.run(batch.graph, counts)
        wanted = batch.logit_rows
        logits = np.empty((len(wanted), self.config.vocab_size), np.float32)
        for first in range(0, len(wanted), HEAD_ROWS):
            part = wanted[first : first + HEAD_ROWS]
            head = self.counts("head", batch.rows, batch.sequences, len(part))
            self.backend.write(self.io("head", "logit_rows", head), part)
            self.executor.run("head", head)
            logits[first : first + len(part)] = self.backend.host(self.io("head", "logits", head))
        return logits

    def draft(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run the draft blocks: ids [S, block], logits [S, block, vocabulary], confidence."""
        counts = self.counts("draft", batch.rows, batch.sequences)
        self._fill(batch, counts)
        ids = self.io("draft", "draft_ids", counts)
        self.backend.write(ids[:, 0], batch.ids.reshape(batch.sequences, -1)[:, 0])
        self.executor.run("draft", counts)
        found = (ids[:, 1:], *(self.io("draft", n, counts) for n in ("draft_logits", "confidence")))
        ids, logits, confidence = (self.backend.host(array).copy() for array in found)
        return ids, logits, confidence

    # Cache state, for prefix hits -------------------------------------------------------------

    def _slot_states(self, slot: int) -> list[Array]:
        found = []
        for name in sorted(self.persistent):
            if name.endswith((".ring", ".tail")):
                slots = self.recipe.max_concurrency
                found.append(self.persistent[name].reshape(slots, -1)[slot])
        return found

    def export_window(self, slot: int) -> bytes:
        """Rings and open groups of a slot."""
        return b"".join(self.backend.host(state).tobytes() for state in self._slot_states(slot))

    def import_window(self, slot: int, content: bytes) -> None:
        """Restore what export_window gave."""
        states = self._slot_states(slot)
        size = sum(state.nbytes for state in states)
        assert len(content) == size, f"window state has {len(content)} bytes, {size} are needed"
        at = 0
        for state in states:
            self.backend.write(state, np.frombuffer(content, np.uint8, state.nbytes, at))
            at += state.nbytes

    def read_page(self, page: int) -> bytes:
        """The bytes of one page of the pool."""
        return self.backend.host(self.page(page)).tobytes()

    def write_page(self, page: int, content: bytes) -> None:
        """Write what read_page gave."""
        self.backend.write(self.page(page), np.frombuffer(content, np.uint8))

    def page(self, page: int) -> Array:
        """One page of the pool, uint8."""
        assert 0 <= page < self.pages, f"page {page} of {self.pages}"
        return self.persistent[KV_POOL].reshape(self.pages, self.layout.page_bytes)[page]

    def close(self) -> None:
        """End the worker threads."""
        self.workers.close()
