"""Compiled kernels are kept by what they were compiled from, so no source runs another's code."""

from __future__ import annotations

import os
from pathlib import Path

import numba
import pytest

from engine import ops
from engine.ops import KERNEL_CACHE_VARIABLE, kernel_cache

NONE: dict[str, str] = {}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of kernel sources that may be changed."""
    folder = tmp_path / "ops"
    folder.mkdir()
    for name in ("__init__.py", "a.py", "b.py"):
        (folder / name).write_text(f"# {name}\n")
    monkeypatch.setattr(ops, "__file__", str(folder / "__init__.py"))
    return folder


def test_the_compiler_uses_the_folder_of_this_source():
    assert Path(numba.config.CACHE_DIR) == kernel_cache(os.environ)


def test_the_folder_is_chosen_by_our_variable_then_by_the_users_cache():
    digest = kernel_cache(NONE).name
    assert len(digest) == 16
    assert kernel_cache(NONE) == Path("~/.cache/sparkproof/kernels").expanduser() / digest
    xdg = {"XDG_CACHE_HOME": "/x"}
    assert kernel_cache(xdg) == Path("/x/sparkproof/kernels") / digest
    ours = {**xdg, KERNEL_CACHE_VARIABLE: "/kernels"}
    assert kernel_cache(ours) == Path("/kernels") / digest
    assert kernel_cache({**xdg, KERNEL_CACHE_VARIABLE: ""}) == kernel_cache(xdg)


def test_the_same_source_has_the_same_folder(sources):
    before = kernel_cache(NONE)
    (sources / "a.py").write_text("# a.py\n")
    (sources / "notes.txt").write_text("no source")
    assert kernel_cache(NONE) == before


@pytest.mark.parametrize("change", ["edited", "added", "removed", "renamed"])
def test_any_change_of_a_source_has_a_folder_of_its_own(sources, change):
    before = kernel_cache(NONE)
    if change == "edited":
        (sources / "a.py").write_text("# a.py \n")
    if change == "added":
        (sources / "c.py").write_text("")
    if change == "removed":
        (sources / "b.py").unlink()
    if change == "renamed":
        (sources / "b.py").rename(sources / "c.py")
    assert kernel_cache(NONE) != before


def test_two_checkouts_do_not_share_a_folder(sources, tmp_path, monkeypatch):
    before = kernel_cache(NONE)
    other = tmp_path / "elsewhere"
    sources.rename(other)
    monkeypatch.setattr(ops, "__file__", str(other / "__init__.py"))
    assert kernel_cache(NONE) != before
