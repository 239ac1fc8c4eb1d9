"""Maps of real sizes without weights: balance, hand arithmetic, sums, KV facts."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from engine.config import parse_config, read_config
from engine.mapping import ALIGNMENT_BYTES, SPREAD_BYTES_MAX, arena_bytes, plan_model
from engine.memmap import memory_map_from_json
from engine.model import KV_POOL
from engine.recipe import Recipe
from engine.shard import deal_ranks, rank_weights, resident_bytes
from engine.units import GIB, MIB
from fixtures.checkpoints.mini_configs import mini_config

RELEASE = Path(__file__).resolve().parents[2] / "fixtures" / "models" / "flash" / "config.json"
EXPERT_BYTES = 18_800_640
"""One routed expert of the release, as its checkpoint's headers say."""


@pytest.fixture(scope="module")
def release():
    recipe = Recipe(max_concurrency=4, mtp_draft_tokens=5, prefill_chunk=64, device="cuda")
    return plan_model(read_config(RELEASE), recipe)


@pytest.fixture(scope="module")
def mini():
    recipe = Recipe(max_concurrency=3, mtp_draft_tokens=3, prefill_chunk=32)
    return plan_model(parse_config(mini_config()), recipe)


def sizes(planned, rank, ends):
    return {a.name: a.nbytes for a in planned.ranks[rank].map.allocations if a.name.endswith(ends)}


def test_the_ranks_of_the_release_lie_within_4_mib(release):
    assert SPREAD_BYTES_MAX == 4 * MIB
    assert release.spread_bytes <= 4 * MIB
    assert [deal.count("groups") for deal in release.deals] == [3, 3, 2]
    assert [deal.count("experts") for deal in release.deals] == [128] * 3


@pytest.mark.slow
@pytest.mark.parametrize("scratch", ["planned", "pools"])
def test_the_seed_recipe_is_levelled_under_each_strategy(scratch):
    recipe = Recipe(max_concurrency=4, mtp_draft_tokens=5, scratch=scratch, device="cuda")
    planned = plan_model(read_config(RELEASE), recipe)
    assert planned.spread_bytes <= 4 * MIB


def test_what_is_no_weight_is_levelled_without_moving_the_groups(release):
    config, recipe = release.config, release.recipe
    other = [300 * MIB, 0, 40 * MIB]
    deals = deal_ranks(config, recipe, other)
    loads = [resident_bytes(config, recipe, d) + b for d, b in zip(deals, other, strict=True)]
    assert max(loads) - min(loads) <= MIB
    assert [deal.groups for deal in deals] == [deal.groups for deal in release.deals]


def test_the_light_rank_of_the_release_gets_more_draft_experts_and_no_padding(release):
    drafts = [deal.count("draft_experts") for deal in release.deals]
    assert sum(drafts) == 128 and drafts[2] > drafts[0]
    assert sum(deal.count("vocab") for deal in release.deals) == 129280


def test_a_token_of_the_release_takes_890_bytes_from_the_formats(release):
    kv = release.memory_map.kv
    entry = 512 // 2 + 512 // 16 + 128 // 2 + 128 // 32
    assert entry == 356
    assert {source["entry_bytes"] for source in kv["sources"]} == {entry}
    assert [s["entries_per_page"] for s in kv["sources"]] == [64, 64, 64, 128]
    assert kv["bytes_per_token"] == 890
    assert kv["page_bytes"] == 128 * 890


def test_other_ratios_and_widths_give_other_bytes_per_token(mini):
    entry = 64 // 2 + 64 // 16 + 32 // 2 + 32 // 32
    assert mini.memory_map.kv["bytes_per_token"] == entry * 1.5
    assert isinstance(mini.memory_map.kv["bytes_per_token"], float)
    assert Fraction(mini.memory_map.kv["bytes_per_token"]).denominator == 2


def test_weights_of_the_release_agree_with_hand_arithmetic(release):
    first = sizes(release, 0, "")
    w1, w3, w2 = (first[f"layers.5.ffn.experts.{part}.weight"] for part in ("w1", "w3", "w2"))
    scales = sum(first[f"layers.5.ffn.experts.{part}.scale"] for part in ("w1", "w3", "w2"))
    assert w1 + w3 + w2 + scales == 128 * EXPERT_BYTES
    assert first["layers.0.attn.wq_b.weight"] == 24 * 512 * 1280
    assert first["layers.0.attn.wo_a.weight"] == 3 * 1024 * 8 * 512
    assert first["layers.0.attn.wo_b.weight"] == 5120 * 3 * 1024
    assert first["layers.0.attn.wo_b.scale"] == 5120 * 3 * 1024 // 32**2
    assert first["norm.weight"] == 5120 * 2
    assert sizes(release, 2, "")["layers.0.attn.wq_b.weight"] == 16 * 512 * 1280
    rows = [deal.count("vocab") for deal in release.deals]
    heads = [sizes(release, rank, "head.weight")["head.weight"] for rank in range(3)]
    assert heads == [count * 5120 * 2 for count in rows]


def test_routed_experts_of_all_ranks_add_up_to_the_release(release):
    parts = (".ffn.experts.w1", ".ffn.experts.w2", ".ffn.experts.w3")
    total = sum(
        weight.nbytes
        for rank in release.ranks
        for weight in rank_weights(release.config, release.recipe, rank.deal)
        if any(part in weight.name for part in parts)
    )
    assert total == (40 * 384 + 3 * 128) * EXPERT_BYTES
    assert round(total / GIB, 2) == 275.67


def test_engram_tables_are_on_disk_and_no_part_of_the_map(release):
    for rank in release.ranks:
        assert not any(".engram.embed" in a.name for a in rank.map.allocations)
        assert rank.map.fixed_bytes < 100 * GIB


def test_the_kv_pool_is_no_fixed_memory(release, mini):
    for planned in (release, mini):
        assert all(a.name != KV_POOL for rank in planned.ranks for a in rank.map.allocations)


@pytest.mark.parametrize("name", ["release", "mini"])
def test_an_arena_takes_what_its_mappings_and_their_gaps_sum_to(name, request):
    planned = request.getfixturevalue(name)
    for rank in planned.ranks:
        for arena in ("weights", "state", "io"):
            own = [a for a in rank.map.allocations if a.arena == arena]
            gaps = [a.nbytes for a in rank.map.allocations if a.name == f"{arena}.gaps"]
            assert all(a.offset % ALIGNMENT_BYTES == 0 for a in own)
            at = 0
            for allocation in own:
                assert at <= allocation.offset < at + ALIGNMENT_BYTES
                at = allocation.offset + allocation.nbytes
            total = sum(a.nbytes for a in own) + sum(gaps)
            assert total == arena_bytes(rank.map, arena)


@pytest.mark.parametrize("name", ["release", "mini"])
def test_ranks_map_the_same_names_in_the_same_order(name, request):
    planned = request.getfixturevalue(name)
    first, *others = [[(a.arena, a.name) for a in r.map.allocations] for r in planned.ranks]
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", ["release", "mini"])
def test_the_inventory_adds_up_to_the_fixed_memory(name, request):
    for rank in request.getfixturevalue(name).ranks:
        rows = rank.map.inventory_bytes
        assert rows.pop("core_fixed_mappings") == sum(rows.values()) == rank.map.fixed_bytes


def test_states_are_rings_and_open_groups_of_every_slot(mini):
    c, recipe = mini.config, mini.recipe
    ring = 3 * (c.sliding_window + 3) * (c.head_dim + c.head_dim // 32)
    tail = 3 * (2 + 3) * 2 * c.head_dim * 4
    states = {a.name: a.nbytes for a in mini.ranks[0].map.allocations if a.category == "state"}
    assert set(states.values()) == {ring, tail}
    assert list(states.values()).count(ring) == c.num_layers_with_drafts
    assert mini.memory_map.kv["fixed_bytes"] == sum(states.values())
    assert recipe.max_concurrency == 3


def test_pools_and_no_reuse_need_more_than_the_plan(mini):
    config = mini.config
    fixed = {
        scratch: plan_model(
            config,
            Recipe(max_concurrency=3, mtp_draft_tokens=3, prefill_chunk=32, scratch=scratch),
        )
        .ranks[0]
        .map.fixed_bytes
        for scratch in ("pools", "none")
    }
    assert mini.ranks[0].map.fixed_bytes < fixed["pools"] < fixed["none"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_number_of_ranks_is_planned(ranks):
    recipe = Recipe(
        ranks=ranks, max_concurrency=2, mtp_draft_tokens=2, prefill_chunk=16, scratch="none"
    )
    planned = plan_model(parse_config(mini_config()), recipe)
    assert len(planned.ranks) == ranks
    assert planned.spread_bytes <= SPREAD_BYTES_MAX


def test_without_drafts_no_draft_block_is_mapped(mini):
    recipe = Recipe(max_concurrency=3, mtp_draft_tokens=0, prefill_chunk=32)
    planned = plan_model(mini.config, recipe)
    names = [a.name for a in planned.ranks[0].map.allocations]
    assert not any(name.startswith("mtp.") for name in names)


def test_planning_twice_gives_the_same_map_and_digests(mini):
    again = plan_model(mini.config, mini.recipe)
    assert again.memory_map == mini.memory_map
    assert again.graph_digests == mini.graph_digests


def test_the_map_survives_its_json_form(mini):
    assert memory_map_from_json(mini.memory_map.to_json()) == mini.memory_map


def test_progress_counts_ranks(mini):
    told = []
    plan_model(mini.config, mini.recipe, lambda *step: told.append(step))
    assert told == [("plan", done, 3) for done in range(4)]
