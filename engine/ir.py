"""The graph: tensors, ops and waits between streams, as plain data without a device or a library.

A tensor's shape is a function of named counts (`T` tokens, `O` rows of this rank, `S` sequences,
`L` rows of logits ...): a graph is planned once for its limits and run for any smaller counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

Dim = int | str

ITEM_BYTES: Mapping[str, int] = {
    "u8": 1,
    "i32": 4,
    "i64": 8,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
}
KINDS = ("weight", "state", "io", "temp")
STREAMS = ("compute", "comm", "copy", "host")


def resolve(dim: Dim, counts: Mapping[str, int]) -> int:
    """The size of one dimension under the given counts."""
    return counts[dim] if isinstance(dim, str) else dim


@dataclass(frozen=True)
class Tensor:
    """One named array.

    kind     weight (read only), state (lives across steps), io (handed in or out), temp
    shape    ints or names of counts; row major unless `strides` is given
    strides  in items, or None for row major without gaps
    alias_of the tensor whose bytes this one shares; `alias_offset_bytes` into it
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[int, ...] | None = None
    alias_of: str | None = None
    alias_offset_bytes: int = 0

    def dims(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """The shape under the given counts."""
        return tuple(resolve(dim, counts) for dim in self.shape)

    def size_bytes(self, counts: Mapping[str, int]) -> int:
        """Bytes from the first to past the last item, gaps of the strides included."""
        dims = self.dims(counts)
        if 0 in dims:
            return 0
        if self.strides is None:
            items = 1
            for dim in dims:
                items *= dim
        else:
            items = 1 + sum((d - 1) * s for d, s in zip(dims, self.strides, strict=True))
        return items * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Op:
    """One operation.

    inputs, outputs  names of tensors; a tensor in both is updated
    inplace          pairs (input, output): the output takes over the input's bytes
    scratch          temps that only this op touches
    waits            names of ops on other streams that must have finished before this one starts
    phase            the part of a layer it belongs to (attention, ...), the same in all layers
    params           whatever the kernel needs besides tensors (JSON values)
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    inplace: tuple[tuple[str, str], ...] = ()
    scratch: tuple[str, ...] = ()
    stream: str = "compute"
    waits: tuple[str, ...] = ()
    phase: str = ""
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def touched(self) -> tuple[str, ...]:
        """Every tensor the op reads or writes, inputs first, scratch last."""
        return self.inputs + self.outputs + self.scratch


@dataclass(frozen=True)
class Graph:
    """Ops in issue order over tensors; `limits` are the largest counts it may be run with."""

    name: str
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]
    limits: Mapping[str, int]

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        """Position of each op in issue order, by name."""
        return {op.name: index for index, op in enumerate(self.ops)}

    def root(self, name: str) -> str:
        """The tensor at the end of the alias chain, whose bytes `name` lives in."""
        while (base := self.tensors[name].alias_of) is not None:
            name = base
        return name

    def root_offset_bytes(self, name: str) -> int:
        """Byte offset of `name` inside its root."""
        offset = 0
        while (tensor := self.tensors[name]).alias_of is not None:
            offset += tensor.alias_offset_bytes
            name = tensor.alias_of
        return offset

    def of_kind(self, kind: str) -> list[Tensor]:
        """Root tensors of one kind, in order of definition."""
        return [t for t in self.tensors.values() if t.kind == kind and t.alias_of is None]

    def to_json(self) -> dict:
        """A JSON value that `graph_from_json` reads back to an equal graph."""
        return {
            "name": self.name,
            "limits": dict(self.limits),
            "tensors": [_without_defaults(t, _TENSOR_DEFAULTS) for t in self.tensors.values()],
            "ops": [_without_defaults(op, _OP_DEFAULTS) for op in self.ops],
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the whole graph; equal graphs have equal digests."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_TENSOR_DEFAULTS = {"strides": None, "alias_of": None, "alias_offset_bytes": 0}
_OP_DEFAULTS = {
    "inplace": (),
    "scratch": (),
    "stream": "compute",
    "waits": (),
    "phase": "",
    "params": {},
}


def _without_defaults(item: Tensor | Op, defaults: Mapping[str, object]) -> dict:
    values = {name: getattr(item, name) for name in item.__dataclass_fields__}
    kept = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in kept.items()}


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def graph_from_json(document: Mapping) -> Graph:
    """The graph that `Graph.to_json` wrote."""
    tensors = [Tensor(**{k: _tuples(v) for k, v in t.items()}) for t in document["tensors"]]
    ops = [
        Op(**{k: v if k == "params" else _tuples(v) for k, v in op.items()})
        for op in document["ops"]
    ]
    return Graph(
        name=document["name"],
        tensors={t.name: t for t in tensors},
        ops=tuple(ops),
        limits=dict(document["limits"]),
    )
