"""`flare inspect`: packages and memory maps as text, JSON or pictures; checked and compared."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import click

from engine.cli import tables
from engine.cli.common import exit_codes_help
from engine.cli.console import Journal
from engine.errors import UsageError
from engine.ir import Graph
from engine.mapping import digests_over_ranks
from engine.memmap import MemoryMap, memory_map_from_json
from engine.model import build_graphs
from engine.package import locate, verify_package
from engine.package_format import Manifest, PackageHeader, file_name, read_header

CHECKERS = "suites.memory.commands"
"""Who judges maps: the engine makes them and must not judge itself."""


@dataclass(frozen=True)
class Subject:
    """What is inspected: a map document, and the package it came from if it did.

    untold: what a foreign dump does not tell, for the checks to repeat
    """

    path: Path
    document: Mapping
    header: PackageHeader | None = None
    verified: bool = False
    untold: tuple = ()

    @property
    def memory_map(self) -> MemoryMap:
        """The map."""
        try:
            return memory_map_from_json(self.document)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self.path} is no memory map: {error}") from error

    @property
    def graphs(self) -> dict[int, Sequence[Graph]] | None:
        """The graphs of every rank, rebuilt from the package's manifest.

        None where there is no package, or where this engine builds other graphs for it.
        """
        if self.header is None:
            return None
        manifest = self.header.manifest
        found = {
            rank: build_graphs(manifest.config, manifest.recipe, manifest.deals, rank)
            for rank in range(manifest.recipe.ranks)
        }
        same = digests_over_ranks(list(found.values())) == dict(manifest.graphs)
        return found if same else None


def open_subject(path: Path, unverified: bool, journal: Journal) -> Subject:
    """Read a package (its directory or model.safetensors), a map, or another engine's dump."""
    if path.is_dir() or path.name == file_name(0):
        directory = locate(path)
        if not unverified:
            verify_package(directory, journal.part("verify"))
        header = read_header(directory / file_name(0))
        return Subject(path, header.manifest.memory_map, header, not unverified)
    if not path.is_file():
        raise UsageError(f"{path} does not exist; a package or a memory map is needed")
    if path.suffix == ".json":
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not readable JSON: {error}") from error
        if isinstance(document, dict) and str(document.get("version", "")).startswith("memmap/"):
            return Subject(path, document)
    document, untold = checkers().read(path)
    return Subject(path, document, untold=tuple(untold))


@click.command(epilog=exit_codes_help())
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--memory-map", "memory_map", is_flag=True, help="Show the memory map.")
@click.option("--check", is_flag=True, help="Judge the map; exit code 1 if anything is found.")
@click.option("--diff", is_flag=True, help="Compare two maps; exit code 1 if they differ.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")
@click.option("--html", type=click.Path(path_type=Path), help="Draw the map into this file.")
@click.option("--draw", is_flag=True, help="Draw address over time in characters.")
@click.option("--rank", type=int, help="Details of this rank only.")
@click.option("--unverified", is_flag=True, help="Do not hash the package's contents.")
def inspect(
    paths: tuple[Path, ...],
    memory_map: bool,
    check: bool,
    diff: bool,
    as_json: bool,
    html: Path | None,
    draw: bool,
    rank: int | None,
    unverified: bool,
) -> int:
    """Show, check, draw or compare packages and memory maps.

    PATHS is one package (a directory or its model.safetensors), map (JSON) or dump of another
    engine (inspect JSON, torch snapshot pickle, MiniMalloc CSV), or two of them for --diff.
    """
    if diff + check + draw + (html is not None) > 1:
        raise UsageError("--check, --diff, --draw and --html exclude each other")
    wanted = 2 if diff else 1
    if len(paths) != wanted:
        raise UsageError(f"{len(paths)} paths given; {wanted} needed{' for --diff' * diff}")
    with Journal() as journal:
        subjects = [open_subject(path, unverified, journal) for path in paths]
    subject = subjects[0]
    if diff:
        return _diff(subjects, as_json)
    if check:
        return _check(subject, as_json)
    if html is not None:
        checkers().html(subject.document, subject.graphs, html)
        click.echo(f"{html}: memory map of {subject.path}")
        return 0
    if draw:
        click.echo(checkers().draw(subject.document))
        return 0
    return _show(subject, memory_map or subject.header is None, as_json, rank)


def checkers() -> ModuleType:
    """The suite that judges maps. Raises UsageError where it is not installed."""
    if importlib.util.find_spec("suites") is None:
        raise UsageError("the suites, which judge memory maps, are not installed")
    return importlib.import_module(CHECKERS)


def _check(subject: Subject, as_json: bool) -> int:
    code, found, text = checkers().check(subject.document, subject.graphs, subject.untold)
    click.echo(json.dumps(found, indent=1) if as_json else text)
    return code


def _diff(subjects: Sequence[Subject], as_json: bool) -> int:
    for subject in subjects:
        assert subject.memory_map, "an unreadable map is refused by now"
    first, second = subjects
    names = str(first.path), str(second.path)
    code, text = checkers().diff(first.document, second.document, names)
    click.echo(json.dumps({"differ": bool(code), "text": text}) if as_json else text)
    return code


def _show(subject: Subject, memory_map: bool, as_json: bool, rank: int | None) -> int:
    if as_json:
        document = subject.document if memory_map else package_facts(subject)
        click.echo(json.dumps(document, indent=1))
        return 0
    out = tables.console()
    if subject.header is not None:
        out.print(tables.facts("package", package_facts(subject, short=True)))
    if memory_map:
        _print_map(out, subject.memory_map, rank)
    return 0


def _print_map(out, memory_map: MemoryMap, rank: int | None) -> None:
    numbers = [entry.rank for entry in memory_map.ranks]
    if rank is not None and rank not in numbers:
        raise UsageError(f"--rank is {rank}; the map has ranks {', '.join(map(str, numbers))}")
    out.print(tables.inventory(memory_map))
    for line in tables.kv_lines(memory_map):
        out.print(line)
    for entry in memory_map.ranks:
        if rank in (None, entry.rank):
            out.print(tables.arenas(entry))
            out.print(tables.graphs(entry))
            out.print(tables.largest(entry))


def package_facts(subject: Subject, short: bool = False) -> dict[str, object]:
    """What a package says about itself."""
    header = subject.header
    assert header is not None, "a map has no package"
    manifest: Manifest = header.manifest
    found: dict[str, object] = {
        "package": header.package_hash,
        "verified": subject.verified,
        "checkpoint": manifest.checkpoint,
        "code_version": manifest.code_version,
    }
    if short:
        recipe = " ".join(f"{k}={v}" for k, v in manifest.recipe.identity.items())
        found["recipe"] = recipe
        for entry in header.contents:
            found[entry["file"]] = f"{entry['size_bytes']:,} bytes"
        for entry in manifest.left_out:
            found[f"left out {entry['names']}"] = f"{entry['count']} ({entry['reason']})"
        return found
    return found | {
        "recipe": manifest.recipe.to_json(),
        "graphs": dict(manifest.graphs),
        "files": list(header.contents),
        "left_out": list(manifest.left_out),
        "side_files": dict(manifest.side_files),
    }
