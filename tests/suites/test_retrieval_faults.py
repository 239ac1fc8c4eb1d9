"""Planted faults make retrieval fail where they should: the kinds of facts lost say what broke.

The table holds what each fault costs; those that retrieval cannot notice are in it too, so that
nobody takes silence for a proof.
"""

import pytest

from fixtures.checkpoints.retrieval import rehearsal, retrieval_tensors
from fixtures.checkpoints.retrieval_faults import (
    FAULTS,
    CandidatesIgnored,
    NoRelu,
    NoSink,
    PageShuffled,
    RatioTwoZeroed,
)
from fixtures.checkpoints.retrieval_forward import Forward
from fixtures.checkpoints.retrieval_ops import one_thread
from fixtures.checkpoints.retrieval_rehearsal import ask, prefill
from fixtures.prompts.retrieval import haystack

# Kinds of facts lost in 1,500 tokens in chunks of 256, where four facts have twenty decoys each.
# "" is silence: bits, index sets or prompts of other lengths have to notice those.
LOST = {
    "no ReLU in the index score": "RSX",
    "index weights missing": "X",
    "most recent instead of best": "RSX",
    "ties go to the higher index": "",
    "index keys dated by entry": "R",
    "index keys dated by the group's last token": "R",
    "index keys dated one token late": "RS",
    "index keys not rotated": "R",
    "candidate set ignored": "X",
    "ratio-2 latents zeroed": "R",
    "latents shifted by one entry": "RSX",
    "latents of a page reversed": "RSX",
    "Engram history lost at a chunk": "RX",
    "window lost at a chunk": "RX",
    "open group lost at a chunk": "",
    "no inverse rotation": "R",
    "an output group lost": "",
    "no sink": "R",
}


@pytest.fixture(scope="module", autouse=True)
def single():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tensors():
    return retrieval_tensors()


@pytest.fixture(scope="module")
def short():
    """300 tokens, and one fact of each kind that is asked for: R, S, X."""
    planted = haystack(300, 1)
    kinds = [fact.kind for fact in planted.facts]
    return planted, [kinds.index(kind) for kind in "RSX"]


def lost(tensors, kind: type[Forward], planted, numbers, chunk: int = 256) -> list[str]:
    """Kinds of the asked facts that were not answered."""
    forward = rehearsal(tensors, kind=kind)
    state = prefill(forward, planted.ids, chunk=chunk)
    answers = [ask(forward, state, planted, planted.questions[number]) for number in numbers]
    return [answer.question.kind for answer in answers if not answer.is_right]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(Forward, ""), (NoRelu, "RSX"), (RatioTwoZeroed, "R"), (PageShuffled, "RSX")],
)
def test_a_fault_loses_the_kinds_that_depend_on_it(tensors, short, fault, expected):
    planted, numbers = short
    assert lost(tensors, fault, planted, numbers) == list(expected)


def test_a_missing_sink_answers_absent_keys(tensors, short):
    planted, _ = short
    forward = rehearsal(tensors, kind=NoSink)
    state = prefill(forward, planted.ids)
    controls = [q for q in planted.questions if q.control == "absent"][:2]
    assert not any(ask(forward, state, planted, q).is_right for q in controls)


def test_decoys_show_that_the_candidate_set_is_ignored(tensors):
    planted = haystack(900, 3, decoyed=1)
    number = next(d.of for d in planted.decoys if d.form == "same-tail")
    assert lost(tensors, Forward, planted, [number]) == []
    assert lost(tensors, CandidatesIgnored, planted, [number]) == ["X"]


def test_every_fault_is_in_the_table():
    assert LOST.keys() == FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, "none"])
def test_faults_cost_what_the_table_says(tensors, name):
    planted = haystack(1500, 0, decoyed=4, chunk=256)
    found = lost(tensors, FAULTS.get(name, Forward), planted, range(16))
    assert "".join(sorted(set(found))) == LOST.get(name, ""), found
