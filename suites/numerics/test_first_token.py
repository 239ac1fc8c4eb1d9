"""The first token moves by no bit: whatever the strategy, ranks, chunk, start or batch."""

from __future__ import annotations

import json
import math

import pytest

from fixtures.prompts.first_token import text_prompt
from suites.findings import joined
from suites.numerics.first_token import (
    BASE,
    BATCH,
    GOLDENS,
    NO_PREFIX_CACHE,
    SECOND_START,
    VARIANTS,
    Said,
    oracle_listing,
    prompt_digest,
    prompts,
    read_goldens,
    said,
)
from suites.numerics.logprobs import Listing, compare, read_completion
from suites.target import require
from suites.target_plan import MODELS, mini_export

NEEDED = ("export", "start", "token-ids", "top-20", "exact-logprobs", "metrics")
RERUN = "pytest suites/numerics/test_first_token.py"
PACKAGE_LENGTHS = (5, 65, 131, 300)
"""Prompts for a package of any model, as far as its positions reach."""
ENDPOINT_VOCAB = 128
"""Ids that every vocabulary has."""


def assert_same(mine: dict[str, Listing], theirs: dict[str, Listing]) -> None:
    """Every prompt has the same tokens and bits; a missing one is a failure."""
    assert mine and mine.keys() == theirs.keys()
    judged = joined(compare(mine[name], theirs[name], RERUN) for name in mine)
    assert judged.is_clean, "\n".join(map(str, judged.findings))


def variants_of(target) -> None:
    """What the comparisons of variants need of a target."""
    require(target, *NEEDED, "scratch-strategies")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_first_tokens_have_the_stored_bits(variant, engines):
    variants_of(engines.target)
    require(engines.target, "canonical-numerics")
    assert_same(said(engines, variant).listings(), read_goldens())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != BASE], ids=lambda v: v.name)
def test_first_tokens_are_those_of_the_planned_package_at_three_ranks(variant, engines):
    variants_of(engines.target)
    assert_same(said(engines, BASE).listings(), said(engines, variant).listings())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_first_tokens_are_the_same_alone_and_in_each_slot_of_a_batch(variant, engines):
    variants_of(engines.target)
    found = said(engines, variant)
    batch = found.batch()
    assert_same({name: found.listings()[name] for name in batch}, batch)
    alone = sum(found.steps[name] for name in batch)
    assert 0 < found.steps[BATCH] < alone, (
        f"{found.steps[BATCH]} steps for the batch, {alone} for its prompts alone: none was shared"
    )


def test_first_tokens_are_the_same_cold_and_from_the_prefix_cache(engines):
    variants_of(engines.target)
    cold, warm = said(engines, SECOND_START), said(engines, BASE)
    assert cold.hit_tokens[0] == 0, "what was to be cold came from the prefix cache"
    assert warm.hit_tokens[1] > 0, "nothing came from the prefix cache"
    assert_same(cold.listings(), warm.listings("again"))


def test_variants_run_prompts_in_different_chunks(engines):
    variants_of(engines.target)
    longest = prompts()[-1]
    steps = {}
    for variant in VARIANTS:
        if not variant.cached:
            found: Said = said(engines, variant)
            steps[variant.chunk] = found.steps[longest.name]
            assert found.steps[longest.name] >= math.ceil(len(longest.ids) / variant.chunk)
    # A smaller chunk takes more steps, and none runs the whole prompt in one.
    assert [steps[chunk] for chunk in sorted(steps)] == sorted(steps.values(), reverse=True)
    assert len(set(steps.values())) == len(steps) >= 3 and min(steps.values()) > 1


def test_prompts_reach_beyond_what_a_layer_looks_at():
    text = json.loads((MODELS["mini"] / "config.json").read_text())["text_config"]
    lengths = [len(p.ids) for p in prompts()]
    ratio = max(text["compress_ratios"])
    assert max(lengths) > text["sliding_window"]
    assert max(lengths) // ratio > text["index_topk"] > 0
    assert min(lengths) < text["sliding_window"]
    assert max(lengths) == text["max_position_embeddings"] - 1
    remainders = {length % BASE.chunk for length in lengths}
    assert {0, 1, 2, 8, BASE.chunk - 1} <= remainders, "last chunks: full, 1, 2, 8, all but one"


def test_stored_bits_are_of_these_prompts_and_tell_them_apart():
    assert json.loads(GOLDENS.read_text())["prompts_sha256"] == prompt_digest()
    stored = read_goldens()
    assert stored.keys() == {p.name for p in prompts()}
    firsts = {tuple(e.token for e in listing.steps[0].top) for listing in stored.values()}
    assert len(firsts) == len(stored)


def test_variants_differ_in_what_they_are_compared_for(engines):
    """The same map under two names would make every comparison empty."""
    variants_of(engines.target)
    require(engines.target, "inspect")
    maps = {}
    for variant in VARIANTS:
        package = engines.package(mini_export(variant.ranks, **variant.options))
        document = engines.target.inspect(package)
        key = (variant.ranks, str(sorted(variant.options.items())))
        maps[key] = json.dumps([rank["temporaries"] for rank in document["ranks"]])
    assert len(set(maps.values())) == len(maps) == 3, "strategies, ranks and chunks"


# Any package, any server --------------------------------------------------------------------------


def test_package_has_the_first_tokens_of_the_oracle(package, asked, engines):
    require(engines.target, *NEEDED[1:], "inspect", "canonical-numerics")
    checkpoint = asked.checkpoint or (None if asked.package else MODELS["mini"])
    if checkpoint is None:
        pytest.fail("--package needs --checkpoint, the checkpoint that it was exported from")
    from suites.numerics.oracle import Oracle

    oracle = Oracle(checkpoint)
    found, expected = {}, {}
    with engines.serve(package) as server:
        for prompt in package_prompts(engines, package)[:3]:
            raw = server.complete(prompt.ids)
            found[prompt.name] = read_completion(raw, "engine", prompt.name)
            expected[prompt.name] = oracle_listing(oracle, prompt, (1,))
    assert_same(found, expected)


def test_package_has_the_same_first_tokens_in_two_starts(package, engines):
    require(engines.target, *NEEDED[1:], "inspect")
    asked_for = package_prompts(engines, package)
    runs = []
    for start, options in (("first", {}), ("second", NO_PREFIX_CACHE)):
        with engines.serve(package, options.items(), start) as server:
            answers = {p.name: server.complete(p.ids) for p in asked_for}
        runs.append({n: read_completion(raw, f"{start} start", n) for n, raw in answers.items()})
    assert_same(*runs)


def package_prompts(engines, package) -> list:
    """Prompts for the package's vocabulary, as long as its positions allow."""
    document = engines.target.inspect(package)
    vocab, positions = document["model"]["vocab_size"], document["kv"]["positions_max"]
    lengths = [n for n in PACKAGE_LENGTHS if n < positions]
    assert len(lengths) >= 2, f"{positions} positions are too few to compare anything"
    return [text_prompt(n, vocab) for n in lengths]


def test_server_gives_the_same_first_tokens_again_and_among_others(engines):
    require(engines.target, "token-ids", "top-20", "exact-logprobs")
    asked_for = [text_prompt(n, ENDPOINT_VOCAB, seed=1) for n in (5, 17, 64, 131)]
    with engines.any_server(mini_export(3)) as server:
        runs = [
            {p.name: server.complete(p.ids) for p in asked_for},
            {p.name: server.complete(p.ids) for p in asked_for},
            dict(zip(
                [p.name for p in asked_for],
                server.complete_all([p.ids for p in asked_for]),
                strict=True,
            )),
        ]
    first, again, among = (
        {name: read_completion(raw, run, name) for name, raw in answers.items()}
        for run, answers in zip(("first", "again", "among others"), runs, strict=True)
    )
    assert_same(first, again)
    assert_same(first, among)
