"""The toy core notices bookkeeping mistakes: each one planted at a seam changes logits or asserts.

A mistake that changes nothing here would make the equality tests of the scheduler worthless.
"""

from dataclasses import replace

import numpy as np
import pytest

from engine.kvcache import PagePool
from engine.request import DraftStep, SequenceStep
from engine.sampler import Sampling
from fixtures.toy_core import NGRAM, ToyCore
from tests.engine.serving import PAGE, SHAPE, alone, ask, build, finish, prompt, run

IDS = prompt(1, 45)
CASES = [(IDS[:n] + prompt(n, 15), 25, Sampling(temperature=0)) for n in (0, 20, 40, 33)]


class Meddling(ToyCore):
    """Changes each step of a sequence behind its first page before running it."""

    def __init__(self, change, **shape):
        super().__init__(**{**SHAPE, "strict": False, **shape})
        self.change, self.changed = change, 0

    def step(self, sequences):
        return super().step([self._meddle(s) for s in sequences])

    def _meddle(self, s):
        if s.start < 2 * PAGE:
            return s
        self.changed += 1
        return self.change(s)


def swap(pages):
    return (pages[1], pages[0], *pages[2:])


STEP_FAULTS = {
    "two pages swapped": lambda s: replace(s, pages=swap(s.pages)),
    "an old page lost": lambda s: replace(s, pages=(63, *s.pages[1:])),
    "history lost": lambda s: replace(s, history=()),
    "history too short": lambda s: replace(s, history=s.history[-NGRAM + 2 :]),
    "history shifted": lambda s: replace(s, history=(s.history[0], *s.history[:-1])),
    "position off by one": lambda s: replace(s, start=s.start - 1),
    "another slot": lambda s: replace(s, slot=(s.slot + 1) % 4),
    "an id altered": lambda s: replace(s, ids=((s.ids[0] + 1) % 96, *s.ids[1:])),
}


@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_meddled_step_changes_tokens(fault):
    core = Meddling(STEP_FAULTS[fault])
    sinks = run(build(core), *[ask(*case) for case in CASES])
    assert core.changed > 0
    assert [s.ids for s in sinks] != [alone(*case) for case in CASES]


def test_the_meddler_itself_changes_nothing():
    core = Meddling(lambda s: s)
    sinks = run(build(core), *[ask(*case) for case in CASES])
    assert [s.ids for s in sinks] == [alone(*case) for case in CASES]


class Forgetful(ToyCore):
    """Loses or alters what a prefix hit restores."""

    def __init__(self, window=lambda state: state, page=lambda content: content):
        super().__init__(**{**SHAPE, "strict": False})
        self.window_fault, self.page_fault, self.restored = window, page, 0

    def import_window(self, slot, state):
        self.restored += 1
        if (state := self.window_fault(state)) is not None:
            super().import_window(slot, state)

    def import_page(self, page, content):
        super().import_page(page, self.page_fault(content))


@pytest.mark.parametrize(
    "window", [lambda s: None, lambda s: bytes(len(s)), lambda s: s[8:] + s[:8]]
)
def test_a_window_not_restored_changes_tokens_after_a_hit(window):
    core = Forgetful(window=window)
    scheduler = build(core, limit_bytes=10**6)
    hits = [run(scheduler, ask(*case))[0] for case in CASES]
    assert core.restored > 0
    assert [s.ids for s in hits] != [alone(*case) for case in CASES]


class Shelf(dict):
    """A block store in memory."""

    def has(self, kind, key):
        return (kind, key) in self

    def get(self, kind, key):
        return self[kind, key]

    def put(self, kind, key, content):
        self[kind, key] = content


@pytest.mark.parametrize("alter", [False, True])
def test_an_altered_page_from_a_store_changes_tokens(alter):
    shelf = Shelf()
    run(build(disk=shelf), ask(IDS))
    core = Forgetful(page=(lambda c: c[8:] + c[:8]) if alter else (lambda c: c))
    (sink,) = run(build(core, disk=shelf), ask(IDS))
    assert sink.cached == 5 * PAGE
    assert (sink.ids != alone(IDS, 8)) == alter


def test_a_page_given_to_two_sequences_changes_tokens(monkeypatch):
    allocate, given = PagePool.allocate, []

    def doubled(pool, count):
        pages = allocate(pool, count)
        given.append(pages[0] if pages else None)
        return [given[0], *pages[1:]] if len(given) == 2 and pages else pages

    monkeypatch.setattr(PagePool, "allocate", doubled)
    scheduler = build(ToyCore(**{**SHAPE, "strict": False}))
    sinks = [scheduler.submit(ask(*case)).request.sink for case in CASES]
    for _ in range(20):
        scheduler.step()
    with pytest.raises(AssertionError, match="page holders differ"):
        scheduler.check()
    wrong = [s.ids != alone(*case)[: len(s.ids)] for s, case in zip(sinks, CASES, strict=True)]
    assert wrong[0] or wrong[1]


def test_a_draft_taken_without_verification_changes_tokens(monkeypatch):
    core = ToyCore(**{**SHAPE, "draft_tokens": 3, "strict": False})
    monkeypatch.setattr("engine.delivery._verify", _believe)
    (sink,) = run_loosely(build(core), ask(*CASES[0]))
    assert sink.ids != alone(*CASES[0])


def _believe(part, draft, token, stats):
    """The rejected draft stays where the target has run it."""
    return draft < len(part.drafts)


def run_loosely(scheduler, *requests):
    for request in requests:
        scheduler.submit(request)
    for _ in range(200):
        if scheduler.busy:
            scheduler.step()
    return [request.sink for request in requests]


def test_a_ring_that_is_not_longer_by_the_drafts_is_noticed():
    class Short(ToyCore):
        def __init__(self):
            super().__init__(**{**SHAPE, "draft_tokens": 5, "draft_skill": 0.3})
            self._depth = self.window
            self._slots = [self._empty_slot() for _ in range(self.slots)]

    sinks = run(build(Short()), *[ask(*case) for case in CASES])
    assert [s.ids for s in sinks] != [alone(*case) for case in CASES]


def test_drafts_asked_at_a_wrong_position_lose_their_skill():
    class Shifted(ToyCore):
        def draft(self, sequences):
            return super().draft([DraftStep(s.slot, s.position - 1, s.next_id) for s in sequences])

    core = Shifted(**{**SHAPE, "draft_tokens": 3, "draft_skill": 1.0})
    scheduler = build(core)
    assert run(scheduler, ask(*CASES[0]))[0].ids == alone(*CASES[0])
    assert sum(scheduler.stats.drafts_accepted) < sum(scheduler.stats.drafts_proposed) / 4


STRICT = {
    "slot .* has run 8 positions": dict(slot=0, start=20, ids=(1,), history=(1, 2, 3)),
    "history of 1 ids": dict(slot=0, start=8, ids=(1,), history=(1,)),
    "a page twice": dict(slot=0, start=8, ids=(1,), history=(1, 2, 3), pages=(0, 0, 1)),
    "id out of range": dict(slot=0, start=8, ids=(96,), history=(1, 2, 3)),
    "rows must ascend": dict(slot=0, start=8, ids=(1, 2), history=(1, 2, 3), logit_rows=(1, 0)),
    "pages for": dict(slot=0, start=8, ids=(1,), history=(1, 2, 3), pages=(0,)),
    "ids in one step": dict(slot=0, start=8, ids=(1,) * 300, history=(1, 2, 3)),
}


@pytest.mark.parametrize("sentence", STRICT)
def test_a_strict_core_refuses_a_step_outside_the_contract(sentence):
    core = ToyCore(**SHAPE)
    core.step([SequenceStep(0, 0, tuple(range(8)), (), (0,), (7,))])
    fields = {"pages": (0, 1, 2, 3), "logit_rows": (0,), **STRICT[sentence]}
    with pytest.raises(AssertionError, match=sentence):
        core.step([SequenceStep(**fields)])


def test_a_strict_core_refuses_a_page_that_two_sequences_write():
    first = SequenceStep(0, 0, (1, 2), (), (4,), (1,))
    with pytest.raises(AssertionError, match="written by two sequences"):
        ToyCore(**SHAPE).step([first, replace(first, slot=1)])


def test_logits_do_not_depend_on_chunks_slots_or_pages():
    def last(core, slot, pages, chunks):
        start = 0
        for count in chunks:
            ids, history = IDS[start : start + count], IDS[max(0, start - 3) : start]
            step = SequenceStep(slot, start, ids, history, pages, (count - 1,))
            (rows,) = core.step([step])
            start += count
        return rows[-1]

    one = last(ToyCore(**SHAPE), 0, tuple(range(6)), [45])
    two = last(ToyCore(**SHAPE), 3, (9, 2, 40, 7, 63, 0), [1, 2, 3, 8, 1, 29, 1])
    assert np.array_equal(one, two)


def test_finish_reports_a_scheduler_that_never_ends():
    scheduler = build()
    scheduler.submit(ask(IDS, 30))
    with pytest.raises(AssertionError, match="still busy after 3 steps"):
        finish(scheduler, steps_max=3)
