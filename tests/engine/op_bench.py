"""Runs a single op through both kernel tables over equal bytes, for tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from engine.config import ModelConfig, read_config
from engine.executor import NATIVE
from engine.formats import bf16_bits, pow2_ceil
from engine.ir import Graph, Op
from engine.model.lowering import Lowering
from engine.ops.bind import Backend, Binding
from engine.ops.reference.backend import TorchBackend
from engine.ops.rows import Workers
from engine.recipe import Recipe
from engine.shard import Deal, Weight

CONFIG = read_config(Path(__file__).parents[2] / "fixtures" / "goldens" / "mini")
IR_DTYPE = {"u1": "u8", "i4": "i32", "i8": "i64", "u2": "bf16", "f4": "f32", "f8": "f64"}
WEIGHT_DTYPE = {"u1": "F8_E4M3", "u2": "BF16", "f4": "F32"}
REFERENCE = TorchBackend()


class Bench:
    """One op under construction: a lowering to declare it with, and the contents of its tensors.

    rows    the step's rows T, the largest that may be run
    values  arrays by name; bf16 are uint16 bits. What is not given holds equal random bytes.
    """

    def __init__(
        self,
        seed: int,
        rows: int,
        *,
        config: ModelConfig | None = None,
        deal: Deal | None = None,
        ranks: int = 1,
        rank: int = 0,
        limit: int | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.config = config or CONFIG
        self.deals = [deal or Deal()] * ranks
        self.rank = rank
        self.counts = {"T": rows}
        limits = {"T": rows if limit is None else limit}
        recipe = Recipe(ranks=ranks, max_concurrency=4, mtp_draft_tokens=5, prefill_chunk=64)
        self.low = Lowering("bench", limits, self.config, recipe, self.deals, rank, {}, False)
        self.values: dict[str, np.ndarray] = {}

    # Contents --------------------------------------------------------------------------------

    def normal(self, *shape: int, size: float = 1.0) -> np.ndarray:
        """bf16 bits of normal values over some octaves, some of them zero."""
        octaves = 2.0 ** self.rng.integers(-3, 3, shape)
        values = self.rng.standard_normal(shape) * octaves * size
        return bf16_bits(np.where(self.rng.random(shape) < 0.05, 0, values))

    def f32(self, *shape: int, size: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * size).astype(np.float32)

    def e4m3(self, *shape: int) -> np.ndarray:
        """Codes without NaN."""
        codes = self.rng.integers(0, 256, shape, dtype=np.uint8)
        return np.where((codes & 0x7F) == 0x7F, 0, codes).astype(np.uint8)

    def e8m0(self, *shape: int, least: int = -6) -> np.ndarray:
        """Scale codes of 2^least to 256 times as much."""
        return self.rng.integers(127 + least, 127 + least + 9, shape, dtype=np.uint8)

    def packed(self, rows: int, width: int, least: int = -6) -> np.ndarray:
        """Packed FP8 rows, one of them zero."""
        codes = self.e4m3(rows, width)
        codes[2:3] = 0
        return np.concatenate((codes, self.e8m0(rows, -(-width // 32), least=least)), axis=1)

    def entries(self, rows: int, width: int, key_width: int) -> np.ndarray:
        """Records of the compressed cache."""
        return np.concatenate(
            (
                self.rng.integers(0, 256, (rows, width // 2), dtype=np.uint8),
                pow2_ceil(np.full((rows, width // 16), 0.5)) // 2,
                self.rng.integers(0, 256, (rows, key_width // 2), dtype=np.uint8),
                self.e8m0(rows, key_width // 32),
            ),
            axis=1,
        )

    # Tensors ---------------------------------------------------------------------------------

    def given(self, name: str, values: np.ndarray, kind: str = "temp") -> str:
        """Declare a tensor that holds these values."""
        self.values[name] = np.ascontiguousarray(values)
        dtype = IR_DTYPE[values.dtype.str[1:]]
        return self.low.b.tensor(name, kind, dtype, values.shape)

    def weight(self, name: str, values: np.ndarray) -> None:
        """Make a weight known to the lowering."""
        self.values[name] = np.ascontiguousarray(values)
        dtype = WEIGHT_DTYPE[values.dtype.str[1:]]
        self.low.weights[name] = Weight(name, dtype, values.shape, ())

    def fp8_weight(self, name: str, rows: int, width: int, shift: int = 0) -> None:
        """An FP8 weight whose first scale block has `shift` rows of another rank."""
        self.weight(f"{name}.weight", self.e4m3(rows, width))
        self.weight(f"{name}.scale", self.e8m0(-(-(rows + shift) // 32), -(-width // 32)))

    def out(self, name: str, dtype: str, *shape: int) -> str:
        """Declare an output."""
        return self.low.b.temp(name, dtype, *shape)

    def op(self, kind: str, inputs, outputs, **more) -> Bench:
        """Declare the op."""
        self.low.b.op("op", kind, inputs, outputs, **more)
        return self

    def step(self, *sequences: tuple[int, int, int]) -> list[str]:
        """positions, seq_of, first_row, start and slots of sequences (slot, start, rows)."""
        slots, start, rows = (np.array(column) for column in zip(*sequences, strict=True))
        position = np.concatenate([s + np.arange(n) for s, n in zip(start, rows, strict=True)])
        contents = {
            "positions": position.astype(np.int64),
            "seq_of": np.repeat(np.arange(len(rows)), rows).astype(np.int32),
            "first_row": np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
            "start": start.astype(np.int64),
            "slots": slots.astype(np.int32),
        }
        return [self.given(name, values, "io") for name, values in contents.items()]

    def pages(self, sequences: int, each: int) -> str:
        """A page table in which no two sequences share a page."""
        numbers = self.rng.permutation(sequences * each).reshape(sequences, each)
        return self.given("pages", numbers.astype(np.int32), "io")

    # Running ---------------------------------------------------------------------------------

    def bind(self, backend: Backend) -> tuple[Op, Binding]:
        """The op over fresh bytes."""
        graph = self.low.b.graph()
        (op,) = graph.ops
        on_host = {op.inputs[i] for i in backend.reads_on_host.get(op.kind, ())}
        contents = self._bytes(graph)
        placed = {n: v if n in on_host else backend.place(v) for n, v in contents.items()}
        workers = Workers(1)
        return op, Binding(
            graph, self.counts, placed.__getitem__, self.config, self.rank, self.deals, workers,
            backend,
        )

    def run(self, backend: Backend) -> dict[str, np.ndarray]:
        """Everything but its scratch that the op leaves behind, as bytes."""
        op, binding = self.bind(backend)
        backend.binders[op.kind](binding, op)()
        on_host = {op.inputs[i] for i in backend.reads_on_host.get(op.kind, ())}
        roots = {binding.graph.root(name) for name in op.inputs + op.outputs}
        return {n: backend.host(binding.bytes_of(n)) for n in roots - on_host}

    def _bytes(self, graph: Graph) -> dict[str, np.ndarray]:
        found, random = {}, np.random.default_rng(0)
        for tensor in graph.tensors.values():
            if tensor.alias_of is None:
                size = tensor.size_bytes({**graph.limits, **self.counts})
                values = self.values.get(tensor.name)
                found[tensor.name] = (
                    random.integers(0, 256, size, dtype=np.uint8)
                    if values is None
                    else values.reshape(-1).view(np.uint8).copy()
                )
                assert found[tensor.name].size == size, f"{tensor.name} has {size} bytes"
        return found

    def compare(self, backend: Backend = REFERENCE) -> dict[str, np.ndarray]:
        """Assert that both tables leave equal bytes; returns them."""
        native, reference = self.run(NATIVE), self.run(backend)
        assert native.keys() >= reference.keys()
        native = {name: native[name] for name in reference}
        for name, expected in native.items():
            wrong = np.flatnonzero(expected != reference[name])
            assert not len(wrong), (
                f"{name}: {len(wrong)} of {expected.size} bytes differ, the first at {wrong[0]}: "
                f"{expected[wrong[0]]} native, {reference[name][wrong[0]]} reference"
            )
        return native


@dataclass(frozen=True)
class Case:
    """One op with its inputs, built anew for each run."""

    kind: str
    name: str
    build: Callable[[], Bench]


class Cases(list):
    """Builders of benches by the kind of op they declare."""

    def of(self, kind: str, arguments: Iterable[tuple] = ((),)):
        """Register a builder once for each tuple of arguments."""

        def register(build: Callable[..., Bench]) -> Callable[..., Bench]:
            for args in arguments:
                name = "-".join((kind, build.__name__, *map(str, args)))
                self.append(Case(kind, name, partial(build, *args)))
            return build

        return register


def with_config(**changes: object) -> ModelConfig:
    """The mini configuration with some values changed, unchecked."""
    return replace(CONFIG, **changes)
