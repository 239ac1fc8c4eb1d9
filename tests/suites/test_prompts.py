"""Prompts are deterministic, reach the lengths and places they promise, and plant what they say."""

from collections import Counter

import numpy as np
import pytest

from fixtures.checkpoints.retrieval_layout import UNK_ID, VOCAB, clock_phase, kind_of, parity_of
from fixtures.checkpoints.retrieval_tokenizer import retrieval_tokenizer
from fixtures.prompts import first_token
from fixtures.prompts.first_token import LENGTHS, first_token_prompts, text_prompt
from fixtures.prompts.retrieval import (
    DECOY_PHASES,
    FACT_TOKENS,
    KIND_COUNTS,
    WINDOW,
    Planter,
    as_text,
    concurrent_requests,
    haystack,
    length_sweep,
    plant_decoys,
)

SIZES = [(300, 0), (300, 7), (2000, 1), (20_000, 2)]


@pytest.fixture(scope="module")
def prompts():
    return first_token_prompts(512, seed=3)


def test_ten_prompts_reach_from_836_to_94341_tokens(prompts):
    assert [len(p.ids) for p in prompts] == list(LENGTHS)
    assert (len(LENGTHS), LENGTHS[0], LENGTHS[-1]) == (10, 836, 94_341)


def test_lengths_hit_the_residues_where_engines_go_wrong():
    chunk, page = (
        {n % size for n in LENGTHS} for size in (first_token.CHUNK, first_token.PAGE)
    )
    assert {0, 1, 2, 3, 4, 7, 8, first_token.CHUNK - 1} <= chunk
    assert {0, 1, 2, 3, 4, 5, 7, 8, first_token.PAGE - 1} <= page
    assert {n % first_token.RATIO for n in LENGTHS} == {0, 1}
    assert min(LENGTHS) > first_token.WINDOW and first_token.STEPS == (1, 2, 8, 64, 128)


def test_a_prompt_depends_on_size_seed_and_length_only(prompts):
    assert text_prompt(836, 512, 3) == prompts[0]
    assert text_prompt(836, 512, 4).ids != prompts[0].ids
    assert text_prompt(836, 513, 3).ids != prompts[0].ids
    assert prompts[1].ids[:836] != prompts[0].ids


@pytest.mark.parametrize("vocab_size", [40, 512, 129_280])
def test_prompts_serve_any_vocabulary(vocab_size):
    ids = text_prompt(3000, vocab_size).ids
    assert min(ids) >= first_token.FIRST_ID and max(ids) < vocab_size


def test_frequencies_fall_as_in_text_and_passages_come_back(prompts):
    ids = prompts[5].ids
    counts = sorted(Counter(ids).values(), reverse=True)
    assert counts[0] > 0.03 * len(ids) and counts[0] > 20 * counts[len(counts) // 2]
    four = Counter(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    assert 0.1 < sum(n - 1 for n in four.values()) / len(ids) < 0.6


def test_an_impossible_text_prompt_is_refused():
    with pytest.raises(ValueError, match="0 tokens of 512 ids"):
        text_prompt(0, 512)


@pytest.mark.parametrize(("tokens", "seed"), SIZES)
def test_sixteen_facts_stand_where_they_say(tokens, seed):
    planted = haystack(tokens, seed)
    assert len(planted.ids) == tokens and len(planted.facts) == 16
    assert Counter(f.kind for f in planted.facts) == KIND_COUNTS
    for fact in planted.facts:
        assert planted.ids[fact.start : fact.start + FACT_TOKENS] == fact.tokens
        assert {kind_of(t) for t in fact.tokens} == {fact.kind}
        assert [parity_of(t) for t in fact.tokens] == [1, -1] * 4 + [1]
    taken = sorted(p.start for p in (*planted.facts, *planted.decoys))
    assert all(b - a >= FACT_TOKENS for a, b in zip(taken, taken[1:], strict=False))
    assert {f.value_start % 2 for f in planted.facts if f.kind == "R"} == {0, 1}


def test_depths_include_the_edges():
    planted = haystack(20_000, 0)
    at = {fact.depth: fact for fact in planted.facts}
    assert at["position 0"].start == 0
    assert at["ends at a boundary"].start + FACT_TOKENS == 4096 == at["starts at a boundary"].start
    assert at["boundary between key and value"].value_start == 16_384
    assert at["boundary inside the key"].start == 8190
    assert at["last tokens"].start + FACT_TOKENS == 20_000
    for depth, distance in (("outside the window", WINDOW), ("oldest in the window", WINDOW - 1)):
        number = planted.facts.index(at[depth])
        question = next(q for q in planted.questions if q.fact == number)
        assert planted.key_end(question) - at[depth].value_start == distance


@pytest.mark.parametrize(("tokens", "seed"), SIZES)
def test_every_question_ends_in_its_key_with_the_clock_right(tokens, seed):
    planted = haystack(tokens, seed)
    for question in planted.questions:
        prompt = planted.prompt(question)
        assert prompt[:tokens] == planted.ids
        if question.control == "needle":
            fact = planted.facts[question.fact]
            assert prompt[-4:] == fact.key and question.expected == fact.value
            end = planted.key_end(question)
            assert end == len(prompt) - 1
            if fact.kind != "X":
                assert abs(clock_phase(fact.kind, end, fact.value_start)) < 0.7
        else:
            assert question.expected == (UNK_ID,) * 4
            assert all(prompt[-4:] != p.tokens[:4] for p in (*planted.facts, *planted.decoys))
    controls = Counter(q.control for q in planted.questions)
    assert controls == {"needle": 16, "absent": 16, "near": 16}


def test_needed_entries_hold_the_value_tokens():
    for fact in haystack(2000, 5).facts:
        for step, needed in enumerate(fact.needed):
            position = fact.value_start + step
            ratio = 2 if fact.kind == "R" else 1
            assert set(needed.values()) == {position // ratio}
            assert set(needed) == {"R": {2}, "S": {5}, "X": {5, 6}}[fact.kind]


def test_decoys_share_the_key_and_stand_at_wrong_phases():
    planted = haystack(8000, 1)
    ends = {q.fact: planted.key_end(q) for q in planted.questions if q.fact is not None}
    forms = Counter()
    for decoy in planted.decoys:
        fact = planted.facts[decoy.of]
        forms[fact.kind, decoy.form] += 1
        assert planted.ids[decoy.start : decoy.start + FACT_TOKENS] == decoy.tokens
        assert {kind_of(t) for t in decoy.tokens} == {fact.kind}
        same = [a == b for a, b in zip(decoy.tokens[:4], fact.key, strict=True)]
        assert same == {"same-key": [True] * 4, "same-tail": [False, True, True, True],
                        "same-head": [True, True, True, False]}[decoy.form]
        least, most = DECOY_PHASES[fact.kind]
        assert least <= abs(clock_phase(fact.kind, ends[decoy.of], decoy.start + 4)) <= most
        assert all(a != b for a, b in zip(decoy.tokens[4:8], fact.value, strict=True))
    assert forms == {
        (kind, form): count * number
        for kind, count in KIND_COUNTS.items()
        for form, number in (("same-tail" if kind == "X" else "same-key", 20), ("same-head", 1))
    }


def test_a_haystack_is_the_same_for_the_same_seed():
    assert haystack(2000, 4) == haystack(2000, 4)
    assert haystack(2000, 4).ids != haystack(2000, 5).ids


def test_too_short_a_haystack_is_refused():
    with pytest.raises(ValueError, match="299 tokens are too few"):
        haystack(299, 0)
    with pytest.raises(ValueError, match="no room for decoys"):
        haystack(400, 0, decoyed=16)
    with pytest.raises(ValueError, match="599 tokens are too few"):
        length_sweep(599, 0)


def test_nothing_is_planted_twice_in_one_place():
    planter = Planter(100, np.random.default_rng(0))
    planter.put(10, planter.draw("R"))
    with pytest.raises(AssertionError, match="position 15 is taken"):
        planter.put(15, planter.draw("R"))
    assert not plant_decoys(planter, [], 0, 20)


def test_concurrent_requests_share_a_key_and_not_their_passphrases():
    requests = concurrent_requests(600, 0)
    assert len(requests) == 8 and len({r.expected for r in requests}) == 8
    assert len({r.prompt[-4:] for r in requests}) == 3
    for request in requests:
        ids = request.prompt
        found = [i for i in range(len(ids) - 4) if ids[i : i + 4] == ids[-4:]]
        assert found == [301] and ids[305:309] == request.expected


def test_a_length_sweep_has_every_length_and_answers_inside_the_prompt():
    requests = length_sweep(600, 2)
    assert [len(r.prompt) for r in requests] == list(range(600, 728))
    for request in requests:
        ids = request.prompt
        start = next(i for i in range(len(ids)) if ids[i : i + 4] == ids[-4:])
        assert ids[start + 4 : start + 8] == request.expected
        kind = kind_of(ids[-1])
        assert kind == "X" or abs(clock_phase(kind, len(ids) - 1, start + 4)) < 0.8


def test_prompts_survive_the_way_through_text():
    ids = haystack(300, 0).ids
    assert retrieval_tokenizer().encode(as_text(ids)).ids == list(ids)
    assert max(ids) < VOCAB
