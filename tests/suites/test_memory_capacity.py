"""KV capacity: the seed's totals, the formats' bytes per token, and wrong claims of every kind."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suites.memory.capacity import (
    GIB,
    KvClaim,
    Observed,
    bytes_per_token,
    check_claim,
    check_kv_facts,
    entry_bytes,
    fixed_part,
    kv_tokens,
    page_budget,
)

SEED = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "memmaps" / "seed_kv_totals.json").read_text()
)
PAIRS = [Observed(pair["budget_gib"], pair["kv_tokens"]) for pair in SEED["pairs"]]


def names(findings) -> list[str]:
    return [finding.name for finding in findings]


# The seed's numbers


def test_one_fixed_part_explains_every_pair_of_the_seed():
    low, high = fixed_part(PAIRS, SEED["bytes_per_token"], SEED["page_tokens"])
    assert 0.734 <= low / GIB < high / GIB <= 0.743


def test_every_total_of_the_seed_follows_from_its_budget_and_the_fixed_part():
    low, high = fixed_part(PAIRS, 890)
    fixed = (low + high) / 2
    for pair in PAIRS:
        least, most = pair.budgets
        needed = page_budget(0, pair.tokens, 890) + fixed
        budget = max(least, needed)
        assert least <= budget < most
        assert kv_tokens(budget, fixed, 890) == pair.tokens


def test_every_total_of_the_seed_is_whole_pages():
    totals = SEED["totals_without_budget"] + [pair.tokens for pair in PAIRS]
    assert all(total % SEED["page_tokens"] == 0 for total in totals)


@given(st.integers(100, 2000), st.integers(0, GIB // 2))
def test_the_fixed_part_that_was_used_is_found_and_its_ends_are_exact(hundredths, fixed):
    budget = Fraction(hundredths, 100) * GIB
    observed = Observed(f"{hundredths / 100:.2f}", kv_tokens(budget, fixed, 890))
    least, most = observed.budgets
    low, high = fixed_part([observed], 890)
    assert low < fixed < high
    tiny = Fraction(1, 1000)
    assert kv_tokens(least, low + tiny, 890) == observed.tokens
    assert kv_tokens(least, low, 890) == observed.tokens + 128
    assert kv_tokens(most - tiny, high - tiny, 890) == observed.tokens
    assert kv_tokens(most - tiny, high, 890) < observed.tokens


def test_without_a_fixed_part_the_pairs_do_not_fit():
    assert all(kv_tokens(pair.budgets[0], 0, 890) > pair.tokens for pair in PAIRS)


@pytest.mark.parametrize(
    "pairs",
    [
        [Observed("6.27", 6670080 + 1)],
        [Observed("6.27", 6670080), Observed("6.30", 6670080 - 128 * 100)],
        [Observed("1.95", 1456256), Observed("6.27", 6670080 * 2)],
    ],
)
def test_totals_that_no_single_fixed_part_explains_are_told(pairs):
    assert fixed_part(pairs, 890) is None


def test_another_bytes_per_token_does_not_explain_the_seed():
    assert fixed_part(PAIRS, 1008) is None


def test_a_printed_budget_stands_for_an_interval():
    assert Observed("6.30", 0).budgets == (Fraction("6.295") * GIB, Fraction("6.305") * GIB)
    assert Observed("2", 0).budgets == (Fraction(3, 2) * GIB, Fraction(5, 2) * GIB)


# The formats


def test_the_released_formats_give_890_bytes():
    assert entry_bytes(512, 128) == 356
    assert bytes_per_token(512, 128, [2, 2, 2, 1]) == 890


def test_bytes_per_token_may_be_a_fraction():
    assert bytes_per_token(64, 32, [2, 2]) == entry_bytes(64, 32)
    assert bytes_per_token(64, 32, [3]) == Fraction(entry_bytes(64, 32), 3)


# The function


@given(
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.fractions(1, 2000, max_denominator=8),
    st.integers(1, 256),
)
def test_the_total_is_the_largest_number_of_pages_that_fits(budget, fixed, per_token, page):
    tokens = kv_tokens(budget, fixed, per_token, page)
    assert tokens % page == 0
    if tokens:
        assert fixed + tokens * per_token <= budget
    assert fixed + (tokens + page) * per_token > budget


@pytest.mark.parametrize(("budget", "fixed"), [(0, 0), (100, 200), (890 * 128 - 1, 0)])
def test_no_room_for_a_page_is_no_tokens(budget, fixed):
    assert kv_tokens(budget, fixed, 890) == 0


# Claims


def claim(tokens: int, **more) -> KvClaim:
    budgets = more.pop("budgets", (6 * GIB, 5 * GIB, 6 * GIB))
    return KvClaim(tokens, budgets, (GIB // 2,) * len(budgets), 890, **more)


RIGHT = kv_tokens(5 * GIB, GIB // 2, 890)


def test_the_least_of_the_ranks_is_right():
    assert list(check_claim(claim(RIGHT))) == []


def test_the_capacity_of_rank_0_is_found():
    wrong = kv_tokens(6 * GIB, GIB // 2, 890)
    (finding,) = check_claim(claim(wrong))
    assert finding.name == "kv-not-minimum"
    assert f"rank 1 has room for {RIGHT}" in finding.message


def test_a_total_off_by_a_page_is_found():
    assert names(check_claim(claim(RIGHT + 128))) == ["kv-tokens"]
    assert names(check_claim(claim(RIGHT - 128))) == ["kv-tokens"]


def test_a_total_of_no_whole_pages_is_found():
    assert names(check_claim(claim(RIGHT - 1))) == ["kv-page"]


def test_a_total_without_the_fixed_part_is_found():
    assert names(check_claim(claim(kv_tokens(5 * GIB, 0, 890)))) == ["kv-tokens"]


def test_decimal_and_binary_gigabytes_confused_are_named():
    for budget in (5 * 10**9, 5 * GIB * GIB // 10**9):
        wrong = kv_tokens(budget, GIB // 2, 890)
        assert names(check_claim(claim(wrong))) == ["kv-units"]


def test_a_silent_clamp_is_found():
    asked = claim(RIGHT, requested_bytes=8 * GIB, granted_bytes=5 * GIB)
    assert names(check_claim(asked)) == ["cache-clamped"]
    assert names(check_claim(claim(RIGHT, requested_bytes=5 * GIB, granted_bytes=5 * GIB))) == []


def test_budgets_without_their_fixed_parts_are_refused():
    with pytest.raises(AssertionError, match="one of each per rank"):
        KvClaim(0, (1, 2), (1,), 890)


# Facts of a map


def facts(**changes) -> dict:
    source = {"ratio": 2, "entries_per_page": 64, "entry_bytes": 356}
    sources = [{**source, "layer": layer} for layer in (2, 8, 14)]
    sources.append({"layer": 20, "ratio": 1, "entries_per_page": 128, "entry_bytes": 356})
    return {
        "bytes_per_token": 890,
        "page_tokens": 128,
        "page_bytes": 113920,
        "sources": sources,
        **changes,
    }


def test_figures_that_agree_have_no_finding():
    assert list(check_kv_facts(facts(), bytes_per_token(512, 128, [2, 2, 2, 1]))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes_per_token": 800},
        {"bytes_per_token": 1008},
        {"page_bytes": 113919},
        {"page_tokens": 64},
        {"sources": []},
        {"sources": None},
        {"page_tokens": None},
    ],
)
def test_figures_that_disagree_are_found(changes):
    assert set(names(check_kv_facts(facts(**changes)))) == {"kv-bytes-per-token"}


def test_an_entry_that_forgets_its_scales_is_found_by_the_formats():
    thin = [{**source, "entry_bytes": 256 + 64} for source in facts()["sources"]]
    kv = facts(sources=thin, bytes_per_token=800, page_bytes=102400)
    assert list(check_kv_facts(kv)) == []
    (finding,) = check_kv_facts(kv, bytes_per_token(512, 128, [2, 2, 2, 1]))
    assert finding.message == "800 bytes a token are stated, the formats give 890"
