"""JSON files of the perf suite: read with finite numbers only, written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from suites.perf.codec import from_data
from suites.perf.errors import RecordError

T = TypeVar("T")


def _loads(text: str, source: str) -> Any:
    def refuse(constant: str) -> Any:
        raise RecordError("record", f"{source} holds {constant}; finite numbers are accepted")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise RecordError("record", f"{source} is no JSON: {error}") from error


def read_json_text(kind: type[T], text: str, source: str) -> T:
    """An instance of `kind` from JSON text; RecordError names `source` and what is wrong."""
    return from_data(kind, _loads(text, source), source)


def read_json(path: Path) -> Any:
    """The JSON in a file; RecordError names the file."""
    try:
        return _loads(path.read_text(), str(path))
    except FileNotFoundError as error:
        raise RecordError("missing", f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError("record", f"{path} cannot be read as JSON: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write to a neighbour file, flush it to the disk, rename it over `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
