"""The prefix cache in memory: what is found, what is given up, and that the tree stays whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache import PagePool
from engine.prefix import PrefixCache, extend_keys, keeps_window, next_kept
from fixtures.toy_core import ToyCore
from tests.engine.serving import PAGE, SHAPE, ask, build, prompt, run

PAGE_BYTES = 96
WINDOW = b"w" * 40


def fresh(limit_bytes=10**6, pages=64):
    core = ToyCore(**{**SHAPE, "pages": pages})
    pool = PagePool(pages)
    return PrefixCache(core, pool, limit_bytes, "test"), pool


def keys_of(ids, root=b"root"):
    keys = []
    extend_keys(keys, root, ids, PAGE)
    return keys


def fill(cache, keys, windows=()):
    """Let a sequence come and go that leaves these pages and windows behind."""
    pages = cache.acquire([], len(keys)).pages
    for index in range(len(keys)):
        cache.add_page(keys, index, pages)
        if index in windows:
            cache.add_window(keys[index], WINDOW)
    cache.release(pages)


def test_keys_cover_all_ids_before_them_and_grow_with_the_sequence():
    keys = keys_of(prompt(1, 3 * PAGE + 2))
    assert len(keys) == 3
    assert keys_of(prompt(1, 2 * PAGE)) == keys[:2]
    other = keys_of((*prompt(2, PAGE), *prompt(1, 3 * PAGE)[PAGE:]))
    assert not set(other) & set(keys)
    assert keys_of(prompt(1, PAGE), b"another package") != keys[:1]


def test_a_hit_reaches_the_deepest_window_and_tells_what_lay_beyond():
    cache, pool = fresh()
    keys = keys_of(prompt(1, 5 * PAGE))
    fill(cache, keys, windows=(0, 2))
    granted = cache.acquire(keys, 7)
    assert (granted.tokens, granted.window, granted.known_pages) == (3 * PAGE, WINDOW, 5)
    assert len(set(granted.pages)) == 7
    assert pool.counts.used == 7 and pool.counts.cached == 2
    cache.release(granted.pages)
    cache.check()
    pool.check([])


def test_pages_without_a_window_are_no_hit():
    cache, _ = fresh()
    keys = keys_of(prompt(1, 3 * PAGE))
    fill(cache, keys)
    granted = cache.acquire(keys, 3)
    assert (granted.tokens, granted.window, granted.known_pages) == (0, None, 3)


def test_a_disabled_cache_keeps_nothing():
    cache, pool = fresh(limit_bytes=0)
    keys = keys_of(prompt(1, 3 * PAGE))
    assert not cache.enabled
    fill(cache, keys, windows=(2,))
    assert pool.free == pool.total and cache.size_bytes == 0


def test_the_least_recently_used_chain_goes_first_and_from_its_end():
    cache, pool = fresh(limit_bytes=4 * PAGE_BYTES + 2 * len(WINDOW))
    first, second, third = (keys_of(prompt(n, 2 * PAGE)) for n in (1, 2, 3))
    fill(cache, first, windows=(1,))
    fill(cache, second, windows=(1,))
    cache.release(cache.acquire(first, 2).pages)
    fill(cache, third, windows=(1,))
    found = [cache.acquire(keys, 2).tokens for keys in (first, second, third)]
    assert found == [2 * PAGE, 0, 2 * PAGE]
    assert cache.stats.evicted_pages == 2


def test_the_limit_counts_pages_and_windows():
    cache, _ = fresh(limit_bytes=5 * PAGE_BYTES)
    for n in range(9):
        fill(cache, keys_of(prompt(n, PAGE)), windows=(0,))
        assert cache.size_bytes <= 5 * PAGE_BYTES
    assert cache.size_bytes == 3 * (PAGE_BYTES + len(WINDOW))


def test_sequences_take_cached_pages_when_no_free_ones_are_left():
    cache, pool = fresh(pages=6)
    fill(cache, keys_of(prompt(1, 5 * PAGE)), windows=(4,))
    assert pool.counts.cached == 5
    assert len(cache.acquire([], 4).pages) == 4
    assert pool.counts == type(pool.counts)(free=0, cached=2, used=4)


def test_a_reserve_is_left_for_the_others():
    cache, _ = fresh(pages=6)
    assert cache.acquire([], 4, reserve=3) is None
    assert cache.acquire([], 3, reserve=3) is not None


def test_pages_in_use_are_never_evicted():
    cache, pool = fresh(pages=6)
    keys = keys_of(prompt(1, 4 * PAGE))
    fill(cache, keys, windows=(3,))
    held = cache.acquire(keys, 5)
    assert held.tokens == 4 * PAGE
    assert cache.acquire([], 2) is None
    assert cache.acquire([], 1) is not None
    pool.check([held.pages, [5]])


def test_a_sequence_goes_on_with_the_page_that_is_cached_already():
    cache, pool = fresh()
    keys = keys_of(prompt(1, 2 * PAGE))
    one, two = cache.acquire(keys, 2), cache.acquire(keys, 2)
    for index in range(2):
        cache.add_page(keys, index, one.pages)
        cache.add_page(keys, index, two.pages)
    assert one.pages == two.pages and pool.counts.used == 2
    pool.check([one.pages, two.pages])


def test_repeated_hits_do_not_pile_up_bookkeeping():
    cache, _ = fresh()
    keys = keys_of(prompt(1, 2 * PAGE))
    fill(cache, keys, windows=(1,))
    for _ in range(1000):
        cache.release(cache.acquire(keys, 2).pages)
    assert len(cache._leaves) < 100


@given(st.integers(1, 3000))
def test_kept_borders_lose_less_than_an_eighth_of_any_prefix(pages):
    kept = max((b for b in range(max(1, pages - 300), pages + 1) if keeps_window(b)), default=0)
    assert pages - kept < max(1, pages / 8)
    following = next_kept(pages)
    assert keeps_window(following)
    assert not any(keeps_window(b) for b in range(pages + 1, following))


def test_a_long_prompt_keeps_few_windows():
    assert sum(keeps_window(border) for border in range(1, 1025)) < 70


@pytest.mark.parametrize(
    "breakage",
    [
        lambda c: setattr(next(iter(c._nodes.values())), "children", 7),
        lambda c: setattr(c, "_window_bytes", 1),
        lambda c: c._nodes.pop(next(iter(c._nodes))),
    ],
)
def test_check_notices_a_broken_tree(breakage):
    cache, _ = fresh()
    fill(cache, keys_of(prompt(1, 3 * PAGE)), windows=(2,))
    cache.check()
    breakage(cache)
    with pytest.raises(AssertionError):
        cache.check()


def test_queries_and_hits_are_counted_in_tokens():
    scheduler = build(limit_bytes=10**6)
    stats = scheduler._prefix.stats
    run(scheduler, ask(prompt(1, 3 * PAGE + 1)))
    assert (stats.query_tokens, stats.hit_tokens["memory"]) == (3 * PAGE, 0)
    run(scheduler, ask(prompt(1, 3 * PAGE + 1)))
    assert (stats.query_tokens, stats.hit_tokens["memory"]) == (6 * PAGE, 3 * PAGE)
