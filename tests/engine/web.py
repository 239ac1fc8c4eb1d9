"""Helpers of the server tests: a real uvicorn over a toy core, a tokenizer, gated cores."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.chat import ChatFormat
from engine.recipe import Recipe
from engine.server import ServeOptions, Service
from fixtures.toy_core import ToyCore
from tests.engine.serving import SHAPE
from tests.engine.serving_child import CONFIG

FORM = ChatFormat()
BYTES = 256
"""Ids 0..255 of the test tokenizer are bytes (in its own order), then come special tokens."""


@dataclass
class Running:
    """A server with its clients."""

    service: Service
    core: ToyCore
    http: httpx.Client
    openai: openai.OpenAI

    def complete(self, prompt, **fields):
        """The JSON of a greedy completion; asserts that it succeeded."""
        body = {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
        answer = self.http.post("/v1/completions", json={**body, "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name, **labels) -> float:
        """One value of /metrics; a metric that is not there is an error."""
        inner = ",".join(f'{k}="{v}"' for k, v in labels.items())
        line = f"{name}{{{inner}}} " if labels else f"{name} "
        found = [x for x in self.http.get("/metrics").text.splitlines() if x.startswith(line)]
        assert len(found) == 1, f"{line!r} occurs {len(found)} times"
        return float(found[0].removeprefix(line))

    def settle(self, seconds_max=5.0) -> None:
        """Wait until nothing runs; all pages must be back."""
        wait_until(lambda: self.metric("flare_requests_running") == 0, seconds_max)
        wait_until(lambda: self.metric("flare_requests_waiting") == 0, seconds_max)
        assert self.metric("flare_used_kv_tokens") == 0


def wait_until(condition, seconds_max=5.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@contextmanager
def serving(core=None, tokenizer=None, fails=None, **options) -> Iterator[Running]:
    """A running server; leaving the block stops it and, unless it `fails`, expects no error."""
    core = core or ToyCore(**SHAPE)
    service = Service(
        core, CONFIG, Recipe(), model_name="toy", tokenizer_path=tokenizer,
        options=ServeOptions(**{"seed": 1, "drain_seconds_max": 2, **options}),
    )  # fmt: skip
    ready, raised = threading.Event(), []

    def run():
        try:
            service.run(lambda url: ready.set())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    key = options.get("api_key") or "none"
    # Without `verify` the certificates of the machine are not read, which takes long.
    with httpx.Client(base_url=service.url, timeout=30, verify=False) as http:
        client = openai.OpenAI(
            base_url=f"{service.url}/v1", api_key=key, max_retries=0, http_client=http
        )
        try:
            yield Running(service, core, http, client)
        finally:
            service.stop()
            thread.join(20)
    assert not thread.is_alive(), "the server did not end"
    assert [type(error) for error in raised] == ([fails] if fails else []), raised


class Gated(ToyCore):
    """Steps only while the gate is open."""

    def __init__(self, **shape):
        super().__init__(**{**SHAPE, **shape})
        self.gate = threading.Event()
        self.gate.set()

    def step(self, sequences):
        assert self.gate.wait(30)
        return super().step(sequences)


def write_tokenizer(path: Path) -> Path:
    """A byte tokenizer with the chat format's special tokens, some of them not marked special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([FORM.begin, FORM.end])
    names = (FORM.user, FORM.assistant, FORM.think_open, FORM.think_close)
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FORM.begin} $A", special_tokens=[(FORM.begin, BYTES)]
    )
    tokenizer.save(str(path))
    return path


def events(answer: httpx.Response) -> list:
    """Documents of an event stream, which must end with [DONE]."""
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
