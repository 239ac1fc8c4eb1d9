"""The memory maps of the recipes, one readable file each; a change has to be accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.memory.render_text import render_map
from suites.memory.snapshots import MapStore, MapText, difference
from suites.target import require
from suites.target_plan import RECIPES, recipe_files, shared_plan

STORED = Path(__file__).parent / "__snapshots__" / Path(__file__).stem


def recipes() -> list:
    """All recipes; those that take long are marked."""
    return [
        pytest.param(found, id=found.name, marks=() if found.default else (pytest.mark.slow,))
        for found in recipe_files()
    ]


@pytest.fixture
def store(pytestconfig) -> MapStore | None:
    """Where accepted maps are kept between runs; pytest may be told to have no such place."""
    if not hasattr(pytestconfig, "cache"):
        return None
    return MapStore(pytestconfig.cache.mkdir("sparkproof-maps"))


# Files are named after recipes; which of them are left over, the test below finds out.
@pytest.mark.filterwarnings("ignore:(?s).*Can not relate snapshot")
@pytest.mark.parametrize("recipe_file", recipes())
def test_map_is_the_accepted_one(recipe_file, target, shared, snapshot, store):
    require(target, "plan")
    name, planned = recipe_file.name, shared_plan(shared, recipe_file)
    text = render_map(planned.memory_map, planned.graphs)
    kept = snapshot(name=name, extension_class=MapText)
    if kept == text:
        if store is not None:
            store.keep(name, text, planned.memory_map)
        return
    accepted = kept.executions[kept.num_executions - 1].recalled_data
    if accepted is None:
        pytest.fail(
            f"recipe {name} has no snapshot yet; write it with --snapshot-update and read it",
            pytrace=False,
        )
    pytest.fail(difference(name, accepted, text, planned.memory_map, store), pytrace=False)


def test_every_snapshot_has_its_recipe(pytestconfig):
    names = {found.name for found in recipe_files()}
    orphans = [path for path in sorted(STORED.glob("*")) if path.stem not in names]
    if pytestconfig.option.update_snapshots:
        for path in orphans:
            path.unlink()
        return
    assert not orphans, (
        f"{', '.join(path.name for path in orphans)}: no recipe of that name in {RECIPES}; "
        "--snapshot-update removes them"
    )
