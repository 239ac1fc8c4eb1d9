"""The page pool keeps its conservation law and notices every way to break it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache import PageCounts, PagePool


def test_pages_go_out_lowest_first_and_come_back():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.counts == PageCounts(free=1, cached=0, used=3)
    pool.release([1])
    assert pool.allocate(1) == [1]
    pool.check([[0, 2], [1]])


def test_a_shared_page_stays_used_until_its_last_holder_leaves():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.held(pages[0])
    pool.release(pages)
    assert pool.counts == PageCounts(free=2, cached=0, used=0)


def test_a_cached_page_outlives_its_sequence_and_can_be_shared_again():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.cache(pages[0])
    pool.release(pages)
    assert pool.counts == PageCounts(free=1, cached=1, used=0)
    pool.retain(pages)
    assert pool.counts == PageCounts(free=1, cached=0, used=1)
    pool.uncache(pages[0])
    pool.release(pages)
    assert pool.counts == PageCounts(free=2, cached=0, used=0)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda p: p.allocate(9), "9 pages asked of 3 free ones"),
        (lambda p: p.release([3]), "page 3 is released more often than held"),
        (lambda p: p.retain([3]), "page 3 is free and cannot be shared"),
        (lambda p: p.cache(3), "page 3 enters the cache without a sequence"),
        (lambda p: (p.cache(0), p.cache(0)), "page 0 enters the cache twice"),
        (lambda p: p.uncache(0), "page 0 leaves the cache without being in it"),
        (lambda p: p.check([[0], [0]]), "page holders differ"),
        (lambda p: p.check([]), "page holders differ"),
        (lambda p: (p._free.pop(), p.check([[0]])), "the free list differs"),
        (lambda p: (p._free.append(0), p.allocate(1)), "page 0 was free and held"),
        (lambda p: (setattr(p, "_cached", 1), p.check([[0]])), "1 are counted"),
    ],
)
def test_misuse_is_noticed_at_once(act, sentence):
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=sentence):
        act(pool)


def test_an_empty_pool_is_refused():
    with pytest.raises(AssertionError, match="a pool needs pages"):
        PagePool(0)


@given(st.lists(st.tuples(st.sampled_from("asrcu"), st.integers(0, 7)), max_size=60))
def test_counts_add_up_after_any_legal_history(history):
    pool, tables, cached = PagePool(6), [], set()
    for action, number in history:
        if action == "a" and number <= pool.free:
            tables.append(pool.allocate(number))
        elif action == "s" and tables:
            shared = list(tables[number % len(tables)])
            pool.retain(shared)
            tables.append(shared)
        elif action == "r" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == "c" and number < 6 and pool.held(number) and number not in cached:
            pool.cache(number)
            cached.add(number)
        elif action == "u" and number in cached:
            pool.uncache(number)
            cached.discard(number)
        pool.check(tables)
