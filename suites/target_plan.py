"""Plans of recipes: the maps and graphs that `ignition plan` works out, shared by a run's tests.

The same function serves `ignition plan`, an export and a start. The graphs, which a map does not
hold and the lifetime checks need, are why it is called here and not through the command.
"""

from __future__ import annotations

import pickle
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from engine.config import ModelConfig, read_config
from engine.errors import UsageError
from engine.ir import Graph
from engine.mapping import plan_model
from engine.memmap import MemoryMap
from engine.recipe import Recipe, recipe_from_json
from suites.target import Export
from suites.target_shared import Shared

FIXTURES = Path(str(files("fixtures")))
RECIPES = FIXTURES / "recipes"
MODELS = {"flash": FIXTURES / "models" / "flash", "mini": FIXTURES / "goldens" / "mini"}
"""Models by name; any other reference is a directory, from that of the recipe's file."""
KEYS = ("about", "model", "default", "recipe")
MINI_OPTIONS = {"max-concurrency": 4, "mtp-draft-tokens": 5, "prefill-chunk": 64}
"""Small enough to plan and start in seconds; longer prompts take several chunks."""
HELD = 2
"""Plans that a process keeps in memory; those of the release have some 50,000 buffers each."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as data: what it is for, the model it is for, and whether every run judges it."""

    name: str
    about: str
    model: Path
    recipe: Recipe
    default: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return read_config(self.model / "config.json")


@dataclass(frozen=True)
class Planned:
    """A recipe's map with the graphs of every rank."""

    memory_map: MemoryMap
    graphs: Mapping[int, Sequence[Graph]]


def read_recipe_file(path: Path) -> RecipeFile:
    """Read a file of `fixtures/recipes`. Raises UsageError naming the file and the key."""
    path = Path(path)
    document = tomllib.loads(path.read_text())
    for key in document:
        if key not in KEYS:
            raise UsageError(f"{path}: unknown key {key!r}; accepted: {', '.join(KEYS)}")
    given = document.get("model")
    model = MODELS.get(given) or path.parent / str(given)
    if given is None or not (model / "config.json").is_file():
        raise UsageError(
            f"{path}: model is {given!r}; accepted: {', '.join(MODELS)}, "
            "or a directory with a config.json"
        )
    return RecipeFile(
        path.stem,
        str(document.get("about", "")),
        model.resolve(),
        recipe_from_json(document.get("recipe", {}), str(path)),
        bool(document.get("default", False)),
    )


def recipe_files(directory: Path = RECIPES) -> list[RecipeFile]:
    """All recipes of a directory, by name. Raises UsageError where there is none."""
    found = [read_recipe_file(path) for path in sorted(directory.glob("*.toml"))]
    if not found:
        raise UsageError(f"{directory} holds no recipe")
    return found


def mini_export(ranks: int, **options: object) -> Export:
    """The golden miniature as the suites export it; `options` with underscores for dashes."""
    given = {name.replace("_", "-"): value for name, value in options.items()}
    return Export(MODELS["mini"], ranks, MINI_OPTIONS | given)


def plan_recipe(recipe_file: RecipeFile) -> Planned:
    """Plan a recipe, in this process."""
    planned = plan_model(recipe_file.config, recipe_file.recipe)
    return Planned(
        planned.memory_map, {rank: each.graphs for rank, each in enumerate(planned.ranks)}
    )


@lru_cache(maxsize=HELD)
def shared_plan(shared: Shared, recipe_file: RecipeFile) -> Planned:
    """The plan of a recipe, worked out by one process of the run and read by the others."""

    def make(path: Path) -> None:
        path.write_bytes(pickle.dumps(plan_recipe(recipe_file), pickle.HIGHEST_PROTOCOL))

    key = [recipe_file.name, str(recipe_file.model), recipe_file.recipe.digest]
    # The file lies in a directory that this run has made and that no one else may write to.
    return pickle.loads(shared.once("plans", key, make).read_bytes())
