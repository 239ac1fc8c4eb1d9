"""Log-probabilities are compared bit by bit, by the rules, and every rule can turn a run red."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suites.numerics import logprobs
from suites.numerics.logprobs import (
    NAMES,
    Bound,
    Printed,
    bits,
    compare,
    judge_spread,
    kl_divergence,
    loses_bits,
    read_completion,
    significant_digits,
    spread,
    ulp_distance,
    vocabulary_hash,
)

F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def single(value: float) -> float:
    return float(np.float32(value))


def listed(count: int = 20, seed: int = 0) -> list[tuple[int, float]]:
    """Ids and descending fp32 values of one step."""
    rng = np.random.default_rng(seed)
    values = np.sort(rng.uniform(-12, -0.1, count).astype(np.float32))[::-1]
    return [(int(i), float(v)) for i, v in zip(rng.permutation(500)[:count], values, strict=True)]


def body(steps: list[list[tuple[int, float]]], **changes) -> str:
    """A completions answer as the reference server writes it; changes replace columns."""
    table = {
        "tokens": [f"w{step[0][0]}" for step in steps],
        "token_ids": [step[0][0] for step in steps],
        "token_logprobs": [step[0][1] for step in steps],
        "top_logprobs": [{f"w{token}": value for token, value in step} for step in steps],
        "top_token_ids": [[token for token, _ in step] for step in steps],
    }
    return json.dumps({"choices": [{"logprobs": table | changes}]})


def listing(steps, run="a", numbers=(1,), **changes):
    return read_completion(body(steps, **changes), run, "p", numbers)


def names(judgement) -> list[str]:
    return [finding.name for finding in judgement.findings]


def verdict(first, second) -> list[str]:
    return names(compare(listing([first], "a"), listing([second], "b"), "sparkproof diverge a b"))


def replaced(step, place: int, token=None, value=None):
    changed = list(step)
    changed[place] = (
        step[place][0] if token is None else token,
        step[place][1] if value is None else value,
    )
    return changed


def test_equal_runs_are_clean():
    steps = [listed(seed=s) for s in range(3)]
    a, b = (listing(steps, run, (1, 2, 3)) for run in "ab")
    assert compare(a, b, "next").findings == () and len(a.steps) == 3


def test_one_ulp_is_reported_with_all_that_is_needed():
    step = listed()
    moved = float(np.nextafter(np.float32(step[4][1]), np.float32(-20)))
    a, b = listing([step], "a"), listing([replaced(step, 4, value=moved)], "b")
    (finding,) = compare(a, b, "sparkproof diverge a b --prompt p").findings
    assert finding.name == "logprob-differs" and finding.where == "p / step 1"
    assert finding.data["ulp"] == 1 and finding.data["token"] == step[4][0]
    assert finding.data["a"] == step[4][1] and finding.data["b"] == moved
    for part in (str(step[4][0]), repr(moved), "1 ULP", "next: sparkproof diverge a b --prompt p"):
        assert part in finding.message


def test_another_chosen_token_is_reported_first():
    step = listed()
    other = [(step[1][0], step[0][1]), (step[0][0], step[1][1]), *step[2:]]
    assert verdict(step, other)[0] == "token-differs"


def test_a_token_missing_above_the_cut_is_reported():
    step = listed()
    assert verdict(step, replaced(step, 7, token=501)) == ["top-differs"]


def test_order_among_equal_values_does_not_matter():
    step = listed()
    tied = replaced(step, 6, value=step[5][1])
    swapped = [*tied[:5], tied[6], tied[5], *tied[7:]]
    assert verdict(tied, swapped) == []


def test_a_tie_across_the_cut_is_a_warning_only():
    step = listed()
    tied = replaced(step, 18, value=step[19][1])
    judgement = compare(
        listing([tied], "a"), listing([replaced(tied, 19, token=502)], "b"), "next"
    )
    assert names(judgement) == ["tie-at-cut"] and judgement.is_clean


def test_another_value_at_the_cut_is_an_error():
    step = listed()
    lower = replaced(step, 19, value=single(step[19][1] - 1))
    assert verdict(step, lower) == ["logprob-differs"]
    assert verdict(lower, step) == ["logprob-differs"]
    assert verdict(step, replaced(lower, 19, token=503)) == ["top-differs"]
    tied = replaced(step, 18, value=step[19][1])
    assert verdict(tied, replaced(tied, 18, value=step[18][1])) == ["logprob-differs"]


def test_minus_zero_equals_zero():
    step = replaced(listed(), 0, value=0.0)
    assert verdict(step, replaced(step, 0, value=-0.0)) == []


def test_the_chosen_value_is_compared_too():
    step = listed()
    a = listing([step], "a")
    b = listing([step], "b", token_logprobs=[single(step[0][1] - 0.5)])
    assert names(compare(a, b, "next")) == ["logprob-differs"]


@pytest.mark.parametrize(
    "changes",
    [
        {"token_logprobs": [None]},
        {"token_logprobs": []},
        {"top_logprobs": [None]},
        {"top_logprobs": None},
        {"top_logprobs": [dict([(f"w{t}", v) for t, v in listed()][:19])],
         "top_token_ids": [[t for t, _ in listed()][:19]]},
    ],
)
def test_a_missing_logprob_is_a_failure(changes):
    a, b = listing([listed()], "a"), listing([listed()], "b", **changes)
    found = names(compare(a, b, "next"))
    assert "logprob-missing" in found and not compare(a, b, "next").is_clean


def test_a_step_that_one_run_lacks_is_a_failure():
    a = listing([listed(), listed(seed=1)], "a", (1, 2))
    b = listing([listed()], "b", (1, 2))
    assert set(names(compare(a, b, "next"))) == {"logprob-missing"}


def test_an_answer_without_logprobs_is_a_failure_and_no_answer_an_error():
    bare = read_completion(json.dumps({"choices": [{"text": "x", "logprobs": None}]}), "b", "p")
    found = names(compare(listing([listed()]), bare, "next"))
    assert found.count("logprob-missing") == 2 and found[-1] == "nothing-compared"
    with pytest.raises(ValueError, match="no completion"):
        read_completion('{"error": {"message": "busy"}}', "b", "p")


def test_two_ids_with_one_string_are_told_apart_or_refused():
    step = listed()
    top = {f"w{t}": v for t, v in step[:19]} | {f"token_id:{step[19][0]}": step[19][1]}
    apart = listing([step], "b", top_logprobs=[top])
    assert names(compare(listing([step]), apart, "next")) == []
    lost = {f"w{t}": v for t, v in step[:19]}
    assert "logprob-collision" in names(compare(listing([step]), listing(
        [step], "b", top_logprobs=[lost]), "next"))
    without_ids = listing([step], "b", top_logprobs=[lost], top_token_ids=None, token_ids=None)
    assert [f.name for f in without_ids.findings] == ["logprob-collision"]


def test_documents_without_id_columns_are_read_by_their_keys():
    step = listed()
    top = {f"token_id:{t}": v for t, v in step}
    bare = {"top_token_ids": None, "token_ids": None}
    a = listing([step], "a", top_logprobs=[top], tokens=[f"token_id:{step[0][0]}"], **bare)
    assert names(compare(a, listing([step], "b"), "next")) == []
    texts = listing([step], "c", **bare)
    assert texts.steps[0].token == f"w{step[0][0]}" and not texts.findings


def test_eight_digit_values_are_found():
    step = listed()
    rows = [{f"w{t}": float(f"{v:.8g}") for t, v in step}]
    short = listing([step], "b", top_logprobs=rows)
    assert [f.name for f in short.findings] == ["logprob-digits"]
    assert "digits; 9 are needed" in short.findings[0].message


@pytest.mark.parametrize("write", [repr, "{:.9g}".format, "{:.17g}".format,
                                   lambda v: str(np.float32(v))])
def test_values_that_keep_their_bits_are_fine(write):
    step = listed()
    rows = [{f"w{t}": float(write(v)) for t, v in step}]
    assert not listing([step], "b", top_logprobs=rows).findings
    assert not any(loses_bits(write(value)) for _, value in step)


@given(F32)
def test_every_fp32_value_survives_nine_digits_and_repr(value):
    assert not loses_bits(repr(value)) and not loses_bits(f"{value:.9g}")
    assert ulp_distance(float(f"{value:.9g}"), value) == 0


@given(F32, F32)
def test_ulp_distance_counts_the_values_between(a, b):
    assert ulp_distance(a, b) == ulp_distance(b, a) and (ulp_distance(a, b) == 0) == (a == b)
    assert (bits(a) < bits(b)) == (a < b)


def test_ulp_distance_crosses_zero():
    tiny = float(np.nextafter(np.float32(0), np.float32(1)))
    assert ulp_distance(-tiny, tiny) == 2 and ulp_distance(-0.0, tiny) == 1


def test_digits_are_counted_without_leading_zeros():
    assert [significant_digits(t) for t in ("-0.00123", "12.50", "-1.5e-07", "0")] == [3, 4, 2, 0]
    assert Printed("-0.10").text == "-0.10"


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_impossible_values_are_found(value):
    assert "logprob-impossible" in [f.name for f in listing([replaced(listed(), 3, value=value)])
                                    .findings]


def test_a_list_out_of_order_is_found():
    step = listed()
    assert [f.name for f in listing([[*step[:3], step[4], step[3], *step[5:]]]).findings] == [
        "logprob-order"
    ]


def test_hashes_over_the_vocabulary_are_compared_where_offered():
    row = np.array([-1.5, -0.0, -3.25], np.float32)
    same = np.array([-1.5, 0.0, -3.25], np.float32)
    assert vocabulary_hash(row) == vocabulary_hash(same)
    other = vocabulary_hash(np.array([-1.5, 0.0, -3.5], np.float32))
    a = listing([listed()], "a", vocabulary_hash=[vocabulary_hash(row)])
    b = listing([listed()], "b", vocabulary_hash=[other])
    assert names(compare(a, b, "next")) == ["vocabulary-differs"]
    assert names(compare(a, listing([listed()], "c"), "next")) == []


def near(step, ulps: int):
    """The same list with every value moved by some ULP."""
    return [(t, float(np.float32(v) - ulps * np.spacing(np.float32(v)))) for t, v in step]


def test_a_spread_within_its_bound_is_clean_and_outside_it_is_not():
    steps = [listed(seed=s) for s in range(3)]
    moved = [steps[0], near(steps[1], 3), steps[2]]
    pair = (listing(steps, "a", (1, 2, 3)), listing(moved, "b", (1, 2, 3)))
    found = spread([pair])
    assert (found.values, found.identical, found.ulp_max) == (60, 40, 3)
    assert found.share_identical == pytest.approx(2 / 3) and 0 <= found.kl_max < 1e-6
    assert judge_spread([pair], Bound(0.6, 3, 1e-6)).is_clean
    for bound in (Bound(0.7, 3, 1e-6), Bound(0.6, 2, 1e-6), Bound(0.6, 3, -1.0)):
        judgement = judge_spread([pair], bound)
        assert names(judgement) == ["outside-bound"] and "the bound is" in str(judgement.findings)


def test_kl_grows_with_the_difference_and_counts_the_rest():
    step = listed()
    a = listing([step]).steps[0]
    flat = listing([[(t, single(math.log(0.04))) for t, _ in step]]).steps[0]
    foreign = listing([[(t + 600, v) for t, v in step]]).steps[0]
    assert kl_divergence(a, a) == 0 < kl_divergence(a, flat)
    assert kl_divergence(a, foreign) == pytest.approx(0)  # nothing in common but the remainder


def test_a_spread_over_nothing_or_with_gaps_is_a_failure():
    a, b = listing([listed()], "a"), listing([listed()], "b", (2,))
    bound = Bound(0.0, 2**31, 1e9)
    assert set(names(judge_spread([(a, b)], bound))) == {"logprob-missing", "nothing-compared"}
    assert names(judge_spread([], bound)) == ["nothing-compared"]


def test_every_name_is_used_and_known():
    source = Path(logprobs.__file__).read_text()
    assert all(source.count(f'"{name}"') >= 2 for name in NAMES), "a name nobody reports"
