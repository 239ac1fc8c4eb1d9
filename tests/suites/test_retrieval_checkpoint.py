"""The retrieval checkpoint is what it claims to be: release format, repeatable, and it recalls."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint import open_checkpoint
from engine.config import parse_config
from engine.folding import fold_texts
from engine.tensors import expected_tensors
from fixtures.checkpoints import retrieval_layout as at
from fixtures.checkpoints.mini_configs import contradictions
from fixtures.checkpoints.retrieval import (
    read_tensors,
    rehearsal,
    retrieval_tensors,
    write_retrieval_checkpoint,
)
from fixtures.checkpoints.retrieval_forward import Forward
from fixtures.checkpoints.retrieval_ops import dense_weights, one_thread
from fixtures.checkpoints.retrieval_rehearsal import ask, prefill, summary
from fixtures.checkpoints.retrieval_state import Selection, State
from fixtures.checkpoints.retrieval_tokenizer import SPECIALS, retrieval_tokenizer, word
from fixtures.checkpoints.retrieval_weights import Builder
from fixtures.prompts.retrieval import concurrent_requests, haystack, length_sweep
from suites.numerics.oracle import History, Oracle, lowest_argmax
from suites.numerics.retrieval import Answer, Rules, Token, asked_of, judge_start
from tests.suites.test_oracle import MINI

slow = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def single():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_retrieval_checkpoint(tmp_path_factory.mktemp("retrieval"))


@pytest.fixture(scope="module")
def oracle(written):
    return Oracle(written)


def digest(tensors) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_files_are_in_release_format(written):
    stored, index = read_tensors(written), written / "model.safetensors.index.json"
    config = json.loads((written / "config.json").read_text())
    assert not contradictions(config["text_config"])
    expected = expected_tensors(parse_config(config))
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        name: tuple(spec.shape) for name, spec in expected.items()
    }
    with open_checkpoint(written) as checkpoint:  # refuses wrong dtypes, gaps and NaN
        assert not checkpoint.ledger(draft_tokens=5).left_out
    document = json.loads(index.read_text())
    assert document["weight_map"].keys() == stored.keys()
    assert 20e6 < document["metadata"]["total_size"] < 40e6


def test_the_bytes_do_not_depend_on_the_shard_count(written, tmp_path):
    one = write_retrieval_checkpoint(tmp_path, shards=1)
    assert digest(read_tensors(one)) == digest(read_tensors(written))
    with pytest.raises(ValueError, match="shards is 0"):
        write_retrieval_checkpoint(tmp_path, shards=0)


@slow
def test_the_bytes_depend_on_the_seed_and_not_on_threads():
    torch.set_num_threads(2)
    assert digest(Builder(0).build()) == digest(retrieval_tensors(0))
    torch.set_num_threads(1)
    assert digest(Builder(1).build()) != digest(retrieval_tensors(0))


def test_every_word_is_one_token_and_none_fold_together(written):
    tokenizer = retrieval_tokenizer()
    assert (written / "tokenizer.json").read_text() == tokenizer.to_str(pretty=True)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(at.VOCAB)]
    assert len(set(texts)) == at.VOCAB
    assert fold_texts(texts, texts).tolist() == list(range(at.VOCAB))
    assert texts[: at.SPECIAL_IDS] == SPECIALS and texts[500] == word(500)
    config = json.loads((written / "tokenizer_config.json").read_text())
    assert config["bos_token"] == SPECIALS[0] and "add_generation_prompt" in config["chat_template"]
    with pytest.raises(ValueError, match="token 3 has no word"):
        word(3)


def test_kinds_and_parities_cover_the_ordinary_ids():
    groups = [at.tokens_of(kind, parity) for kind in "RSX" for parity in (1, -1)]
    assert sorted(t for group in groups for t in group) == list(range(at.SPECIAL_IDS, at.VOCAB))
    with pytest.raises(ValueError, match="kind 'Y'"):
        at.tokens_of("Y", 1)


@pytest.mark.parametrize("tokens", [17, 131])
def test_the_fast_forward_reproduces_the_goldens_in_float64(tokens):
    tensors = {n: t for f in MINI.glob("model-*") for n, t in load_file(f).items()}
    text = json.loads((MINI / "config.json").read_text())["text_config"]
    forward = Forward(dense_weights(tensors, torch.float64), text, torch.float64)
    golden, state = load_file(MINI / f"prefill_{tokens}.safetensors"), State()
    ids = golden["input_ids"].tolist()
    forward.extend(state, ids[:9])
    assert torch.equal(forward.extend(state, ids[9:])[-1], golden["logits"])


def oracle_answer(oracle, history, question) -> Answer:
    """Greedy answer of the oracle with logprobs and selections; `history` stays as it is."""
    h, ids = History(), list(question.tail)
    h.tokens, h.rows = list(history.tokens), dict(history.rows)
    tokens, selected = [], []
    for _ in question.expected:
        trace = oracle.extend(h, ids)
        logprobs = trace["logits"].log_softmax(-1)
        token = lowest_argmax(trace["logits"])
        best = logprobs.topk(2).values
        tokens.append(Token(token, float(logprobs[token]), float(best[1])))
        selected.append({layer: frozenset(trace[f"topk.{layer}"][-1].tolist())
                         for layer in at.INDEX_LAYERS})
        ids = [token]
    return Answer(question.name, tuple(tokens), tuple(selected))


def test_the_oracle_finds_sixteen_of_sixteen_in_300_tokens(oracle):
    planted, history = haystack(300, 0), History()
    oracle.extend(history, list(planted.ids))
    asked = [a for a in asked_of(planted) if a.is_needle]
    answers = [oracle_answer(oracle, history, q) for q in planted.questions if q.fact is not None]
    result = judge_start("oracle", asked, answers, Rules(at.UNK_ID, margin_min=5.0))
    assert result.judgement.findings == () == result.judgement.not_checked
    assert result.score == "16/16" and result.margins[0] > 10


def test_the_fast_forward_has_the_oracles_bits_and_selections(oracle, written):
    ids = list(haystack(300, 3).ids[:90])
    trace, selection = oracle.prefill(ids), Selection()
    forward = rehearsal(read_tensors(written), torch.float64)
    logits = forward.extend(State(), ids, selection=selection)
    assert torch.equal(logits.double(), trace["logits_all"])
    for layer in at.INDEX_LAYERS:
        assert torch.equal(selection.chosen[layer].int(), trace[f"topk.{layer}"])


@pytest.fixture(scope="module")
def forward():
    return rehearsal(retrieval_tensors())


def test_absent_and_near_keys_are_answered_with_unknown(forward):
    planted = haystack(300, 1)
    state = prefill(forward, planted.ids)
    controls = [q for q in planted.questions if q.control != "needle"][::5]
    answers = [ask(forward, state, planted, question) for question in controls]
    assert all(a.is_right for a in answers), [a for a in answers if not a.is_right]
    assert min(min(a.margins) for a in answers) > 3


def test_a_prompt_in_two_chunks_and_whole_gives_the_same_answer(forward):
    planted = haystack(300, 1)
    question = planted.questions[5]
    first, second = (
        ask(forward, prefill(forward, planted.ids, chunk=size), planted, question)
        for size in (300, 77)
    )
    assert first == second and first.is_right and first.ranks == (0, 0, 0, 0)


def test_decoys_with_the_same_key_do_not_answer(forward):
    planted = haystack(2000, 2)
    decoyed = {d.of for d in planted.decoys}
    state = prefill(forward, planted.ids, lazy=True)
    kinds = {planted.facts[i].kind: i for i in decoyed}
    for number in kinds.values():
        answer = ask(forward, state, planted, planted.questions[number])
        assert answer.is_right and min(answer.margins) > 5, (answer, planted.facts[number])
    assert set(kinds) == set("RSX")


def greedy(forward, request) -> tuple[int, ...]:
    state, ids, tokens = State(), list(request.prompt), []
    for _ in request.expected:
        tokens.append(int(forward.extend(state, ids)[-1].argmax()))
        ids = tokens[-1:]
    return tuple(tokens)


def test_passphrases_and_every_kind_of_length_are_answered(forward):
    requests = concurrent_requests(300, 0, count=3)[:2] + length_sweep(600, 0, count=3)[1:]
    assert [greedy(forward, r) for r in requests] == [r.expected for r in requests]


@slow
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_recall_as_well(seed):
    forward = rehearsal(retrieval_tensors(seed))
    planted = haystack(300, seed)
    state = prefill(forward, planted.ids)
    figures = summary([ask(forward, state, planted, q) for q in planted.questions])
    assert figures["exact"] == figures["absent"] == figures["near"] == "16/16"


@slow
@pytest.mark.parametrize(("tokens", "seed"), [(2000, 0), (2000, 1), (8000, 0), (8000, 1)])
def test_longer_haystacks_are_recalled_with_all_decoys(forward, tokens, seed):
    planted = haystack(tokens, seed)
    state = prefill(forward, planted.ids, lazy=tokens > 4000)
    figures = summary([ask(forward, state, planted, q) for q in planted.questions])
    assert figures["exact"] == figures["absent"] == figures["near"] == "16/16"
    assert figures["margin_min"] > 8 and figures["rank_max"] < 8, figures


@slow
def test_every_length_of_a_sweep_is_answered(forward):
    for request in length_sweep(600, 1):
        assert greedy(forward, request) == request.expected, request.name
