"""The wire: what the suites ask of a server, over OpenAI's completions and Prometheus text.

It asks and hands on; it does not judge an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import httpx

TOP = 20
ANSWER_S = 300.0
"""How long one answer may take."""
_POLL_S = 0.05

Prompt = Sequence[int] | str


@cache
def client() -> httpx.Client:
    """One for all: making one reads every certificate. A target is addressed without a proxy."""
    return httpx.Client(timeout=ANSWER_S, trust_env=False)


class TargetError(Exception):
    """The engine under test did not do what it was asked: a failure of the test, with its words."""


class NotSupportedError(Exception):
    """The target cannot do what a check needs. Never a pass: the run reports it apart."""

    def __init__(self, capability: str, reason: str) -> None:
        super().__init__(f"{capability}: {reason}")
        self.capability = capability
        self.reason = reason


@dataclass(frozen=True)
class Server:
    """A server at `url` (without /v1) that serves `model`."""

    url: str
    model: str
    answer_s: float = ANSWER_S

    def complete(
        self, prompt: Prompt, max_tokens: int = 1, logprobs: int | None = TOP, **more: object
    ) -> bytes:
        """The body of the answer to one greedy completion, as received.

        more  further fields of the request. Raises TargetError with the server's words.
        """
        return self.complete_all([prompt], max_tokens, logprobs, **more)[0]

    def complete_all(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 1,
        logprobs: int | None = TOP,
        **more: object,
    ) -> list[bytes]:
        """Answers to requests that are sent at the same time, each in a connection of its own."""
        bodies = [self._body(prompt, max_tokens, logprobs, more) for prompt in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self._post("/v1/completions", body), bodies))

    def complete_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 1, logprobs: int | None = TOP
    ) -> bytes:
        """The answer to one request with several prompts, which the server sees all at once."""
        return self._post(
            "/v1/completions", self._body([list(p) for p in prompts], max_tokens, logprobs, {})
        )

    def _body(self, prompt, max_tokens: int, logprobs: int | None, more: Mapping) -> dict:
        body = {"model": self.model, "prompt": prompt if isinstance(prompt, str) else list(prompt)}
        body |= {"max_tokens": max_tokens, "temperature": 0}
        return body | ({} if logprobs is None else {"logprobs": logprobs}) | dict(more)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, labels as written. Raises NotSupportedError without any."""
        text = self._get("/metrics")
        if text is None:
            raise NotSupportedError("metrics", f"{self.url}/metrics does not exist")
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def health(self) -> bool:
        """Whether /health says that the server is well."""
        try:
            return client().get(f"{self.url}/health", timeout=self.answer_s).is_success
        except httpx.HTTPError:
            return False

    def _get(self, path: str) -> str | None:
        answer = _asked(lambda: client().get(f"{self.url}{path}", timeout=self.answer_s), self.url)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return _good(answer).text

    def _post(self, path: str, body: Mapping) -> bytes:
        url = f"{self.url}{path}"
        answer = _asked(lambda: client().post(url, json=body, timeout=self.answer_s), url)
        return _good(answer).content


def _asked(ask: Callable[[], httpx.Response], url: str) -> httpx.Response:
    try:
        return ask()
    except httpx.HTTPError as error:
        raise TargetError(f"{url}: {type(error).__name__}: {error}") from error


def _good(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        words = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        words = answer.text[:400]
    raise TargetError(f"{answer.request.url}: HTTP {answer.status_code}: {words}")


def served_model(url: str, wanted: str | None = None, timeout_s: float = 10.0) -> str:
    """The model a server names, or that of `wanted` among several. Raises TargetError."""
    answer = _good(_asked(lambda: client().get(f"{url}/v1/models", timeout=timeout_s), url))
    try:
        names = [entry["id"] for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TargetError(f"{url}/v1/models is no list of models: {answer.text[:200]}") from error
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        said = "no --model was given" if wanted is None else f"--model is {wanted!r}"
        raise TargetError(f"{said}; {url} serves: {', '.join(names) or 'nothing'}")
    return wanted


def answers(url: str) -> bool:
    """Whether a server lists its models yet."""
    try:
        return client().get(f"{url}/v1/models", timeout=2.0).is_success
    except httpx.HTTPError:
        return False


def first_tokens(answer: bytes) -> list[tuple[int | str, float]]:
    """Token (id, or text without ids) and log-probability of the first step, best first."""
    table = json.loads(answer)["choices"][0]["logprobs"]
    best = table["top_logprobs"][0]
    ids = (table.get("top_token_ids") or [list(best)])[0]
    return list(zip(ids, best.values(), strict=True))


def until(
    condition: Callable[[], object], limit_s: float, alive: Callable[[], None] = lambda: None
) -> bool:
    """Wait until `condition()`, at most `limit_s`; `alive()` may raise to end it early."""
    deadline = time.monotonic() + limit_s
    while not condition():
        alive()
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
