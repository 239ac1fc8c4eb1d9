"""The recipe: every choice of an export that may move bytes, bits or speed."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from engine.errors import UsageError, must_be_one_of
from engine.units import GIB, parse_size

SCRATCH_STRATEGIES = ("planned", "pools", "none")
ACCUMULATIONS = ("float64", "float32")
DEVICES = ("cpu", "cuda")
RANKS_MAX = 8


@dataclass(frozen=True)
class Recipe:
    """Defaults are those of the seed's exporter.

    prefill_chunk           tokens of one prefill step at most
    mtp_draft_tokens        drafts per decode step; 0 leaves the draft blocks out
    scratch                 how temporaries get their bytes
    accumulation            dtype inside an op; float32 is for CUDA
    host_memory_floor_bytes bytes of MemAvailable that an export or start must leave
    """

    ranks: int = 3
    max_concurrency: int = 32
    mtp_draft_tokens: int = 7
    prefill_chunk: int = 4096
    scratch: str = "planned"
    accumulation: str = "float64"
    device: str = "cpu"
    kv_page_tokens: int = 128
    host_memory_floor_bytes: int = 8 * GIB

    def __post_init__(self) -> None:
        _in_range("ranks", self.ranks, 1, RANKS_MAX)
        _in_range("max_concurrency", self.max_concurrency, 1, 1024)
        _in_range("mtp_draft_tokens", self.mtp_draft_tokens, 0, 32)
        _in_range("prefill_chunk", self.prefill_chunk, 1, 65536)
        _in_range("kv_page_tokens", self.kv_page_tokens, 2, 4096)
        _in_range("host_memory_floor_bytes", self.host_memory_floor_bytes, 0, 2**50)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(must_be_one_of(name, getattr(self, name), choices))
        if self.kv_page_tokens % 2:
            raise UsageError(f"kv_page_tokens is {self.kv_page_tokens}; an even number is needed")
        if self.device == "cpu" and self.accumulation != "float64":
            raise UsageError("accumulation is 'float32'; on cpu only float64 is accepted")

    @property
    def identity(self) -> dict:
        """The choices that decide bytes and bits (the memory floor does not)."""
        values = asdict(self)
        del values["host_memory_floor_bytes"]
        return values

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict:
        """A JSON value that `recipe_from_json` reads back."""
        return asdict(self)

    def with_ranks(self, ranks: int) -> Recipe:
        """The same choices at another number of ranks."""
        return replace(self, ranks=ranks)


_CHOICES = {"scratch": SCRATCH_STRATEGIES, "accumulation": ACCUMULATIONS, "device": DEVICES}


def _in_range(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{name} is {value!r}; accepted: an integer from {least} to {most}")


def recipe_from_json(document: Mapping, where: str = "recipe") -> Recipe:
    """A recipe from plain values; sizes may be texts such as `8GiB`. Raises UsageError."""
    known = {f.name for f in fields(Recipe)}
    values = dict(document)
    if "host_memory_floor" in values:
        values["host_memory_floor_bytes"] = parse_size(
            str(values.pop("host_memory_floor")), "host_memory_floor"
        )
    for key in values:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}; accepted: {', '.join(sorted(known))}")
    return Recipe(**values)


def read_recipe(path: Path) -> Recipe:
    """Read the `[recipe]` table of a TOML file; other tables are not its own. Raises UsageError."""
    try:
        document = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if not isinstance(table := document.get("recipe"), dict):
        raise UsageError(f"{path} has no [recipe] table; it has {', '.join(document) or 'nothing'}")
    return recipe_from_json(table, str(path))
