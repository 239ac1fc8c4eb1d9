"""Every recipe is planned without a finding: form, bounds, overlap, lives, sums, balance, KV."""

from __future__ import annotations

from fractions import Fraction

import pytest

from engine.units import GIB, MIB
from suites.findings import Judgement, joined
from suites.memory.capacity import bytes_per_token, check_kv_facts
from suites.memory.checks import check_document
from suites.memory.ledger import Readings, read_package_file, reconcile
from suites.memory.test_snapshots import recipes
from suites.target import require
from suites.target_plan import RECIPES, Planned, RecipeFile, read_recipe_file, shared_plan

GB10_BYTES = int(121.69 * GIB)
"""What the operating system of a GB10 sees."""
RELEASE_BYTES_PER_TOKEN = 890
SCRATCH_BYTES_MAX = 512 * MIB
SCRATCH_PER_1024_BYTES_MAX = 110 * MIB
"""Temporaries of the seed's recipe, and their growth with the chunk."""


def expected_per_token(recipe_file: RecipeFile) -> Fraction:
    """KV bytes of a token, from the formats and the configuration's figures."""
    config = recipe_file.config
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    return bytes_per_token(config.head_dim, config.index_head_dim, ratios)


def judge(recipe_file: RecipeFile, planned: Planned) -> Judgement:
    """All static checks of a planned recipe; the release has to fit a GB10."""
    budget = None
    if recipe_file.name.startswith("flash"):
        budget = GB10_BYTES - recipe_file.recipe.host_memory_floor_bytes
    memory_map = planned.memory_map
    judged = check_document(memory_map.to_json(), planned.graphs, budget_bytes_max=budget)
    kv = check_kv_facts(memory_map.kv, expected_per_token(recipe_file))
    return joined([judged, Judgement(tuple(kv))])


def told(judged: Judgement) -> str:
    """Findings, for a failure."""
    return "\n".join(map(str, judged.findings))


def temporaries_bytes(planned: Planned) -> int:
    """The temporaries arena of the rank that has most."""
    return max(
        sum(a.nbytes for a in rank.allocations if a.category == "temporaries")
        for rank in planned.memory_map.ranks
    )


@pytest.mark.parametrize("recipe_file", recipes())
def test_recipe_is_planned_without_a_finding(recipe_file, target, shared):
    require(target, "plan")
    planned = shared_plan(shared, recipe_file)
    judged = judge(recipe_file, planned)
    assert not judged.findings, told(judged)
    # Nothing may pass because there was nothing to look at.
    assert [entry.check for entry in judged.not_checked] in ([], ["budget"])
    assert len(planned.memory_map.ranks) == recipe_file.recipe.ranks
    assert all(rank.temporaries and rank.allocations for rank in planned.memory_map.ranks)
    if recipe_file.model.name == "flash":
        assert planned.memory_map.kv["bytes_per_token"] == RELEASE_BYTES_PER_TOKEN


def test_scratch_of_the_seed_recipe_is_small_and_grows_slowly_with_the_chunk(target, shared):
    require(target, "plan")
    small, large = (
        temporaries_bytes(shared_plan(shared, read_recipe_file(RECIPES / f"{name}.toml")))
        for name in ("flash-tp3-chunk-1024", "flash-tp3-seed")
    )
    assert 0 < small < large <= SCRATCH_BYTES_MAX, f"{large / MIB:.1f} MiB at chunk 4096"
    growth = (large - small) / 3
    assert growth <= SCRATCH_PER_1024_BYTES_MAX, f"{growth / MIB:.1f} MiB per 1024 chunk tokens"


def test_package_has_a_map_without_a_finding(package, target):
    require(target, "inspect")
    judged = check_document(target.inspect(package))
    assert not judged.findings, told(judged)
    assert judged.not_checked, "without graphs something has to remain unchecked"


def test_package_map_keeps_to_its_graphs(package, target):
    require(target, "check")
    found = target.check(package)
    assert found["findings"] == []
    assert [entry["check"] for entry in found["not_checked"]] == ["budget"]


def test_package_files_hold_what_the_map_says(package, target):
    require(target, "inspect")
    from engine.memmap import memory_map_from_json

    memory_map = memory_map_from_json(target.inspect(package))
    files = sorted(package.glob("*.safetensors"))
    assert len(files) == len(memory_map.ranks)
    for rank, file in zip(memory_map.ranks, files, strict=True):
        read = read_package_file(file)
        assert read.tensors, f"{file} holds no tensor"
        ledger = reconcile(Readings(rank, memory_map.kv, read))
        assert not ledger.findings, "\n".join(map(str, ledger.findings))


def test_started_package_has_the_kv_cache_that_its_metrics_state(package, engines):
    require(engines.target, "inspect", "start", "metrics")
    from engine.memmap import memory_map_from_json

    memory_map = memory_map_from_json(engines.target.inspect(package))
    with engines.serve(package) as server:
        metrics = server.metrics()
    for rank in memory_map.ranks:
        ledger = reconcile(Readings(rank, memory_map.kv, metrics=metrics))
        assert not ledger.findings, "\n".join(map(str, ledger.findings))
    assert metrics["flare_total_kv_tokens"] > 0
