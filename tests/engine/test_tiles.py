"""Tiles of any size give the golden bits: the paths that only large models or long steps take."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import repeat

import numpy as np
import pytest
from safetensors.torch import load_file

from engine import tiling
from engine.ops import gemm, select
from engine.recipe import Recipe
from fixtures import local_ranks
from fixtures.local_ranks import LocalRanks
from tests.engine.runs import MINI, assert_same_bits, in_pieces, some_ids

GOLDEN = load_file(MINI / "prefill_131.safetensors")
IDS = tuple(GOLDEN["input_ids"].tolist())
LOGITS = GOLDEN["logits_all"].numpy()

SMALL_TILES = {
    "GEMM_ROWS": 20,
    "GEMM_WEIGHT_ITEMS": 5000,
    "MIX_ROWS": 7,
    "REDUCE_ROWS": 32,
    "INDEX_ROWS": 11,
    "INDEX_KEYS": 18,
    "FEW_SLOTS": 8,
}
FEWER_BRANCHES = {"FEW_ROWS": 1, "FEW_SLOTS": 1, "GEMM_WEIGHT_ITEMS": 3 * 256 * 128}
"""Tiles even for few rows, and one expert at a time."""


@pytest.fixture
def tiles(monkeypatch):
    """Sets tile sizes in all modules that took them over, for models built from then on."""

    def use(sizes: dict[str, int]) -> None:
        local_ranks._planned.cache_clear()
        for name, value in sizes.items():
            assert getattr(tiling, name) > value, f"{name} is no smaller than usual"
            for module in [m for n, m in sys.modules.items() if n.startswith("engine.")]:
                if module is not select and hasattr(module, name):
                    monkeypatch.setattr(module, name, value)

    yield use
    local_ranks._planned.cache_clear()


@pytest.fixture
def ways(monkeypatch) -> Counter:
    """How often each way through the experts and the selection was taken."""
    taken: Counter = Counter()
    for owner, names in (
        (gemm._Experts, ("few", "side_by_side", "tiled_expert")),
        (select._Select, ("by_row", "sequence")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, _counted(getattr(owner, name), name, taken))
    return taken


def _counted(method, name: str, taken: Counter):
    def counted(self, *args):
        taken[name] += 1
        return method(self, *args)

    return counted


def recipe(ranks: int, **more) -> Recipe:
    values = {"max_concurrency": 2, "mtp_draft_tokens": 0, "prefill_chunk": 131}
    return Recipe(ranks=ranks, **{**values, **more})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_small_tiles_give_the_golden_bits(tiles, ways, ranks, threads):
    tiles(SMALL_TILES)
    with LocalRanks(MINI, recipe(ranks), threads=threads) as model:
        limits = model.models[0].graphs["prefill"].limits
        assert sum(name.startswith("F") for name in limits) == 5, "a step has five tiles of sums"
        assert_same_bits(in_pieces(model, IDS, [131]), LOGITS)
        assert_same_bits(in_pieces(model, IDS, [70, 33, 28]), LOGITS)
        assert_same_bits(in_pieces(model, IDS[:9], repeat(1)), LOGITS[:9])
    assert ways["tiled_expert"] and ways["few"] and not ways["side_by_side"]
    assert ways["sequence"] and ways["by_row"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tiles_for_few_rows_give_the_golden_bits(tiles, ways, ranks):
    tiles(FEWER_BRANCHES)
    with LocalRanks(MINI, recipe(ranks), threads=2) as model:
        assert_same_bits(in_pieces(model, IDS, [131]), LOGITS)
        assert_same_bits(in_pieces(model, IDS[:24], [3, 4]), LOGITS[:24])
    assert ways["side_by_side"] and not ways["tiled_expert"]


def test_usual_tiles_take_the_other_ways(ways):
    with LocalRanks(MINI, recipe(1)) as model:
        assert_same_bits(in_pieces(model, IDS, [131]), LOGITS)
        assert_same_bits(in_pieces(model, IDS[:3], repeat(1)), LOGITS[:3])
    assert ways["side_by_side"] and ways["few"] and not ways["tiled_expert"]


def test_a_candidate_block_wider_than_a_key_tile_is_chosen_row_by_row(tiles, ways):
    tiles({"INDEX_KEYS": 3})
    with LocalRanks(MINI, recipe(1)) as model:
        assert_same_bits(in_pieces(model, IDS, [131]), LOGITS)
    assert ways["by_row"] and not ways["sequence"]


def test_pages_beyond_two_gibibytes_are_found():
    """The pool is only touched where pages are written, so most of it takes no memory."""
    ids = some_ids(3, 150)
    with LocalRanks(MINI, recipe(1), pages=2) as model:
        expected = in_pieces(model, ids, [131], pages=(1, 0))
        page_bytes = model.models[0].layout.page_bytes
    pages = 2**31 // page_bytes + 10
    with LocalRanks(MINI, recipe(1), pages=pages) as model:
        assert (pages - 2) * page_bytes > 2**31
        found = in_pieces(model, ids, [131], pages=(pages - 1, pages - 2))
    assert_same_bits(found, expected)
    assert np.isfinite(found).all()
