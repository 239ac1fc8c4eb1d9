"""Batching, preemption, caching and drafts change no token, and lose no page."""

import pytest

from engine.errors import RequestError, UsageError
from engine.sampler import Sampling, logprobs
from engine.scheduler import LATENCY_CHUNK_TOKENS
from engine.sequence import Request
from fixtures.toy_core import ToyCore
from tests.engine.serving import (
    GREEDY,
    PAGE,
    SHAPE,
    Recorder,
    alone,
    ask,
    build,
    finish,
    prompt,
    run,
)

CASES = [(prompt(1, n), 20, s) for n in (3, 30, 31, 57) for s in (GREEDY, Sampling(seed=n))]
CASES += [(prompt(2, n), 25, Sampling(temperature=0.5, top_p=0.9, seed=n)) for n in (8, 40)]


def outputs(scheduler):
    return [sink.ids for sink in run(scheduler, *[ask(*case) for case in CASES])]


@pytest.mark.parametrize(
    ("core", "options"),
    [
        ({}, {}),
        ({"slots": 1}, {}),
        ({"slots": 8, "tokens_per_step_max": 9}, {}),
        ({"slots": 8, "tokens_per_step_max": 9}, {"policy": "latency"}),
        ({"pages": 11}, {}),
        ({"pages": 11}, {"limit_bytes": 10**6}),
        ({}, {"limit_bytes": 10**6}),
        ({}, {"limit_bytes": 900}),
        ({"draft_tokens": 4}, {}),
        ({"draft_tokens": 4, "draft_skill": 0.0}, {}),
        ({"draft_tokens": 4, "draft_skill": 1.0}, {"draft_tokens": 2}),
        ({"slots": 6, "prefill_rows_max": 1}, {"prefill_chunk": 1}),
        ({"slots": 6, "prefill_rows_max": 3, "draft_tokens": 4}, {"prefill_chunk": 3}),
        ({"slots": 6, "prefill_rows_max": 16, "draft_tokens": 4}, {"prefill_chunk": 16}),
        ({"draft_tokens": 7, "pages": 11, "tokens_per_step_max": 12}, {"limit_bytes": 10**6}),
    ],
)
def test_every_way_to_serve_gives_the_tokens_of_each_request_alone(core, options):
    scheduler = build(ToyCore(**{**SHAPE, **core}), **options)
    assert outputs(scheduler) == [alone(*case) for case in CASES]
    assert scheduler.stats.generation_tokens == sum(len(alone(*case)) for case in CASES)
    if options.get("limit_bytes"):
        assert outputs(scheduler) == [alone(*case) for case in CASES]  # now with hits


def test_preemption_happens_when_pages_run_out_and_is_counted():
    scheduler = build(ToyCore(**{**SHAPE, "pages": 11}))
    outputs(scheduler)
    assert scheduler.stats.preemptions > 0


def test_a_second_prompt_of_the_same_beginning_hits_at_page_granularity():
    scheduler = build(limit_bytes=10**6)
    ids = prompt(1, 60)
    assert run(scheduler, ask(ids[:41]))[0].cached == 0
    (sink,) = run(scheduler, ask(ids[:19] + prompt(3, 30)))
    assert sink.cached == 2 * PAGE
    assert sink.ids == alone(ids[:19] + prompt(3, 30), 8)


def test_a_prompt_that_is_cached_whole_still_runs_its_last_id():
    scheduler = build(limit_bytes=10**6)
    ids = prompt(1, 4 * PAGE)
    first, second = run(scheduler, ask(ids))[0], run(scheduler, ask(ids))[0]
    assert (first.cached, second.cached) == (0, 3 * PAGE)
    assert first.ids == second.ids


def test_an_answer_is_cached_for_the_next_turn():
    scheduler = build(limit_bytes=10**6)
    ids = prompt(1, 20)
    answer = run(scheduler, ask(ids, max_tokens=30))[0].ids
    (sink,) = run(scheduler, ask((*ids, *answer, 5, 6)))
    assert sink.cached == 6 * PAGE


def test_a_border_where_long_prompts_part_is_learned():
    core = ToyCore(**{**SHAPE, "pages": 128})
    scheduler = build(core, limit_bytes=10**7)
    ids = prompt(1, 27 * PAGE)  # borders from 16 on are kept two apart
    tails = [prompt(seed, 40) for seed in (5, 6, 7)]
    run(scheduler, ask(ids + ids[:100]))
    cached = [run(scheduler, ask(ids + tail))[0].cached for tail in tails[:2]]
    assert cached == [26 * PAGE, 27 * PAGE]


@pytest.mark.parametrize("policy", ["throughput", "latency"])
def test_equal_prompts_that_arrive_together_are_computed_once(policy):
    core = Watched(**{**SHAPE, "slots": 6, "pages": 128, "tokens_per_step_max": 300})
    scheduler = build(core, limit_bytes=10**6, policy=policy)
    ids = prompt(1, 6 * PAGE + 3)
    cases = [ids] * 4 + [ids[: 3 * PAGE] + prompt(2, 9)]
    sinks = run(scheduler, *[ask(case) for case in cases])
    assert [s.ids for s in sinks] == [alone(case, 8) for case in cases]
    assert [s.cached for s in sinks] == [0] + [6 * PAGE] * 3 + [3 * PAGE]
    ran = sum(len(s.ids) for step in core.seen for s in step if s.start < 3 * PAGE)
    assert ran == 3 * PAGE
    stats = scheduler._prefix.stats
    assert stats.query_tokens == (4 * 6 + 4) * PAGE
    assert stats.hit_tokens["memory"] == (3 * 6 + 3) * PAGE


def test_waiting_requests_are_admitted_in_order_of_arrival():
    core = ToyCore(**{**SHAPE, "slots": 1})
    scheduler, order = build(core), []

    class Noting(Recorder):
        def end(self, reason, cached_tokens):
            super().end(reason, cached_tokens)
            order.append(self)

    requests = [ask(prompt(n, 40 - n), sink=Noting()) for n in range(6)]
    run(scheduler, *requests)
    assert order == [request.sink for request in requests]


def test_a_long_prompt_does_not_hold_up_running_sequences():
    for policy in ("throughput", "latency"):
        core = ToyCore(**{**SHAPE, "pages": 128, "tokens_per_step_max": 300})
        scheduler = build(core, policy=policy)
        short, long = Recorder(), Recorder()
        scheduler.submit(ask(prompt(1, 5), 40, sink=short))
        scheduler.step()
        scheduler.submit(ask(prompt(2, 480), 2, sink=long))
        while not long.tokens:
            before = len(short.tokens)
            scheduler.step()
            assert len(short.tokens) == before + 1
        finish(scheduler)


def test_latency_bounds_the_prompt_ids_of_a_step_and_shares_them():
    core = Watched(**{**SHAPE, "pages": 200, "tokens_per_step_max": 400})
    scheduler = build(core, policy="latency")
    scheduler.submit(ask(prompt(1, 5), 40))
    scheduler.step()
    for seed in (2, 3):
        scheduler.submit(ask(prompt(seed, 450), 1))
    scheduler.step()
    sizes = sorted(len(s.ids) for s in core.seen[-1])
    assert sizes == [1, LATENCY_CHUNK_TOKENS // 2, LATENCY_CHUNK_TOKENS // 2]


def test_a_chunk_smaller_than_the_batch_lets_prompts_and_answers_take_turns():
    core = Watched(**{**SHAPE, "slots": 3, "prefill_rows_max": 2})
    scheduler = build(core, prefill_chunk=2)
    for seed in (1, 2):
        scheduler.submit(ask(prompt(seed, 3), 60))
    for _ in range(6):
        scheduler.step()
    long = scheduler.submit(ask(prompt(3, 21), 2))
    while long.slot is None or long.left > 1:
        scheduler.step()
    ran = [sorted(s.start == 0 or s.start < 21 and s.slot == long.slot for s in step)
           for step in core.seen[-20:]]  # fmt: skip
    assert ran == [[True], [False, False]] * 10 or ran == [[False, False], [True]] * 10


class Watched(ToyCore):
    """Remembers the sequences of each step."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.seen = []

    def step(self, sequences):
        self.seen.append(list(sequences))
        return super().step(sequences)


def test_drafts_save_steps_and_are_counted_by_position():
    core = ToyCore(**{**SHAPE, "draft_tokens": 3, "draft_skill": 1.0})
    scheduler = build(core)
    assert run(scheduler, ask(prompt(1, 5), 41))[0].ids == alone(prompt(1, 5), 41)
    assert core.steps == 1 + 10
    assert scheduler.stats.drafts_proposed == scheduler.stats.drafts_accepted == [10, 10, 10]


def test_wrong_drafts_are_never_accepted():
    core = ToyCore(**{**SHAPE, "draft_tokens": 3, "draft_skill": 0.0})
    scheduler = build(core)
    run(scheduler, ask(prompt(1, 5), 40))
    assert scheduler.stats.drafts_proposed == [38, 0, 0]
    assert scheduler.stats.drafts_accepted == [0, 0, 0]


def test_no_draft_is_asked_for_beyond_the_last_token():
    core = ToyCore(**{**SHAPE, "draft_tokens": 3})
    run(build(core), ask(prompt(1, 5), 1))
    assert core.drafts_asked == 0


def test_drafts_are_cut_rather_than_anyone_preempted_for_their_pages():
    core = Watched(**{**SHAPE, "pages": 5, "draft_tokens": 3, "draft_skill": 1.0})
    scheduler = build(core)
    for seed in (1, 2):
        scheduler.submit(ask(prompt(seed, 15), 4))
    scheduler.step()
    scheduler.step()
    assert [len(s.ids) for s in core.seen[-1]] == [3, 1]
    finish(scheduler)
    assert scheduler.stats.preemptions == 0


def test_stop_ids_and_the_sink_end_a_sequence_inside_accepted_drafts():
    whole = alone(prompt(1, 9), 30)
    core = ToyCore(**{**SHAPE, "draft_tokens": 5, "draft_skill": 1.0})
    stop = next(i for i in whole[3:] if whole.index(i) >= 3)
    by_id, by_sink = run(
        build(core),
        ask(prompt(1, 9), 30, stop_ids=frozenset({stop})),
        ask(prompt(1, 9), 30, sink=Recorder(stop_after=5)),
    )
    assert by_id.ids == whole[: whole.index(stop) + 1] and by_id.reason == "stop"
    assert by_sink.ids == whole[:5] and by_sink.reason == "stop"


def test_prompt_logprobs_are_complete_in_order_and_cold():
    ids = prompt(1, 50)
    core = ToyCore(**{**SHAPE, "tokens_per_step_max": 7})
    scheduler = build(core, limit_bytes=10**6)
    run(scheduler, ask(ids))
    (sink,) = run(scheduler, ask(ids, 2, logprobs=2, prompt_logprobs=3))
    assert sink.cached == 0
    assert [position for position, _ in sink.rows] == list(range(1, 50))
    for position in (1, 17, 49):
        (shorter,) = run(build(), ask(ids[:position], 1, logprobs=3))
        chosen = logprobs_of(ids[:position], ids[position])
        row = dict(sink.rows)[position]
        assert row.top == shorter.tokens[0].logprobs.top
        assert row.chosen == chosen


def logprobs_of(ids, chosen):
    core = Watched(**SHAPE)
    scheduler = build(core)
    scheduler.submit(ask(ids, 1))
    step = core.step
    found = []
    core.step = lambda sequences: found.extend(step(sequences)) or found
    finish(scheduler)
    return logprobs(found[0][-1], chosen, 0).chosen


def test_prompt_logprobs_survive_a_preemption_once_each():
    core = ToyCore(**{**SHAPE, "pages": 11, "tokens_per_step_max": 16})
    requests = [ask(prompt(n, 30), 30, prompt_logprobs=0) for n in range(3)]
    scheduler = build(core)
    for sink in run(scheduler, *requests):
        assert [position for position, _ in sink.rows] == list(range(1, 30))
    assert scheduler.stats.preemptions > 0


def test_max_tokens_0_runs_the_prompt_only():
    (sink,) = run(build(), ask(prompt(1, 20), 0, prompt_logprobs=1))
    assert sink.reason == "length" and not sink.tokens and len(sink.rows) == 19


def test_cancelling_returns_pages_of_running_and_waiting_sequences():
    scheduler = build(ToyCore(**{**SHAPE, "slots": 2}))
    sequences = [scheduler.submit(ask(prompt(n, 30), 100)) for n in range(4)]
    for _ in range(5):
        scheduler.step()
    for sequence in sequences:
        scheduler.cancel(sequence)
    assert scheduler.step() is None
    scheduler.check_idle()
    assert [s.request.sink.reason for s in sequences] == ["cancelled"] * 4
    assert scheduler.page_counts.free == 64


def test_broken_logits_end_one_sequence_with_an_error_and_spare_the_others():
    class Poisoned(ToyCore):
        def step(self, sequences):
            results = super().step(sequences)
            for s, rows in zip(sequences, results, strict=True):
                if s.history and s.history[-1] == 95 and s.start > 4:
                    rows[:] = float("nan")
            return results

    bad = (95,) * 12
    scheduler = build(Poisoned(**{**SHAPE, "tokens_per_step_max": 8}), limit_bytes=10**6)
    broken, fine = run(scheduler, ask(bad), ask(prompt(1, 9)))
    assert broken.reason.startswith("error: the model's logits") and not broken.tokens
    assert fine.ids == alone(prompt(1, 9), 8)


def test_what_the_core_raises_reaches_the_caller_and_everyone_can_be_told():
    class Lost(ToyCore):
        def step(self, sequences):
            raise ConnectionError("rank 2 is gone")

    scheduler = build(Lost(**{**SHAPE, "slots": 1}))
    sequences = [scheduler.submit(ask(prompt(n, 9))) for n in range(2)]
    with pytest.raises(ConnectionError):
        scheduler.step()
    scheduler.fail_all("rank 2 is gone")
    assert {s.request.sink.reason for s in sequences} == {"error: rank 2 is gone"}
    scheduler.check_idle()


@pytest.mark.parametrize(
    ("ids", "max_tokens", "sentence"),
    [
        ((), 1, "no tokens; at least 1"),
        ((3, 96), 1, "id 96 is out of range; accepted: 0 to 95"),
        ((3, -1), 1, "id -1 is out of range"),
        (prompt(1, 500), 13, "together 513; the limit is 512"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(ids, max_tokens, sentence):
    with pytest.raises(RequestError, match=sentence):
        build().submit(Request(tuple(ids), max_tokens, Recorder()))


def test_requests_up_to_the_limits_are_served_even_when_they_need_the_whole_pool():
    core = ToyCore(**{**SHAPE, "pages": 12})
    scheduler = build(core, limit_bytes=10**6)
    assert scheduler.tokens_max == 12 * PAGE
    for sink in run(scheduler, *[ask(prompt(n, 80), 16) for n in range(3)]):
        assert sink.reason == "length" and len(sink.tokens) == 16
    (sink,) = run(build(), ask(prompt(1, 511), 1))
    assert len(sink.tokens) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "fast"}, "scheduler-policy is 'fast'; accepted: throughput, latency"),
        ({"max_concurrency": 5}, "max-concurrency is 5; this package accepts 1 to 4"),
        ({"max_concurrency": 0}, "max-concurrency is 0"),
        ({"draft_tokens": 1}, "mtp-draft-tokens is 1; this package accepts 0 to 0"),
    ],
)
def test_options_beyond_the_package_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        build(**options)


def test_max_concurrency_bounds_the_batch():
    core = Watched(**SHAPE)
    run(build(core, max_concurrency=2), *[ask(prompt(n, 9)) for n in range(5)])
    assert max(len(step) for step in core.seen) == 2
