"""Whatever a client sends, it gets a clear 4xx in OpenAI's shape and the engine lives on."""

import json
import socket

import hypothesis.strategies as st
import openai
import pytest
from hypothesis import HealthCheck, given, settings

from engine.errors import ConfigError, RequestError, UsageError
from engine.openai_api import CHAT, COMPLETION, ApiError, checked, parse_json
from engine.server import ServeOptions, Service
from fixtures.toy_core import ToyCore
from tests.engine.serving import SHAPE, prompt
from tests.engine.web import CONFIG, Gated, serving, write_tokenizer

IDS = list(prompt(1, 9))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer.json")
    core = ToyCore(**{**SHAPE, "vocab_size": 262})
    with serving(core, tokenizer=path, body_bytes_max=20_000) as running:
        yield running
        running.settle()
        assert running.complete(IDS)["usage"]["completion_tokens"] > 0


BAD_FIELDS = {
    "prompt is missing": {},
    "prompt is a list of 0 items": {"prompt": []},
    "prompt[1] is 'b'": {"prompt": [1, "b"]},
    "prompt is 5; accepted: a string": {"prompt": 5},
    "prompt[0] is True; accepted: an integer from 0 to 2147483647 or a string": {"prompt": [True]},
    "prompt[0] is 1.5": {"prompt": [1.5]},
    "prompt[1] is -3": {"prompt": [1, -3]},
    "prompt[1] is 'a'; accepted: a list of at least 1": {"prompt": [[1], "a"]},
    "id 262 is out of range; accepted: 0 to 261": {"prompt": [4, 262]},
    "prompt[0] is 9999999999999": {"prompt": [9999999999999]},
    "has 512 tokens and max_tokens is 1, together 513; the limit is 512": {"prompt": [3] * 512},
    "together 513; the limit is 512 tokens": {"prompt": [3] * 500, "max_tokens": 13},
    "max_tokens is 0; accepted: at least 1, or 0 with echo": {"prompt": IDS, "max_tokens": 0},
    "max_tokens is -1": {"prompt": IDS, "max_tokens": -1},
    "max_tokens is '5'": {"prompt": IDS, "max_tokens": "5"},
    "max_tokens is 5.0": {"prompt": IDS, "max_tokens": 5.0},
    "max_tokens is 1000000": {"prompt": IDS, "max_tokens": 10**400},
    "temperature is 2.1; accepted: a number from 0 to 2": {"prompt": IDS, "temperature": 2.1},
    "temperature is -0.1": {"prompt": IDS, "temperature": -0.1},
    "top_p is 0; accepted: a number above 0 and up to 1": {"prompt": IDS, "top_p": 0},
    "top_k is -2": {"prompt": IDS, "top_k": -2},
    "logprobs is 21; accepted: an integer from 0 to 20": {"prompt": IDS, "logprobs": 21},
    "logprobs is True": {"prompt": IDS, "logprobs": True},
    "n is 65": {"prompt": IDS, "n": 65},
    "2 prompts with n = 40 are 80 sequences; the limit is 64": {"prompt": [[4], [5]], "n": 40},
    "seed is 9223372036854775808": {"prompt": IDS, "seed": 2**63},
    "stop is a list of 17 items": {"prompt": IDS, "stop": ["x"] * 17},
    "stop holds an empty text": {"prompt": IDS, "stop": ["x", ""]},
    "stop_token_ids holds 262": {"prompt": IDS, "stop_token_ids": [262]},
    "stream is 'yes'; accepted: a boolean": {"prompt": IDS, "stream": "yes"},
    "stream_options is given without stream": {
        "prompt": IDS, "stream_options": {"include_usage": True},
    },
    "unknown field 'stream_options.x'": {"prompt": IDS, "stream": True, "stream_options": {"x": 1}},
    "unknown field 'foo'": {"prompt": IDS, "foo": 1},
    "repetition_penalty is 2; accepted: 1": {"prompt": IDS, "repetition_penalty": 2},
    "presence_penalty is 0.5; accepted: 0": {"prompt": IDS, "presence_penalty": 0.5},
    "unknown field 'logit_bias.5'": {"prompt": IDS, "logit_bias": {"5": 1}},
    "best_of is 2; accepted: 1": {"prompt": IDS, "best_of": 2},
    "suffix is 'x'": {"prompt": IDS, "suffix": "x"},
    "lone surrogate '\\ud800' at 1": {"prompt": "a\ud800"},
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD_FIELDS)
def test_a_bad_completion_field_is_named_with_its_value_and_limit(server, sentence):
    answer = server.http.post("/v1/completions", content=json.dumps(BAD_FIELDS[sentence]))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert sentence in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 1000


HI = [{"role": "user", "content": "hi"}]
BAD_CHATS = {
    "messages is missing": {},
    "messages is a list of 0 items": {"messages": []},
    "messages[0].role is 'tool'": {"messages": [{"role": "tool", "content": "x"}]},
    "messages[0].content is missing": {"messages": [{"role": "user"}]},
    "unknown field 'messages[0].tool_calls'": {"messages": [{**HI[0], "tool_calls": []}]},
    "the last of messages is the assistant's": {
        "messages": [*HI, {"role": "assistant", "content": "x"}],
    },
    "messages[0].content[0].type is 'image_url'": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}],
    },
    "top_logprobs is given without logprobs": {"messages": HI, "top_logprobs": 3},
    "top_logprobs is 21": {"messages": HI, "logprobs": True, "top_logprobs": 21},
    "thinking.type is 'maybe'": {"messages": HI, "thinking": {"type": "maybe"}},
    "unknown field 'tools'": {"messages": HI, "tools": []},
    "max_tokens is 0; accepted: at least 1": {"messages": HI, "max_tokens": 0},
    "max_tokens is 3 and max_completion_tokens is 4": {
        "messages": HI, "max_tokens": 3, "max_completion_tokens": 4,
    },
    "response_format.type is 'json_object'": {
        "messages": HI, "response_format": {"type": "json_object"},
    },
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD_CHATS)
def test_a_bad_chat_field_is_named_with_its_value_and_limit(server, sentence):
    answer = server.http.post("/v1/chat/completions", json=BAD_CHATS[sentence])
    assert answer.status_code == 400
    assert sentence in answer.json()["error"]["message"]


BAD_BODIES = {
    b"": "the body is not JSON",
    b"{": "the body is not JSON",
    b"[1]": "the body is a list of 1 items; an object is needed",
    b"null": "the body is None; an object is needed",
    b'{"prompt": [1], "temperature": NaN}': "NaN is no JSON number",
    b'{"prompt": [1], "temperature": 1e999}': "temperature is inf",
    b'{"prompt": [1], "n": 1, "n": 2}': "the key 'n' occurs twice",
    b"\xff\xfe{}": "the body is not JSON",
    b"[" * 15_000: "nested too deeply",
    b'{"prompt": ' + b"9" * 6000 + b"}": "the body is not JSON",
    b"\0": "the body is not JSON",
}


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert BAD_BODIES[body] in answer.json()["error"]["message"]


def test_a_huge_body_is_refused_whether_announced_or_not(server):
    announced = server.http.post("/v1/completions", content=b" " * 30_000)
    chunked = server.http.post("/v1/completions", content=iter([b" " * 15_000] * 2))
    for answer in (announced, chunked):
        assert answer.status_code == 413
        assert "the limit is 20000 bytes" in answer.json()["error"]["message"]


def test_a_body_that_does_not_arrive_is_given_up():
    with serving(body_seconds_max=0.1) as running:
        url = running.http.base_url
        with socket.create_connection((url.host, url.port)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            assert b"408" in slow.recv(100)


def test_unknown_paths_methods_and_models_have_the_shape_too(server):
    cases = [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)]
    for method, path, status in cases:
        answer = server.http.request(method, path)
        assert answer.status_code == status and "error" in answer.json()
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; accepted: toy"):
        server.openai.completions.create(model="gpt", prompt=IDS)
    assert server.http.get("/../../etc/passwd").status_code == 404


def test_tokenize_and_detokenize_check_their_fields(server):
    assert server.http.post("/tokenize", json={"prompt": 5}).status_code == 400
    answer = server.http.post("/detokenize", json={"tokens": [262]})
    assert "accepted: 0 to 261" in answer.json()["error"]["message"]


def test_without_a_tokenizer_text_is_refused_and_ids_work():
    with serving() as running:
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": HI}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            answer = running.http.post(path, json=body)
            assert answer.status_code == 400
            assert "there is no tokenizer here" in answer.json()["error"]["message"]
        assert running.http.post("/detokenize", json={"tokens": [5]}).json() == {
            "prompt": "token_id:5"
        }
        assert running.complete(IDS)


def test_an_api_key_guards_everything_but_health_and_metrics():
    with serving(api_key="secret") as running:
        assert running.http.get("/health").status_code == 200
        assert running.http.get("/metrics").status_code == 200
        for path in ("/v1/models", "/openapi.json"):
            assert running.http.get(path).status_code == 401
        wrong = {"authorization": "Bearer secre\xe9".encode("latin-1")}
        answer = running.http.post("/v1/completions", json={"prompt": IDS}, headers=wrong)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert running.openai.completions.create(model="toy", prompt=IDS).choices


def test_a_full_queue_answers_429_and_serves_again_later():
    core = Gated(slots=1)
    with serving(core, waiting_max=4) as running:
        core.gate.clear()
        with pytest.raises(openai.RateLimitError, match="the limit is 4"):
            running.openai.completions.create(model="toy", prompt=IDS, n=5)
        core.gate.set()
        assert running.openai.completions.create(model="toy", prompt=IDS, n=4).choices
        running.settle()


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 700), st.integers(), st.floats(), st.text(max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def bodies(schema):
    """Objects with the schema's own names and any values, now and then a foreign name."""
    names = st.sampled_from([*schema["properties"], "x"])
    return st.dictionaries(names, values, max_size=5)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.tuples(st.just("/v1/completions"), bodies(COMPLETION)),
        st.tuples(st.just("/v1/chat/completions"), bodies(CHAT)),
        st.tuples(st.just("/v1/completions"), values),
    )
)
def test_no_malformed_request_brings_a_server_error(server, case):
    path, body = case
    if isinstance(body, dict):
        body.pop("stream", None)
        if type(body.get("max_tokens", 2)) is int:
            body["max_tokens"] = min(2, body.get("max_tokens", 2))
    answer = server.http.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_parse_or_are_refused(body):
    try:
        checked(parse_json(body), COMPLETION)
    except ApiError as error:
        assert error.status == 400 and str(error).isascii()


def build(**options):
    core = ToyCore(**SHAPE)
    keep = {k: options.pop(k) for k in ("host", "port", "tokenizer_path") if k in options}
    from engine.recipe import Recipe

    return Service(core, CONFIG, Recipe(), options=ServeOptions(**options), **keep)


def test_a_port_in_use_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}"):
            build(port=port)


def test_a_host_that_is_none_is_refused():
    with pytest.raises(UsageError, match="host is '256.1.1.1'"):
        build(host="256.1.1.1")


def test_options_that_cannot_be_served_free_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for _ in range(2):
        with pytest.raises(UsageError, match="scheduler-policy"):
            build(port=port, scheduler_policy="fast")


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}', "\xff"])
def test_a_bad_tokenizer_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="tokenizer.json"):
        build(tokenizer_path=path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "an object is needed"),
        ('{"colour": "red"}', "unknown key 'colour'; accepted: begin"),
        ('{"user": 5}', "user is 5; a str is needed"),
    ],
)
def test_a_bad_chat_format_is_refused(tmp_path, content, sentence):
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        build(chat_format=path)


def test_a_disk_cache_without_the_packages_hash_is_our_own_mistake(tmp_path):
    with pytest.raises(AssertionError, match="package's hash"):
        build(prefix_cache_disk=tmp_path)


def test_request_errors_keep_their_sentence():
    assert str(ApiError("a sentence")) == "a sentence"
    assert isinstance(ApiError("a sentence"), RequestError)
