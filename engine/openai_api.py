"""What a request body may hold: one table per endpoint, read by the checker and by OpenAPI."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import RequestError
from engine.sampler import LOGPROBS_MAX

CHOICES_MAX = 64
"""Sequences that one request may ask for: prompts x n."""
STOPS_MAX = 16
_SHOWN = 60
_INT_MAX = 2**31 - 1

_NUMBER = {"type": "number"}
_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_ID = {"type": "integer", "minimum": 0, "maximum": _INT_MAX}
_IDS = {"type": "array", "items": _ID}
_STOP = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": STOPS_MAX}]}
# Accepted only at the value that changes nothing, because clients send them unasked.
_NEUTRAL = {
    "presence_penalty": {**_NUMBER, "enum": [0]},
    "frequency_penalty": {**_NUMBER, "enum": [0]},
    "repetition_penalty": {**_NUMBER, "enum": [1]},
    "min_p": {**_NUMBER, "enum": [0]},
    "logit_bias": {"type": "object", "properties": {}},
    "user": _TEXT,
}
_SHARED = {
    "model": _TEXT,
    "max_tokens": {"type": "integer", "minimum": 0, "maximum": _INT_MAX},
    "temperature": {**_NUMBER, "minimum": 0, "maximum": 2},
    "top_p": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": _INT_MAX},
    "n": {"type": "integer", "minimum": 1, "maximum": CHOICES_MAX},
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "stop": _STOP,
    "stop_token_ids": {**_IDS, "maxItems": STOPS_MAX},
    "ignore_eos": _FLAG,
    "stream": _FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
    "return_token_ids": _FLAG,
    **_NEUTRAL,
}
COMPLETION = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "anyOf": [
                _TEXT,
                {**_IDS, "minItems": 1},
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": CHOICES_MAX},
                {
                    "type": "array",
                    "items": {**_IDS, "minItems": 1},
                    "minItems": 1,
                    "maxItems": CHOICES_MAX,
                },
            ]
        },
        "echo": _FLAG,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": LOGPROBS_MAX},
        "add_special_tokens": _FLAG,
        "best_of": {"type": "integer", "enum": [1]},
        "suffix": {**_TEXT, "enum": [""]},
        **_SHARED,
    },
}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {**_TEXT, "enum": ["text"]}, "text": _TEXT},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {**_TEXT, "enum": ["system", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
        "name": _TEXT,
        "reasoning_content": _TEXT,
    },
}
CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "max_completion_tokens": {"type": "integer", "minimum": 0, "maximum": _INT_MAX},
        "logprobs": _FLAG,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": LOGPROBS_MAX},
        "thinking": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {**_TEXT, "enum": ["enabled", "disabled"]}},
        },
        "chat_template_kwargs": {"type": "object", "properties": {"thinking": _FLAG}},
        "response_format": {
            "type": "object",
            "properties": {"type": {**_TEXT, "enum": ["text"]}},
        },
        **_SHARED,
    },
}
TOKENIZE = {
    "type": "object",
    "required": ["prompt"],
    "properties": {"model": _TEXT, "prompt": _TEXT, "add_special_tokens": _FLAG},
}
DETOKENIZE = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": _TEXT, "tokens": _IDS},
}
_KINDS = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(eq=False)
class ApiError(RequestError):
    """An answer in OpenAI's error shape; `status` is the HTTP code."""

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def document(self) -> dict:
        """The body to send."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def parse_json(body: bytes) -> object:
    """JSON without NaN, infinities and doubled keys. Raises ApiError."""
    try:
        return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except RecursionError as error:
        raise ApiError("the body is nested too deeply to be a request") from error
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _no_doubles(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {show(doubled)} occurs twice")
    return found


def show(value: object) -> str:
    """A value for an error message: ASCII, at most some dozen characters."""
    text = ascii(value) if not isinstance(value, list | dict) else f"a {_kind_of(value)}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind_of(value: object) -> str:
    if isinstance(value, list):
        return f"list of {len(value)} items"
    return "object" if isinstance(value, dict) else type(value).__name__


def checked(document: object, schema: Mapping) -> dict:
    """The body's fields that are not null, each of the schema's type and within its limits.

    Raises ApiError naming the field, its value and what would be accepted.
    """
    if not isinstance(document, dict):
        raise ApiError(f"the body is {show(document)}; an object is needed")
    present = {k: v for k, v in document.items() if v is not None}
    _check(present, schema, "")
    return present


def _fail(where: str, value: object, accepted: str) -> None:
    name = where or "the body"
    raise ApiError(f"{name} is {show(value)}; accepted: {accepted}", param=where or None)


def _check(value: object, schema: Mapping, where: str) -> None:
    if "anyOf" in schema:
        return _check_any(value, schema["anyOf"], where)
    kind = schema["type"]
    wrong = not isinstance(value, _KINDS[kind])
    # In Python a bool is an int; in JSON it is not.
    if wrong or (isinstance(value, bool) and kind != "boolean"):
        _fail(where, value, describe(schema))
    if "enum" in schema and value not in schema["enum"]:
        _fail(where, value, describe(schema))
    if kind in ("integer", "number"):
        _check_range(value, schema, where)
    elif kind == "array":
        _check_items(value, schema, where)
    elif kind == "object":
        _check_fields(value, schema, where)
    return None


def _check_any(value: object, options: list, where: str) -> None:
    """Passes if one option fits; otherwise the error is that of the option that fits furthest."""
    errors = []
    for option in options:
        try:
            return _check(value, option, where)
        except ApiError as error:
            errors.append(error)
    furthest = max(_places(error) for error in errors)
    best = [error for error in errors if _places(error) == furthest]
    if len(best) == 1:
        raise best[0]
    found, _, _ = best[0].message.partition("; accepted: ")
    accepted = " or ".join(error.message.partition("; accepted: ")[2] for error in best)
    raise ApiError(f"{found}; accepted: {accepted}", param=best[0].param)


def _places(error: ApiError) -> list[int]:
    return [int(place) for place in re.findall(r"\[(\d+)\]", error.param or "")]


def _check_range(value: float, schema: Mapping, where: str) -> None:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above = schema.get("exclusiveMinimum", -math.inf)
    infinite = isinstance(value, float) and math.isinf(value)
    if infinite or not (low <= value <= high and value > above):
        _fail(where, value, describe(schema))


def _check_items(value: list, schema: Mapping, where: str) -> None:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
        _fail(where, value, describe(schema))
    item = schema["items"]
    # A prompt of a million ids has to be looked through quickly.
    if item is _ID and all(type(v) is int and 0 <= v <= _INT_MAX for v in value):
        return
    for place, element in enumerate(value):
        _check(element, item, f"{where}[{place}]")


def _check_fields(value: dict, schema: Mapping, where: str) -> None:
    known = schema["properties"]
    for name, element in value.items():
        path = f"{where}.{name}" if where else name
        if name not in known:
            accepted = ", ".join(sorted(known)) or "no field"
            raise ApiError(f"unknown field {show(path)}; accepted: {accepted}", param=show(path))
        if element is not None:
            _check(element, known[name], path)
    for name in schema.get("required", ()):
        if value.get(name) is None:
            path = f"{where}.{name}" if where else name
            raise ApiError(f"{path} is missing; accepted: {describe(known[name])}", param=path)


def describe(schema: Mapping) -> str:
    """A schema in words, for error messages."""
    if "anyOf" in schema:
        return " or ".join(describe(option) for option in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"a list{_bounds(schema, 'minItems', 'maxItems')} of: {describe(schema['items'])}"
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind}{_bounds(schema, 'minimum', 'maximum')}"


def _bounds(schema: Mapping, low: str, high: str) -> str:
    least, most = schema.get(low), schema.get(high)
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']} and up to {most}"
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" of at least {least}"
    return "" if most is None else f" of at most {most}"
