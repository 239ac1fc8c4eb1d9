"""A checked request body as the sequences it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.chat import ChatFormat, check_messages
from engine.errors import RequestError
from engine.openai_api import CHAT, CHOICES_MAX, COMPLETION, ApiError, checked
from engine.sampler import Sampling
from engine.text import Text

COMPLETION_TOKENS_DEFAULT = 16
"""What OpenAI's completion endpoint gives when max_tokens is absent."""


@dataclass(frozen=True)
class Limits:
    """What the running model accepts."""

    model_name: str
    vocab_size: int
    tokens_max: int
    eos_id: int


@dataclass(frozen=True)
class Prompt:
    """Ids, and the text they came from (decoded from the ids where ids were given)."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Call:
    """One HTTP request: `n` choices for each prompt, all with the same options.

    `logprobs` counts alternatives, None for no log-probabilities. `think_close` is the id that
    ends the reasoning which a chat answer opens with, None without reasoning.
    """

    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    usage_in_chunks: bool
    return_token_ids: bool
    chat: bool
    think_close: int | None = None

    @property
    def choices(self) -> int:
        """Sequences in all."""
        return len(self.prompts) * self.n


def read_completion(document: object, text: Text, limits: Limits, seed: int) -> Call:
    """A body of /v1/completions; `seed` serves if it names none. Raises ApiError."""
    body = checked(document, COMPLETION)
    prompts = [
        _prompt(prompt, text, body.get("add_special_tokens", True))
        for prompt in _listed(body["prompt"])
    ]
    echo = body.get("echo", False)
    longest = max(len(prompt.ids) for prompt in prompts)
    default = max(1, min(COMPLETION_TOKENS_DEFAULT, limits.tokens_max - longest))
    max_tokens = body.get("max_tokens", default)
    if max_tokens == 0 and not echo:
        raise ApiError("max_tokens is 0; accepted: at least 1, or 0 with echo", param="max_tokens")
    return _call(body, limits, seed, prompts, max_tokens, body.get("logprobs"), chat=False)


def _listed(prompt: object) -> list:
    """The prompts of a body: a text, a list of ids, or a list of either."""
    if isinstance(prompt, str) or type(prompt[0]) is int:
        return [prompt]
    return prompt


def _prompt(prompt: str | list[int], text: Text, add_special_tokens: bool) -> Prompt:
    if isinstance(prompt, str):
        try:
            return Prompt(tuple(text.encode(prompt, add_special_tokens)), prompt)
        except RequestError as error:
            raise ApiError(str(error), param="prompt") from error
    return Prompt(tuple(prompt), "")


def read_chat(document: object, text: Text, limits: Limits, seed: int, form: ChatFormat) -> Call:
    """A body of /v1/chat/completions. Raises ApiError."""
    body = checked(document, CHAT)
    messages = [{**m, "content": _joined(m["content"])} for m in body["messages"]]
    thinking = _thinking(body, form)
    try:
        check_messages(messages)
        ids = form.encode(messages, text, thinking)
        close = text.special_id(form.think_close) if thinking else None
    except RequestError as error:
        raise ApiError(str(error), param="messages") from error
    rest = max(1, limits.tokens_max - len(ids))
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", rest))
    if body.get("max_tokens", max_tokens) != max_tokens:
        raise ApiError(
            f"max_tokens is {body['max_tokens']} and max_completion_tokens is {max_tokens}; "
            "one of them, or both alike, are accepted",
            param="max_tokens",
        )
    if max_tokens == 0:
        raise ApiError("max_tokens is 0; accepted: at least 1", param="max_tokens")
    count = body.get("top_logprobs", 0) if body.get("logprobs", False) else None
    if "top_logprobs" in body and count is None:
        raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")
    prompts = [Prompt(tuple(ids), "")]
    return _call(body, limits, seed, prompts, max_tokens, count, chat=True, think_close=close)


def _joined(content: str | list[dict]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _thinking(body: dict, form: ChatFormat) -> bool:
    """DeepSeek's `thinking`, or the template argument that other servers take."""
    if "thinking" in body:
        return body["thinking"]["type"] == "enabled"
    asked = (body.get("chat_template_kwargs") or {}).get("thinking")
    return form.thinking if asked is None else asked


def _call(
    body: dict,
    limits: Limits,
    seed: int,
    prompts: Sequence[Prompt],
    max_tokens: int,
    logprobs: int | None,
    chat: bool,
    think_close: int | None = None,
) -> Call:
    if body.get("model", limits.model_name) != limits.model_name:
        raise ApiError(
            f"the model {ascii(body['model'])} is not served here; accepted: {limits.model_name}",
            status=404,
            param="model",
            code="model_not_found",
        )
    n = body.get("n", 1)
    if len(prompts) * n > CHOICES_MAX:
        raise ApiError(
            f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} sequences; "
            f"the limit is {CHOICES_MAX}",
            param="n",
        )
    options = body.get("stream_options", {})
    if options and not body.get("stream", False):
        raise ApiError("stream_options is given without stream: true", param="stream_options")
    return Call(
        prompts=tuple(prompts),
        n=n,
        max_tokens=max_tokens,
        sampling=_sampling(body, seed),
        stops=_stops(body.get("stop", [])),
        stop_ids=_stop_ids(body, limits),
        logprobs=logprobs,
        echo=body.get("echo", False),
        stream=body.get("stream", False),
        include_usage=bool(options.get("include_usage")),
        usage_in_chunks=bool(options.get("continuous_usage_stats")),
        return_token_ids=body.get("return_token_ids", False),
        chat=chat,
        think_close=think_close,
    )


def _sampling(body: dict, seed: int) -> Sampling:
    return Sampling(
        temperature=float(body.get("temperature", 1.0)),
        top_p=float(body.get("top_p", 1.0)),
        top_k=max(0, body.get("top_k", 0)),
        seed=body.get("seed", seed),
    )


def _stops(stop: str | list[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise ApiError("stop holds an empty text; accepted: texts of at least 1 character")
    return stops


def _stop_ids(body: dict, limits: Limits) -> frozenset[int]:
    ids = set(body.get("stop_token_ids", []))
    for token_id in ids:
        if token_id >= limits.vocab_size:
            raise ApiError(
                f"stop_token_ids holds {token_id}; accepted: 0 to {limits.vocab_size - 1}",
                param="stop_token_ids",
            )
    return frozenset(ids if body.get("ignore_eos", False) else ids | {limits.eos_id})
