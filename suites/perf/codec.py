"""Frozen dataclasses to JSON and back; unknown, missing and mistyped fields are refused by path."""

from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from suites.perf.errors import RecordError

T = TypeVar("T")


def to_data(instance: Any) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers of a frozen dataclass (enums become their values)."""
    return asdict(instance)


def from_data(kind: type[T], data: Any, path: str = "$") -> T:
    """An instance of `kind` from plain data; RecordError names the path, value and what is due."""
    if is_dataclass(kind):
        return _dataclass(kind, data, path)
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(kind, data, path)
    if origin in (Union, UnionType):
        return _optional(kind, data, path)
    return _scalar(kind, data, path)


def _dataclass(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError("record", f"{path} is {type(data).__name__}; an object is accepted")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise RecordError("record", f"{path}: unknown {unknown}; known are {sorted(known)}")
    due = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in due if name not in data]:
        raise RecordError("record", f"{path}: {missing} missing")
    hints = get_type_hints(kind)
    return kind(**{n: from_data(hints[n], value, f"{path}.{n}") for n, value in data.items()})


def _tuple(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, list | tuple):
        raise RecordError("record", f"{path} is {type(data).__name__}; a list is accepted")
    item = get_args(kind)[0]
    return tuple(from_data(item, value, f"{path}[{i}]") for i, value in enumerate(data))


def _optional(kind: Any, data: Any, path: str) -> Any:
    if data is None and NoneType in get_args(kind):
        return None
    inner = [arg for arg in get_args(kind) if arg is not NoneType]
    assert len(inner) == 1, f"{path}: only `X | None` is supported, not {kind}"
    return from_data(inner[0], data, path)


def _scalar(kind: Any, data: Any, path: str) -> Any:
    if issubclass(kind, StrEnum):
        if data not in list(kind):
            raise RecordError("record", f"{path} is {data!r}; one of {[k.value for k in kind]}")
        return kind(data)
    accepted = (int, float) if kind is float else (kind,)
    # bool is an int in Python, never in a record.
    if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
        raise RecordError("record", f"{path} is {data!r}; {kind.__name__} is accepted")
    return kind(data)
