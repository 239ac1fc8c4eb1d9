"""The server's own OpenAPI document, made from the tables that check the requests."""

from __future__ import annotations

from engine.openai_api import CHAT, COMPLETION, DETOKENIZE, TOKENIZE

_BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
_READS = ("/v1/models", "/health", "/metrics", "/openapi.json")
_ERRORS = ("400", "401", "404", "405", "408", "413", "429", "500", "503")


def document(title: str) -> dict:
    """OpenAPI 3.1 for every endpoint."""
    paths = {path: {"get": _operation(path)} for path in _READS}
    for path, schema in _BODIES.items():
        content = {"application/json": {"schema": closed(schema)}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {**_operation(path), "requestBody": body}}
    return {"openapi": "3.1.0", "info": {"title": title, "version": "1"}, "paths": paths}


def _operation(path: str) -> dict:
    responses = {code: {"description": "refused, in OpenAI's error shape"} for code in _ERRORS}
    return {"operationId": path, "responses": {"200": {"description": "answered"}, **responses}}


def closed(schema: dict) -> dict:
    """The schema as the checker means it: no further fields, and null for an absent one."""
    if "anyOf" in schema:
        return {"anyOf": [closed(option) for option in schema["anyOf"]]}
    if schema["type"] == "array":
        return {**schema, "items": closed(schema["items"])}
    if schema["type"] != "object":
        return schema
    required = schema.get("required", ())
    fields = {
        name: closed(field) if name in required else {"anyOf": [closed(field), {"type": "null"}]}
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": fields, "additionalProperties": False}
