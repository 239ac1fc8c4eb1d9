"""Collects tensors and ops of one graph and puts in the waits between streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.ir import Dim, Graph, Op, Tensor

IR_DTYPE = {"F8_E4M3": "u8", "F8_E8M0": "u8", "I8": "u8", "BF16": "bf16", "F32": "f32"}


class Builder:
    """Appends ops in issue order.

    An op waits for the last writer of all it touches, and for the readers of what it overwrites,
    where those run on another stream.
    """

    def __init__(self, name: str, limits: Mapping[str, int]) -> None:
        self.name = name
        self.limits = dict(limits)
        self.phase = ""
        self._tensors: dict[str, Tensor] = {}
        self._ops: list[Op] = []
        self._writer: dict[str, Op] = {}
        self._readers: dict[str, list[Op]] = {}

    def tensor(self, name: str, kind: str, dtype: str, shape: Iterable[Dim], **more) -> str:
        """Declare a tensor and return its name; a second equal declaration is the same tensor."""
        new = Tensor(name, kind, dtype, tuple(shape), **more)
        old = self._tensors.setdefault(name, new)
        assert old == new, f"{name} is declared as {old} and as {new}"
        return name

    def declared(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._tensors[name]

    def temp(self, name: str, dtype: str, *shape: Dim) -> str:
        """Declare a temporary."""
        return self.tensor(name, "temp", dtype, shape)

    def updated(self, name: str, base: str) -> str:
        """Declare the version of `base` that an in-place op leaves behind."""
        old = self._tensors[base]
        return self.tensor(name, old.kind, old.dtype, old.shape, alias_of=base)

    def op(
        self,
        name: str,
        kind: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        *,
        scratch: Iterable[str] = (),
        inplace: Iterable[tuple[str, str]] = (),
        stream: str = "compute",
        after: str | None = None,
        **params: object,
    ) -> None:
        """Append an op; `after` names one more op that it waits for."""
        op = Op(
            name,
            kind,
            tuple(inputs),
            tuple(outputs),
            tuple(inplace),
            tuple(scratch),
            stream,
            phase=self.phase,
            params=params,
        )
        waits = sorted(
            {other.name for other in self._before(op) if other.stream != stream}
            | ({after} if after else set()),
            key=lambda other: next(i for i, o in enumerate(self._ops) if o.name == other),
        )
        op = Op(**{**{f: getattr(op, f) for f in op.__dataclass_fields__}, "waits": tuple(waits)})
        self._ops.append(op)
        self._note(op)

    def _root(self, name: str) -> str:
        while (base := self._tensors[name].alias_of) is not None:
            name = base
        return name

    def _before(self, op: Op) -> list[Op]:
        found = []
        for name in op.inputs + op.outputs:
            root = self._root(name)
            if root in self._writer:
                found.append(self._writer[root])
        for name in op.outputs:
            found.extend(self._readers.get(self._root(name), ()))
        return found

    def _note(self, op: Op) -> None:
        for name in op.inputs:
            self._readers.setdefault(self._root(name), []).append(op)
        for name in op.outputs:
            self._writer[self._root(name)] = op
            self._readers[self._root(name)] = []

    def graph(self) -> Graph:
        """The finished graph."""
        return Graph(self.name, dict(self._tensors), tuple(self._ops), dict(self.limits))
