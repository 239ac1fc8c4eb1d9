"""The scheduler over the real mini model: every way to serve gives the reference's own tokens."""

from pathlib import Path

import pytest
from safetensors import safe_open

from engine.recipe import Recipe
from engine.sampler import Sampling
from fixtures.local_ranks import LocalRanks
from tests.engine.serving import GREEDY, ask, build, run
from tests.engine.test_toy_core import Shelf

GOLDENS = Path(__file__).parents[2] / "fixtures" / "goldens" / "mini"
LENGTHS = (17, 131, 300)
NEW = 12


def golden_case(length):
    """A prompt and the reference's greedy continuation."""
    ids = _ids(f"prefill_{length}", "input_ids")
    return tuple(ids), _ids(f"decode_{length}", "tokens")[:NEW]


def _ids(name, tensor):
    with safe_open(GOLDENS / f"{name}.safetensors", "np") as file:
        return [int(i) for i in file.get_tensor(tensor)]


CASES = [golden_case(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def core():
    recipe = Recipe(ranks=1, max_concurrency=6, mtp_draft_tokens=5, prefill_chunk=512)
    with LocalRanks(GOLDENS, recipe, pages=16) as ranks:
        yield ranks.core


def serve(core, sampling=GREEDY, **options):
    scheduler = build(core, **options)
    sinks = run(scheduler, *[ask(ids, NEW, sampling, logprobs=5) for ids, _ in CASES])
    return scheduler, sinks


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 0},
        {},
        {"policy": "latency", "prefill_chunk": 37},
        {"limit_bytes": 10**8, "prefill_chunk": 100},
    ],
    ids=["plain", "drafts", "latency in chunks", "with a cache"],
)
def test_batched_answers_are_the_references(core, options):
    scheduler, sinks = serve(core, **options)
    assert [sink.ids for sink in sinks] == [tokens for _, tokens in CASES]
    if options.get("limit_bytes"):
        again = run(scheduler, *[ask(ids, NEW, logprobs=5) for ids, _ in CASES])
        assert [sink.cached for sink in again] == [0, 128, 256]
        for first, second in zip(sinks, again, strict=True):
            assert second.tokens == first.tokens


def test_a_hit_from_disk_gives_the_same_bits_in_another_slot(core):
    shelf = Shelf()
    _, cold = serve(core, disk=shelf, draft_tokens=0)
    _, warm = serve(core, disk=shelf, draft_tokens=0)
    assert [sink.cached for sink in warm] == [0, 128, 256]
    assert [sink.tokens for sink in warm] == [sink.tokens for sink in cold]


def test_sampled_answers_do_not_depend_on_drafts_or_company(core):
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=7)
    _, plain = serve(core, sampling, draft_tokens=0)
    _, drafted = serve(core, sampling)
    assert [sink.tokens for sink in drafted] == [sink.tokens for sink in plain]
    for (ids, _), sink in zip(CASES, plain, strict=True):
        (alone,) = run(build(core, draft_tokens=0), ask(ids, NEW, sampling, logprobs=5))
        assert alone.tokens == sink.tokens


def test_preempted_answers_are_the_references():
    recipe = Recipe(ranks=1, max_concurrency=4, mtp_draft_tokens=2, prefill_chunk=512)
    with LocalRanks(GOLDENS, recipe, pages=3) as ranks:
        (ids, tokens), scheduler = CASES[1], build(ranks.core)
        short = ids[:120]
        sinks = run(scheduler, ask(ids, NEW), *[ask(short, NEW) for _ in range(2)])
        assert scheduler.stats.preemptions > 0
        assert sinks[0].ids == tokens
        assert sinks[1].ids == sinks[2].ids == run(build(ranks.core), ask(short, NEW))[0].ids
