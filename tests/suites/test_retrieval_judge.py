"""The judge tells right, wrong, missing, confused and bled apart, and reads the evidence."""

import json
import math
from pathlib import Path

import pytest

from fixtures.prompts.retrieval import concurrent_requests, haystack
from suites.findings import NotChecked
from suites.numerics import retrieval
from suites.numerics.logprobs import read_completion
from suites.numerics.retrieval import (
    NAMES,
    Answer,
    Asked,
    Rules,
    Token,
    answer_of,
    asked_of,
    asked_of_requests,
    judge_answer,
    judge_concurrent,
    judge_start,
)

UNKNOWN = 3
RULES = Rules(UNKNOWN, margin_min=1.0)
VALUE, OTHER = (40, 41, 42, 43), (50, 51, 52, 53)
NEEDED = tuple({5: entry, 6: entry} for entry in (70, 71, 72, 73))
HELD = tuple({5: frozenset({1, entry}), 6: frozenset({2, entry})} for entry in (70, 71, 72, 73))


def answer(ids, name="n", margin=9.0, selected=()) -> Answer:
    tokens = tuple(Token(i, -0.001, -0.001 - margin) for i in ids)
    return Answer(name, tokens, tuple(selected))


def asked(name="n", expected=VALUE, control="needle", needed=()) -> Asked:
    return Asked(name, tuple(expected), control, tuple(needed))


def start(question, given, rules=RULES, **more):
    questions = question if isinstance(question, list) else [question]
    return judge_start("start 1", questions, given, rules, **{"needles_min": 0, **more})


def names(result) -> list[str]:
    return [finding.name for finding in result.judgement.findings]


def test_a_right_answer_is_clean():
    result = start(asked(), [answer(VALUE)])
    assert result.judgement.findings == () and result.score == "1/1"
    assert result.margins == (pytest.approx(9.0),)


@pytest.mark.parametrize(
    ("ids", "name", "step"),
    [
        ((40, 41, 99, 43), "needle-wrong", 2),
        ((99, 41, 42, 43), "needle-wrong", 0),
        ((40, 41), "needle-missing", 2),
        ((), "needle-missing", 0),
        ((UNKNOWN,) * 4, "needle-missing", 0),
        ((40, UNKNOWN, 42, 43), "needle-missing", 1),
        ((40, 51, 52, 99), "needle-wrong", 1),
    ],
)
def test_a_failed_needle_is_named_with_its_first_wrong_token(ids, name, step):
    result = start(asked(), [answer(ids)])
    assert names(result)[0] == name and result.verdicts[0].step == step
    finding = result.judgement.findings[0]
    assert finding.where == "start 1 / n" and finding.data["expected"] == list(VALUE)
    assert f"first wrong at token {step}" in finding.message and result.score == "0/1"


def test_another_needles_value_is_confusion():
    other = asked("m", OTHER)
    result = start([asked(), other], [answer(OTHER), answer(OTHER, "m")])
    assert names(result) == ["needle-confused"] and "value of m" in str(result.judgement.findings)
    half = start([asked(), other], [answer((40, 51, 52, 53)), answer(OTHER, "m")])
    assert names(half) == ["needle-confused"]


def test_another_requests_value_has_bled():
    rules = Rules(UNKNOWN, others={"request 2": OTHER})
    assert judge_answer(asked(), answer(OTHER), rules).name == "needle-bled"
    assert judge_answer(asked(), answer((40, 41, 52, 53)), rules).source == "request 2"
    assert judge_answer(asked(), answer((50, 51, 52, 9)), rules).name == "needle-wrong"


def test_a_control_must_stay_unanswered():
    control = asked("c", (UNKNOWN,) * 4, "absent")
    assert names(start(control, [answer((UNKNOWN,) * 4, "c")])) == []
    assert names(start(control, [answer((60, 61, 62, 63), "c")])) == ["absent-answered"]
    assert names(start(control, [answer((UNKNOWN, 61, 62, 63), "c")])) == ["absent-answered"]
    assert names(start(control, [answer((UNKNOWN,), "c")])) == ["needle-missing"]
    foreign = Rules(UNKNOWN, others={"request 2": OTHER})
    assert names(start(control, [answer(OTHER, "c")], foreign)) == ["needle-bled"]


def test_a_thin_margin_is_a_finding_of_its_own():
    thin = start(asked(), [answer(VALUE, margin=0.5)])
    assert set(names(thin)) == {"margin-low"} and thin.score == "1/1"
    assert names(start(asked(), [answer(VALUE, margin=0.0)], Rules(UNKNOWN)))[0] == "margin-low"


@pytest.mark.parametrize("token", [Token(40, None, -9.0), Token(40, -0.1, None)])
def test_a_missing_logprob_is_a_finding(token):
    given = Answer("n", (token, *answer(VALUE).tokens[1:]))
    result = start(asked(), [given])
    assert names(result) == ["logprob-missing"] and result.margins == ()


def test_a_missing_margin_after_the_wrong_token_is_not_asked_for():
    given = Answer("n", (*answer((40, 99)).tokens, Token(42, None, None)))
    assert names(start(asked(), [given])) == ["needle-wrong"]


def test_one_lost_needle_of_sixteen_makes_the_start_red():
    questions = [asked(f"n{i}", (100 + i,) * 4) for i in range(16)]
    given = [answer(q.expected, q.name) for q in questions]
    whole = judge_start("start", questions, given, RULES)
    assert whole.judgement.is_clean and whole.score == "16/16" and len(whole.margins) == 16
    lost = judge_start("start", questions, [answer((7,) * 4, "n0"), *given[1:]], RULES)
    assert not lost.judgement.is_clean and lost.score == "15/16"


def test_fewer_than_sixteen_needles_prove_nothing():
    questions = [asked(f"n{i}", (100 + i,) * 4) for i in range(15)]
    given = [answer(q.expected, q.name) for q in questions]
    assert names(judge_start("start", questions, given, RULES)) == ["too-few-needles"]


def test_questions_and_answers_must_pair():
    assert names(start(asked(), [])) == ["answer-unasked"]
    assert names(start(asked(), [answer(VALUE), answer(VALUE, "m")])) == ["answer-unasked"]


def test_evidence_is_silent_when_every_entry_was_selected():
    question = asked(needed=NEEDED)
    result = start(question, [answer(VALUE, selected=HELD)])
    assert result.judgement.findings == () == result.judgement.not_checked


def test_a_miss_of_the_selection_is_told_from_one_of_the_model():
    question, wrong = asked(needed=NEEDED), (40, 41, 99, 43)
    result = start(question, [answer(wrong, selected=HELD)])
    assert names(result) == ["needle-wrong", "lost-by-model", "lost-by-model"]
    lost = list(HELD)
    lost[2] = {5: frozenset({72}), 6: frozenset({1, 2})}
    result = start(question, [answer(wrong, selected=lost)])
    assert names(result) == ["needle-wrong", "lost-by-model", "lost-by-selection"]
    found = result.judgement.findings[2]
    assert (found.data["layer"], found.data["entry"], found.data["step"]) == (6, 72, 2)
    assert "entry 72 is not among the 2 that layer 6 selected" in found.message


def test_a_right_answer_without_its_entry_contradicts_itself():
    lost = [{5: frozenset({9}), 6: frozenset({70})}, *HELD[1:]]
    assert names(start(asked(needed=NEEDED), [answer(VALUE, selected=lost)])) == [
        "evidence-contradicts"
    ]


def test_missing_evidence_is_not_a_pass():
    result = start(asked(needed=NEEDED), [answer(VALUE)])
    assert result.judgement.not_checked == (
        NotChecked("evidence of start 1 / n", "the target shows no selected entries"),
    )
    part = [{5: frozenset({70})}, *HELD[1:]]
    result = start(asked(needed=NEEDED), [answer(VALUE, selected=part)])
    assert "no selection of layer 6" in str(result.judgement.not_checked[0])


def test_concurrent_passphrases_are_judged_against_each_other():
    questions = asked_of_requests(concurrent_requests(300, 0))
    given = [answer(q.expected, q.name) for q in questions]
    clean = judge_concurrent("eight", questions, given, RULES)
    assert clean.judgement.findings == () and clean.score == "8/8"
    bled = [answer(questions[1].expected, questions[0].name), *given[1:]]
    result = judge_concurrent("eight", questions, bled, RULES)
    assert names(result) == ["needle-bled"] and "passphrase 1" in str(result.judgement.findings)
    assert names(judge_concurrent("one", questions[:1], given[:1], RULES)) == ["too-few-needles"]
    assert names(judge_concurrent("eight", questions, [*given, answer(VALUE, "x")], RULES)) == [
        "answer-unasked"
    ]


def test_the_questions_of_a_haystack_carry_their_evidence():
    planted = haystack(300, 0)
    questions = asked_of(planted)
    assert [q.is_needle for q in questions].count(True) == 16 and len(questions) == 48
    for question in questions:
        assert len(question.needed) == (4 if question.is_needle else 0)


def test_answers_come_from_completions():
    step = {f"w{i}": -math.log(2) - i for i in range(20)}
    table = {
        "tokens": ["w0"],
        "token_ids": [40],
        "token_logprobs": [step["w0"]],
        "top_logprobs": [step],
        "top_token_ids": [list(range(40, 60))],
    }
    listing = read_completion(json.dumps({"choices": [{"logprobs": table}]}), "a", "p")
    given = answer_of(listing, "n")
    assert given.ids == (40,) and given.tokens[0].margin == pytest.approx(1.0)


def test_every_name_is_used_and_tested():
    source, tests = (Path(f).read_text() for f in (retrieval.__file__, __file__))
    assert all(source.count(f'"{name}"') >= 2 for name in NAMES), "a name nobody reports"
    assert all(f'"{name}"' in tests for name in NAMES), "a name nobody has seen"
