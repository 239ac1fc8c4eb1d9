"""The layout that design and style promise, held to the truth: imports, lengths, what is said where."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
FUNCTION_LINES_MEDIAN_MAX = 10

LAYERS = (
    "errors units",
    "config recipe ir memmap request tiling",
    "formats engram folding planner packing batch",
    "shard hostmem capacity kvcache prefix prefix_disk sampler text chat openai_api openapi sse",
    "model ops tensorfile",
    "device comm exchange mapping tensors",
    "link meeting rendezvous mesh launch delivery seating start sequence calls",
    "package_format checkpoint package package_writer distribution executor scheduler",
    "rank export core engine_loop metrics answers warm",
    "residence app server",
    "cli",
)
"""Rooms of the engine; a room imports rooms of its own line (without a cycle) and of those above."""

NO_TORCH = ("ir", "memmap", "request", "planner", "scheduler", "packing", "config", "recipe", "shard")
CHECKERS = ("checks", "compare", "stats", "lifetimes", "overlap", "logprobs", "retrieval", "oracle")
OUR_PACKAGES = ("engine", "fixtures", "suites", "tests")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@lru_cache(maxsize=None)
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Dotted names a file imports, `from a import b` as a.b and a; strings of import_module too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")


def layer_of(name: str) -> int:
    found = [i for i, line in enumerate(LAYERS) if name in line.split()]
    assert len(found) == 1, f"engine/{name} stands in {len(found)} layers of this table, not in one"
    return found[0]


def engine_rooms(names: Iterator[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "engine").iterdir()}
    return {p[1] for p in parts if p[0] == "engine" and len(p) > 1 and p[1] in rooms}


ENGINE_FILES = [p for p in python_files("engine") if p != ROOT / "engine" / "__init__.py"]


@pytest.mark.parametrize("path", ENGINE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_inside_the_engine_run_in_one_direction(path):
    own = layer_of(room(path))
    for other in engine_rooms(imported(path)) - {room(path)}:
        assert layer_of(other) <= own, f"{path.relative_to(ROOT)} imports engine.{other} from above"


def test_rooms_of_one_layer_do_not_import_each_other_in_a_circle():
    edges: dict[str, set[str]] = {}
    for path in ENGINE_FILES:
        edges.setdefault(room(path), set()).update(engine_rooms(imported(path)) - {room(path)})

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle {' -> '.join((*trail, name))}"
        for other in edges.get(name, ()):
            if layer_of(other) == layer_of(name):
                visit(other, (*trail, name))

    for name in edges:
        visit(name, ())


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_packages_import_only_those_before_them(package):
    allowed = OUR_PACKAGES[: OUR_PACKAGES.index(package) + 1]
    for path in python_files(package):
        for name in imported(path):
            top = name.split(".")[0]
            assert top not in OUR_PACKAGES or top in allowed, (
                f"{path.relative_to(ROOT)} imports {name}; {package} may import {allowed}"
            )


@pytest.mark.parametrize("name", NO_TORCH)
def test_plain_rooms_do_not_know_torch(name):
    files = [p for p in ENGINE_FILES if room(p) == name]
    assert files, f"engine/{name} does not exist"
    for path in files:
        assert "torch" not in {n.split(".")[0] for n in imported(path)}, path


def test_only_the_device_file_touches_cuda():
    for path in ENGINE_FILES:
        if path.name != "device.py":
            assert "torch.cuda" not in path.read_text(), f"{path.relative_to(ROOT)} touches torch.cuda"


def test_checkers_do_not_import_what_they_check():
    judged = {"planner", "executor", "ops", "model", "rank", "core", "sampler", "scheduler"}
    found = [p for p in python_files("suites") if p.stem.split("_")[0] in CHECKERS]
    assert len(found) > 5
    for path in found:
        assert not engine_rooms(imported(path)) & judged, f"{path} imports what it judges"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_files_and_functions_stay_short(package):
    lengths = []
    for path in python_files(package):
        lines = path.read_text().count("\n")
        assert lines <= LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines"
        for name, length in functions(path):
            assert length <= FUNCTION_LINES_MAX, f"{path}: {name} has {length} lines"
            lengths.append(length)
    assert sorted(lengths)[len(lengths) // 2] < FUNCTION_LINES_MEDIAN_MAX


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_every_file_says_what_it_is_for(package):
    for path in python_files(package):
        assert path.read_text() == "" or ast.get_docstring(tree(path)), f"{path} says nothing"


def swallowed(node: ast.ExceptHandler) -> bool:
    bare = node.type is None
    return bare or (all(isinstance(b, ast.Pass) for b in node.body) and not has_reason(node))


def has_reason(node: ast.ExceptHandler) -> bool:
    return getattr(node, "explained", False)


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_no_exception_is_swallowed_without_a_word(package):
    for path in python_files(package):
        lines = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                body = lines[node.lineno - 1 : node.end_lineno]
                node.explained = any("#" in line for line in body)
                assert not swallowed(node), f"{path}:{node.lineno} swallows an exception"


MARKS = re.compile(r"TODO|FIXME|NotImplementedError|mark\.skip\b|mark\.xfail|flaky|reruns")
OVERLOADS = ROOT / "engine" / "ops" / "tiles.py"
"""Stands for a compiled overload there; the interpreter must never run it."""


@pytest.mark.parametrize("package", OUR_PACKAGES)
def test_nothing_is_left_for_later(package):
    for path in python_files(package):
        if path in (Path(__file__), OVERLOADS):
            continue
        found = MARKS.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)} holds {found.group(0)!r}"


def tracked_text() -> Iterator[tuple[str, str]]:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".json", ".txt", "") and path.is_file():
            yield name, path.read_text(errors="replace")


def test_the_project_speaks_of_itself_alone():
    machine_path = "/" + "work/"
    index_host = "pypi" + ".org"
    for name, text in tracked_text():
        assert machine_path not in text, f"{name} names a path of one machine"
        assert index_host not in text and "files.pythonhosted" + ".org" not in text, name
