"""Whatever arrives, is cancelled, preempted, cached or drafted: tokens and pages are right."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine import scheduler as scheduler_module
from engine import seating as seating_module
from engine.kvcache import PagePool
from engine.prefix import PrefixCache, extend_keys
from engine.sampler import Sampling
from engine.scheduler import POLICIES, Scheduler
from fixtures.toy_core import ToyCore
from tests.engine.serving import GREEDY, SHAPE, alone, ask, build, finish, prompt
from tests.engine.test_toy_core import Shelf

SAMPLINGS = (GREEDY, Sampling(seed=1), Sampling(temperature=0.6, top_p=0.8, top_k=9, seed=2))


class Serving(RuleBasedStateMachine):
    """A scheduler under random traffic; every answer is compared with the request alone."""

    @initialize(
        core=st.fixed_dictionaries(
            {
                "slots": st.integers(1, 5),
                "pages": st.sampled_from((12, 17, 30, 90)),
                "tokens_per_step_max": st.sampled_from((5, 8, 19, 100)),
                "draft_tokens": st.integers(0, 6),
                "draft_skill": st.sampled_from((0.0, 0.5, 0.9, 1.0)),
            }
        ),
        policy=st.sampled_from(POLICIES),
        limit_bytes=st.sampled_from((0, 700, 3000, 10**6)),
        with_disk=st.booleans(),
        chunk=st.sampled_from((1, 2, 7, 100)),
    )
    def start(self, core, policy, limit_bytes, with_disk, chunk):
        self.shelf = Shelf() if with_disk else None
        chunk = min(chunk, core["tokens_per_step_max"])
        self.shape = {**SHAPE, **core, "prefill_rows_max": chunk}
        self.options = {"policy": policy, "limit_bytes": limit_bytes, "prefill_chunk": chunk}
        self.asked = []
        self.restart()

    @precondition(lambda self: not self.scheduler.busy)
    @rule()
    def restart(self):
        """A new process over the same disk."""
        self.scheduler = build(ToyCore(**self.shape), disk=self.shelf, **self.options)

    @rule(
        family=st.integers(0, 2),
        pages=st.integers(0, 5),
        more=st.sampled_from((0, 0, 1, 5)),
        shared=st.sampled_from((0, 0, 17)),
        own=st.integers(1, 9),
        max_tokens=st.integers(1, 25),
        sampling=st.sampled_from(SAMPLINGS),
        with_rows=st.booleans(),
    )
    def submit(self, family, pages, more, shared, own, max_tokens, sampling, with_rows):
        """A prompt that may share its head with others, or its middle behind another head."""
        head = prompt(family, 60)[: pages * SHAPE["page_tokens"] + more]
        ids = head + prompt(9, shared) + prompt(100 + own, own)
        owed = 0 if with_rows else None
        request = ask(ids, max_tokens, sampling, logprobs=owed, prompt_logprobs=owed)
        self.asked.append(self.scheduler.submit(request))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.cancel(data.draw(st.sampled_from(self.asked)))

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.scheduler.step()
            self.scheduler.check()

    @invariant()
    def everything_delivered_is_right(self):
        for sequence in getattr(self, "asked", ()):
            request, sink = sequence.request, sequence.request.sink
            right = alone(request.ids, request.max_tokens, request.sampling)
            assert sink.ids == right[: len(sink.ids)]
            assert [t.index for t in sink.tokens] == list(range(len(sink.tokens)))
            if sink.reason == "length":
                assert sink.ids == right
                owed = request.prompt_logprobs is not None
                assert [p for p, _ in sink.rows] == list(range(1, len(request.ids))) * owed
            else:
                assert sink.reason in (None, "cancelled")

    def teardown(self):
        if hasattr(self, "scheduler"):
            finish(self.scheduler)
            self.everything_delivered_is_right()
            assert all(s.request.sink.reason for s in self.asked)


Serving.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestServing = Serving.TestCase


def _keys_without_their_past(keys, root, ids, page_tokens):
    for index in range(len(keys), len(ids) // page_tokens):
        keys.append(bytes(str(ids[index * page_tokens : (index + 1) * page_tokens]), "ascii"))


def _window_of_any_position(scheduler, sequence):
    page_tokens = scheduler._core.page_tokens
    extend_keys(sequence.keys, scheduler._prefix.root, sequence.ids, page_tokens)
    for index in range(sequence.stored, sequence.computed // page_tokens):
        scheduler._prefix.add_page(sequence.keys, index, sequence.pages)
        state = scheduler._core.export_window(sequence.slot)
        scheduler._prefix.add_window(sequence.keys[index], state)
        sequence.stored = index + 1


def _step_without_history(scheduler, part, step_of=Scheduler._step_of):
    return replace(step_of(scheduler, part), history=())


FAULTS = {
    "keys cover one page only": [
        (scheduler_module, "extend_keys", _keys_without_their_past),
        (seating_module, "extend_keys", _keys_without_their_past),
    ],
    "windows are kept off the border": [
        (Scheduler, "_store", _window_of_any_position),
        (Scheduler, "_to_border", lambda scheduler, sequence: 10**6),
    ],
    "a sequence keeps its pages": [(PrefixCache, "release", lambda cache, pages: None)],
    "an evicted page stays held": [(PagePool, "uncache", lambda pool, page: None)],
    "history is not passed on": [(Scheduler, "_step_of", _step_without_history)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch, fault):
    for patch in FAULTS[fault]:
        monkeypatch.setattr(*patch)
    quick = settings(Serving.TestCase.settings, phases=[Phase.generate], derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Serving, settings=quick)
