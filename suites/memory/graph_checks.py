"""Checks of a graph by itself: waits between streams, in-place pairs, first uses, aliases.

It does not know any plan: what it finds is wrong under every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.ir import ITEM_BYTES, Graph, Op, Tensor
from suites.findings import Finding
from suites.memory.lifetimes import Access, Family, Oracle


def _where(graph: Graph, *more: str) -> str:
    return " / ".join([f"graph {graph.name}", *more])


def _op_text(graph: Graph, index: int) -> str:
    op = graph.ops[index]
    return f"op {index} {op.name} on {op.stream}"


def waits_are_known(oracle: Oracle) -> Iterator[Finding]:
    """Every wait names an op of the graph that is issued earlier."""
    graph = oracle.graph
    number = {op.name: index for index, op in enumerate(graph.ops)}
    for index, op in enumerate(graph.ops):
        for name in op.waits:
            if name not in number:
                yield Finding(
                    "wait-unknown",
                    _where(graph, op.name),
                    f"{_op_text(graph, index)} waits for {name}, which the graph does not have",
                    {"op": op.name, "waits_for": name},
                )
            elif number[name] >= index:
                yield Finding(
                    "wait-not-issued",
                    _where(graph, op.name),
                    f"{_op_text(graph, index)} waits for {_op_text(graph, number[name])}, "
                    f"which is issued later, so nothing is waited for",
                    {"op": op.name, "waits_for": name},
                )


def streams_wait(oracle: Oracle) -> Iterator[Finding]:
    """Two ops on the same bytes, at least one of them writing, are ordered by streams and waits."""
    graph = oracle.graph
    for head, accesses in oracle.accesses.items():
        streams = {graph.ops[access.op].stream for access in accesses}
        if len(streams) < 2 or not any(access.writes for access in accesses):
            continue
        family = oracle.families[head]
        for number, late in enumerate(accesses):
            for early in accesses[:number]:
                if graph.ops[early.op].stream == graph.ops[late.op].stream:
                    continue
                if not (early.writes or late.writes) or oracle.is_ordered(early.op, late.op):
                    continue
                if bytes_meet(graph, family, early.tensor, late.tensor):
                    yield _missing_wait(oracle, family, early, late)


def _missing_wait(oracle: Oracle, family: Family, early: Access, late: Access) -> Finding:
    graph = oracle.graph
    if early.writes:
        kind, what = ("raw", "reads") if late.reads else ("waw", "writes")
    else:
        kind, what = "war", "writes"
    start, size = _range(graph, family, late.tensor)
    did = "written" if early.writes else "read"
    return Finding(
        f"missing-wait-{kind}",
        _where(graph, graph.ops[late.op].name),
        f"{_op_text(graph, late.op)} {what} {late.tensor} (bytes {start}..{start + size} of "
        f"{family.head}) without waiting until {_op_text(graph, early.op)} has {did} "
        f"{early.tensor}",
        {
            "first": early.tensor,
            "second": late.tensor,
            "ops": [early.op, late.op],
            "op_names": [graph.ops[early.op].name, graph.ops[late.op].name],
            "bytes": [start, start + size],
        },
    )


def _range(graph: Graph, family: Family, name: str) -> tuple[int, int]:
    return family.places[name], graph.tensors[name].size_bytes(graph.limits)


def bytes_meet(graph: Graph, family: Family, one: str, other: str) -> bool:
    """True when two tensors of a family have a byte in common.

    Column slices of one pitch are told apart; any other strides count as their whole extent.
    """
    (a, a_size), (b, b_size) = _range(graph, family, one), _range(graph, family, other)
    if a >= b + b_size or b >= a + a_size or 0 in (a_size, b_size):
        return False
    first, second = (_columns(graph, graph.tensors[n]) for n in (one, other))
    if first is None or second is None or first[0] != second[0]:
        return True
    pitch, width = first
    shift = (b - a) % pitch
    return shift < width or shift + second[1] > pitch


def _columns(graph: Graph, tensor: Tensor) -> tuple[int, int] | None:
    """(pitch, width) in bytes of rows with gaps between them, None for anything else."""
    if tensor.strides is None or len(tensor.shape) < 2:
        return None
    dims = tensor.dims(graph.limits)
    item = ITEM_BYTES[tensor.dtype]
    run = 1
    for dim, stride in zip(dims[:0:-1], tensor.strides[:0:-1], strict=True):
        if stride != run:
            return None
        run *= dim
    pitch = tensor.strides[0] * item
    return (pitch, run * item) if run * item <= pitch else None


def inplace_is_legal(oracle: Oracle) -> Iterator[Finding]:
    """Declared pairs are the op's own, do not grow and are not shifted; others do not exist."""
    graph = oracle.graph
    for index, op in enumerate(graph.ops):
        for source, target in op.inplace:
            yield from _pair(oracle, index, op, source, target)
        yield from _undeclared(oracle, index, op)


def _pair(oracle: Oracle, index: int, op: Op, source: str, target: str) -> Iterator[Finding]:
    graph = oracle.graph
    where = _where(graph, op.name)
    data = {"op": op.name, "first": source, "second": target}
    if source not in op.inputs or target not in op.outputs:
        yield Finding(
            "inplace-foreign",
            where,
            f"{_op_text(graph, index)} declares {target} over {source}, but reads "
            f"{list(op.inputs)} and writes {list(op.outputs)}",
            data,
        )
        return
    family = oracle.families[source]
    (start, size), (at, target_size) = (
        _range(graph, family, source),
        _range(graph, family, target),
    )
    items = [ITEM_BYTES[graph.tensors[name].dtype] for name in (source, target)]
    if target_size > size or items[1] > items[0]:
        yield Finding(
            "inplace-grows",
            where,
            f"{_op_text(graph, index)} writes {target} ({target_size} bytes, items of {items[1]}) "
            f"over {source} ({size} bytes, items of {items[0]})",
            {**data, "nbytes": [size, target_size], "item_bytes": items},
        )
    if at != start and target_size and size:
        meets = at < start + size and start < at + target_size
        yield Finding(
            "inplace-shifted" if meets else "inplace-not-shared",
            where,
            f"{_op_text(graph, index)} writes {target} (bytes {at}..{at + target_size}) in place "
            f"of {source} (bytes {start}..{start + size}), which starts elsewhere",
            {**data, "bytes": [[start, start + size], [at, at + target_size]]},
        )


def _undeclared(oracle: Oracle, index: int, op: Op) -> Iterator[Finding]:
    graph = oracle.graph
    written = op.outputs + op.scratch
    for position, target in enumerate(written):
        family = oracle.families[target]
        for source in dict.fromkeys(op.inputs + written[:position]):
            if source == target or source not in family.places:
                continue
            if (source, target) in op.inplace or not bytes_meet(graph, family, source, target):
                continue
            if _follows_declared(op, source, target, graph):
                continue
            (start, size), (at, target_size) = (
                _range(graph, family, name) for name in (source, target)
            )
            yield Finding(
                "inplace-undeclared",
                _where(graph, op.name),
                f"{_op_text(graph, index)} writes {target} (bytes {at}..{at + target_size}) over "
                f"{source} (bytes {start}..{start + size} of {family.head}) without declaring it",
                {
                    "op": op.name,
                    "first": source,
                    "second": target,
                    "bytes": [[start, start + size], [at, at + target_size]],
                },
            )


def _follows_declared(op: Op, source: str, target: str, graph: Graph) -> bool:
    """An update of a view is declared by the view's standing among inputs and outputs."""
    return target in op.inputs and source in op.outputs and source in op.inputs


def second_readers(oracle: Oracle) -> Iterator[Finding]:
    """No op uses a tensor whose bytes another op has taken over before."""
    graph = oracle.graph
    below = _descendants(graph)
    taken: dict[str, tuple[int, str]] = {}
    for index, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.inputs):
            if name in taken:
                writer, target = taken[name]
                yield Finding(
                    "inplace-second-reader",
                    _where(graph, op.name),
                    f"{_op_text(graph, index)} reads {name}, over which "
                    f"{_op_text(graph, writer)} has written {target}",
                    {
                        "op": op.name,
                        "first": name,
                        "second": target,
                        "ops": [writer, index],
                    },
                )
        for source, target in op.inplace:
            if source == target or source not in graph.tensors:
                continue
            safe = {target, *below.get(target, ())}
            for name in (source, *below.get(source, ())):
                if name not in safe:
                    taken[name] = (index, target)
        for name in op.outputs + op.scratch:
            for fresh in (name, *below.get(name, ())):
                taken.pop(fresh, None)


def _descendants(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Per tensor, all aliases of it of any depth."""
    found: dict[str, list[str]] = {}
    for tensor in graph.tensors.values():
        base, seen = tensor.alias_of, {tensor.name}
        while base is not None and base in graph.tensors and base not in seen:
            seen.add(base)
            found.setdefault(base, []).append(tensor.name)
            base = graph.tensors[base].alias_of
    return {name: tuple(names) for name, names in found.items()}


def written_before_read(oracle: Oracle) -> Iterator[Finding]:
    """The first access of every temporary's bytes is a write."""
    graph = oracle.graph
    for head, accesses in oracle.accesses.items():
        first = accesses[0]
        if oracle.families[head].kind != "temp":
            continue
        same_op = [access for access in accesses if access.op == first.op]
        read = next((access for access in same_op if access.reads), None)
        if read is not None:
            yield Finding(
                "read-before-write",
                _where(graph, graph.ops[read.op].name),
                f"{_op_text(graph, read.op)} reads {read.tensor}, which no op has written",
                {"op": graph.ops[read.op].name, "first": read.tensor},
            )


def aliases_are_sound(oracle: Oracle) -> Iterator[Finding]:
    """Aliases have a base, stay inside it, and nothing that outlives the graph is a temporary's."""
    graph = oracle.graph
    for tensor in graph.tensors.values():
        where = _where(graph, tensor.name)
        family = oracle.families[tensor.name]
        if tensor.alias_of is None:
            if "temp" in (family.kind, tensor.kind) and family.kind != tensor.kind:
                yield _outlives(tensor, family, where)
            continue
        base = graph.tensors.get(tensor.alias_of)
        if base is None or graph.tensors[family.head].alias_of is not None:
            yield Finding(
                "alias-unknown",
                where,
                f"alias of {tensor.alias_of}, from which no chain leads to a tensor",
                {"first": tensor.name, "second": tensor.alias_of},
            )
            continue
        at, size = tensor.alias_offset_bytes, tensor.size_bytes(graph.limits)
        limit = base.size_bytes(graph.limits)
        if at < 0 or at + size > limit:
            yield Finding(
                "alias-outside-base",
                where,
                f"bytes {at}..{at + size} of {base.name}, which has {limit}",
                {"first": tensor.name, "second": base.name, "bytes": [at, at + size]},
            )
        if family.kind == "temp" and tensor.kind != "temp":
            yield _outlives(tensor, family, where)


def _outlives(tensor: Tensor, family: Family, where: str) -> Finding:
    return Finding(
        "persistent-alias",
        where,
        f"{tensor.kind} {tensor.name} is on the bytes of {family.kind} {family.head}; a "
        f"temporary's bytes are given away after its last op, here {family.last}",
        {"first": tensor.name, "second": family.head, "kinds": [tensor.kind, family.kind]},
    )


def scratch_is_private(oracle: Oracle) -> Iterator[Finding]:
    """What an op uses as scratch no other op touches."""
    graph = oracle.graph
    for index, op in enumerate(graph.ops):
        for name in op.scratch:
            others = oracle.families[name].accesses & ~(1 << index)
            if others:
                other = others.bit_length() - 1
                yield Finding(
                    "scratch-elsewhere",
                    _where(graph, op.name),
                    f"scratch {name} of {_op_text(graph, index)} is touched by "
                    f"{_op_text(graph, other)}",
                    {"first": name, "ops": [index, other]},
                )


CHECKS = (
    waits_are_known,
    streams_wait,
    inplace_is_legal,
    second_readers,
    written_before_read,
    aliases_are_sound,
    scratch_is_private,
)


def check_graph(graph: Graph, oracle: Oracle | None = None) -> tuple[Finding, ...]:
    """Everything that is wrong with a graph under any layout."""
    oracle = oracle or Oracle(graph)
    return tuple(finding for check in CHECKS for finding in check(oracle))
