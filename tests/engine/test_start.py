"""The size of the KV cache at a start: every term, shared hosts, limits, and agreement of ranks."""

from __future__ import annotations

import threading
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from engine.config import parse_config
from engine.errors import MemoryFloorError
from engine.mapping import plan_model
from engine.recipe import Recipe
from engine.rendezvous import meet
from engine.residence import aligned_zeros, plan_from_map
from engine.start import HostTerms, agree_on_pages, budgets, host_id, plan_cache
from engine.units import GIB, MIB
from fixtures.checkpoints.mini_configs import mini_config

KV = {"page_tokens": 128, "page_bytes": 128 * 890}
CONFIG = replace(parse_config(mini_config()), max_position_embeddings=1_000_000)
RECIPE = Recipe(max_concurrency=32)


def apart(*available_gib, fixed=0):
    """Ranks on hosts of their own."""
    return [
        HostTerms(rank, int(gib * GIB), fixed, f"host {rank}")
        for rank, gib in enumerate(available_gib)
    ]


def test_a_rank_alone_on_its_host_has_all_that_is_left_above_the_floor():
    assert budgets(apart(20, 30, fixed=GIB), 8 * GIB) == [11 * GIB, 21 * GIB]


def test_ranks_that_share_a_host_share_what_is_left():
    terms = [HostTerms(rank, 20 * GIB, GIB, "one") for rank in range(3)]
    assert budgets(terms, 8 * GIB) == [3 * GIB] * 3


def test_the_lowest_reading_of_a_shared_host_counts():
    terms = [HostTerms(0, 20 * GIB, 0, "one"), HostTerms(1, 18 * GIB, 0, "one")]
    assert budgets(terms, 8 * GIB) == [5 * GIB] * 2


def test_the_rank_with_the_least_room_decides():
    plan = plan_cache(apart(20, 14, 18), 8 * GIB, KV, CONFIG, RECIPE, None)
    assert plan.limiting_rank == 1
    assert plan.tokens == 6 * GIB // (128 * 890) * 128
    assert plan.pages * plan.page_bytes <= 6 * GIB < (plan.pages + 1) * plan.page_bytes


def test_no_more_is_taken_than_all_slots_can_fill():
    config = replace(CONFIG, max_position_embeddings=1000)
    plan = plan_cache(apart(500), 8 * GIB, KV, config, RECIPE, None)
    assert plan.tokens == plan.useful_tokens == 32 * 8 * 128
    assert plan.room_tokens > plan.tokens


def test_a_size_that_is_asked_for_is_granted_exactly_though_it_cannot_be_filled():
    config = replace(CONFIG, max_position_embeddings=1000)
    plan = plan_cache(apart(500), 8 * GIB, KV, config, RECIPE, 100 * MIB)
    assert plan.pages == 100 * MIB // (128 * 890)


def test_a_size_above_the_budget_is_refused_with_both_figures():
    with pytest.raises(MemoryFloorError, match="on rank 1: 2,048 MiB available, 4,096 MiB"):
        plan_cache(apart(20, 10), 8 * GIB, KV, CONFIG, RECIPE, 4 * GIB)


def test_no_room_beside_weights_and_floor_is_refused_with_both_figures():
    with pytest.raises(MemoryFloorError, match="rank 1: 9,216 MiB available, 10,240 MiB required"):
        plan_cache(apart(20, 9, fixed=2 * GIB), 8 * GIB, KV, CONFIG, RECIPE, None)


def test_bytes_a_token_that_are_no_integer_are_counted_exactly():
    kv = {"page_tokens": 128, "page_bytes": 10176}
    plan = plan_cache(apart(9), 8 * GIB, kv, CONFIG, RECIPE, None)
    assert Fraction(plan.page_bytes, plan.page_tokens) == Fraction(159, 2)
    assert plan.pages == GIB // 10176


def test_the_log_has_every_term_of_every_rank_and_the_result():
    said = []
    plan = plan_cache(apart(20, 14, fixed=GIB), 8 * GIB, KV, CONFIG, RECIPE, None)
    plan.log(lambda event, **facts: said.append((event, facts)))
    assert [event for event, _ in said] == ["Plan cache", "Plan cache", "Allocate cache"]
    assert said[1][1] == {
        "of_rank": 1,
        "available_mib": 14336,
        "floor_mib": 8192,
        "fixed_mib": 1024,
        "sharing_host": 1,
        "budget_mib": 5120,
    }
    assert said[2][1]["tokens"] == plan.tokens and said[2][1]["limiting_rank"] == 1


def test_all_ranks_allocate_the_pages_that_rank_0_decides():
    from engine.cli.options import free_address

    address, found = free_address(), {}

    def work(rank):
        with meet(rank, 3, address, {}, "s", 10) as meeting:
            own = HostTerms(rank, (10 + rank) * GIB, 0, f"host {rank}")
            found[rank] = agree_on_pages(
                meeting, own, lambda terms: plan_cache(terms, 8 * GIB, KV, CONFIG, RECIPE, None)
            )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    pages = 2 * GIB // (128 * 890)
    assert [found[rank][0] for rank in range(3)] == [pages] * 3
    assert found[0][1].limiting_rank == 0 and found[1][1] is None


def test_processes_of_one_host_name_it_alike(tmp_path):
    assert host_id() == host_id() != ""
    assert host_id(tmp_path / "missing") != ""


@pytest.mark.parametrize("scratch", ["planned", "pools", "none"])
def test_the_plan_read_back_from_the_map_has_the_offsets_that_were_planned(scratch):
    recipe = Recipe(max_concurrency=2, mtp_draft_tokens=2, prefill_chunk=8, scratch=scratch)
    planned = plan_model(parse_config(mini_config()), recipe)
    for rank in planned.ranks:
        plan = plan_from_map(rank.map, rank.graphs, scratch)
        assert plan.size_bytes == rank.plan.size_bytes
        assert set(plan.arenas) == {a.name for a in rank.plan.arenas.values() if a.size_bytes}
        for name, original in rank.plan.graphs.items():
            assert plan.graphs[name].offsets == original.offsets
            assert plan.graphs[name].sizes == original.sizes


def test_a_map_that_lacks_a_temporary_is_not_run():
    recipe = Recipe(ranks=1, max_concurrency=2, mtp_draft_tokens=0, prefill_chunk=8)
    (rank,) = plan_model(parse_config(mini_config()), recipe).ranks
    short = replace(rank.map, temporaries=rank.map.temporaries[1:])
    with pytest.raises(AssertionError, match="the map lacks temporaries"):
        plan_from_map(short, rank.graphs, "planned")


def test_arenas_begin_at_a_multiple_of_256():
    for size in (1, 1000):
        arena = aligned_zeros(size)
        assert arena.size == size and arena.dtype == np.uint8
        assert arena.ctypes.data % 256 == 0 and not arena.any()
