"""What a well-behaved client gets over HTTP, mostly through the unmodified openai client."""

import threading

import numpy as np
import pytest

from engine.sampler import Sampling
from engine.sampler import logprobs as logprobs_of
from fixtures.toy_core import ToyCore
from tests.engine.serving import PAGE, SHAPE, alone, ask, build, prompt, run
from tests.engine.web import BYTES, FORM, events, serving, write_tokenizer

IDS = prompt(1, 30)
CHAT_SHAPE = {**SHAPE, "vocab_size": 262}


@pytest.fixture(scope="module")
def server():
    core = ToyCore(**{**SHAPE, "draft_tokens": 3})
    with serving(core) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    path = write_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer.json")
    with serving(ToyCore(**CHAT_SHAPE), tokenizer=path) as running:
        yield running
        running.settle()


def spelled(ids):
    return "".join(f"token_id:{i}" for i in ids)


def test_a_completion_of_ids_gives_the_engines_tokens_and_counts(server):
    answer = server.openai.completions.create(
        model="toy", prompt=list(IDS), max_tokens=7, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == spelled(alone(IDS, 7)) and choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 7, 37)
    assert answer.model == "toy" and answer.id.startswith("cmpl-")


def test_logprobs_keep_their_bits_and_name_ids(server):
    (sink,) = run(build(), ask(IDS, 3, logprobs=20))
    found = server.complete(IDS, max_tokens=3, logprobs=20)["choices"][0]["logprobs"]
    assert found["token_ids"] == sink.ids
    for place, token in enumerate(sink.tokens):
        assert found["token_logprobs"][place] == token.logprobs.chosen
        assert np.float32(found["token_logprobs"][place]) == found["token_logprobs"][place]
        assert found["top_token_ids"][place] == list(token.logprobs.top_ids)
        top = {f"token_id:{i}": v for i, v in zip(*token_top(token), strict=True)}
        assert found["top_logprobs"][place] == top
    assert found["text_offset"] == [0, *np.cumsum([len(t) for t in found["tokens"]])[:-1]]


def token_top(token):
    return token.logprobs.top_ids, token.logprobs.top


def test_logprobs_0_gives_the_chosen_tokens_only(server):
    found = server.complete(IDS, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert found["top_token_ids"] == [[], []] and len(found["token_logprobs"]) == 2


def test_echo_repeats_the_prompt_with_its_logprobs(server):
    answer = server.complete(IDS, max_tokens=2, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"] == spelled([*IDS, *alone(IDS, 2)]) == "".join(found["tokens"])
    assert found["token_ids"][:30] == list(IDS)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    (sink,) = run(build(), ask(IDS, 2, prompt_logprobs=1))
    assert found["token_logprobs"][1:30] == [row.chosen for _, row in sink.rows]
    assert answer["usage"]["completion_tokens"] == 2


def test_echo_with_max_tokens_0_scores_a_prompt(server):
    answer = server.complete(IDS, max_tokens=0, logprobs=1, echo=True)
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 30
    assert answer["usage"]["completion_tokens"] == 0
    plain = server.complete(IDS, max_tokens=0, echo=True)
    assert plain["choices"][0]["text"] == spelled(IDS)


def test_a_stream_brings_the_same_as_the_whole_answer(server):
    fields = {"prompt": list(IDS), "max_tokens": 9, "logprobs": 2, "temperature": 0}
    whole = server.http.post("/v1/completions", json=fields).json()
    stream = server.openai.completions.create(
        model="toy", stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = [chunk.model_dump() for chunk in stream]
    assert chunks[-1]["choices"] == []
    usage = {k: chunks[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 30, "completion_tokens": 9}
    parts = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    ids = [i for part in parts if part["logprobs"] for i in part["logprobs"]["token_ids"]]
    assert ids == whole["choices"][0]["logprobs"]["token_ids"]
    offsets = [o for part in parts if part["logprobs"] for o in part["logprobs"]["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]
    assert [part["finish_reason"] for part in parts] == [None] * 9 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


LOAD_GENERATORS = {
    "guidellm": {
        "ignore_eos": True, "stop": None,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "vllm bench": {
        "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None, "n": 1, "best_of": 1,
        "stream_options": {"include_usage": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOAD_GENERATORS)
def test_what_load_generators_send_is_accepted(server, name):
    fields = {"model": "toy", "prompt": list(IDS), "max_tokens": 5, "stream": True}
    answer = server.http.post("/v1/completions", json={**fields, **LOAD_GENERATORS[name]})
    documents = events(answer)
    assert documents[-1]["usage"]["completion_tokens"] == 5
    if name == "guidellm":
        counts = [document["usage"]["completion_tokens"] for document in documents]
        assert counts == [1, 2, 3, 4, 5, 5, 5]


def test_a_stream_without_usage_sends_none(server):
    fields = {"prompt": [5, 6], "max_tokens": 2, "stream": True, "echo": True, "temperature": 0}
    documents = events(server.http.post("/v1/completions", json=fields))
    assert not any("usage" in document for document in documents)
    text = "".join(document["choices"][0]["text"] for document in documents)
    assert text == spelled([5, 6, *alone((5, 6), 2)])


def test_several_prompts_and_choices_are_indexed_and_do_not_bleed(server):
    prompts = [list(IDS), [3, 4, 5]]
    answer = server.openai.completions.create(
        model="toy", prompt=prompts, n=3, max_tokens=6, seed=11,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        sampling = Sampling(seed=11).for_choice(index % 3)
        assert choice.token_ids == alone(tuple(prompts[index // 3]), 6, sampling)
    assert answer.usage.prompt_tokens == 33 and answer.usage.completion_tokens == 36


def test_a_seed_repeats_an_answer_and_no_seed_does_not(server):
    def tokens(**fields):
        return server.complete(IDS, temperature=1, max_tokens=8, **fields)["choices"][0]["text"]

    assert tokens(seed=5) == tokens(seed=5) != tokens(seed=6)
    assert len({tokens() for _ in range(3)}) == 3


def test_concurrent_requests_get_their_own_answers(server):
    found, cases = {}, [(prompt(seed, 5 + 3 * seed), 12) for seed in range(12)]

    def one(case):
        body = server.complete(case[0], max_tokens=case[1], return_token_ids=True)
        found[case] = body["choices"][0]["token_ids"]

    threads = [threading.Thread(target=one, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {case: alone(*case) for case in cases}


def test_stop_texts_cut_the_answer_also_across_tokens(server):
    ids = alone(IDS, 12)
    stop = f":{ids[4]}token_id"
    for stream in (False, True):
        fields = {"prompt": list(IDS), "max_tokens": 12, "temperature": 0, "stop": [stop, "zzz"]}
        answer = server.http.post("/v1/completions", json={**fields, "stream": stream})
        documents = events(answer) if stream else [answer.json()]
        choices = [document["choices"][0] for document in documents]
        assert "".join(c["text"] for c in choices) == spelled(ids[:4]) + "token_id"
        assert choices[-1]["finish_reason"] == "stop"


def test_stop_ids_end_an_answer_and_bring_no_text(server):
    ids = alone(IDS, 12)
    answer = server.complete(IDS, max_tokens=12, stop_token_ids=[ids[3]])
    assert answer["choices"][0]["text"] == spelled(ids[: ids.index(ids[3])])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == ids.index(ids[3]) + 1


def test_the_end_of_text_id_stops_unless_it_is_ignored(server):
    ending = next(ids for ids in (prompt(seed, 9) for seed in range(2000)) if alone(ids, 1) == [1])
    stopped = server.complete(ending, max_tokens=4)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["text"] == ""
    on = server.complete(ending, max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert on["choices"][0]["token_ids"] == alone(ending, 4)


def test_a_second_ask_reports_cached_tokens(server):
    ids = prompt(77, 3 * PAGE + 2)
    cached = [
        server.complete(ids)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)
    ]
    assert cached == [0, 3 * PAGE]


def test_max_tokens_defaults_to_16_or_what_is_left(server):
    assert server.complete(IDS, ignore_eos=True)["usage"]["completion_tokens"] == 16
    long = server.complete(prompt(1, 509), ignore_eos=True)
    assert long["usage"]["completion_tokens"] == 3


def test_models_lists_what_is_served(server):
    (model,) = server.openai.models.list().data
    assert model.id == "toy" and model.max_model_len == 512


def test_text_goes_in_and_comes_out(talking):
    answer = talking.openai.completions.create(
        model="toy", prompt="caf\u00e9", max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    found = answer.choices[0].logprobs
    assert found.token_ids[0] == BYTES and len(found.token_ids) == 1 + 5 + 5
    assert answer.choices[0].text.startswith("caf\u00e9")
    ids = found.token_ids[:6]
    back = talking.http.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": FORM.begin + "caf\u00e9"}


def test_tokens_that_read_alike_stay_apart_in_logprobs(talking):
    body = {"prompt": [1, 2, 3], "max_tokens": 30, "logprobs": 20, "temperature": 0}
    found = talking.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    alike = [top for top in found["top_logprobs"] if any(k.startswith("token_id:") for k in top)]
    assert alike
    assert all(len(top) == 20 for top in found["top_logprobs"])
    for top, ids in zip(found["top_logprobs"], found["top_token_ids"], strict=True):
        assert all(k.removeprefix("token_id:") == str(i) for k, i in zip(top, ids, strict=True)
                   if k.startswith("token_id:"))  # fmt: skip


def test_tokenize_treats_special_tokens_as_text(talking):
    body = {"prompt": f"a{FORM.end}", "add_special_tokens": False}
    found = talking.http.post("/tokenize", json=body).json()
    assert found["count"] == 1 + len(FORM.end.encode()) and max(found["tokens"]) < BYTES
    assert talking.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][0] == BYTES


def marks(*names):
    found = (FORM.begin, FORM.end, FORM.user, FORM.assistant, FORM.think_open, FORM.think_close)
    return [BYTES + found.index(name) for name in names]


def text_ids(talking, text):
    body = {"prompt": text, "add_special_tokens": False}
    return talking.http.post("/tokenize", json=body).json()["tokens"]


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi <think></think>"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "?"}]},
]


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_is_encoded_as_the_format_says(talking, thinking):
    answer = talking.openai.chat.completions.create(
        model="toy", messages=CONVERSATION, max_completion_tokens=6, temperature=0,
        extra_body={
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "return_token_ids": True,
        },
    )  # fmt: skip
    ids = [
        *marks(FORM.begin), *text_ids(talking, "be brief"),
        *marks(FORM.user), *text_ids(talking, "hi <think></think>"),
        *marks(FORM.assistant, FORM.think_close), *text_ids(talking, "yes"), *marks(FORM.end),
        *marks(FORM.user), *text_ids(talking, "and?"),
        *marks(FORM.assistant, FORM.think_open if thinking else FORM.think_close),
    ]  # fmt: skip
    (sink,) = run(build(ToyCore(**CHAT_SHAPE)), ask(ids, 6))
    (choice,) = answer.choices
    assert choice.token_ids == sink.ids and answer.usage.prompt_tokens == len(ids)
    assert (choice.message.content == "") == thinking
    assert hasattr(choice.message, "reasoning_content") == thinking


def test_reasoning_ends_where_the_model_closes_it(talking):
    close = marks(FORM.think_close)[0]
    seed = 0
    while True:
        answer = talking.openai.chat.completions.create(
            model="toy", messages=CONVERSATION[:2], max_tokens=60, seed=seed,
            extra_body={"chat_template_kwargs": {"thinking": True}, "return_token_ids": True},
        )  # fmt: skip
        (choice,) = answer.choices
        if close in choice.token_ids[1:-1]:
            break
        seed += 1
    message = choice.message
    assert message.reasoning_content and message.content
    assert FORM.think_close not in message.content + message.reasoning_content
    stream = talking.openai.chat.completions.create(
        model="toy", messages=CONVERSATION[:2], max_tokens=60, seed=seed, stream=True,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == message.content
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == message.reasoning_content


def test_chat_logprobs_carry_ids(talking):
    answer = talking.openai.chat.completions.create(
        model="toy", messages=CONVERSATION[:2], max_tokens=3, temperature=0, logprobs=True,
        top_logprobs=4,
    )  # fmt: skip
    found = answer.choices[0].logprobs
    assert [item.token_id for item in found.content] == found.token_ids
    for item, ids in zip(found.content, found.top_token_ids, strict=True):
        assert [top.token_id for top in item.top_logprobs] == ids and len(ids) == 4
        assert item.bytes is None or bytes(item.bytes).decode() == item.token


def test_curl_style_requests_need_no_model_name(server):
    assert server.complete([4, 5])["model"] == "toy"


def test_the_openapi_document_names_every_endpoint(server):
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/health"}
    for path, methods in document["paths"].items():
        for method in methods:
            answer = server.http.request(method, path)
            assert answer.status_code in (200, 400), path


def test_a_logprob_row_over_http_equals_the_definition(server):
    class Keeping(ToyCore):
        def step(self, sequences):
            self.last = super().step(sequences)
            return self.last

    core = Keeping(**SHAPE)
    run(build(core), ask(IDS, 1))
    (row,) = core.last[0]
    found = server.complete(IDS, max_tokens=1, logprobs=20)["choices"][0]["logprobs"]
    expected = logprobs_of(row, int(np.argmax(row)), 20)
    assert found["top_token_ids"] == [list(expected.top_ids)]
    assert list(found["top_logprobs"][0].values()) == list(expected.top)
