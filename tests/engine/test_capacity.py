"""KV capacity: the seed's figures, whole pages, the least rank, and limits that are not bent."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.capacity import kv_capacity, kv_capacity_tokens
from engine.errors import MemoryFloorError
from engine.units import GIB, MIB

# Cache budgets (GiB, two decimals) and KV totals that the seed report quotes.
SEED = [(1.95, 1_456_256), (3.16, 2_927_232), (6.27, 6_670_080), (6.30, 6_713_728)]
SEED_FIXED_BYTES = round(0.7382 * GIB)


@pytest.mark.parametrize(("budget_gib", "tokens"), SEED)
def test_seed_totals_follow_from_one_fixed_part(budget_gib, tokens):
    least = SEED_FIXED_BYTES + tokens * 890
    assert round(least / GIB, 2) == budget_gib
    assert kv_capacity_tokens(least, SEED_FIXED_BYTES, 890, 128) == tokens
    assert kv_capacity_tokens(least - 1, SEED_FIXED_BYTES, 890, 128) == tokens - 128
    rounded = kv_capacity_tokens(round(budget_gib * GIB), SEED_FIXED_BYTES, 890, 128)
    assert abs(rounded - tokens) * 890 <= 0.005 * GIB + 128 * 890


def test_seed_totals_do_not_follow_without_the_fixed_part():
    assert all(
        abs(kv_capacity_tokens(round(budget * GIB), 0, 890, 128) - tokens) > 800_000
        for budget, tokens in SEED
    )


@given(
    budget=st.integers(0, 10**12),
    fixed=st.integers(0, 10**10),
    per_token=st.integers(1, 5000) | st.fractions(Fraction(1, 2), 5000, max_denominator=8),
    page=st.sampled_from([2, 16, 128, 4096]),
)
def test_one_more_page_never_fits(budget, fixed, per_token, page):
    tokens = kv_capacity_tokens(budget, fixed, per_token, page)
    assert tokens % page == 0 and tokens >= 0
    assert tokens == 0 or fixed + tokens * per_token <= budget
    assert fixed + (tokens + page) * per_token > budget


def test_smallest_rank_decides():
    budgets = [5 * GIB, 3 * GIB, 4 * GIB]
    capacity = kv_capacity(budgets, [GIB, GIB, 3 * GIB], 890, 128)
    assert capacity.limiting_rank == 2
    assert capacity.tokens == kv_capacity_tokens(4 * GIB, 3 * GIB, 890, 128)
    assert capacity.tokens_per_rank[0] > capacity.tokens_per_rank[1] > capacity.tokens


def test_cache_size_is_granted_exactly():
    limit = GIB + 890 * 128 * 10
    capacity = kv_capacity([5 * GIB, limit, 9 * GIB], [GIB] * 3, 890, 128, limit_bytes=limit)
    assert capacity.tokens_per_rank == (1280, 1280, 1280)


def test_cache_size_above_a_rank_is_refused_with_both_figures():
    with pytest.raises(
        MemoryFloorError, match="on rank 1: 3,071 MiB available, 4,096 MiB required"
    ):
        kv_capacity([5 * GIB, 3 * GIB - 1, 9 * GIB], [0] * 3, 890, 128, limit_bytes=4 * GIB)


def test_budget_without_room_for_a_page_is_refused_with_both_figures():
    with pytest.raises(MemoryFloorError, match="rank 0, one page of 128 tokens: 756 MiB available"):
        kv_capacity([756 * MIB], [756 * MIB], 890, 128)
    with pytest.raises(MemoryFloorError, match="757 MiB required"):
        kv_capacity([-5 * MIB], [756 * MIB], 890, 128)
    assert kv_capacity([757 * MIB], [756 * MIB], 890, 128).tokens > 0


def test_inexact_bytes_per_token_are_our_own_mistake():
    with pytest.raises(AssertionError, match="not exact"):
        kv_capacity_tokens(GIB, 0, 890.0, 128)
